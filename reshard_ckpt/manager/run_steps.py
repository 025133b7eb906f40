"""The read-only part of a manager: the steps of a run in its store and in the memory of this node, with paths and metadata."""

from __future__ import annotations

import os
from typing import Any, SupportsIndex

from ..checkpoint.listing import metric_of
from ..core.catalog.model import Catalog
from ..errors import CheckpointNotFound, UsageError
from ..formats.source import open_source
from ..memory.run import MemoryRun
from .retention import Retention
from .stored import StoredSteps


class RunSteps:
    """The methods of a manager that ask no other rank. They also work on a closed manager."""

    _root: str
    _process: int
    _read_only: bool
    _is_closed: bool
    _rule: Retention
    _stored: StoredSteps
    _memory: MemoryRun | None

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
        """Read the catalog of a step from this node's memory or the store; None if neither has the step."""
        in_memory = {} if self._memory is None else self._memory.catalogs()
        if checked_step(step) in in_memory:
            return in_memory[step]
        try:
            with open_source(self.path(step)) as source:
                return source.catalog
        except CheckpointNotFound:
            return None

    def metadata(self, step: int) -> Any:
        """Return the metadata of a step, with its metric; None if it was saved without, or if there is no such step."""
        found = self.catalog(step)
        return None if found is None else found.metadata

    @property
    def memory_skipped(self) -> int:
        """The number of saves that went straight to the store because memory was full; 0 without ``memory=``."""
        return 0 if self._memory is None else self._memory.num_skipped

    def latest(self) -> int | None:
        """Return the newest of `steps`; None if there is no step."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Return the step with the best metric; None if no step has a metric."""
        metrics = self._stored.metrics(self._stored.steps())
        if self._memory is not None:
            in_memory = {step: metric_of(catalog.metadata) for step, catalog in self._memory.catalogs().items()}
            metrics.update({step: metric for step, metric in in_memory.items() if metric is not None})
        return next(iter(self._rule.ranked(self.steps(), metrics)), None)

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
    """Return a step as an int; raise a `UsageError` if it is not a whole number of at least 0."""
    if isinstance(step, bool) or not isinstance(step, SupportsIndex) or step.__index__() < 0:
        raise UsageError(f"step={step!r}: pass a whole number, 0 or more")
    return step.__index__()
