"""`Manager`: names the checkpoints of a run by step, saves, prunes, and finds the newest that is whole.

1. Rank 0 holds a lock on the root for as long as the manager lives. A second job is refused; the system releases the lock of
   a dead one.
2. So a file that no catalog refers to was left by a dead save, and is removed.
3. After each commit, never before, checkpoints that the rule does not keep are removed. One that somebody reads stays, and so
   does the last one that is known to be good.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

from ..checkpoint.saving import async_save, save
from ..comm import ArgumentCheck, open_session, value_of_first
from ..core.planning.interval import MAX_OVERHEAD
from ..core.report import SaveReport, check_count, duration_s
from ..engine.common.run_lineage import RunLineage
from ..engine.common.step_folders import STEP_NAME, StepNames, names_at
from ..engine.saving.handle import RunningSave, SaveHandle
from ..errors import CheckpointError, CheckpointNotFound, StorageError, UsageError
from ..formats.source import Path
from ..memory.options import Memory
from ..memory.run import MemoryRun
from ..storage import open_storage
from ..storage.protocol import begin
from .attempts import PRIOR_S, AttemptLog
from .exports import Exports
from .pending import PendingSaves, ToleratedFailures
from .preemption import Preemption, grace_of
from .restoring import Restoring
from .retention import Retention
from .run_folder import check_memory_options, checked_root, known_names, take_lock, with_metric
from .run_steps import RunSteps, checked_step
from .schedule import Decision, SaveCosts, SaveSchedule, interval_rule
from .stored import StoredSteps


class Manager(RunSteps):
    """The checkpoints of one training run, below one folder, named by step.

    All ranks make it together, and call its saves and loads together. Use it in a ``with`` block, or `close` it. A closed manager
    still answers `steps`, `latest`, `best` and `path`; other calls are errors.

    Parameters
    ----------
    root
        A folder that all ranks share, or ``memory://name``. The checkpoint of step 100 is ``root/step_100``, an ordinary one.
    name
        The name of a new checkpoint's folder, with ``{}`` for the step, such as ``"step-{}"`` or ``"iter_{:07d}"``. It is noted
        in the root, so that other calls find the steps. Folders ``step_N``, and those of earlier names, are found too.
    keep_last
        Number of newest checkpoints to keep. By default all are kept.
    keep_every
        Also keep the steps that are multiples of this.
    keep_best, best
        Also keep this number of checkpoints with the highest (``"max"``) or lowest (``"min"``) metric; see ``metric=`` of `save`.
    read_only
        For a job that reads another job's checkpoints: no lock and no clean-up; saving is an error.
    finish_on_sigterm
        On SIGTERM, finish the save in progress, then run the previous handler of the signal: by default it ends the process. A
        number limits the seconds from the signal on, by default 20; after them the save is given up. A loop that reads
        `preempted` does not need this option.
    memory
        A `Memory`: `async_save` saves to the memory of nodes first, and from there to the store at ``persist_every``.
        `load_latest` loads the newest checkpoint of both.
    persist_every
        With ``memory=``, how often a save is copied from memory to the store: a duration, by default ``"10min"``, or a number of
        steps. A save that ``keep_every`` or ``keep_best`` keeps is copied at once, and so is one of a step that the store has.
    interval
        How often `should_save` returns True: a duration, in seconds or as text (``"10min"``); or ``"auto"``, the interval that
        loses the least time by the measured cost of saves and the rate of failures.
    mtbf
        For ``"auto"``: the mean time between failures of the whole job, a duration. By default it is estimated from the run's
        earlier attempts, which are logged in the root.
    max_overhead
        For ``"auto"``: the largest share of time that saves may cost.
    target_pls
        For ``"auto"``, in a run that recovers by ``recover(policy="partial")``: the portion of lost samples that the run may
        reach. Then the interval is at least ``2 × target_pls × ranks × mtbf``, as such a run loses no steps in a failure.
    grace
        In an object store, which has no locks: how long the files of a removed checkpoint stay there after its catalog is gone,
        for jobs that are reading them. A later save, or the next manager, removes them. 0 removes them at once.
    on_failure, max_failures
        ``"raise"``: the next save raises the error of a background save that failed. ``"warn"``: when the next save begins, all
        ranks give the same warning about it, and training goes on; `failures` lists these errors, and the reports of saves count
        them. Once ``max_failures`` saves in a row (by default 3) have failed, an error is raised. ``save``, and ``result()`` of a
        handle, always raise.
    incremental
        Each save writes only the blocks that changed since the step that was saved or loaded last; see ``base=`` of `save`.
    full_every
        With `incremental`, the first save is a full one, and later one save out of this many.
    also
        ``"safetensors"``: after each commit, rank 0 also writes the model, in the background, to ``safetensors/`` below the
        step's folder, where ``from_pretrained`` loads it. If that fails, it warns.
    process_group, timeout_s
        As for `save`.

    Raises
    ------
    UsageError
        Another job has a manager on this root, or an option is not valid.
    """

    def __init__(
        self,
        root: Path,
        *,
        name: str = STEP_NAME,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int = 0,
        best: str = "max",
        read_only: bool = False,
        finish_on_sigterm: bool | float = False,
        memory: Memory | None = None,
        persist_every: int | str | None = None,
        interval: str | float | None = None,
        mtbf: str | float | None = None,
        max_overhead: float = MAX_OVERHEAD,
        target_pls: float | None = None,
        on_failure: str = "raise",
        max_failures: int | None = None,
        grace: str | float = "10min",
        incremental: bool = False,
        full_every: int = 10,
        also: str | None = None,
        process_group: Any = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._session = {"process_group": process_group, "timeout_s": timeout_s}
        with ArgumentCheck("manage", root, **self._session):
            grace_s = grace_of(finish_on_sigterm)
            self._grace_s = keep_s = duration_s(grace, option="grace", or_zero=True)
            names = StepNames((name,))
            self._rule = Retention(keep_last, keep_every, keep_best, best)
            self._num_ranks, rule = 1, None
            if interval is not None or mtbf is not None or target_pls is not None:
                rule = interval_rule(
                    interval, mtbf, max_overhead, target_pls, lambda: self._num_ranks,
                    lambda: PRIOR_S if self._attempts is None else self._attempts.mtbf_s(),
                )  # fmt: skip
            self._root = checked_root(root)  # once: the process may change its working folder
            self._full_every = full_every if incremental else 0
            check_memory_options(memory, self._root, persist_every=persist_every, read_only=read_only, incremental=incremental)
            if incremental:
                check_count("full_every", full_every, 1)
            self._exports = None if also is None else Exports(also, self._root, timeout_s)
            self._tolerated = ToleratedFailures(on_failure, max_failures)
        self._read_only = read_only
        self._process = os.getpid()
        self._is_first = True
        self._is_closed = False
        self._pending = PendingSaves()
        self._preemption = Preemption(self._root, self._session, self._pending, grace_s)
        self._attempts: AttemptLog | None = None
        self._memory: MemoryRun | None = None
        self._has_failed = False
        self._costs = SaveCosts()
        self._held = ExitStack()
        with ExitStack() as opening:
            with open_session("manage", self._root, **self._session) as comm:
                storage = opening.enter_context(open_storage(self._root, timeout_s=timeout_s))
                self._is_first, self._num_ranks = comm.rank == 0, comm.size
                had_manager, lease = False, None
                if self._is_first and not read_only:
                    had_manager, lease = opening.enter_context(take_lock(storage))
                # The names are read while the lineage is.
                noted_names = begin(storage, lambda: names_at(storage)) if self._is_first else StepNames
                self._lineage = RunLineage(storage, comm, self._root, self._session, had_manager=had_manager)
                self._names = known_names(comm, storage, names, noted_names, read_only=read_only)
                self._stored = StoredSteps(
                    storage, self._root, self._names, self._rule, self._lineage,
                    read_only=read_only, lease=lease, grace_s=keep_s,
                )  # fmt: skip
                if self._is_first and not read_only:
                    self._stored.remove_leftovers()
                    if interval == "auto":
                        self._attempts = AttemptLog(storage)
                if grace_s:
                    self._preemption.install(opening)
            if memory is not None:
                with open_session("open the memory of", self._root, **self._session) as comm:
                    self._memory = MemoryRun(
                        memory, self._root, self._names, comm, self._lineage,
                        "10min" if persist_every is None else persist_every, self._stored.keeps, self._committed,
                        self._stored.newest, grace_s=keep_s, **self._session,
                    )  # fmt: skip
            self._held = opening.pop_all()
        self._restoring = Restoring(
            self._root, self._stored, self._lineage, self._memory, self._preemption.deferring,
            is_first=self._is_first, session=self._session,
        )  # fmt: skip
        self._schedule = None if rule is None else SaveSchedule(*rule, self._agree_at, self._costs if self._is_first else None)

    @property
    def failures(self) -> tuple[str, ...]:
        """The background saves that failed since the last one that succeeded, a line for each. Only for ``on_failure="warn"``.

        A failure is listed once the next save begins, because the ranks tell each other of it then.
        """
        return tuple(self._tolerated.in_a_row)

    @property
    def preempted(self) -> bool:
        """Whether any rank of the job got a SIGTERM. It becomes True in the same step on all ranks, and stays True.

        Read it once in every step, on all ranks. When it is True, make a last save and leave the loop. The first read installs a
        handler that stays until `close`: with it, SIGTERM by itself does not end the process. The first read is collective.
        Later ones need no communication, except one after the signal: it waits until all ranks have agreed on the step to stop
        at. No rank has to take a step for that.

        Raises
        ------
        UsageError
            The manager is closed; or the first read is not in the main thread.
        PeerError
            After a signal, a rank did not report its step.
        """
        self._refuse_unless_open("preempted")
        return self._preemption.reached(self._held)

    def should_save(self, step: int) -> bool:
        """Tell whether to save at this step, by the manager's option ``interval=``; the answer is the same on all ranks.

        Call it once in every step, on all ranks, with rising steps. Rank 0 decides. Ranks communicate only in a few steps near
        the next save, which rank 0 chooses; all other calls return at once.

        Raises
        ------
        UsageError
            The manager is closed, or was made without ``interval=``.
        PeerError
            Ranks called it for different steps, or one did not call it.
        """
        self._refuse_unless_open("should_save")
        if self._schedule is None:
            raise UsageError('should_save: the manager was made without interval=; pass one, such as interval="auto" or "10min"')
        return self._schedule.due(checked_step(step))

    def save(
        self, step: int, state: Mapping[str, Any], *, metric: float | None = None, metadata: Any = None, **options: Any
    ) -> SaveReport:
        """Save a state as the checkpoint of a step, and remove steps that ``keep_last`` and the like do not keep. Collective.

        Parameters
        ----------
        step
            The number of the step, which names the checkpoint's folder; one of an earlier save replaces that checkpoint.
        state
            As for `checkpoint.save`.
        metric
            A number for ``keep_best``, the same on all ranks, such as the validation loss. It is stored in the metadata, which
            must then be a dict.
        metadata
            Plain values to keep in the catalog, the same on all ranks.
        options
            Further options of `checkpoint.save`.

        Returns
        -------
        SaveReport
        """
        step, path = self._begin("save", step, state)
        if self._memory is not None:
            self._wait()
            self._memory.wait_for(step)
        with self._preemption.deferring(), self._costs.saving() as saved:
            self._restoring.begin_attempt()
            self._look_ahead()
            report = save(path, state, **self._options(metadata, metric, options))
            saved.append(report)
            if self._memory is not None:
                self._memory.forget(step)  # a generation of this step in memory is older
            self._committed(step)
        report = replace(report, failed_before=len(self._tolerated.in_a_row))
        self._tolerated.in_a_row.clear()
        return report

    def async_save(
        self, step: int, state: Mapping[str, Any], *, metric: float | None = None, metadata: Any = None, **options: Any
    ) -> SaveHandle:
        """Save like `save`, while training goes on. Older steps are removed in the background too, after the commit. Collective.

        Parameters
        ----------
        step, state, metric, metadata
            As for `save`.
        options
            Further options of `checkpoint.async_save`.

        Returns
        -------
        SaveHandle
        """
        step, path = self._begin("async_save", step, state)
        with self._preemption.deferring():
            self._costs.begin()
            try:
                options = self._options(metadata, metric, options)
                self._restoring.begin_attempt()
                if self._memory is None:
                    self._look_ahead()
                    handle = async_save(path, state, **options)
                else:
                    handle = self._memory.async_save(step, path, state, options)
            except BaseException as error:
                self._costs.end(None)
                if not self._tolerated.are_tolerated or not isinstance(error, StorageError):
                    raise
                self._tolerated.note(step, error)
                refused = RunningSave(path, "")  # the store refused it before it went to the background
                refused.finish_staging()
                refused.finish(error)
                return SaveHandle(refused)
            settled = self._pending.add(handle)
            self._tolerated.add(handle)

            def settle(done: SaveHandle) -> None:
                try:
                    self._costs.end(None if done.failed() else done.running.report())
                    self._tolerated.note(step, done.running.failure)
                    # The memory tier prunes by its own rule; the store's rule is applied once the step is in the store.
                    if not done.failed() and self._memory is None:
                        self._committed(step)
                finally:
                    settled.set()

            handle.add_done_callback(settle)
        return handle

    def _begin(self, call: str, step: int, state: Mapping[str, Any]) -> tuple[int, str]:
        """Check that a save may begin, and return the step as an int, and the path to save to.

        With ``on_failure="warn"``, wait for earlier saves, and let the ranks compare their failures: collective then.
        """
        with self._checking(call):
            step = checked_step(step)
            self._refuse_unless_open(call)
            self._refuse_read_only()
            if self._exports is not None:
                self._exports.find_model(state)
        path = self._stored.new_path(step)
        if self._tolerated.are_tolerated:
            self._wait()
            with open_session("save", f"{self._root} at step {step}", **self._session) as comm:
                self._tolerated.compare(comm)
        return step, path

    def _options(self, metadata: Any, metric: float | None, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return all options of a save. An incremental save first waits for the one in progress, which may be its base."""
        base: dict[str, Any] = {}
        if self._full_every:
            self._wait()
            base = {"base": partial(self._stored.next_base, self._full_every)}
        with self._checking("save"):
            metadata = with_metric(metadata, metric)
        return {"metadata": metadata, **self._session, "grace": self._grace_s, **base, **options}

    def delete(self, step: int) -> None:
        """Remove the checkpoint of one step, whatever ``keep_last`` and the like say. Files that another step refers to stay.

        All ranks call it together; rank 0 removes.

        Raises
        ------
        CheckpointNotFound
            The step has no checkpoint.
        StorageError
            The step is being read; nothing was removed.
        """
        with self._checking("delete"):
            self._refuse_unless_open("delete")
            self._refuse_read_only()
            step = checked_step(step)
        path = self.path(step)
        self._wait()
        if self._exports is not None:
            self._exports.wait()
        with self._preemption.deferring(), open_session("delete", path, **self._session):
            in_memory = self._memory is not None and self._memory.forget(step)
            if self._is_first and not self._stored.delete(step) and not in_memory:
                raise CheckpointNotFound(f"{path}: no committed checkpoint; {self._steps_text()}")
        self._stored.note_deleted(step)

    def close(self) -> None:
        """Wait for the save in progress, and release the run's folder for other managers.

        If a background save failed and no caller has seen its error, raise that.
        """
        if self._is_forked():
            self._is_closed = True
            return
        try:
            self._wait()
            self._pending.raise_errors()
            self._tolerated.close()
        finally:
            if self._exports is not None:
                self._exports.close(wait=not self._preemption.gave_up)
            failed = self._has_failed or self._pending.failed()
            attempts, self._attempts = self._attempts, None  # the first call of `close` notes how the attempt ended
            if attempts is not None:
                attempts.close(failed=failed)
            try:
                if self._memory is not None and not self._is_closed:
                    self._memory.close(clean=not failed)
            finally:
                self._is_closed = True
                self._held.close()

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._has_failed = error is not None
        self.close()

    def _agree_at(self, step: int, own: Decision | None) -> Decision:
        with open_session("should_save", f"{self._root} at step {step}", **self._session) as comm:
            save, look_at = value_of_first(comm, lambda: own)
        return save, look_at

    def _look_ahead(self) -> None:
        if self._is_first and self._rule.keep_last is not None:
            self._stored.look_ahead()

    def _committed(self, step: int) -> None:
        """Do all that follows a commit: note the step, queue its export, and remove steps that the rule does not keep."""
        self._stored.note_committed(step)
        attempts = self._attempts  # `close`, in another thread, ends it
        if attempts is not None:
            attempts.note_alive()
        if self._exports is not None and self._is_first:
            self._exports.begin(self._stored.path(step), self._prune)
        self._prune()

    def _prune(self) -> None:
        # A close that was interrupted may have let go of the root meanwhile.
        if self._is_first and self._rule.keep_last is not None and not self._is_closed:
            try:
                self._stored.prune()
            except CheckpointError as error:  # the save itself is done
                warnings.warn(f"saved, but not all that may go is removed: {error}; the next save tries again", stacklevel=3)
