"""A save that is under way: its futures, the handle that a user waits on, and the queue of this process's saves.

1. `RunningSave` holds three futures: optimizer steps may go on, the state may change, the save is committed. The threads of the
   save set them. It counts how long callers waited, and remembers whether its error was raised.
2. `SaveHandle` is the value that `async_save` returns.
3. `SAVES` lets one save run at a time. If nobody has asked for the error of a save, it is raised when the next save begins.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout  # Python 3.10 has two classes of this name
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from ...core.report import SaveReport
from ...errors import CheckpointError, UsageError
from ...storage import resolved_path
from ..common.host_memory import POOL
from ..common.progress import LOGGER
from .agreement import PLANS


def _running_future() -> Future[Any]:
    """Make a future that is already running, so that nobody can cancel it."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


class RunningSave:
    """One save of this process, shared by the threads that carry it out and the callers that wait. All methods are thread-safe.

    Attributes
    ----------
    queued
        Future that is done once optimizer steps may go on: the tensors that they change are copied, or the copies are queued on
        the device ahead of the steps.
    staged
        Future that is done once the state may change.
    committed
        Future of the save's report, or of its error.
    threads
        The threads that carry out the save.
    failed_before
        Number of background saves in a row that failed before this one, for its report.
    """

    def __init__(self, path: str, save_id: str) -> None:
        self.path, self.save_id = path, save_id
        self._outcome: SaveReport | BaseException | None = None
        self._error_is_known = False
        self._stall_s = 0.0
        self.failed_before = 0
        self.threads: list[threading.Thread] = []
        self._make_futures()
        _RUNNING.add(self)

    def _make_futures(self) -> None:
        self._lock = threading.Lock()
        self.queued: Future[None] = _running_future()
        self.staged: Future[None] = _running_future()
        self.committed: Future[SaveReport] = _running_future()

    def let_steps_through(self) -> None:
        """Let held optimizer steps go on; a second call does nothing."""
        with suppress(InvalidStateError):
            self.queued.set_result(None)

    def finish_staging(self) -> None:
        """Say that all is copied: the state may change from now on. A second call does nothing."""
        self.let_steps_through()
        with suppress(InvalidStateError):
            self.staged.set_result(None)

    def wait_for(self, future: Future[None]) -> None:
        """Wait for the future `queued` or `staged`, and count the time as a stall of the training."""
        if not future.done():
            began = time.monotonic()
            future.result()
            self.add_stall(time.monotonic() - began)

    def finish(self, outcome: SaveReport | BaseException) -> None:
        """End the save with its report or its error, which all waiting callers get."""
        self._outcome = outcome  # before the future is set: a child forked between the two must not take the save for unfinished
        if isinstance(outcome, SaveReport):
            self.committed.set_result(outcome)
        else:
            self.committed.set_exception(outcome)

    def wait(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the save is over. Return its error, or None if it was committed.

        Raise `TimeoutError` if the save is still under way.
        """
        try:
            error = self.committed.exception(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        except FutureTimeout:
            raise TimeoutError(f"the save to {self.path} is not committed after {timeout} s; it goes on") from None
        if not threading.main_thread().is_alive():
            # In an exit function the interpreter no longer waits for threads. The process would abort if it ended a thread in the
            # middle of torch's code.
            for thread in self.threads:
                if thread is not threading.current_thread():
                    thread.join()
        return error

    def add_stall(self, seconds: float) -> None:
        """Add to the seconds for which the save has held up its callers."""
        with self._lock:
            self._stall_s += seconds

    def report(self) -> SaveReport:
        """Return the report of a committed save; `stall_s` in it counts all stalls so far."""
        report = self.committed.result()
        return replace(report, stall_s=min(self._stall_s, report.duration_s), failed_before=self.failed_before)

    def take_error(self) -> BaseException | None:
        """Return the error of a failed save the first time; None later, or if the save has not failed."""
        error = None if self._error_is_known else self.failure
        self._error_is_known = True
        return error

    @property
    def has_unseen_error(self) -> bool:
        """Whether the save has failed, and nobody has taken its error yet."""
        return self.failure is not None and not self._error_is_known

    @property
    def failure(self) -> BaseException | None:
        """The error of the save if it has failed, else None."""
        return self._outcome if isinstance(self._outcome, BaseException) else None

    def after_fork(self) -> None:
        """End this save in a forked child: its threads do not exist there, and its locks may be held for ever."""
        outcome = self._outcome
        if outcome is None:
            outcome = UsageError(
                f"this process was forked while the save to {self.path} was under way: that goes on in the process that began "
                "it, so ask there for its result"
            )
        self._make_futures()
        self.finish_staging()
        self.finish(outcome)


_RUNNING: WeakSet[RunningSave] = WeakSet()
"""All saves of this process that some object refers to; a forked child ends them."""


def saves_to(path: str) -> list[SaveHandle]:
    """Return the saves of this process to a path (as given, or absolute) that are under way, or whose error nobody asked for."""
    wanted = resolved_path(path)
    saves = [save for save in _RUNNING if resolved_path(save.path) == wanted]
    return [SaveHandle(save) for save in saves if not save.committed.done() or save.has_unseen_error]


class SaveHandle:
    """A save that is under way, as `async_save` returns it.

    Every method may be called from any thread, any number of times. Leaving a ``with`` block waits for the save and raises its
    error. If the block itself raises, leaving it waits too, because this may be the last save. Then the block's error is raised;
    an error of the save is raised by the next save.
    """

    def __init__(self, running: RunningSave) -> None:
        self.running = running

    def staged(self) -> None:
        """Wait until the state may change: all of it is copied, or the save has failed (`result` raises its error)."""
        self.running.wait_for(self.running.staged)

    def done(self) -> bool:
        """Whether the save has been committed or has failed."""
        return self.running.committed.done()

    def failed(self) -> bool:
        """Whether the save has failed; `result` raises its error."""
        return self.done() and self.running.failure is not None

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the checkpoint is committed, and return the report of the save.

        Parameters
        ----------
        timeout
            Seconds to wait; None waits for ever.

        Raises
        ------
        TimeoutError
            The save is still under way.
        CheckpointError
            The save failed; the message says why. The checkpoint that the path held before is still there.
        """
        error = self.running.wait(timeout)
        self.running.take_error()
        if error is not None:
            raise error
        return self.running.report()

    def __enter__(self) -> SaveHandle:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.result()
        self.running.wait()

    def __repr__(self) -> str:
        if not self.done():
            state = "staged, being written" if self.running.staged.done() else "being staged"
        else:
            error = self.running.failure
            state = "committed" if error is None else f"failed: {type(error).__name__}"
        return f"<{type(self).__name__} {self.running.path!r}: {state}>"

    def add_done_callback(self, callback: Callable[[SaveHandle], object]) -> None:
        """Call a function with this handle once the save has been committed or has failed, or at once if it already has.

        It is called in the thread that saves, or in the caller's if the save is over. An error that it raises is logged.
        """

        def call(_: Future[SaveReport]) -> None:
            try:
                callback(self)
            except Exception:
                LOGGER.exception("a function to be called after the save to %s failed", self.running.path)

        self.running.committed.add_done_callback(call)


def joint_error(errors: Sequence[BaseException], note: str = "") -> CheckpointError:
    """Return one error with the texts of the errors of several failed background saves; `note` says which saves these were."""
    saves = "the save" if len(errors) == 1 else f"{len(errors)} saves"
    return CheckpointError(f"{saves}{note} failed in the background: {'; '.join(map(str, errors))}")


class SaveQueue:
    """The saves of this process.

    They run one at a time, because they share the staging memory, and the error of each must be raised.
    """

    def __init__(self) -> None:
        self.begun: list[SaveHandle] = []
        """The saves that no `wait_turn` has waited for yet; more than one if several threads began saves at once. `launch` adds
        each save."""

    def wait_turn(self, *, when_busy: str) -> None:
        """Wait for the saves before the new one, and raise their errors if nobody has seen them.

        Called inside the new save's session, so that an error of one rank is raised on all ranks. Raise `UsageError` if a save is
        under way and ``when_busy`` is ``"error"``, and `CheckpointError` if an earlier save failed in the background.
        """
        begun = list(self.begun)
        for save in begun:
            if when_busy == "error" and not save.done():
                raise UsageError(
                    f"the save to {save.running.path} is still under way; wait for its result(), or pass when_busy='wait'"
                )
        for save in begun:
            save.running.wait()
        # A save that another thread has begun meanwhile stays in the list for the next call.
        self.begun = [save for save in self.begun if save not in begun]
        errors = [error for save in begun if (error := save.running.take_error()) is not None]
        if errors:
            raise joint_error(errors, " before this one") from errors[0]


SAVES = SaveQueue()


def _after_fork() -> None:
    """In a forked child (a data loader's worker), end the parent's saves, whose threads do not exist there, and empty caches."""
    for save in _RUNNING:
        save.after_fork()
    SAVES.begun = []
    POOL.forked()
    PLANS.forked()


os.register_at_fork(after_in_child=_after_fork)
