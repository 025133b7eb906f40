"""SIGTERM: finish the save in progress, then run the previous handler. If the training loop reads `preempted`, only record it.

The handler runs in the main thread, between any two bytecodes. So it takes no lock, and polls the save. If the main thread is
inside a save or load, it may hold a lock that the saving thread needs; then the handler waits for the end of that call first.

There is a time limit for all of this. After it, a save that waits for other ranks is given up, and the previous handler runs,
whatever the main thread is doing.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from ..comm import give_up_sessions, open_session, value_of_first
from ..engine.common.progress import LOGGER
from ..errors import UsageError
from .pending import PendingSaves
from .stopping import open_stop

GRACE_S = 20.0
"""Default seconds for a save to finish after SIGTERM: torchrun, Slurm and Kubernetes kill after 30 s."""

_POLL_S = 0.02


def grace_of(finish_on_sigterm: bool | float) -> float:
    """Return the seconds for the option ``finish_on_sigterm=``; 0 if SIGTERM is not handled.

    >>> grace_of(False), grace_of(True), grace_of(7)
    (0.0, 20.0, 7.0)
    """
    if isinstance(finish_on_sigterm, bool):
        return GRACE_S if finish_on_sigterm else 0.0
    if not isinstance(finish_on_sigterm, int | float) or not 0 < finish_on_sigterm <= threading.TIMEOUT_MAX:
        most = f"at most {threading.TIMEOUT_MAX:,.0f}"
        raise UsageError(f"finish_on_sigterm={finish_on_sigterm!r}: pass True, False, or the seconds for it, above 0 and {most}")
    return float(finish_on_sigterm)


class Preemption:
    """A manager's reaction to SIGTERM: none, or to finish the saves in progress, or to tell the training loop.

    Parameters
    ----------
    root, session
        The path of the run, and the ``process_group`` and ``timeout_s`` for every `open_session`.
    pending
        The saves in progress.
    grace_s
        Seconds for a save to finish after SIGTERM; 0 for the default.

    Attributes
    ----------
    gave_up
        Whether a save was given up because it did not finish in time.
    """

    def __init__(self, root: str, session: Mapping[str, Any], pending: PendingSaves, grace_s: float) -> None:
        self._root, self._session, self._pending = root, session, pending
        self.gave_up = False
        self._stop: Callable[[], bool] | None = None
        self._grace_s, self._deadline = grace_s or GRACE_S, math.inf
        self._process = os.getpid()
        self._depth = 0
        self._is_installed = self._has_come = False
        # After the first read of `preempted`, a signal is only recorded.
        self._only_records = self._is_recorded = False

    def reached(self, held: ExitStack) -> bool:
        """Return whether all ranks have agreed to stop.

        The first call is collective, and installs the signal handler; closing `held` removes the handler.
        """
        if self._stop is None:
            self._stop = self._watch(held)
        return self._stop()

    def _watch(self, held: ExitStack) -> Callable[[], bool]:
        with open_session("read preempted of", self._root, **self._session) as comm:
            if not self._is_installed:
                self.install(held)
            name = value_of_first(comm, lambda: uuid.uuid4().hex)
            self._only_records = True
        return held.enter_context(open_stop(f"stop/{name}", lambda: self._is_recorded, **self._session))

    def install(self, held: ExitStack) -> None:
        """Install the handler that finishes the save in progress; closing `held` removes it."""
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "SIGTERM can be handled in the main thread alone: make a manager with finish_on_sigterm=True there, and read "
                "manager.preempted there first"
            )
        self._before = signal.signal(signal.SIGTERM, self._on_signal)
        self._is_installed = True
        held.callback(self._uninstall)

    def _uninstall(self) -> None:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == self._on_signal:
            self._restore()

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Delay the handling of SIGTERM until the ``with`` block ends."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._has_come and not self._depth:
                if threading.current_thread() is threading.main_thread():
                    self._finish_save_and_end()
                else:  # handlers run, and are restored, in the main thread alone
                    self._signal_again()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child, such as a loader's worker, has no saves
            self._run_previous_handler()
        elif self._only_records:
            # The previous handler is not called: torchrun's handler for forked functions raises, which would end the loop.
            self._is_recorded = True
        else:
            self._has_come = True
            self._begin_grace()
            if not self._depth or self._is_over():
                self._finish_save_and_end()

    def _begin_grace(self) -> None:
        """Begin to count the time that a save has to finish, at the first SIGTERM.

        If a call defers the signal (`deferring`), start a timer that sends SIGTERM to this process again at the deadline.
        """
        if self._deadline == math.inf and self._grace_s < threading.TIMEOUT_MAX:
            self._deadline = time.monotonic() + self._grace_s
            if self._depth:
                timer = threading.Timer(self._grace_s, self._signal_again)
                timer.daemon = True
                timer.start()

    def _signal_again(self) -> None:
        if self._has_come and os.getpid() == self._process:
            os.kill(self._process, signal.SIGTERM)

    def _is_over(self) -> bool:
        return time.monotonic() >= self._deadline

    def _finish_save_and_end(self) -> None:
        if not self._pending.done():
            LOGGER.warning("SIGTERM: finishing the save that is under way")
            while not self._pending.done() and not self._is_over():
                time.sleep(_POLL_S)
        self._has_come = False
        if self._depth or not self._pending.done():
            LOGGER.error("SIGTERM: not finished within %g s, so given up; the checkpoint of before is still there", self._grace_s)
            self.gave_up = True
            give_up_sessions()
        self._run_previous_handler()

    def _run_previous_handler(self) -> None:
        """Run the handler of SIGTERM that was installed before this one, or end the process if there was none."""
        before = self._before
        if callable(before):
            before(signal.SIGTERM, None)
        elif before != signal.SIG_IGN:
            self._restore()
            os.kill(os.getpid(), signal.SIGTERM)

    def _restore(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
