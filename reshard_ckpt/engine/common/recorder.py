"""The timeline of a save: its steps, timed on all ranks and put on one axis of time.

1. Each rank has a `Recorder`: wall-clock time at its start, and the monotonic clock from there on.
2. Its steps are recorded in whatever thread they run. `TimedComm` also notes when each message is sent and received.
3. With its receipt a rank sends all of that (`sealed`); rank 0 compares the times of the messages on both sides, corrects the
   clocks that these contradict, and makes the `Timeline`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import msgpack

from ...comm.protocol import Comm
from ...core.catalog.specs import Mesh
from ...core.timeline import ClockBounds, Step, Timeline
from .logs import RankLog
from .progress import OnProgress, silent

T = TypeVar("T")

_THREADS = {"reshard-ckpt-stage": "stage", "reshard-ckpt-save": "save"}


class CommCall(NamedTuple):
    """One call of a session: whether its messages went to rank 0 or came from there, and when it began and ended here."""

    to_first: bool
    began: float
    ended: float


class Recorder:
    """This rank's steps; its methods may be called in any thread.

    Attributes
    ----------
    report, log
        Receive the bytes under way, and log lines. To be set before the work begins.
    """

    def __init__(self) -> None:
        self.report: OnProgress = silent
        self.log = RankLog(0, None)
        self._epoch = time.time() - time.monotonic()
        self._lock = threading.Lock()
        self._steps: list[list[Any]] = []
        self.calls: list[CommCall] = []
        self.began = self.now()

    def now(self) -> float:
        """Seconds since 1970, as the clock stood when this recorder was made."""
        return self._epoch + time.monotonic()

    @contextmanager
    def step(self, name: str, num_bytes: int = 0) -> Iterator[None]:
        """Record what the ``with`` block does, unless it fails."""
        began = self.now()
        yield
        self.add(name, began, num_bytes)

    def add(self, name: str, began: float, num_bytes: int = 0) -> None:
        """Record a step that ends now."""
        thread = _THREADS.get(threading.current_thread().name, "caller")
        with self._lock:
            self._steps.append([name, thread, began, self.now(), num_bytes])

    def sealed(self) -> bytes:
        """All so far, and the time, as bytes: to be sent at once."""
        with self._lock:
            packed: bytes = msgpack.packb([self.now(), self.calls, self._steps])
        return packed


class TimedComm:
    """A `Comm` whose calls a recorder notes."""

    def __init__(self, comm: Comm, recorder: Recorder) -> None:
        self._comm, self._recorder = comm, recorder
        self.rank, self.size = comm.rank, comm.size

    def gather(self, payload: bytes, *, undo: Callable[[], None] | None = None) -> list[bytes] | None:
        return self._noted(True, lambda: self._comm.gather(payload, undo=undo))

    def broadcast(self, payload: bytes | None) -> bytes:
        return self._noted(False, lambda: self._comm.broadcast(payload))

    def scatter(self, payloads: Sequence[bytes] | None) -> bytes:
        return self._noted(False, lambda: self._comm.scatter(payloads))

    def _noted(self, to_first: bool, call: Callable[[], T]) -> T:
        began = self._recorder.now()
        result = call()
        self._recorder.calls.append(CommCall(to_first, began, self._recorder.now()))
        return result


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What a rank sealed."""

    sealed_at: float
    calls: tuple[CommCall, ...]
    steps: tuple[tuple[str, str, float, float, int], ...]


def opened(data: bytes) -> RankRecord:
    """The inverse of `Recorder.sealed`."""
    sealed_at, calls, steps = msgpack.unpackb(data, use_list=False)
    return RankRecord(sealed_at, tuple(CommCall(*call) for call in calls), steps)


def clock_bounds(first: Sequence[CommCall], other: RankRecord, received_at: float) -> ClockBounds:
    """How far the clock of another rank is ahead of rank 0's, from the calls of both, and when rank 0 had its record."""
    least, most = other.sealed_at - received_at, float("inf")
    for here, there in zip(first, other.calls, strict=False):  # rank 0 may have gone further meanwhile
        if here.to_first:
            least = max(least, there.began - here.ended)
        else:
            most = min(most, there.ended - here.began)
    return ClockBounds(least, most)


def timeline(recorder: Recorder, records: Sequence[bytes], received_at: float, *, save_id: str, mesh: Mesh | None) -> Timeline:
    """The timeline of all ranks, on rank 0.

    Parameters
    ----------
    records
        What each rank sealed, by rank; rank 0's own is taken anew, with what it did since.
    received_at
        When rank 0 had them.
    """
    parts = [opened(recorder.sealed()), *(opened(data) for data in records[1:])]
    bounds = [ClockBounds(0.0, 0.0), *(clock_bounds(recorder.calls, part, received_at) for part in parts[1:])]
    offsets = [bound.offset for bound in bounds]
    starts = (step[2] - offset for part, offset in zip(parts, offsets, strict=True) for step in part.steps)
    zero = min(starts, default=recorder.began)
    steps = tuple(
        Step(rank, name, thread, began - offset - zero, ended - offset - zero, num_bytes)
        for rank, (part, offset) in enumerate(zip(parts, offsets, strict=True))
        for name, thread, began, ended, num_bytes in sorted(part.steps, key=itemgetter(2))
    )
    return Timeline(save_id, zero, mesh, tuple(bound.uncertainty for bound in bounds), steps)
