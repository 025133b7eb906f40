"""The timeline of a save: its steps, timed on all ranks and put on one axis of time.

1. Each rank has a `Recorder`. It reads the wall clock at its start, and the monotonic clock from then on.
2. It records the steps of all threads of a save. `TimedComm` also records when each message was sent and received.
3. Each rank sends its records with its receipt (`Recorder.sealed`), some 90 bytes. Rank 0 compares the times of each message on
   both sides, for all ranks at once, and corrects the clocks that these contradict. It keeps the steps as they came (`merged`);
   they are decoded when the timeline is read.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...comm.protocol import Comm
from ...core.catalog.specs import Mesh
from ...core.timeline import ClockBounds
from ...format.timeline import encode_steps, encode_timeline
from .progress import OnProgress, RankLog, silent

T = TypeVar("T")

_HEAD = struct.Struct("<dBf")
"""Head of a record: the rank's own time at its start, the number of calls, and seconds from the start until it was sent.

The time of each call follows, in seconds since the start as four bytes, and then the steps.
"""
_HEAD_CALLS = 255

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
        self._steps: list[tuple[str, str, float, float, int]] = []
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
            self._steps.append((name, thread, began, self.now(), num_bytes))

    def sealed(self) -> bytes:
        """Return all records and the current time as bytes. Send them at once: rank 0 compares the time with its own."""
        # Of a call only the end that says something about the clock: when its message left, or when rank 0's came.
        calls = [call.began if call.to_first else call.ended for call in self.calls[:_HEAD_CALLS]]
        with self._lock:
            steps = encode_steps(self._steps, self.began)
        head = _HEAD.pack(self.began, len(calls), self.now() - self.began)
        return b"".join((head, struct.pack(f"<{len(calls)}f", *(at - self.began for at in calls)), steps))


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


def merged(recorder: Recorder, records: Sequence[bytes], received_at: float, *, save_id: str, mesh: Mesh | None) -> bytes:
    """Merge the records of all ranks, on rank 0, into the bytes of a timeline.

    Parameters
    ----------
    records
        `Recorder.sealed` of each rank, by rank. Rank 0's entry is not used: `recorder` has its later steps too.
    received_at
        Time on rank 0 when it had all of them.
    """
    records = [recorder.sealed(), *records[1:]]
    began, num_calls, sealed = (np.array(column) for column in zip(*map(_HEAD.unpack_from, records), strict=True))
    # times[rank, i]: when the rank's message of call i left, or rank 0's came; rank 0 may have made more calls since
    num_common = min(int(num_calls.min()), len(recorder.calls))
    heads = b"".join(record[_HEAD.size : _HEAD.size + 4 * num_common] for record in records)
    times = began[:, None] + np.frombuffer(heads, "<f4").reshape(len(records), num_common)
    bounds = clock_bounds(recorder.calls[:num_common], times, began + sealed - received_at)
    shift = began - bounds.offset
    zero = float(shift.min())
    steps = [record[_HEAD.size + 4 * count :] for record, count in zip(records, num_calls.tolist(), strict=True)]
    return encode_timeline(save_id, zero, mesh, shift - zero, bounds.uncertainty, steps)


def clock_bounds(first: Sequence[CommCall], times: NDArray[np.float64], least: NDArray[np.float64]) -> ClockBounds:
    """Return bounds of the seconds by which each rank's clock is ahead of rank 0's.

    Parameters
    ----------
    first
        The calls of rank 0.
    times
        ``times[rank, i]``: when the message of call i left this rank if it went to rank 0, else when it came to this rank.
    least
        For each rank a bound that the sending of its record gives.
    """
    least, most = least.copy(), np.full(len(times), np.inf)
    for call, there in zip(first, times.T, strict=True):
        if call.to_first:
            np.maximum(least, there - call.ended, out=least)
        else:
            np.minimum(most, there - call.began, out=most)
    least[0] = most[0] = 0.0
    return ClockBounds(least, most)
