"""Writing generations (checkpoints in the memory of nodes) to the store in the background.

1. `PersistRule` decides on rank 0 which generations go to the store.
2. `Persisting` writes one of them in a thread, after the one before it is done. All ranks take part.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable

from ..core.report import duration_s
from ..engine.common.progress import LOGGER
from ..errors import CheckpointError, UsageError
from .generations import Generation


class PersistRule:
    """Decides which checkpoints in memory also go to the store: one in each interval of steps or seconds. Used on rank 0.

    Parameters
    ----------
    every
        A whole number of steps, or a duration such as ``"10min"``.
    clock
        Returns seconds; they only have to count up.

    Raises
    ------
    UsageError
        `every` is not a duration, or is a number below 1.
    """

    def __init__(self, every: int | str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps = self._seconds = None
        if isinstance(every, int) and not isinstance(every, bool):
            if every < 1:
                raise UsageError(f'persist_every={every!r}: pass a number of steps, 1 or more, or a duration such as "10min"')
            self._steps = every
        else:
            self._seconds = duration_s(every, option="persist_every")
        self._last_step = 0
        self._last_s = clock()

    def begin(self, step: int) -> None:
        """Let the interval of steps begin at the step that was just loaded."""
        self._last_step = step

    def due(self, step: int, *, kept: bool = False) -> bool:
        """Return whether the checkpoint of this step goes to the store; always if `kept`. If so, a new interval begins."""
        if kept:
            is_due = True
        elif self._steps is not None:
            is_due = step - self._last_step >= self._steps
        else:
            is_due = self._clock() - self._last_s >= (self._seconds or 0.0)
        if is_due:
            self._last_step, self._last_s = step, self._clock()
        return is_due


class Persisting:
    """A generation (checkpoint in memory) that a thread writes to the store. All ranks make one together.

    Parameters
    ----------
    path
        Path of the checkpoint in the store.
    write
        Writes the generation there, in the thread. Returns whether the store lacked it.
    before
        The previous generation on its way to the store. This one waits until that one is done.
    then
        Called at the end as ``then(is_stored, is_new)``: whether the store has the generation, and the result of `write`.

    Attributes
    ----------
    generation, before
        As passed. `before` becomes None as soon as that generation is done.
    """

    def __init__(
        self,
        generation: Generation,
        path: str,
        write: Callable[[], bool],
        before: Persisting | None,
        then: Callable[[bool, bool], object],
    ) -> None:
        self.generation, self.before = generation, before
        self._path, self._write, self._then = path, write, then
        self._over = threading.Event()
        self._error: BaseException | None = None
        # Not a daemon thread: when the job ends, the interpreter waits for it, as for a save.
        threading.Thread(target=self._run, name="reshard-ckpt-persist", daemon=False).start()

    def _run(self) -> None:
        # One after the other, in the order of the commits, which is the same on all ranks.
        if self.before is not None:
            self.before.join()
            self.before = None
        is_new = False
        try:
            is_new = self._write()
        except BaseException as error:
            self._error = error
            LOGGER.error("the save to %s is in memory, but not in the store: %s", self._path, error)
            warnings.warn(f"the save to {self._path} is in memory, but not in the store: {error}", stacklevel=2)
        finally:
            try:
                # Before `_over` is set: whoever waits for this generation may rely on the effects of `then`.
                self._then(self._error is None, is_new)
            finally:
                self._over.set()

    def done(self) -> bool:
        """Return whether the writing to the store has ended, with success or with an error."""
        return self._over.is_set()

    def join(self) -> None:
        """Wait until the writing to the store has ended. Raise no error if it failed."""
        self._over.wait()

    def wait(self, timeout: float | None) -> bool:
        """Wait until the checkpoint is in the store, and return True.

        Raise `TimeoutError` if it is still being written after `timeout` seconds, and `CheckpointError` if writing failed.
        """
        if not self._over.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            raise TimeoutError(f"the save to {self._path} is still being written to the store after {timeout} s; it goes on")
        if self._error is not None:
            raise CheckpointError(f"the save is in memory, but was not written to {self._path}: {self._error}") from self._error
        return True
