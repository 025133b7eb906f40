"""When generations go to the store, and how: in threads of their own, one after the other."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ..comm.protocol import Comm
from ..core.durations import duration_s
from ..engine.common.logs import LOGGER
from ..errors import CheckpointError, UsageError
from ..storage import open_storage
from .generations import Generation, NodeImages
from .persist import persist


class PersistRule:
    """When rank 0 sends a generation to the store: every so many steps, or so many seconds after the one before.

    Parameters
    ----------
    every
        A whole number of steps, or a duration such as ``"10min"``.

    Raises
    ------
    UsageError
        It is neither.
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
        """Count from this step on: the one that was loaded."""
        self._last_step = step

    def due(self, step: int, *, kept: bool = False) -> bool:
        """Whether to send the generation of this step, as always one that is to be kept; if so, the interval begins anew."""
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
    """A generation on its way to the store, in a thread of its own, on all ranks.

    Parameters
    ----------
    mine
        The keys of the files that this rank writes.
    session
        Opened in the caller's thread.
    before
        The one before, for which this one waits.
    then
        Called at the end, with whether the generation is in the store.

    Attributes
    ----------
    generation, before
        As passed; `before` is None once it is over.
    """

    def __init__(
        self,
        folder: Path,
        generation: Generation,
        mine: Sequence[str],
        path: str,
        session: AbstractContextManager[Comm],
        before: Persisting | None,
        then: Callable[[bool], object],
    ) -> None:
        self._folder, self.generation, self._mine, self._path = folder, generation, mine, path
        self._session, self.before, self._then = session, before, then
        self._over = threading.Event()
        self._error: BaseException | None = None
        # No daemon: when the job ends, the interpreter waits for it, as for a save.
        threading.Thread(target=self._run, name="reshard-ckpt-persist", daemon=False).start()

    def _run(self) -> None:
        if self.before is not None:
            self.before.join()
            self.before = None
        try:
            with self._session as comm, open_storage(self._path) as storage:
                images = NodeImages(self._folder, self.generation.save_id)
                try:
                    persist(comm, images, self.generation, self._mine, storage)
                finally:
                    images.close()
        except BaseException as error:
            self._error = error
            LOGGER.error("the save to %s is in memory, but not in the store: %s", self._path, error)
            warnings.warn(f"the save to {self._path} is in memory, but not in the store: {error}", stacklevel=2)
        finally:
            try:
                self._then(self._error is None)
            finally:
                self._over.set()

    def done(self) -> bool:
        """Whether it is over, by success or error."""
        return self._over.is_set()

    def join(self) -> None:
        """Wait until it is over."""
        self._over.wait()

    def wait(self, timeout: float | None) -> bool:
        """Wait until it is over; True where the generation is in the store."""
        if not self._over.wait(timeout):
            raise TimeoutError(f"the save to {self._path} is still being written to the store after {timeout} s; it goes on")
        if self._error is not None:
            raise CheckpointError(f"the save is in memory, but was not written to {self._path}: {self._error}") from self._error
        return True
