"""Progress and logs of long work, and the timeline of a save.

1. Long work counts its bytes with a `Tally`, from any of its threads.
2. The tally calls an `OnProgress` with the name of the step, bytes done and bytes in all: first with 0 done, last with all.
3. `StatusLine` prints them: one line that it rewrites on a terminal, or a new line every few seconds in a log. Work that takes
   less than a second gets no line.
4. The lines of the package's logger begin with the rank and its mesh coordinates (`RankLog`).

The timeline has the steps of a save, timed on all ranks and put on one axis of time:

1. Each rank has a `Recorder`. It reads the wall clock at its start, and the monotonic clock from then on.
2. It records the steps of all threads of a save. `TimedComm` also records when each message was sent and received.
3. Each rank sends its records with its receipt (`Recorder.encoded`), some 90 bytes. Rank 0 compares the times of each message on
   both sides, for all ranks at once, and corrects the clocks that these contradict. It keeps the steps as they came (`merged`);
   they are decoded when the timeline is read.

Ranks have clocks of their own. Messages show how far two clocks differ: because a message never arrives before it is sent, each
message to rank 0 gives a lower bound of how far the sender's clock is ahead of rank 0's, and each message from rank 0 an upper
bound (`merged`). If the bounds allow it, the clock counts as 0 ahead, which is exact on one machine, else as the nearest value
that they allow (`clock_offset`).
"""

from __future__ import annotations

import logging
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...core.catalog.specs import Mesh
from ...core.timeline import rank_label
from ...errors import UsageError
from ...format.timeline import encode_steps, encode_timeline

OnProgress = Callable[[str, int, int], None]
"""Called with the name of a step of work, the bytes done, and the bytes in all. An exception that it raises ends the work."""

MOMENT_S = 1.0
"""Work that takes fewer seconds prints no progress line."""

TERMINAL_PAUSE_S = 0.2
PLAIN_PAUSE_S = 10.0


def reporter(progress: bool | OnProgress) -> OnProgress:
    """Convert the option ``progress=`` of public functions: True gives a line on stderr, False gives nothing."""
    if progress is False:
        return silent
    if progress is not True and not callable(progress):
        raise UsageError(f"progress={progress!r}: pass True, False, or a function of a step, the bytes done and the bytes in all")
    return StatusLine() if progress is True else progress


def silent(step: str, done: int, total: int) -> None:
    """The `OnProgress` of callers that want no progress: do nothing."""


class Tally:
    """Counts the bytes that are done in one step of work. Any thread may add to it; it reports from one thread at a time."""

    def __init__(self, step: str, total: int, report: OnProgress = silent) -> None:
        self._step, self._total, self._report = step, total, report
        self._done = 0
        self._lock = threading.Lock()
        report(step, 0, total)

    def add(self, num_bytes: int) -> None:
        """Add to the bytes that are done, and report the new total."""
        with self._lock:
            self._done += num_bytes
            self._report(self._step, self._done, self._total)


class SharedTally(Tally):
    """Counts the bytes that several ranks have done in one step of work; rank 0 reports the sum.

    Each rank sends its count about once a second, and in `finish`. Rank 0 calls `finish` after the others.

    Parameters
    ----------
    comm
        The ranks that share the step. A process on its own reports each addition.
    total
        The bytes of all ranks.
    """

    def __init__(self, comm: Comm, step: str, total: int, report: OnProgress = silent) -> None:
        super().__init__(step, total, report if comm.rank == 0 else silent)
        self._comm, self._sent_at = comm, time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Add to the bytes that this rank has done."""
        if self._comm.size == 1:
            super().add(num_bytes)
            return
        with self._lock:
            self._done += num_bytes  # since the last `_send`, if there are several ranks
            now = time.monotonic()
            if now - self._sent_at >= MOMENT_S:
                self._sent_at = now
                self._send()

    def finish(self) -> None:
        """On rank 0, report all bytes as done; on any other rank, send the bytes that it has not yet sent.

        A process on its own does nothing here: it has reported each addition.
        """
        if self._comm.size > 1:
            with self._lock:
                if self._comm.rank:
                    self._send()
                else:
                    self._report(self._step, self._total, self._total)

    def _send(self) -> None:
        sent, self._done = self._done, 0
        self._report(self._step, min(self._comm.count(sent), self._total), self._total)


class StatusLine:
    """An `OnProgress` that prints a progress line for people.

    Parameters
    ----------
    stream
        The stream to write to; by default stderr. Errors of a closed or missing stream are ignored.
    clock
        Returns seconds since any fixed moment.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._rewrites = _is_terminal(self._stream)
        self._step: str | None = None
        self._began = self._reported = clock()
        self._width = 0
        self._over = True

    def __call__(self, step: str, done: int, total: int) -> None:
        now = self._clock()
        if step != self._step or done == 0:
            self._finish_line()
            self._step, self._began, self._reported, self._over = step, now, now, False
        if done >= total and not self._over:
            self._over = True
            if now - self._began >= MOMENT_S:
                self._show(f"{step}: {size_text(done)} in {_seconds(now - self._began)}, {_rate(done, now - self._began)}", now)
            self._finish_line()
        elif done < total and now - self._began >= MOMENT_S:
            pause = TERMINAL_PAUSE_S if self._rewrites else PLAIN_PAUSE_S
            if self._reported == self._began or now - self._reported >= pause:
                elapsed = now - self._began
                left = f", {_seconds(elapsed * (total - done) / done)} left" if done else ""
                of_all = f"{size_text(done)} of {size_text(total)} ({done / total:.0%})"
                self._show(f"{step}: {of_all}, {_rate(done, elapsed)}{left}", now)

    def _show(self, text: str, now: float) -> None:
        self._reported = now
        padded = text.ljust(self._width)  # covers the rest of an earlier, longer line
        self._width = len(text)
        self._write(f"\r{padded}" if self._rewrites else f"{text}\n")

    def _finish_line(self) -> None:
        if self._rewrites and self._width:
            self._write("\n")
        self._width = 0

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError, AttributeError):  # a broken pipe; a closed file; no stderr at all
            self._stream.write(text)
            self._stream.flush()


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (ValueError, AttributeError):
        return False


def _rate(done: int, elapsed: float) -> str:
    return f"{size_text(round(done / max(elapsed, 1e-9)))}/s"


def size_text(num_bytes: int) -> str:
    """Write a number of bytes as text for people, in powers of 1000.

    >>> size_text(999), size_text(1_540_000), size_text(3_289_000_000)
    ('999 B', '1.54 MB', '3.29 GB')
    """
    value, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


def _seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


LOGGER = logging.getLogger("reshard_ckpt")

if TYPE_CHECKING:
    from ...comm.protocol import Comm  # the command line imports this module, and must not import torch with it

    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class RankLog(_Adapter):
    """The package's logger for one rank: ``[rank 5 dp=1 tp=1] saved …``."""

    def __init__(self, rank: int, mesh: Mesh | None) -> None:
        super().__init__(LOGGER, {})
        self._rank, self._mesh = rank, mesh

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"[{rank_label(self._rank, self._mesh).replace('%', '%%')}] {msg}", kwargs


T = TypeVar("T")

_HEAD = struct.Struct("<dBf")
"""Head of a rank's record: the rank's own time at its start, the number of messages to and from rank 0, and the seconds from the
start until the record was sent.

The time of each message follows, in seconds since the start as four bytes, and then the steps.
"""
_HEAD_CALLS = 255

_THREADS = {"reshard-ckpt-stage": "stage", "reshard-ckpt-save": "save"}


class CommCall(NamedTuple):
    """One call with messages between rank 0 and all ranks: whether they went to rank 0 (else they came from it), and when.

    `began` and `ended` are the times of the call on this rank, in seconds on its own clock.
    """

    to_first: bool
    began: float
    ended: float


class Recorder:
    """The steps of a save on this rank, recorded with their times. All methods are thread-safe.

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
        """Record the ``with`` block as one step of the save, with its times, unless it raises."""
        began = self.now()
        yield
        self.add(name, began, num_bytes)

    def add(self, name: str, began: float, num_bytes: int = 0) -> None:
        """Record a step of the save that began at `began` and ends now."""
        thread = _THREADS.get(threading.current_thread().name, "caller")
        with self._lock:
            self._steps.append((name, thread, began, self.now(), num_bytes))

    def encoded(self) -> bytes:
        """Return all records and the current time as bytes. Send them at once: rank 0 compares the time with its own."""
        # Of a call only the end that says something about the clock: when its message left, or when rank 0's came.
        calls = [call.began if call.to_first else call.ended for call in self.calls[:_HEAD_CALLS]]
        with self._lock:
            steps = encode_steps(self._steps, self.began)
        head = _HEAD.pack(self.began, len(calls), self.now() - self.began)
        return b"".join((head, struct.pack(f"<{len(calls)}f", *(at - self.began for at in calls)), steps))


class TimedComm:
    """A `Comm` that also records when each message to or from rank 0 was sent or received."""

    def __init__(self, comm: Comm, recorder: Recorder) -> None:
        self._comm, self._recorder = comm, recorder
        self.rank, self.size = comm.rank, comm.size
        self.undo_unless_gathered, self.count = comm.undo_unless_gathered, comm.count
        self.neighbours, self.broadcast_near = comm.neighbours, comm.broadcast_near

    def gather(self, payload: bytes) -> list[bytes] | None:
        return self._noted(True, lambda: self._comm.gather(payload))

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
        `Recorder.encoded` of each rank, by rank. Rank 0's entry is not used: `recorder` has its later steps too.
    received_at
        Time on rank 0 when it had received all records.
    """
    records = [recorder.encoded(), *records[1:]]
    began, num_calls, sealed = (np.array(column) for column in zip(*map(_HEAD.unpack_from, records), strict=True))
    # times[rank, i]: when the rank's message of call i left, or rank 0's came; rank 0 may have made more calls since
    num_common = min(int(num_calls.min()), len(recorder.calls))
    heads = b"".join(record[_HEAD.size : _HEAD.size + 4 * num_common] for record in records)
    times = began[:, None] + np.frombuffer(heads, "<f4").reshape(len(records), num_common)
    # least, most: bounds of the seconds by which each rank's clock is ahead of rank 0's. The sending of its record gives one too.
    least, most = began + sealed - received_at, np.full(len(records), np.inf)
    for call, there in zip(recorder.calls[:num_common], times.T, strict=True):
        if call.to_first:
            np.maximum(least, there - call.ended, out=least)
        else:
            np.minimum(most, there - call.began, out=most)
    least[0] = most[0] = 0.0
    offset, uncertainty = clock_offset(least, most)
    shift = began - offset
    zero = float(shift.min())
    steps = [record[_HEAD.size + 4 * count :] for record, count in zip(records, num_calls.tolist(), strict=True)]
    return encode_timeline(save_id, zero, mesh, shift - zero, uncertainty, steps)


def clock_offset(least: NDArray[np.float64], most: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Estimate how far clocks are ahead, in seconds, from lower and upper bounds. Return estimates and their largest errors.

    An estimate is 0 if the bounds allow that, else the bound nearest to 0; their middle if the bounds contradict each other.

    >>> clock_offset(np.array([-0.1, 7.0]), np.array([0.3, 7.5]))[0].tolist()
    [0.0, 7.0]
    """
    # Bounds that contradict each other: a clock ran faster, or was set, meanwhile.
    offset = np.where(least > most, (least + most) / 2, np.minimum(np.maximum(0.0, least), most))
    return offset, np.maximum(np.abs(most - offset), np.abs(offset - least))
