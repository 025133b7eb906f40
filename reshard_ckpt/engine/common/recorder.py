"""The timeline of a save: its steps, timed on all ranks and put on one axis of time.

1. Each rank has a `Recorder`. It reads the wall clock at its start, and the monotonic clock from then on.
2. It records the steps of all threads of a save. `TimedComm` also records when each message was sent and received.
3. Each rank sends its records with its receipt (`Recorder.sealed`). Rank 0 compares the times of each message on both sides,
   corrects the clocks that these contradict, and makes the `Timeline`.
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
from .progress import OnProgress, RankLog, silent

T = TypeVar("T")

_THREADS = {"reshard-ckpt-stage": "stage", "reshard-ckpt-save": "save"}


class CommCall(NamedTuple):
    """One call of a session: whether its messages went to rank 0 (else from it), and its begin and end on this rank."""

    to_first: bool
    began: float
    ended: float


class Recorder:
    """The recorded steps of this rank. All methods are thread-safe.

    Attributes
    ----------
    report, log
        The `OnProgress` and the logger of the save; set them before the work begins.
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
        """Return seconds since 1970: the wall clock when the recorder was made, plus the monotonic time since."""
        return self._epoch + time.monotonic()

    @contextmanager
    def step(self, name: str, num_bytes: int = 0) -> Iterator[None]:
        """Record the ``with`` block as one step, unless it fails."""
        began = self.now()
        yield
        self.add(name, began, num_bytes)

    def add(self, name: str, began: float, num_bytes: int = 0) -> None:
        """Record a step that began at `began` and ends now."""
        thread = _THREADS.get(threading.current_thread().name, "caller")
        with self._lock:
            self._steps.append([name, thread, began, self.now(), num_bytes])

    def sealed(self) -> bytes:
        """Return all records and the current time as bytes. Send them at once: rank 0 compares the time with its own."""
        with self._lock:
            packed: bytes = msgpack.packb([self.now(), self.calls, self._steps])
        return packed


class TimedComm:
    """A `Comm` that records its calls."""

    def __init__(self, comm: Comm, recorder: Recorder) -> None:
        self._comm, self._recorder = comm, recorder
        self.rank, self.size = comm.rank, comm.size

    def gather(self, payload: bytes) -> list[bytes] | None:
        return self._noted(True, lambda: self._comm.gather(payload))

    def undo_unless_gathered(self, undo: Callable[[], None]) -> None:
        self._comm.undo_unless_gathered(undo)

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
    """The content of `Recorder.sealed`, decoded."""

    sealed_at: float
    calls: tuple[CommCall, ...]
    steps: tuple[tuple[str, str, float, float, int], ...]


def opened(data: bytes) -> RankRecord:
    """Decode the bytes of `Recorder.sealed`."""
    sealed_at, calls, steps = msgpack.unpackb(data, use_list=False)
    return RankRecord(sealed_at, tuple(CommCall(*call) for call in calls), steps)


def clock_bounds(first: Sequence[CommCall], other: RankRecord, received_at: float) -> ClockBounds:
    """Return bounds of the seconds by which another rank's clock is ahead of rank 0's.

    Parameters
    ----------
    first
        The calls of rank 0.
    received_at
        Time on rank 0 when it had the other rank's record.
    """
    least, most = other.sealed_at - received_at, float("inf")
    for here, there in zip(first, other.calls, strict=False):  # rank 0 may have made more calls since
        if here.to_first:
            least = max(least, there.began - here.ended)
        else:
            most = min(most, there.ended - here.began)
    return ClockBounds(least, most)


def timeline(recorder: Recorder, records: Sequence[bytes], received_at: float, *, save_id: str, mesh: Mesh | None) -> Timeline:
    """Make the timeline of all ranks, on rank 0.

    Parameters
    ----------
    records
        `Recorder.sealed` of each rank, by rank. Rank 0's entry is not used: `recorder` has its later steps too.
    received_at
        Time on rank 0 when it had all of them.
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
