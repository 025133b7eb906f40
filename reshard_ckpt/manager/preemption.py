"""SIGTERM while a save is in progress: finish the save, then run the previous handler. Or only record it, for a loop that asks.

The handler runs in the main thread, between any two bytecodes, so it takes no lock and polls the save. Where the main thread is
itself within a save or load, it may hold what the saving thread needs, so the handler waits for the end of that call first.
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


class SigtermHandler:
    """A handler of SIGTERM, installed while its block lasts, that waits for the save `pending`.

    Attributes
    ----------
    pending
        The save that is under way.
    only_notes
        SIGTERM ends nothing: it sets `received`.
    noted
        Whether it has come since.
    """

    def __init__(self) -> None:
        self.pending: SaveHandle | None = None
        self.only_records = self.received = False
        self._process = os.getpid()
        self._depth = 0
        self._seen = False

    def __enter__(self) -> SigtermHandler:
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
                self._finish_save_and_end()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child, such as a loader's worker: no save is its own
            self._run_previous_handler()
        elif self.only_records:
            # The handler of before is not called: torchrun's, where it forks a function, raises, which would end the loop.
            self.received = True
        else:
            self._seen = True
            if not self._depth:
                self._finish_save_and_end()

    def _finish_save_and_end(self) -> None:
        self._seen = False
        if self.pending is not None and not self.pending.done():
            LOGGER.warning("SIGTERM: finishing the save that is under way")
            while not self.pending.done():
                time.sleep(_POLL_S)
        self._run_previous_handler()

    def _run_previous_handler(self) -> None:
        """Run the handler that was installed before."""
        before = self._before
        if callable(before):
            before(signal.SIGTERM, None)
        elif before != signal.SIG_IGN:
            self._restore()
            os.kill(os.getpid(), signal.SIGTERM)

    def _restore(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
