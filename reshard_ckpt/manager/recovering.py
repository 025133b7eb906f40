"""`recover`: fill a state after a failure from the nearest holder of each part; see `checkpoint/recovering.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..checkpoint.fall_back import Checkpoints, Loaded, OfPath, State
from ..checkpoint.loading import Prepare
from ..checkpoint.recovering import Recovery, RecoveryReport
from ..comm import ArgumentCheck
from ..errors import CheckpointNotFound, UsageError
from ..formats.source import Path
from .manager import Manager
from .restoring import LoadedStep
from .run_steps import checked_step


def recover(
    state: State,
    *,
    alive: bool | State,
    path: Path | None = None,
    manager: Manager | None = None,
    step: int | None = None,
    policy: str = "exact",
    allow_mixed: bool = False,
    process_group: Any = None,
    timeout_s: float = 600.0,
) -> RecoveryReport:
    """Fill a state after a failure, in place: from live ranks first, then from memory and the store, and only lost parts.

    All ranks of the new process group call it together. The group may have any size, and the state any layout.

    Parameters
    ----------
    state
        The state that training continues with, as for `load`.
    alive
        Whether this rank's state is whole, as its last step left it: True or False. Or the state that this rank had before the
        failure, if `state` is a new one: of another layout, or on the mesh of the new process group.
    path, manager
        The checkpoint, or the checkpoints of the run, to fall back on; at most one of them. Without it, a part that no rank holds
        is an error.
    step
        The number of steps that this rank's state has taken. By default, the value called ``step`` in the state.
    policy
        ``"exact"``: the result is the state of one step. The survivors must be at one step, and each part of the state must have
        a live holder, or be in a checkpoint of that very step. Otherwise all ranks go back to the newest whole checkpoint.
        ``"partial"``: as ``"exact"``, but instead of going back, the survivors keep their state, and the lost parts alone come
        from the newest checkpoint. That is sound for the rows of embedding tables, and refused for anything else.
    allow_mixed
        With ``policy="partial"``, accept that dense tensors and the state of their optimizer are at two steps.
    process_group, timeout_s
        As for `save`.

    Returns
    -------
    RecoveryReport
        The step, and the source of all bytes.

    Raises
    ------
    UsageError
        An argument is not valid.
    MismatchError
        The state disagrees with that of the survivors, or with the checkpoint.
    CheckpointNotFound
        A part has no holder, and there is no checkpoint.
    PeerError
        Another rank failed or did not arrive. Make a group of the ranks that are left, and call `recover` again: a rank whose
        state had been touched by then does not count as alive.
    """
    session = {"process_group": process_group, "timeout_s": timeout_s}
    with ArgumentCheck("recover", policy, **session):  # each rank has an `alive` of its own
        if policy not in ("exact", "partial"):
            raise UsageError(f"policy={policy!r}: pass 'exact' or 'partial'")
        if allow_mixed and policy == "exact":
            raise UsageError("allow_mixed=True: policy='exact' mixes no steps; pass policy='partial' too")
        if not isinstance(alive, bool | Mapping):
            raise UsageError(f"alive={alive!r}: pass True, False, or the state that this rank had before the failure")
        if path is not None and manager is not None:
            raise UsageError("path= and manager=: pass one of them, the checkpoint or the manager of the run")
        step = None if step is None else checked_step(step)
        if manager is not None and not isinstance(manager, Manager):
            raise UsageError(f"manager={manager!r:.200}: pass a checkpoint.Manager")
        if manager is not None:
            manager._refuse_unless_open("recover")
    checkpoints: Checkpoints | None = None
    if manager is not None:
        checkpoints = _OfManager(manager)
    elif path is not None:
        checkpoints = OfPath(path, session)
    return Recovery(state, alive, step, policy, checkpoints, session, allow_mixed=allow_mixed).run()


@dataclass(frozen=True, slots=True)
class _OfManager:
    """The checkpoints of a manager's run, for a recovery to load from."""

    manager: Manager

    def has(self, step: int) -> bool:
        self.manager._wait()  # the save of that step may be under way
        return self.manager._restoring.has(step)

    def newest(self) -> int | None:
        return self.manager._restoring.newest()

    def load_part(self, step: int, prepare: Prepare) -> Loaded:
        return _loaded(self.manager._restoring.load(step, prepare, {}, goes_on=False))

    def load_newest(self, state: State, reason: str) -> Loaded:
        found = self.manager.load_latest(state)
        if found is None:
            raise CheckpointNotFound(f"{reason}; and the run has no checkpoint to go back to: begin it anew")
        return _loaded(found)

    def names(self) -> Sequence[str]:
        newest = self.manager.latest()
        found = None if newest is None else self.manager.catalog(newest)
        return () if found is None else found.names

    def go_on_from(self, step: int) -> None:
        self.manager._restoring.begin_at(step, in_store=False)


def _loaded(found: LoadedStep) -> Loaded:
    return Loaded(found.step, found.report, found.tier)
