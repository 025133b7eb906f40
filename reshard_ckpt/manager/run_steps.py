"""The reading part of a manager: the steps of a run in its store and in the memory of this node, their metadata, and loads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from operator import index as as_int
from typing import Any

from ..checkpoint.listing import metric_of
from ..checkpoint.loading import options_of
from ..comm import ArgumentCheck
from ..core.catalog.model import Catalog
from ..core.report import LoadReport
from ..engine.common.step_folders import StepNames, name_steps
from ..errors import CheckpointNotFound, UsageError
from ..formats.source import open_source
from ..memory.run import MemoryRun
from .pending import PendingSaves
from .preemption import Preemption
from .restoring import LoadedStep, Restoring
from .retention import Retention
from .stored import StoredSteps


class RunSteps:
    """The methods of a manager that read.

    `steps`, `latest`, `best`, `path`, `catalog` and `metadata` ask no other rank, and also work on a closed manager. Loads and
    `read` are collective.
    """

    _root: str
    _session: dict[str, Any]
    _process: int
    _read_only: bool
    _is_closed: bool
    _rule: Retention
    _stored: StoredSteps
    _names: StepNames
    _memory: MemoryRun | None
    _pending: PendingSaves
    _preemption: Preemption
    _restoring: Restoring

    def path(self, step: int) -> str:
        """Return the path of the checkpoint of a step."""
        return self._stored.path(checked_step(step))

    def steps(self) -> list[int]:
        """List the committed steps, in order; with ``memory=``, also the steps in the memory of this node.

        If the run went back to an older step, the steps that it had saved beyond that one are left out, as in `load_latest`.
        """
        stored = self._stored.counted()
        return stored if self._memory is None else sorted({*stored, *self._memory.steps()})

    def catalog(self, step: int) -> Catalog | None:
        """Read the catalog of a step from this node's memory or the store; None if neither has the step.

        Raises
        ------
        CorruptError
            The catalog is damaged, or the folder is a copy of another step's folder.
        """
        step = checked_step(step)
        in_memory = {} if self._memory is None else self._memory.catalogs(step)
        if step in in_memory:
            return in_memory[step]
        try:
            with open_source(self.path(step), timeout_s=self._stored.timeout_s) as source:
                self._stored.refuse_copy(step, self.path(step), source.catalog)
                return source.catalog
        except CheckpointNotFound:
            return None

    def metadata(self, step: int) -> Any:
        """Return the metadata of a step, with its metric; None if the step was saved without metadata, or is not there."""
        found = self.catalog(step)
        return None if found is None else found.metadata

    @property
    def memory_skipped(self) -> int:
        """The number of saves that went straight to the store because memory was full; 0 without ``memory=``."""
        return 0 if self._memory is None else self._memory.num_skipped

    def latest(self) -> int | None:
        """Return the newest of `steps`, without folders that are copies of other steps; None if there is no step."""
        newest = max([self._stored.newest(), *([] if self._memory is None else self._memory.steps())])
        return newest if newest >= 0 else None

    def best(self) -> int | None:
        """Return the step with the best metric; None if no step has a metric."""
        metrics = self._stored.metrics(self._stored.steps())
        if self._memory is not None:
            in_memory = {step: metric_of(catalog.metadata) for step, catalog in self._memory.catalogs().items()}
            metrics.update({step: metric for step, metric in in_memory.items() if metric is not None})
        return next(iter(self._rule.ranked(self.steps(), metrics)), None)

    def read(self, step: int, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Read whole tensors and values of a step on every rank, from memory or the store; see `checkpoint.read`. Collective.

        Raises
        ------
        CheckpointNotFound
            That step has no checkpoint.
        """
        self._refuse_unless_open("read")
        step = checked_step(step)
        self._wait()
        return self._restoring.read(step, names)

    def load(self, step: int, state: Mapping[str, Any], **options: Any) -> LoadReport:
        """Load the checkpoint of one step into a state, in place. Collective. Later steps no longer count, from the next save on.

        Parameters
        ----------
        state
            As for `checkpoint.load`.
        options
            Options of `checkpoint.load`.

        Raises
        ------
        CheckpointNotFound
            The step has no checkpoint; the message lists the run's steps.
        """
        return self._load(step, state, options, goes_on=True)

    def _load(self, step: int, state: Mapping[str, Any], options: Mapping[str, Any], *, goes_on: bool) -> LoadReport:
        with self._checking("load"):
            self._refuse_unless_open("load")
            step = checked_step(step)
            options_of(options)
        self._wait()
        try:
            return self._restoring.load(step, state, options, goes_on=goes_on).report
        except CheckpointNotFound as error:
            raise CheckpointNotFound(f"{self._stored.path(step)}: no committed checkpoint; {self._steps_text()}") from error

    def load_latest(self, state: Mapping[str, Any], **options: Any) -> LoadedStep | None:
        """Load the newest whole checkpoint into a state, in place. Damaged ones are passed over with a warning. Collective.

        Parameters
        ----------
        state
            As for `checkpoint.load`.
        options
            Options of `checkpoint.load`. ``verify_first=True`` is the default with ``strict=False``, ``allow_missing`` or
            ``allow_resize``, because parts of the state then keep their value: a damaged checkpoint must not change them.

        Returns
        -------
        LoadedStep or None
            None if the run has no checkpoint yet.

        Raises
        ------
        CorruptError
            All checkpoints of the run are damaged.
        StorageError
            A rank could not read the newest checkpoint, which need not be damaged; see docs/manager.md.
        MismatchError
            Checkpoint and state disagree.
        """
        with self._checking("load_latest"):
            self._refuse_unless_open("load_latest")
            options_of(options)
        self._wait()
        return self._restoring.load_latest(state, options)

    def _checking(self, call: str) -> ArgumentCheck:
        return ArgumentCheck(call, self._root, **self._session)

    def _wait(self) -> None:
        """Wait for the saves in progress and for the pruning after each."""
        if not self._preemption.gave_up:
            self._pending.wait()

    def _steps_text(self) -> str:
        folders = self._stored.folders()
        named = {step: folders.get(step, self._names.of(step)) for step in self.steps()}
        return f"the run has {name_steps(named) or 'none at all'}"

    def _refuse_unless_open(self, call: str) -> None:
        if self._is_forked():
            raise UsageError(
                f"{call}: this process was forked from the one that manages {self._root}, and has no lock on it; {call} there, "
                "or make a manager of its own with read_only=True here"
            )
        if self._is_closed:
            raise UsageError(f"{call}: the manager of {self._root} is closed, and another job may have the root; make a new one")

    def _is_forked(self) -> bool:
        """Whether this process is a forked child, without the threads of saves and without the lock."""
        return os.getpid() != self._process

    def _refuse_read_only(self) -> None:
        if self._read_only:
            raise UsageError(f"{self._root}: this manager is read_only; make one without that to save or delete")


def checked_step(step: int) -> int:
    """Return a step as an int; raise a `UsageError` if it is not a whole number from 0 to 2⁶³ - 1."""
    try:
        number = -1 if isinstance(step, bool) else as_int(step)
    except (TypeError, RuntimeError):  # of tensors and arrays that hold no whole number, or several
        number = -1
    if not 0 <= number < 1 << 63:
        raise UsageError(f"step={step!r:.80}: pass a whole number, 0 or more, and below 2⁶³")
    return number
