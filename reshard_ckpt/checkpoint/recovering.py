"""`recover`: fill a state after a failure, each run of a tensor from its nearest holder, so that only lost parts are read.

1. `_ask_survivors`: all ranks say whether they are alive, and at which step. The survivors must be at one step.
2. `Job.begin` opens the states of the survivors as a checkpoint that may lack regions. `_lost` names the regions that it lacks.
3. If it lacks none, `Job.move_opened` fills the other ranks from the survivors. Storage is not touched.
4. If it lacks some, and there is a checkpoint of that step, survivors compare a sample of their state with it (`StepSample`).
   Then `Job.move_opened` fills all that the survivors have, and a load reads the lost regions alone (`core.planning.lost`).
5. Otherwise all ranks go back to the newest whole checkpoint, and the report says why. With ``policy="partial"``, only the lost
   regions come from that checkpoint (CPR: Maeng et al., 2020), if they are regions of embedding tables, or with `allow_mixed`.

A survivor's state changes only in the last case. If that fails halfway, the state no longer counts as alive (`_TORN`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ..comm import ALONE, ArgumentCheck, Comm, merge_of_all, open_session, union, value_of_first
from ..comm.wire import name_ranks
from ..core.catalog.model import Catalog
from ..core.catalog.names import GROUPS, STATE, bare, optimizer_of, state_name
from ..core.catalog.param_groups import groups_beyond
from ..core.catalog.problems import COMBINE, ELSEWHERE, Problem
from ..core.catalog.specs import ValueKind
from ..core.planning.lost import lost_parts
from ..core.report import LoadReport, few, summarize
from ..engine.common.progress import LOGGER
from ..engine.common.tensor_bytes import LocalTensor, memory_bytes, public_call
from ..errors import CheckpointNotFound, CorruptError, LayoutError, MismatchError, UsageError
from ..format.files import digest128
from ..format.values import decode_value, encode_value
from ..state.capture import Captured, Target, capture, prepare_load, walk_state
from ..state.entries import Kind
from ..state.shards import PerRankValues
from .fall_back import Checkpoints, Loaded, State, step_in, steps_in
from .live import MEMORY_BYTES
from .live_job import Job
from .live_states import Options
from .loading import LoadOptions
from .step_sample import StepSample

SOURCES = ("self", "rank", "memory", "peer", "store")


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """The outcome of `recover`, the same on all ranks.

    Attributes
    ----------
    step
        The step that the state is at; None if nothing tells it.
    bytes_from
        Bytes of tensors that all ranks want, by their source: ``"self"`` (the rank had them), ``"rank"`` (live memory of another
        rank), ``"memory"`` and ``"peer"`` (checkpoints in the memory of the rank's node, and of other nodes), ``"store"``.
    went_back
        The reason why all ranks went back to a checkpoint; empty if the survivors kept their state.
    lost_values
        A line for each `PerRank` value that was lost with its rank: the rank that took its place keeps the value that it has.
    pls
        With ``policy="partial"``, the portion of lost samples that this failure adds, in CPR's sense: the share of the state that
        went back, times the share of all samples so far that it has lost. 0.0 if nothing went back alone.
    steps
        With ``policy="partial"``, the steps of each tensor and value that is not wholly at `step`, by name, in order.
    """

    step: int | None
    bytes_from: Mapping[str, int]
    went_back: str = ""
    lost_values: tuple[str, ...] = ()
    pls: float = 0.0
    steps: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


_TORN: set[tuple[int, int]] = set()
"""Address and version (`_version`) of each tensor that a failed recovery has overwritten. A later write changes the version."""


def _versions(state: State) -> dict[int, int]:
    tensors = (memory for _, memory in capture(state, process_group=ALONE).tensors if memory.numel())
    return {memory.data_ptr(): _version(memory) for memory in tensors}


def _version(memory: torch.Tensor) -> int:
    """Return a number that changes with each write: torch's version counter; for inference tensors, which have none, a digest."""
    if not memory.is_inference():
        return memory._version
    held = memory.cpu().contiguous()  # by a name, because `memory_bytes` does not keep it alive
    return int.from_bytes(digest128(memory_bytes(held)[: held.nbytes]), "little")


class Recovery:
    """One call of `recover` on one rank, with its arguments.

    Parameters
    ----------
    policy, allow_mixed
        Whether parts of the state may be at different steps, as for `recover`.
    checkpoints
        The checkpoints to fall back on.
    session
        The ``process_group`` and ``timeout_s`` for every `open_session` and every load of the recovery.
    """

    def __init__(
        self,
        state: State,
        alive: bool | State,
        step: int | None,
        policy: str,
        checkpoints: Checkpoints | None,
        session: Mapping[str, Any],
        *,
        allow_mixed: bool,
    ) -> None:
        self._state, self._step, self._checkpoints, self._session = state, step, checkpoints, session
        self._policy, self._allow_mixed, self._alive = policy, allow_mixed, alive
        self._lost_tensors: list[str] = []
        self._lost_values: list[str] = []
        """The tensors that have lost regions on any rank, and the values that no survivor has."""
        self._kept_values: list[str] = []
        """A line for each `PerRank` value that this rank keeps, because it is lost and no checkpoint has it for this rank."""
        self._lost_names: dict[str, bool] = {}
        """The tensors and values that are lost on this rank, and whether survivors have other regions of them."""

    @property
    def _keeps(self) -> bool:
        """Whether this rank kept its state, so that nothing is loaded into it unless all ranks go back to a checkpoint."""
        return self._alive is True

    @property
    def _source(self) -> State:
        """The state from which this rank sends parts to others in a recovery; empty if the rank is not alive."""
        return self._state if self._alive is True else self._alive or {}

    def run(self) -> RecoveryReport:
        """Recover. Collective. If this fails, note the overwritten tensors: their rank does not count as alive any more."""
        with public_call():
            before = _versions(self._state)
            if _TORN and not _TORN.isdisjoint(_versions(self._source).items()):
                LOGGER.warning(
                    "recover: a recovery that failed has overwritten a part of this rank's state, so it does not count as alive"
                )
                self._alive = False
            try:
                report = self._recovered()
            except BaseException:
                _TORN.update(pair for pair in _versions(self._state).items() if before.get(*pair) != pair[1])
                raise
            if _TORN:  # the state may lie where a torn one did
                _TORN.difference_update(_versions(self._state).items())
            return report

    def _recovered(self) -> RecoveryReport:
        """Recover: let the survivors send their state to all ranks in one session, then load the regions that no survivor has."""
        try:
            with open_session("recover", self._policy, **self._session) as comm:
                step = self._ask_survivors(comm)
                job = self._begin(comm)
                lost = self._lost(comm, job)
                if not lost:
                    lost_values = [_kept(name, rank) for name, ranks in job.lost_values.items() for rank in ranks]
                    return self._report(comm, step, job.move_opened(comm), lost_values=lost_values)
        except LayoutError as error:
            return self._go_back(str(error))
        saved_step = self._saved_step(step)
        if saved_step is not None and saved_step != step:
            self._refuse_to_mix(saved_step)
        if step is None or saved_step is None:
            why = "nothing tells their step (pass step=)" if step is None else f"there is no checkpoint of their step {step}"
            return self._go_back(f"no survivor holds parts of the state: {summarize(lost, why)}")
        return self._fill_up(step, saved_step, job)

    def _saved_step(self, step: int | None) -> int | None:
        """Return the step of the checkpoint that the lost regions are loaded from; None if all ranks must go back. Collective."""
        if step is None or self._checkpoints is None:
            return None
        if self._checkpoints.has(step):
            return step
        newest = self._checkpoints.newest() if self._policy == "partial" else None
        return None if newest is None or newest > step else newest

    def _refuse_to_mix(self, saved_step: int) -> None:
        """Raise a UsageError if a region is lost that is not of an embedding table, unless the caller allows that."""
        state = tuple(f".{STATE}.{fqn}." for fqn in self._tables.values())
        lost = [*self._lost_tensors, *self._lost_values]
        dense = [name for name in lost if name not in self._tables and not any(part in name for part in state)]
        if dense and not self._allow_mixed:
            raise UsageError(
                f"{few(dense)}: lost, and only in the checkpoint of step {saved_step}. Dense tensors, the state of their "
                "optimizer, and values at two steps are not a state that training ever had: pass policy='exact', or "
                "allow_mixed=True"
            )

    def _ask_survivors(self, comm: Comm) -> int | None:
        """Return the one step at which all survivors are; None if no rank knows its step. Collective.

        Raise `LayoutError` if no rank is alive, or they are at different steps.
        """
        captured = capture(self._source, process_group=self._session["process_group"])
        step = step_in(captured.values) if self._step is None else self._step
        own = [bool(self._source), step, _steps_counted(captured), _without_state(captured), _embedding_tables(self._state)]
        # Each is a tuple with an entry for each rank.
        is_alive, steps, counts, without, tables = zip(*merge_of_all(comm, own), strict=True)
        survivors = [rank for rank, alive in enumerate(is_alive) if alive]
        self._without = union(list(without))
        self._tables = {name: fqn for of_rank in tables for name, fqn in of_rank.items()}
        self._is_alone = len(survivors) == 1
        if not survivors:
            raise LayoutError("no rank's state is alive")
        found: dict[str, tuple[int, Any]] = {}
        for rank in survivors:
            for what, number in {"step": steps[rank], **counts[rank]}.items():
                first, known = (rank, number) if number is None else found.setdefault(what, (rank, number))
                if known != number:
                    text = "step" if what == "step" else f"count {what}"
                    raise LayoutError(
                        f"the survivors are not at one step: {text} is {known} on rank {first}, {number} on rank {rank}"
                    )
        return next((steps[rank] for rank in survivors if steps[rank] is not None), None)

    def _begin(self, comm: Comm) -> Job:
        """Open the states of the survivors, and plan the parts that they send. Collective."""
        options = Options(LoadOptions(strict=False, offered=(), may_lack=True), None, False, MEMORY_BYTES, "verify")
        return Job(self._source, self._state, options, **self._session).begin(comm)

    def _lost(self, comm: Comm, job: Job) -> list[str]:
        """Return a line for each part of the state that no survivor holds, the same on all ranks. Collective."""
        report, wanted, live = job.plan.report, job.opened.target, job.opened.saved
        if differing := (*report.shape, *report.dtype, *report.unexpected):
            raise MismatchError(summarize(differing, "give the state the tensors that the survivors have"), differing)
        lost = [*report.missing, *report.uncovered, *report.values]
        if lost:
            parts = lost_parts([spec for spec, _ in wanted.tensors], live)
            # Groups of an optimizer are lost with their parameters, which are among the tensors.
            values = sorted(name for name in {*wanted.values}.difference(live.value_names) if not name.endswith(f".{GROUPS}"))
            of_ranks = merge_of_all(comm, ([spec.name for spec in parts if spec is not None], values))
            self._lost_tensors, self._lost_values = (union(list(names)) for names in zip(*of_ranks, strict=True))
        # A new optimizer wants no state by itself. If survivors have the state of different parameters, as ZeRO by parameters has
        # it, a gone rank may have been the only holder of some: so a checkpoint is asked whether these had state.
        having = {state_name(link.optimizer, link.fqn) for link in live.links().values()}
        without = tuple(f"{name}." for name in self._without if name not in having)
        is_divided = self._is_alone or not having.isdisjoint(self._without)
        if not without or not is_divided or self._checkpoints is None:
            return lost
        names = self._checkpoints.names
        had = value_of_first(comm, lambda: [name for name in names() if name.startswith(without)])
        self._lost_tensors += had
        return [*lost, *(f"{name}: its only holder is gone" for name in had)]

    def _fill_up(self, step: int, saved_step: int, job: Job) -> RecoveryReport:
        """Fill the state from the survivors, and the regions that they lack from the checkpoint of a step. Collective."""
        assert self._checkpoints is not None
        live, values = job.opened.saved, job.opened.values
        sample = StepSample(self._source, self._session["process_group"])
        try:
            if saved_step == step:
                self._checkpoints.load_part(step, sample.prepare)
            with open_session("recover", f"step {step}", **self._session) as comm:
                if differing := merge_of_all(comm, sample.differing(), union):
                    raise LayoutError(
                        f"{few(differing)}: the survivors are not as in the checkpoint of their step {step}, which is of another "
                        "run, or was saved before this run went back"
                    )
                moved = job.move_opened(comm)
            loaded = self._checkpoints.load_part(saved_step, partial(self._wanted_of, live, values, saved_step == step))
        except (LayoutError, CheckpointNotFound, CorruptError) as error:
            return self._go_back(str(error))
        with open_session("recovered", f"step {step}", **self._session) as comm:
            lost_values = merge_of_all(comm, self._kept_values, union)
            report = self._report(comm, step, moved, loaded, lost_values=lost_values)
            if saved_step == step:
                return report
            names: dict[str, bool] = {}
            for of_rank in merge_of_all(comm, self._lost_names):
                names |= of_rank
        share = 1 - (report.bytes_from["self"] + report.bytes_from["rank"]) / max(sum(report.bytes_from.values()), 1)
        steps = {name: (saved_step, step) if is_mixed else (saved_step,) for name, is_mixed in sorted(names.items())}
        return replace(report, pls=share * (step - saved_step) / max(step, 1), steps=steps)

    def _wanted_of(self, live: Catalog, values: Mapping[str, Any], is_exact: bool, saved: Catalog, comm: Comm) -> Target:
        """Return a load target with the regions of this rank's tensors, and the values, that no survivor has.

        `live` is the catalog of the survivors, `saved` that of the checkpoint to load from.
        """
        for name, step in steps_in(saved.values_table).items():
            if is_exact and step != values.get(name, step):
                raise LayoutError(f"{name} is {values[name]} on the survivors, {step} in the checkpoint of their step")
        # A new optimizer wants from a checkpoint only the state that is there: other parts would keep the bytes of new memory.
        if absent := [name for name in self._lost_tensors if name not in saved]:
            raise LayoutError(f"{few(absent)}: lost, and the checkpoint does not have it")
        # A save of chosen rows (`TouchedRows`) leaves older or rounded rows in the checkpoint; the lost rank had newer ones.
        stale = [name for name in self._lost_tensors if name in saved.lossy] if self._policy == "exact" else []
        if stale:
            why = saved.lossy[stale[0]]
            raise LayoutError(f"{few(stale)}: lost, and the checkpoint of this step does not hold all rows as they were ({why})")
        if self._keeps:
            return Target((), (), (), (), lambda values: [], lambda values, skipped: None)
        target = prepare_load(self._state, saved, rank=comm.rank, size=comm.size)
        parts = lost_parts([spec for spec, _ in target.tensors], live)
        tensors = [LocalTensor(spec, memory) for spec, (_, memory) in zip(parts, target.tensors, strict=True) if spec is not None]
        for spec in filter(None, parts):
            self._lost_names[spec.name] = spec.name in live and bool(live.tensor(spec.name).shards)
        own = {name for name, value in values.items() if isinstance(value, PerRankValues) and comm.rank not in value.lost}
        if not is_exact:  # the survivors' values count; values that no survivor has come from an older step
            own |= {name for name, value in values.items() if not isinstance(value, PerRankValues)}
            self._lost_names |= dict.fromkeys((name for name in target.values if name not in own), False)
        groups = [value.name for value in saved.values_table if value.kind is ValueKind.PARAM_GROUPS and value.name in own]

        per_rank = {name: value for name, value in values.items() if isinstance(value, PerRankValues) and name not in own}
        own |= per_rank.keys() - {*saved.value_names}

        def wanted(saved_values: Mapping[str, Any]) -> dict[str, Any]:
            found = {name: value for name, value in saved_values.items() if name not in own}
            return found | {name: lost for name in groups if (lost := groups_beyond(values[name], saved_values[name]))}

        def check(saved_values: Mapping[str, Any]) -> list[str]:
            own.update(
                name
                for name, live in per_rank.items()
                if isinstance(found := saved_values.get(name), PerRankValues)
                and _are_renumbered(live.values, found.values, comm.rank)
            )
            problems = [Problem.of(line) for line in target.check(wanted(saved_values))]
            # A value of each rank that was saved by another number of ranks, or under other numbers, has no rank here.
            elsewhere = {problem.name for problem in problems if problem.cure == COMBINE}.intersection(per_rank)
            self._kept_values = [_kept(name, comm.rank) for name in per_rank if name in own or name in elsewhere]
            # Survivors have the values that this rank passes over. An older checkpoint may lack some that they have.
            lacks = (ELSEWHERE,) if is_exact else (ELSEWHERE, "allow_missing")
            return [problem for problem in problems if problem.name not in elsewhere and problem.cure not in lacks]

        return replace(
            target,
            tensors=tuple(tensors),
            values=tuple(name for name in target.values if name not in own),
            check=check,
            finish=lambda saved_values, skipped: target.finish(wanted(saved_values), skipped),
        )

    def _go_back(self, reason: str) -> RecoveryReport:
        """Load the newest whole checkpoint on all ranks. Collective."""
        if self._checkpoints is None:
            with ArgumentCheck("load", reason, **self._session):  # other ranks may have one
                raise CheckpointNotFound(f"{reason}; pass manager= or path= to go back to a checkpoint")
        loaded = self._checkpoints.load_newest(self._state, reason)
        with open_session("recovered", "checkpoint", **self._session) as comm:
            if comm.rank == 0:
                LOGGER.warning("recover: all ranks went back to the checkpoint of step %s: %s", loaded.step, reason)
            return self._report(comm, loaded.step, None, loaded, went_back=reason)

    def _report(
        self,
        comm: Comm,
        step: int | None,
        moved: LoadReport | None,
        loaded: Loaded | None = None,
        *,
        went_back: str = "",
        lost_values: Sequence[str] = (),
    ) -> RecoveryReport:
        """Add up the bytes of all ranks by source, and make the report. Collective: a gather and a broadcast.

        If the survivors kept their state (`moved`), also record their step as the one from which training continues.
        """
        own = dict.fromkeys(SOURCES, 0)
        if moved is not None:
            own["self"], own["rank"] = moved.num_bytes - moved.bytes_read, moved.bytes_read
        if loaded is not None:
            own["peer"] = loaded.report.bytes_from_peers
            own["store" if loaded.tier == "store" else "memory"] += loaded.report.num_bytes - loaded.report.bytes_from_peers
        everyone = merge_of_all(comm, list(own.values()))
        total = {source: sum(column) for source, column in zip(SOURCES, zip(*everyone, strict=True), strict=True)}
        if moved is not None and step is not None and self._checkpoints is not None:
            self._checkpoints.go_on_from(step)
        if comm.rank == 0:
            LOGGER.info("recovered at step %s: %s", step, ", ".join(f"{n} bytes from {s}" for s, n in total.items() if n))
        return RecoveryReport(step, total, went_back, tuple(lost_values))


def _kept(name: str, rank: int) -> str:
    return f"{name}: {name_ranks([rank])} keeps the value that it has, as its own is lost"


def _are_renumbered(live: Sequence[Any], saved: Sequence[Any], rank: int) -> bool:
    """Tell whether survivors have new rank numbers: another rank than `rank` holds the `PerRank` value saved for `rank`.

    `live` has the value of each rank now, None without a survivor; `saved` has those of the checkpoint. A rank that was saved
    with an equal value, such as the same seed, does not count.
    """
    if len(live) != len(saved):
        return False
    of_saved, own = [encode_value(value, "") for value in saved], encode_value(saved[rank], "")
    return any(encode_value(value, "") == own != of_saved[r] for r, value in enumerate(live) if value is not None and r != rank)


def _steps_counted(captured: Captured) -> dict[str, float]:
    """Map the name of each optimizer to the largest step count among its parameters on this rank."""
    found: dict[str, float] = {}
    counted = [(spec.link, memory) for spec, memory in captured.tensors if memory.numel() == 1]
    plain = [(v.link, decode_value(v.data, name=v.name)) for v in captured.values if v.link is not None and v.data is not None]
    for link, count in (*counted, *plain):
        if link is not None and link.key == "step" and isinstance(count, int | float | torch.Tensor):
            found[link.optimizer] = max(found.get(link.optimizer, 0.0), float(count))
    return found


def _embedding_tables(state: State) -> dict[str, str]:
    """Map the names of the weights of embedding tables, in all modules of a state, to the FQNs of these weights."""
    rows = [row for tree in walk_state(state)[0] for row in tree.rows if row.kind is Kind.MODULES]
    modules = [(row.name, at, inner) for row in rows for module in row.value for at, inner in module.children.items()]
    found: dict[str, str] = {}
    for name, at, inner in modules:
        if isinstance(inner, torch.nn.Embedding | torch.nn.EmbeddingBag):
            fqn = bare(f"{at}.weight" if at else "weight")
            found[f"{name}.{fqn}"] = fqn
    return found


def _without_state(captured: Captured) -> list[str]:
    """Name the parameters whose optimizer state is missing on this rank: they are in a group, but have no entry in the state.

    An optimizer without any state on this rank has not stepped, and is left out.
    """
    links = [spec.link for spec, _ in captured.tensors] + [value.link for value in captured.values]
    having = {(link.optimizer, link.fqn) for link in links if link is not None}
    stepped = {optimizer for optimizer, _ in having}
    found: list[str] = []
    for value in captured.values:
        if value.kind is ValueKind.PARAM_GROUPS and value.data is not None and (optimizer := optimizer_of(value.name)) in stepped:
            fqns = [fqn for group in decode_value(value.data, name=value.name) for fqn in group["params"]]
            found += [state_name(optimizer, fqn) for fqn in fqns if (optimizer, fqn) not in having]
    return found
