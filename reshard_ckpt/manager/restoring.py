"""Loading the checkpoints of a run, from memory or the store: a given step, or the newest whole one.

1. Rank 0 finds the newest step in the store that counts. All nodes together find the newest generation (a step in the memory of
   nodes) that is not older. With a memory tier, one session (a `Comm` for one call) does both.
2. If there is such a generation, it is loaded, and verified while it is read. If it is damaged, all copies in memory are
   verified, and the next older whole generation is taken.
3. Otherwise the step in the store is loaded. If it is damaged or gone, it is passed over with a warning, and the next older one
   is loaded. If a rank cannot read the store at all, all ranks raise that: a second try may load the step, so no older one is
   taken.
4. A load writes nothing. The first save after it records in the lineage from which step the run goes on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from ..checkpoint.loading import Prepare, load_given, options_of
from ..checkpoint.reading import read_from
from ..comm import Comm, open_session, value_of_first
from ..core.report import LoadReport
from ..engine.common.progress import LOGGER
from ..engine.common.rounds import without_changes
from ..engine.common.run_lineage import RunLineage
from ..errors import CheckpointError, CheckpointNotFound, CorruptError, StorageError
from ..formats.source import Source, open_shared_source, open_source
from ..memory.restore import PassedOver, Restorable
from ..memory.run import MemoryRun
from .stored import StoredSteps

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """The result of `Manager.load_latest`.

    Attributes
    ----------
    step
        The step of the checkpoint.
    report
        The report of `load`.
    passed_over
        One line for each newer checkpoint that is damaged or incomplete.
    tier
        The source of the bytes: ``"memory"`` of this rank's node, ``"peer"`` if memory of other nodes was needed, or ``"store"``.
    """

    step: int
    report: LoadReport
    passed_over: tuple[str, ...]
    tier: str = "store"


class Restoring:
    """Loads the checkpoints of one run.

    Parameters
    ----------
    root
        The path of the run.
    stored, memory
        The checkpoints in the store, and in memory; None without ``memory=``.
    lineage
        The lineage of the run, in which `begin_at` records the step that was loaded.
    deferring
        Opens a ``with`` block around each load, during which signals wait.
    is_first
        Whether this is rank 0, which warns of checkpoints that are passed over.
    session
        The ``process_group`` and ``timeout_s`` for every `open_session` and every load.
    """

    def __init__(
        self,
        root: str,
        stored: StoredSteps,
        lineage: RunLineage,
        memory: MemoryRun | None,
        deferring: Callable[[], AbstractContextManager[object]],
        *,
        is_first: bool,
        session: Mapping[str, Any],
    ) -> None:
        self._root, self._stored, self._lineage, self._memory = root, stored, lineage, memory
        self._deferring, self._is_first, self._session = deferring, is_first, session

    def load(
        self, step: int, wanted: Mapping[str, Any] | Prepare, options: Mapping[str, Any], *, goes_on: bool = True
    ) -> LoadedStep:
        """Load the checkpoint of one step, from memory or the store; `wanted` is a state, or a function as for `load_given`.

        With `goes_on`, training continues from this step, so later steps no longer count from the next save on.
        """
        passed: dict[str, PassedOver] = {}
        memory = self._memory
        options = {"verify_first": memory is not None and options_of(options).may_keep, **self._session, **options}
        loaded = None if memory is None else self._from_memory(step, lambda found: memory.load(found, wanted, options), passed)
        report, tier = loaded or (self._from_store(step, wanted, options), "store")
        if goes_on:
            self.begin_at(step, in_store=loaded is None)
        return LoadedStep(step, report, _lines(passed), tier)

    def has(self, step: int) -> bool:
        """Return on every rank whether memory or the store has the checkpoint of a step. Collective."""
        if self._memory is not None and self._find(lambda: 0, {}, step, verify=False)[1] is not None:
            return True
        with open_session("has", f"{self._root} at {step}", **self._session) as comm:
            return bool(value_of_first(comm, lambda: self._stored.has(step)))

    def newest(self) -> int | None:
        """Return the step of the newest checkpoint, in the store or whole in the nodes' memory; None without any. Collective."""
        if self._memory is None:
            with open_session("newest", self._root, **self._session) as comm:
                step = value_of_first(comm, self._stored.newest)
        else:
            step, found = self._find(self._stored.newest, {}, verify=False)
            step = step if found is None else found.generation.step
        return step if step >= 0 else None

    def read(self, step: int, names: Sequence[str] | None) -> dict[str, Any]:
        """Read whole tensors and values of one step, from memory or the store; see `Manager.read`. Collective."""
        memory = self._memory
        values = None if memory is None else self._from_memory(step, lambda found: memory.read(found, names), {})
        if values is not None:
            return values
        path = self._stored.path(step)
        with open_source(path, timeout_s=self._session["timeout_s"]) as source:
            self._stored.refuse_copy(step, path, source.catalog)
            return read_from(source, names)

    def load_latest(self, state: Mapping[str, Any], options: Mapping[str, Any]) -> LoadedStep | None:
        """Load the newest whole checkpoint of memory and the store, as `Manager.load_latest` does. Collective."""
        # A load that may keep parts of the state must not have changed them when it fails.
        options = {"verify_first": options_of(options).may_keep, **self._session, **options}
        passed: dict[int, str] = {}
        in_memory: dict[str, PassedOver] = {}
        verify = False  # whether to verify all copies: after damage was found; the load itself verifies the bytes that it reads
        while True:
            if self._memory is None:
                step = self._newest_except(passed)
            else:
                step, found = self._find(lambda: self._stored.newest_except(passed), in_memory, verify=verify)
                if found is not None:
                    loaded = self._tried(
                        found, partial(self._memory.load, wanted=state, options=options), in_memory, verify=verify
                    )
                    if loaded is None:
                        verify = True  # it could not be loaded: try another copy of it, or the next older one
                        continue
                    self.begin_at(found.generation.step, in_store=False)
                    self._memory.persist_found(found)
                    report, tier = loaded
                    return LoadedStep(found.generation.step, report, _lines(in_memory, passed), tier)
            if step < 0:
                break
            try:
                report = self._from_store(step, state, options)
            except (CheckpointNotFound, CorruptError, StorageError) as error:
                self._refuse_unless_damage(step, error)
                passed[step] = f"step {step}: {error}"
                self._stored.note_damaged(step)
                if self._is_first:
                    warnings.warn(f"passed over, as it cannot be loaded: {passed[step]}", stacklevel=3)
                continue
            self.begin_at(step, in_store=True)
            return LoadedStep(step, report, _lines(in_memory, passed))
        if passed or any(one.is_damaged for one in in_memory.values()):
            lines = (*(one.line for one in in_memory.values()), *passed.values())
            raise CorruptError(f"{self._root}: no checkpoint can be loaded:\n" + "\n".join(lines))
        return None

    def _refuse_unless_damage(self, step: int, error: CheckpointError) -> None:
        """Raise on all ranks if any rank could not read the store, as an older step must not be loaded then. Collective.

        A `StorageError` leaves open whether the newer step is damaged.
        """
        path = self._stored.path(step)
        with open_session("pass over", path, **self._session):
            if isinstance(error, StorageError):
                raise StorageError(
                    f"{error}. So nobody knows whether step {step} is damaged, and no older one is loaded in its place: load "
                    f"again once it can be read; or give it up, by manager.load of an older step, or manager.delete({step})"
                ) from error

    def _from_store(self, step: int, wanted: Mapping[str, Any] | Prepare, options: Mapping[str, Any]) -> LoadReport:
        path = self._stored.path(step)

        @contextmanager
        def opened(comm: Comm) -> Iterator[Source]:
            with open_shared_source(comm, path, timeout_s=options["timeout_s"]) as source:
                self._stored.refuse_copy(step, path, source.catalog)
                yield source

        with self._deferring():
            return load_given(path, wanted, options, opened=opened)

    def _from_memory(self, step: int, call: Callable[[Restorable], T], passed: dict[str, PassedOver]) -> T | None:
        """Find the generation of a step (its copy in the memory of nodes), and return the result of `call` with it. Collective.

        Return None if memory has no whole generation of this step. Damaged ones are added to `passed`.
        """
        for verify in (False, True):
            _, found = self._find(lambda: 0, passed, step, verify=verify)
            result = None if found is None else self._tried(found, call, passed, verify=verify)
            if result is not None:
                return result
        return None

    def _tried(
        self, found: Restorable, call: Callable[[Restorable], T], passed: dict[str, PassedOver], *, verify: bool
    ) -> T | None:
        """Return the result of `call` with a generation (a step in the memory of nodes); None if the generation is damaged.

        A damaged generation is added to `passed` if all its copies were verified before the call (`verify`).
        """
        step = found.generation.step
        try:
            with self._deferring():
                return call(found)
        except (CorruptError, StorageError) as error:
            if not verify:
                LOGGER.warning("step %d in memory is damaged, so that all copies are verified now: %s", step, error)
                return None
            if isinstance(error, StorageError):  # memory cannot be read now; an older generation would not help
                raise
            self._pass_over({found.generation.save_id: PassedOver(f"step {step} in memory: {error}", is_damaged=True)}, passed)
            return None

    def _find(
        self, at_least: Callable[[], int], passed: dict[str, PassedOver], step: int | None = None, *, verify: bool
    ) -> tuple[int, Restorable | None]:
        """Find a generation to load (one step in the memory of nodes), as `MemoryRun.find` does.

        Leave out the generations in `passed`, and add to it each generation that cannot be loaded, with the reason. Return the
        oldest step of the search, as `at_least` gave it on rank 0, and the generation.
        """
        assert self._memory is not None
        found = self._memory.find(at_least, list(passed), step, verify=verify)
        self._pass_over(found.passed, passed)
        return found.least, found.generation

    def _pass_over(self, found: Mapping[str, PassedOver], passed: dict[str, PassedOver]) -> None:
        for save_id, passed_over in found.items():
            passed[save_id] = passed_over
            if self._is_first:
                warnings.warn(f"passed over, as it cannot be loaded: {passed_over.line}", stacklevel=5)

    def begin_at(self, step: int, *, in_store: bool) -> None:
        """Record that training continues from a step: once the next save begins, later steps of the run no longer count."""
        self._lineage.loaded(step, in_store=in_store)
        if in_store:
            self._stored.note_good(step)
        if self._memory is not None:
            self._memory.loaded(step)

    def begin_attempt(self) -> None:
        """Before a save, note in the run's lineage from which step training continued, unless it is noted already. Collective."""
        memory = self._memory

        def newer(step: int) -> list[str]:
            # Memory first: a save that comes to the store between the two is in both lists, and else in neither.
            return [*([] if memory is None else memory.save_ids_beyond(step)), *self._stored.save_ids_beyond(step)]

        if self._lineage.begin(newer, self._stored.save_id, always=memory is not None) and memory is not None:
            memory.attempt_begun()

    def _newest_except(self, passed: Mapping[int, str]) -> int:
        """Return the newest step in the store that is not in `passed`, as rank 0 sees it; −1 if there is none. Collective."""
        subject = f"{self._root} without steps {sorted(passed)}" if passed else self._root
        with open_session("load_latest", subject, **self._session) as comm:
            newest: int = value_of_first(comm, lambda: self._stored.newest_except(passed))
        return newest


def _lines(in_memory: Mapping[str, PassedOver], in_store: Mapping[int, str] = MappingProxyType({})) -> tuple[str, ...]:
    """Return the lines of `LoadedStep.passed_over`: the errors of damaged checkpoints, without names of tensors they overwrote.

    An older checkpoint has filled these tensors by now.
    """
    return tuple(map(without_changes, (*(generation.line for generation in in_memory.values()), *in_store.values())))
