"""Progress of long work: bytes, rate and time left, passed to a function of the caller, or shown as a line on stderr; and logs.

1. Long work counts its bytes with a `Tally`, from any of its threads.
2. The tally calls an `OnProgress` with the name of the step, bytes done and bytes in all: first with 0 done, last with all.
3. `StatusLine` prints them: one line that it rewrites on a terminal, or a new line every few seconds in a log. Work that takes
   less than a second gets no line.

The lines of the package's logger begin with the rank and its mesh coordinates (`RankLog`).
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from ...core.catalog.specs import Mesh
from ...core.timeline import rank_label
from ...errors import UsageError

OnProgress = Callable[[str, int, int], None]
"""Called with the name of a step, the bytes done and the bytes in all. An exception that it raises ends the work."""

MOMENT_S = 1.0
"""Work of fewer seconds gets no line."""

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
    """Counts the bytes of one step, in any number of threads, and reports them, one thread at a time."""

    def __init__(self, step: str, total: int, report: OnProgress = silent) -> None:
        self._step, self._total, self._report = step, total, report
        self._done = 0
        self._lock = threading.Lock()
        report(step, 0, total)

    def add(self, num_bytes: int) -> None:
        """Add to the bytes that are done, and report the new number."""
        with self._lock:
            self._done += num_bytes
            self._report(self._step, self._done, self._total)


class StatusLine:
    """An `OnProgress` that writes a line for people.

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
                self._show(_under_way(step, done, total, now - self._began), now)

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


def _under_way(step: str, done: int, total: int, elapsed: float) -> str:
    left = f", {_seconds(elapsed * (total - done) / done)} left" if done else ""
    return f"{step}: {size_text(done)} of {size_text(total)} ({done / total:.0%}), {_rate(done, elapsed)}{left}"


def _rate(done: int, elapsed: float) -> str:
    return f"{size_text(round(done / max(elapsed, 1e-9)))}/s"


def size_text(num_bytes: int) -> str:
    """Spell a number of bytes for people, in powers of 1000.

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
