"""SIGTERM while a save is under way: finish the save, then do what the signal did before. Or just note it, for a loop that looks.

The handler runs in the main thread, between any two of its steps, so it takes no lock: it looks at the save now and then. Where
the main thread is itself within a save or load, which may hold what the saving thread needs, the end of that comes first.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from ..engine.common.logs import LOGGER
from ..engine.saving.handle import SaveHandle
from ..errors import UsageError

_POLL_S = 0.02


class OnSigterm:
    """While its block lasts, SIGTERM waits for `pending`.

    Attributes
    ----------
    pending
        The save that is under way.
    only_notes
        SIGTERM ends nothing: it sets `noted`.
    noted
        Whether it has come since.
    """

    def __init__(self) -> None:
        self.pending: SaveHandle | None = None
        self.only_notes = self.noted = False
        self._process = os.getpid()
        self._depth = 0
        self._seen = False

    def __enter__(self) -> OnSigterm:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "SIGTERM can be handled in the main thread alone: make a manager with finish_on_sigterm=True there, and read "
                "manager.preempted there first"
            )
        self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == self._on_signal:
            self._restore()

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Let a signal that comes in this block wait for its end."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._seen and not self._depth:
                self._go()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child, such as a loader's worker: no save is its own
            self._end()
        elif self.only_notes:
            # The handler of before is not called: torchrun's, where it forks a function, raises, which would end the loop.
            self.noted = True
        else:
            self._seen = True
            if not self._depth:
                self._go()

    def _go(self) -> None:
        self._seen = False
        if self.pending is not None and not self.pending.done():
            LOGGER.warning("SIGTERM: finishing the save that is under way")
            while not self.pending.done():
                time.sleep(_POLL_S)
        self._end()

    def _end(self) -> None:
        """Do what the signal did before."""
        before = self._before
        if callable(before):
            before(signal.SIGTERM, None)
        elif before != signal.SIG_IGN:
            self._restore()
            os.kill(os.getpid(), signal.SIGTERM)

    def _restore(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
