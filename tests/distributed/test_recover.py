"""Recovery after failures: from the survivors, then from the checkpoint of their step; else all go back to the newest one."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import cycle, product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.checkpoint import loading
from reshard_ckpt.engine.common.mover import Mover
from reshard_ckpt.errors import CheckpointError, CheckpointNotFound, StorageError, UsageError
from reshard_ckpt.storage.local import LocalStorage
from tests.distributed.cases import Case
from tests.distributed.lives import KILLED, Life, run_lives
from tests.distributed.net import STEP, Layout, blank
from tests.distributed.outcomes import Outcome, outcome
from tests.distributed.test_live import Held, held_by
from tests.helpers import position_values
from tests.launch import on_ranks, run_ranks
from tests.tries import is_long

SIZE = 4
NODES = {"one dead": (3,), "a node dead": (2, 3), "two that are no replicas dead": (1, 2), "two replicas dead": (0, 2)}


class Networks:
    """A model and its optimizer on one of the layouts of the matrix."""

    def __init__(self, layout: Layout) -> None:
        self._case = Case(layout)
        self.group = self._case.place.group

    def whole(self) -> dict[str, Any]:
        return {**self._case.saved_state(), "step": int(STEP)}

    def empty(self) -> tuple[dict[str, Any], Callable[[], list[str]]]:
        """A state as a new process makes it, and a function that says what is wrong in it."""
        case = self._case
        blank(case.target)
        optimizers = case.optimizers(case.target, full=False)

        def wrong() -> list[str]:
            return [*case.wrong_model(), *(case.wrong_flat if case.layout.flat else case.wrong_adam)(optimizers)]

        return {"model": case.place.model(case.target), "optimizer": optimizers, "step": 0}, wrong


class Experts:
    """Experts in equal parts, each on ranks that follow each other, and a router on all of the first `size` ranks."""

    SHAPE = (6, 5)

    def __init__(self, parts: int, size: int) -> None:
        self.part, self.parts = dist.get_rank() * parts // size, parts
        self.group = dist.new_group(list(range(size)))

    def whole(self) -> dict[str, Any]:
        state, _ = self.empty()
        state["experts"].tensor.copy_(position_values(self.SHAPE).chunk(self.parts)[self.part])
        state["router"].copy_(position_values((4, 6), salt=1))
        return {**state, "step": int(STEP)}

    def empty(self) -> tuple[dict[str, Any], Callable[[], list[str]]]:
        rows = self.SHAPE[0] // self.parts
        experts = LocalShard(torch.full((rows, 5), -1.0), self.SHAPE, (rows * self.part, 0))
        state = {"experts": experts, "router": torch.full((4, 6), -1.0), "step": 0}

        def wrong() -> list[str]:
            wanted = {
                "experts": position_values(self.SHAPE).chunk(self.parts)[self.part],
                "router": position_values((4, 6), salt=1),
            }
            got = {"experts": experts.tensor, "router": state["router"]}
            return [name for name, tensor in wanted.items() if not torch.equal(got[name], tensor)]

        return state, wrong


ON = ("replaced", "another layout", "shrunk to 3")
"""On which ranks and in which layout it goes on: as before, as another kind, and without the last rank."""

TP_DP, PP_DP = Layout("dp×tp", dp=2, tp=2, data="copies"), Layout("dp×pp", pp=2, dp=2, data="copies")
KINDS: dict[str, tuple[Layout | tuple[int, int], ...]] = {
    "DDP": (Layout("dp", dp=4, data="ddp"), TP_DP, Layout("fsdp", dp=3)),
    "HSDP": (Layout("hsdp", rep=2, dp=2), PP_DP, Layout("dp", dp=3, data="ddp")),
    "TP × DP": (TP_DP, Layout("fsdp", dp=4), Layout("tp", tp=3)),
    "PP × DP": (PP_DP, Layout("hsdp", rep=2, dp=2), Layout("pp", pp=3)),
    "ZeRO-1": (Layout("flat", dp=4, flat=True, data="copies"), TP_DP, Layout("flat", dp=3, flat=True, data="copies")),
    "EP": ((2, 4), (3, 4), (3, 3)),
}


def chosen() -> list[tuple[str, str, str]]:
    """The combinations to run: all in a long run; else on other ranks or layouts one dead and a node dead by turns."""
    turns = zip(product(KINDS, ON[1:]), cycle(("one dead", "a node dead", "a node dead", "one dead")), strict=False)
    by_turns = {(kind, on, deaths) for (kind, on), deaths in turns}
    return [case for case in product(KINDS, ON, NODES) if is_long() or case[1] == ON[0] or case in by_turns]


def job_on(layout: Layout | tuple[int, int]) -> Networks | Experts:
    return Networks(layout) if isinstance(layout, Layout) else Experts(*layout)


def size_of(layout: Layout | tuple[int, int]) -> int:
    return layout.size if isinstance(layout, Layout) else layout[1]


def of_all(held: list[Held]) -> list[dict[str, Held]]:
    of_ranks: list[dict[str, Held]] = [{} for _ in range(SIZE)]
    dist.all_gather_object(of_ranks, {one.name: one for one in held})
    return of_ranks


def expected_bytes(saved: list[dict[str, Held]], wanted: list[dict[str, Held]], alive: set[int], goes_on: bool) -> dict[str, int]:
    """Where the bytes that all ranks want must come from, by the plainest means. Survivors may go on with their own state."""

    def is_apart(one: Held, ranks: Iterable[int]) -> bool:
        """Whether a tensor has bytes of its own: it is not tied on this rank, or not on all of these ranks that have it."""
        others = [saved[rank][one.name] for rank in ranks if one.name in saved[rank]]
        return one.alias_of is None or not all(other.alias_of is not None for other in others)

    total = dict.fromkeys(("self", "rank", "memory", "peer", "store"), 0)
    for rank, own in enumerate(wanted):
        for name, one in own.items():
            nothing, holders = np.zeros_like(one.mask), {r: saved[r][name] for r in alive if name in saved[r]}
            # Buffers under DDP may differ: a new state has those of the first rank.
            masks = {r: held.mask for r, held in holders.items() if goes_on or not held.is_buffer or r == min(holders)}
            mine, live = masks.get(rank, nothing), np.logical_or.reduce([nothing, *masks.values()])
            if is_apart(one, alive):
                total["self"] += one.item_bytes * int((one.mask & mine).sum())
                total["rank"] += one.item_bytes * int((one.mask & live & ~mine).sum())
            if is_apart(one, range(SIZE)):
                total["store"] += one.item_bytes * int((one.mask & ~live).sum())
    return total


@contextmanager
def no_reads() -> Any:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("storage was read")

    with mock.patch.object(LocalStorage, "read_into", refuse), mock.patch.object(LocalStorage, "read", refuse):
        yield


@dataclass(frozen=True)
class Answer:
    kind: str
    on: str
    deaths: str
    wanted: dict[str, int]
    got: dict[str, int]
    wrong: list[str]
    went_back: str
    step: int | None
    without: Outcome = field(default_factory=Outcome)
    """What a recovery without any checkpoint ends with."""


def cases_job(folder: str, cases: list[tuple[str, str, str]]) -> list[Answer]:
    rank, answers = dist.get_rank(), []
    for kind in KINDS:
        layouts = dict(zip(ON, KINDS[kind], strict=True))
        jobs = {on: job_on(layout) for on, layout in layouts.items()}
        whole, path = jobs["replaced"].whole(), Path(folder, kind)
        checkpoint.save(path, whole)
        saved = of_all(held_by(whole))
        wholes = {on: of_all(held_by(job.whole() if rank < size_of(layouts[on]) else {})) for on, job in jobs.items()}
        for of_kind, on, deaths in cases:
            if of_kind != kind:
                continue
            job, dead, size = jobs[on], NODES[deaths], size_of(layouts[on])
            alive = {*range(size)} - {*dead}
            wanted = expected_bytes(saved, wholes[on], alive, on == "replaced")
            if rank >= size:
                continue
            state, wrong = (whole, list) if on == "replaced" and rank in alive else job.empty()
            old: Any = rank in alive and (on == "replaced" or whole)
            without = Outcome()
            if wanted["store"]:
                without = outcome(lambda: checkpoint.recover(state, alive=old, process_group=job.group))  # noqa: B023
            # A survivor that is alone asks the catalog whether parameters without state had some on the others.
            with nullcontext() if wanted["store"] or len(alive) == 1 else no_reads():
                report = checkpoint.recover(state, alive=old, path=path, process_group=job.group)
            is_step = [] if state["step"] == STEP else [f"step {state['step']}"]
            got = dict(report.bytes_from)
            answers.append(Answer(kind, on, deaths, wanted, got, wrong() + is_step, report.went_back, report.step, without))
    return answers


def check_cases(folder: Path, cases: list[tuple[str, str, str]]) -> dict[tuple[str, str, str], Answer]:
    by_rank = run_ranks(cases_job, SIZE, str(folder), cases)
    for answers in by_rank:
        for one in answers:
            assert not one.wrong, one
            assert (one.got, one.went_back, one.step) == (one.wanted, "", STEP), one
            assert one.without.error == ("CheckpointNotFound" if one.wanted["store"] else ""), one
    return {(one.kind, one.on, one.deaths): one for one in by_rank[0]}


def test_every_byte_comes_from_its_nearest_holder(tmp_path: Path):
    cases = chosen()
    answers = check_cases(tmp_path, cases)
    assert [*answers] == cases
    assert len(cases) == (72 if is_long() else 36)
    read = {(kind, deaths) for (kind, on, deaths), one in answers.items() if on == "replaced" and one.wanted["store"]}
    assert read == {
        *(("ZeRO-1", deaths) for deaths in NODES),
        ("PP × DP", "a node dead"),
        ("EP", "a node dead"),
        ("HSDP", "two replicas dead"),
        ("TP × DP", "two replicas dead"),
    }


class Training:
    """A model under HSDP, or wrapped by nothing and averaged by hand, that trains on batches which depend on the step alone."""

    def __init__(self, axes: tuple[int, int] | None) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.axes = axes
        if axes:
            mesh = init_device_mesh("cpu", axes, mesh_dim_names=("replica", "shard"))
            for layer in (*self.model, self.model):
                fully_shard(layer, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "step": 0}

    def train(self, until: int, die_at: int | None = None, life: Life | None = None) -> list[float]:
        """Train up to a step, and return the losses of all ranks' batches."""
        losses = []
        while self.state["step"] < until:
            step = self.state["step"]
            if step == die_at and life is not None:
                life.die()
            batch = torch.randn(12, 6, generator=torch.Generator().manual_seed(step)).tensor_split(dist.get_world_size())
            loss = self.model(batch[dist.get_rank()]).square().mean()
            loss.backward()
            if not self.axes:
                for parameter in self.model.parameters():
                    dist.all_reduce(parameter.grad)
            total = loss.detach().clone()
            dist.all_reduce(total)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state["step"] += 1
            losses.append(float(total))
        return losses

    def whole(self) -> dict[str, torch.Tensor]:
        """All tensors, gathered on every rank."""
        tensors = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            tensors |= {f"{name}.{key}": t for key, t in self.optimizer.state[parameter].items()}
        return {name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in tensors.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[name]) for name, t in one.items())


def replaced_life(life: Life, group: int, axes: tuple[int, int] | None, die_at: int) -> Any:
    """Group 0 trains undisturbed, then again with a kill; group 1, with a new process, goes on from the survivors' memory."""
    rank = dist.get_rank()
    if group == 0:
        undisturbed = Training(axes).train(6)
        training = life.kept["old"] = Training(axes)
        life.kept["losses"] = undisturbed
        training.train(6, die_at if rank == 2 else None, life)
        return "not killed"
    # Plain modules go on as they are; those of FSDP are on the mesh of the old group, so that new ones take their place.
    old = life.kept.get("old")
    training = old if old is not None and not axes else Training(axes)
    training.optimizer.zero_grad()  # of the step in which the other rank was killed
    alive = old is not None and (True if not axes else old.state)
    with no_reads():
        report = checkpoint.recover(training.state, alive=alive)
    return life.kept.get("losses"), training.train(6), report


@pytest.mark.parametrize("axes", [(2, 2), None], ids=["HSDP", "plain replicas"])
def test_killed_rank_is_replaced_and_the_next_losses_are_those_of_an_undisturbed_run(axes: tuple[int, int] | None):
    die_at = random.SystemRandom().randrange(1, 6)
    first, second = run_lives(replaced_life, [[0, 1, 2, 3], [0, 1, 4, 3]], axes, die_at)
    assert first[2] == KILLED
    assert all(isinstance(answer, Outcome) for rank, answer in enumerate(first) if rank != 2), first
    for rank, answer in enumerate(second):
        losses, after, report = answer
        assert (report.step, report.went_back) == (die_at, "")
        assert (
            report.bytes_from["rank"] > 0 == report.bytes_from["store"] + report.bytes_from["memory"] + report.bytes_from["peer"]
        )
        assert rank == 2 or after == losses[die_at:], (rank, die_at)


def shrunk_life(life: Life, group: int) -> Any:
    """Process 2 is killed in training, and process 1 in the recovery after it; three ranks go on, of another layout."""
    rank, axes = dist.get_rank(), [(2, 2), (2, 2), (1, 3)][group]
    if group == 0:
        old = life.kept["old"] = Training(axes)
        old.train(2)
        life.kept["whole"] = old.whole()
        old.train(3, 2 if rank == 2 else None, life)
    old = life.kept.get("old")
    new = Training(axes)
    dies = mock.patch.object(Mover, "begin", side_effect=life.die) if group == 1 and rank == 1 else nullcontext()
    with dies, no_reads():
        report = checkpoint.recover(new.state, alive=False if old is None else old.state)
    whole = new.whole()
    return report, same(whole, life.kept.get("whole", whole)), new.state["step"]


def test_survivor_killed_in_the_recovery_is_left_out_and_fewer_ranks_recover_all():
    first, second, third = run_lives(shrunk_life, [[0, 1, 2, 3], [0, 1, 4, 3], [0, 3, 4]])
    assert (first[2], second[1]) == (KILLED, KILLED)
    assert [answer.error for rank, answer in enumerate(second) if rank != 1] == ["PeerError"] * 3, second
    for report, is_right, step in third:
        assert is_right
        assert (report.step, step, report.went_back, report.bytes_from["store"]) == (2, 2, "", 0)


def fetch_fails() -> Any:
    """A storage that fails once all is read."""
    fetch = loading.fetch

    def fails(*args: Any, **kwargs: Any) -> Any:
        fetch(*args, **kwargs)
        raise StorageError("the device failed")

    return mock.patch.object(loading, "fetch", fails)


@on_ranks(3)
def test_survivors_that_disagree_or_are_torn_go_back_to_the_newest_checkpoint(tmp_path: Path):
    rank, training = dist.get_rank(), Training(None)
    with checkpoint.Manager(tmp_path / "run") as manager:
        training.train(2)
        manager.save(2, training.state)
        wanted = training.whole()

        def goes_back(why: str) -> None:
            report = checkpoint.recover(training.state, alive=True, manager=manager)
            assert why in report.went_back
            assert (same(training.whole(), wanted), training.state["step"], report.step) == (True, 2, 2)
            assert report.bytes_from["store"] == sum(report.bytes_from.values()) > 0

        training.train(3)
        training.state["step"] += rank == 1  # rank 1 has counted a step that the others have not
        goes_back("the survivors are not at one step: step is 3 on rank 0, 4 on rank 1")
        training.train(3)
        with torch.no_grad():  # the state of rank 1 differs in a bit, at the same step
            training.model[0].weight[0, 0] += rank == 1
        goes_back("model.0.weight")
        # Going back fails once tensors are overwritten: no state counts as alive, though each is said to be.
        training.state["step"] += rank == 1
        with fetch_fails(), pytest.raises(StorageError):
            checkpoint.recover(training.state, alive=True, manager=manager)
        training.state["step"] = 3
        goes_back("no rank's state is alive")


@on_ranks(SIZE)
def test_replicas_that_are_lost_together_come_from_memory_then_the_store_then_an_older_step(tmp_path: Path):
    rank = dist.get_rank()
    memory = checkpoint.Memory(copies=0, folder=str(tmp_path / "memory"))
    with checkpoint.Manager(tmp_path / "run", memory=memory, persist_every=1000) as manager:
        old = Training((2, 2))
        old.state["own"] = checkpoint.PerRank(rank)
        for saved, step, tier in ((2, 2, "memory"), (3, 3, "store"), (4, 5, "store")):
            old.train(saved)
            wanted = old.whole()
            if tier == "memory":
                manager.async_save(saved, old.state).result()
            else:
                manager.save(saved, old.state)
            old.train(step)
            new = Training((2, 2))
            new.state["own"] = checkpoint.PerRank(None)
            report = checkpoint.recover(new.state, alive=False if rank in (0, 2) else old.state, manager=manager)
            assert (same(new.whole(), wanted), new.state["step"], report.step) == (True, saved, saved)
            assert new.state["own"].value == rank
            used = {source for source, num in report.bytes_from.items() if num}
            assert used == ({"self", "rank", tier} if step == saved else {tier})
            assert "there is no checkpoint of their step 5" in report.went_back if step != saved else not report.went_back
            old = new


@on_ranks(SIZE)
def test_part_whose_node_is_gone_comes_from_the_memory_of_another_node(tmp_path: Path):
    """Two replicas of each other are lost, one of them with its node: its part is in the memory of the other node alone."""
    rank = dist.get_rank()
    node = tmp_path / f"node{rank // 2}"
    memory = checkpoint.Memory(copies=1, folder=str(node))
    with checkpoint.Manager(tmp_path / "run", memory=memory, persist_every=1000) as manager:
        old = Training((2, 2))
        old.train(2)
        wanted = old.whole()
        manager.async_save(2, old.state).result()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(node)
    dist.barrier()
    with checkpoint.Manager(tmp_path / "run", memory=memory, persist_every=1000) as manager:
        new = Training((2, 2))
        report = checkpoint.recover(new.state, alive=False if rank in (0, 2) else old.state, manager=manager)
    assert (same(new.whole(), wanted), report.step, report.went_back) == (True, 2, "")
    # Ranks 0 and 2 want the same part, which the copy on the other node alone has: none of it is in the store.
    assert report.bytes_from["peer"] > 0 == report.bytes_from["store"]


@pytest.mark.parametrize("dead", [(3,), (2, 3)], ids=["one dead", "a node dead"])
@on_ranks(SIZE)
def test_state_that_zero_redundancy_optimizer_has_on_one_rank_comes_from_the_checkpoint(tmp_path: Path, dead: tuple[int, ...]):
    rank = dist.get_rank()

    def made() -> tuple[dict[str, Any], Callable[[int, int], None], ZeroRedundancyOptimizer]:
        torch.manual_seed(7)
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
        state = {"model": model, "optimizer": optimizer, "step": 0}

        def train(begin: int, end: int) -> None:
            for step in range(begin, end):
                batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(step)).tensor_split(SIZE)[rank]
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                state["step"] = step + 1

        return state, train, optimizer

    def values(state: dict[str, Any], optimizer: ZeroRedundancyOptimizer) -> list[torch.Tensor]:
        own = [value.clone() for held in optimizer.optim.state.values() for _, value in sorted(held.items())]
        return [*(parameter.detach().clone() for parameter in state["model"].parameters()), *own]

    old, train, optimizer = made()
    train(0, 2)
    checkpoint.save(tmp_path / "saved", old)
    wanted = values(old, optimizer)
    own_bytes = sum(value.nbytes for held in optimizer.optim.state.values() for value in held.values())
    lost = torch.tensor(own_bytes if rank in dead else 0)
    dist.all_reduce(lost)
    state, train, optimizer = made()
    report = checkpoint.recover(state, alive=False if rank in dead else old, path=tmp_path / "saved")
    found = values(state, optimizer)
    assert len(found) == len(wanted) > 8
    assert all(map(torch.equal, found, wanted))
    assert (report.step, report.went_back) == (2, "")
    assert report.bytes_from["store"] == lost > 0
    train(2, 3)  # it goes on


@on_ranks(3)
def test_value_of_each_rank_that_is_lost_is_named_and_kept_fresh():
    rank = dist.get_rank()
    state = {"w": torch.ones(3) if rank != 1 else torch.zeros(3), "own": checkpoint.PerRank(10 * rank), "step": 3}
    if rank == 1:
        state |= {"own": checkpoint.PerRank("fresh"), "step": 0}
    report = checkpoint.recover(state, alive=rank != 1)
    assert report.lost_values == ("own: rank 1 keeps the value that it has, as its own is lost",)
    assert (state["own"].value, state["step"]) == ("fresh" if rank == 1 else 10 * rank, 3)


def own_of(rank: int, size: int, step: int) -> dict[str, Any]:
    """The part of a rank of 12 numbers, and a value of its own; blank at step 0."""
    part = torch.arange(12).chunk(size)[rank].float()
    own = checkpoint.PerRank(f"of {rank}" if step else None)
    return {
        "w": LocalShard(part.clone() if step else torch.zeros_like(part), (12,), (len(part) * rank,)),
        "own": own,
        "step": step,
    }


@on_ranks(SIZE)
def test_values_of_ranks_that_have_other_numbers_than_in_the_checkpoint_are_kept_and_named(tmp_path: Path):
    """Parts and values of ranks 2 are lost. Two new processes make 4 ranks of 3; or the last rank of 4 gets number 2."""
    rank = dist.get_rank()
    for size, olds, new, values in (
        (3, [0, 1], [2, 3], ["of 0", "of 1", None, None]),
        (4, [0, 1, 3], [3], ["of 0", "of 1", "of 3", None]),
    ):
        group = dist.new_group(list(range(size)))
        if rank < size:
            checkpoint.save(tmp_path / str(size), own_of(rank, size, 5), process_group=group)
        dist.barrier()
        state = own_of(rank, SIZE, 0)
        old = own_of(olds[rank], size, 5) if rank < len(olds) else False
        report = checkpoint.recover(state, alive=old, path=tmp_path / str(size))
        assert report.went_back == ""
        assert report.lost_values == tuple(f"own: rank {n} keeps the value that it has, as its own is lost" for n in new)
        assert state["w"].tensor.tolist() == [3.0 * rank + i for i in range(3)]
        assert state["own"].value == values[rank]


class Tables:
    """A model with an embedding table divided by rows, and a dense layer that is on all ranks, or divided by rows too."""

    def __init__(self, *, divides_dense: bool) -> None:
        mesh = init_device_mesh("cpu", (SIZE,))
        self.model = nn.ModuleDict({"table": nn.Embedding(12, 3), "dense": nn.Linear(3, 8)})
        for layer in self.model.values() if divides_dense else (self.model["table"],):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
        self.optimizer = torch.optim.Adagrad(self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer, "step": 0}

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            found[f"optimizer.state.{name}.sum"] = self.optimizer.state[p]["sum"]
        return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in found.items()}

    def fill(self, step: int) -> None:
        for salt, tensor in enumerate(self.tensors().values()):
            tensor.fill_(100 * step + salt)
        for state in self.optimizer.state.values():
            state["step"].fill_(step)
        self.state["step"] = step

    def is_filled(self, step: int, names: str = "") -> bool:
        chosen = [(salt, t) for salt, (name, t) in enumerate(self.tensors().items()) if names in name]
        return all(bool((tensor == 100 * step + salt).all()) for salt, tensor in chosen)


@on_ranks(SIZE)
def test_partial_recovery_takes_lost_rows_of_tables_alone_from_the_checkpoint(tmp_path: Path):
    """Rank 3 is lost with its rows of the table at step 5, and the newest checkpoint is of step 2."""
    rank, path = dist.get_rank(), tmp_path / "step_2"
    rows = 3 * 3 * 4  # bytes of a rank's part of the table
    for divides_dense in (False, True):
        job = Tables(divides_dense=divides_dense)
        job.fill(2)
        checkpoint.save(path, job.state)
        job.fill(5)
        fresh = Tables(divides_dense=divides_dense)  # on all ranks, as it divides tensors together
        job = fresh if rank == 3 else job
        options = {"alive": rank != 3, "path": path, "policy": "partial"}
        if divides_dense:
            with pytest.raises(UsageError, match=r"model.dense.weight(?s:.*)allow_mixed=True"):
                checkpoint.recover(job.state, **options)
            options["allow_mixed"] = True
        report = checkpoint.recover(job.state, **options)
        assert job.is_filled(5) if rank != 3 else job.is_filled(2, "table") and job.is_filled(5, "dense.bias")
        assert job.is_filled(2 if divides_dense and rank == 3 else 5, "dense.weight")
        if divides_dense:
            mixed = {name for name in report.steps if "dense" in name}
            assert mixed == {"model.dense.weight", "optimizer.state.dense.weight.sum"}
        else:
            assert (job.state["step"], report.step) == (5, 5)
            assert report.steps == {"model.table.weight": (2, 5), "optimizer.state.table.weight.sum": (2, 5)}
            assert report.bytes_from["store"] == 2 * rows
            assert report.pls == pytest.approx(2 * rows / sum(report.bytes_from.values()) * (5 - 2) / 5)


@pytest.mark.parametrize(("key", "policy"), [("model", "exact"), ("my: model", "exact"), ("model", "partial")])
@on_ranks(SIZE)
def test_checkpoint_with_older_rows_fills_lost_rows_alone_and_none_in_an_exact_recovery(tmp_path: Path, key: str, policy: str):
    """Rank 3 is lost with its rows of a table, and the checkpoint of this step has a part of the rows of the table alone."""
    rank = dist.get_rank()

    def made() -> Tables:
        job = Tables(divides_dense=False)
        job.state = {key: job.model, f"{key}'s": job.optimizer, "step": 0}
        return job

    job, fresh = made(), made()
    rows = checkpoint.TouchedRows(job.model["table"], policy="most_used", fraction=0.25)
    checkpoint.save(tmp_path / "full", job.state, rows=rows)
    indices = distribute_tensor(torch.arange(12), init_device_mesh("cpu", (SIZE,)), [Replicate()])
    for step in (1, 2):
        job.optimizer.zero_grad()
        job.model["table"](indices[step:]).full_tensor().sum().backward()
        job.optimizer.step()
        job.state["step"] = step
    checkpoint.save(tmp_path / "rows", job.state, base=tmp_path / "full", rows=rows)
    own = job.tensors()["model.table.weight"].clone()
    job = fresh if rank == 3 else job
    report = checkpoint.recover(job.state, alive=rank != 3, path=tmp_path / "rows", policy=policy)
    name = f"{key}.table.weight"
    saved = checkpoint.read(tmp_path / "rows", [name])[name].chunk(SIZE)[rank]
    assert report.step == 2
    if policy == "exact":
        assert name in report.went_back
        assert "most_used, 0.25 of the rows" in report.went_back
    else:
        assert report.went_back == ""
    kept = policy == "partial" and rank != 3
    assert torch.equal(job.tensors()["model.table.weight"], own if kept else saved)


def on_rank_3(step: int, lr: float = 0.5, *, has_value: bool = False) -> dict[str, Any]:
    """A dense layer on all ranks, and on rank 3 alone tables, one in a group and one in an optimizer of its own, and a value."""
    tables = {"table": nn.Embedding(5, 2), "apart": nn.Embedding(5, 2)} if dist.get_rank() == 3 else {}
    model = nn.ModuleDict({"dense": nn.Linear(2, 2), **tables})
    groups = [{"params": list(part.parameters()), "lr": lr / n} for n, part in enumerate([*model.values()][:2], 1)]
    optimizers = {"optimizer": torch.optim.Adagrad(groups)}
    if tables:
        optimizers["other"] = torch.optim.Adagrad(tables["apart"].parameters(), lr=lr)
    for optimizer in optimizers.values():
        for parameter, held in optimizer.state.items():
            parameter.data.fill_(step)
            held["sum"].fill_(step)
            held["step"].fill_(step)
    own = {"schedule": {"at": step}} if has_value and tables else {}
    return {"all": {"stages": [model]}, **optimizers, "step": step, **own}


@on_ranks(SIZE)
def test_partial_recovery_restores_hyperparameters_and_refuses_to_mix_values(tmp_path: Path):
    """Rank 3 is lost with whole tables and their hyperparameters; then with a value that no other rank has."""
    rank = dist.get_rank()
    names = (
        "all.stages.apart.weight",
        "all.stages.table.weight",
        "optimizer.state.table.weight.step",
        "optimizer.state.table.weight.sum",
        "other.param_groups",
        "other.state.apart.weight.step",
        "other.state.apart.weight.sum",
    )
    for has_value in (False, True):
        path = tmp_path / str(has_value)
        checkpoint.save(path, on_rank_3(2, 0.2, has_value=has_value))
        state = on_rank_3(0, has_value=has_value) if rank == 3 else on_rank_3(5, 0.1)
        options = {"alive": rank != 3, "path": path, "policy": "partial"}
        if has_value:
            with pytest.raises(UsageError, match="schedule.at: lost"):
                checkpoint.recover(state, **options)
            options["allow_mixed"] = True
        report = checkpoint.recover(state, **options)
        assert report.steps == dict.fromkeys((*names, "schedule.at") if has_value else names, (2,))
        if not has_value:
            assert report.went_back == ""
            optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
            rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
            assert rates == [0.1, *([0.1, 0.2] if rank == 3 else [])]  # those of the tables at step 2 were 0.2 / 2 and 0.2
            weights = [float(p.flatten()[0]) for p in state["all"]["stages"][0].parameters()]
            assert weights == [5.0, 5.0, *([2.0, 2.0] if rank == 3 else [])]
    assert state.get("schedule") == ({"at": 2} if rank == 3 else None)


@on_ranks(SIZE)
def test_partial_recovery_goes_back_where_the_checkpoint_lacks_a_lost_part(tmp_path: Path):
    """Rank 3 is lost with its rows after the first step; the only checkpoint is older than the state of the optimizer."""
    rank = dist.get_rank()

    def made() -> dict[str, Any]:
        torch.manual_seed(7)
        table = nn.Embedding(12, 3)
        table.weight = nn.Parameter(distribute_tensor(table.weight.detach(), init_device_mesh("cpu", (SIZE,)), [Shard(0)]))
        return {"all": [table], "optimizer": torch.optim.Adam(table.parameters()), "step": 0}

    state, fresh = made(), made()
    checkpoint.save(tmp_path / "step_0", state)
    weight = state["all"][0].weight
    weight.grad = torch.ones_like(weight)
    state["optimizer"].step()
    state["step"] = 1
    state = fresh if rank == 3 else state
    report = checkpoint.recover(state, alive=rank != 3, path=tmp_path / "step_0", policy="partial")
    assert "optimizer.state.weight.exp_avg" in report.went_back
    assert (state["step"], len(state["optimizer"].state)) == (0, 0)


@on_ranks(3)
def test_overwritten_state_does_not_count_as_the_old_state_of_a_survivor(tmp_path: Path):
    old = Training(None)
    old.train(2)
    checkpoint.save(tmp_path / "step_2", old.state)
    wanted = old.whole()
    old.train(3)
    old.state["step"] += dist.get_rank() == 1
    with fetch_fails(), pytest.raises(StorageError):
        checkpoint.recover(old.state, alive=True, path=tmp_path / "step_2")
    old.state["step"] = 3
    for went_back in ("no rank's state is alive", ""):
        new = Training(None)
        report = checkpoint.recover(new.state, alive=old.state, path=tmp_path / "step_2")
        assert (report.went_back, new.state["step"], same(new.whole(), wanted)) == (went_back, 2, True)
        old = new


@on_ranks(2)
def test_overwritten_state_of_inference_tensors_does_not_count_as_alive(tmp_path: Path):
    """torch counts no changes of such tensors."""
    with torch.inference_mode():
        state = {"w": torch.full((4,), 2.0), "step": 2}
        checkpoint.save(tmp_path / "step_2", state)
        state["w"].fill_(5)
    state["step"] = 5 + dist.get_rank()  # they disagree, so all go back, which fails once tensors are overwritten
    with fetch_fails(), pytest.raises(StorageError):
        checkpoint.recover(state, alive=True, path=tmp_path / "step_2")
    for went_back in ("no rank's state is alive", ""):
        state["step"] = 5
        report = checkpoint.recover(state, alive=True, path=tmp_path / "step_2")
        assert went_back in report.went_back
        assert bool(report.went_back) == bool(went_back)


@on_ranks(3)
def test_steps_are_compared_though_the_first_survivor_says_none():
    """The survivors hold different tensors."""
    rank = dist.get_rank()
    with pytest.raises(CheckpointError, match="step is 3 on rank 1, 4 on rank 2"):
        checkpoint.recover({f"w{rank}": torch.ones(2)}, alive=True, step=(None, 3, 4)[rank])


@on_ranks(SIZE)
def test_partial_recovery_finds_the_newest_checkpoint_of_all_nodes(tmp_path: Path):
    """Rank 0 is lost with its node and its rows; the newest checkpoint is in the memory of other nodes alone."""
    rank = dist.get_rank()
    memory = checkpoint.Memory(copies=1, folder=str(tmp_path / f"node{rank}"))
    job = Tables(divides_dense=False)
    manager = checkpoint.Manager(tmp_path / "run", memory=memory, persist_every=1000)
    job.fill(2)
    manager.save(2, job.state)
    job.fill(4)
    manager.async_save(4, job.state).result()
    manager._memory.close(clean=False)  # as after a kill: nothing goes to the store
    manager._held.close()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(tmp_path / "node0")
    dist.barrier()
    job.fill(5)
    fresh = Tables(divides_dense=False)
    job = fresh if rank == 0 else job
    with checkpoint.Manager(tmp_path / "run", memory=memory, persist_every=1000) as manager:
        report = checkpoint.recover(job.state, alive=rank != 0, manager=manager, policy="partial")
    assert report.went_back == ""
    assert report.steps == {"model.table.weight": (4, 5), "optimizer.state.table.weight.sum": (4, 5)}
    assert job.is_filled(4, "table") if rank == 0 else job.is_filled(5)


@on_ranks(SIZE)
def test_lost_parts_do_not_come_from_a_checkpoint_of_their_step_that_took_other_steps(tmp_path: Path):
    """A run goes back to step 3, trains otherwise to step 5, and loses a rank: the checkpoint of step 5 is of the first way."""
    rank = dist.get_rank()

    def state(value: int, step: int) -> dict[str, Any]:
        return {"w": LocalShard(torch.full((2,), float(value)), (8,), (2 * rank,)), "step": step}

    with checkpoint.Manager(tmp_path / "run") as manager:
        manager.save(3, state(3, 3))
        manager.save(5, state(5, 5))
        manager.load(3, state(0, 0))
    own = state(0, 0) if rank == 3 else state(55, 5)
    with checkpoint.Manager(tmp_path / "run") as manager:
        report = checkpoint.recover(own, alive=rank != 3, manager=manager)
    assert "w: the survivors are not as in the checkpoint of their step 5" in report.went_back
    assert own["w"].tensor.tolist() == [5.0, 5.0]


def test_a_recovery_without_a_checkpoint_says_why_it_wanted_one(tmp_path: Path):
    with pytest.raises(CheckpointNotFound, match=r"^no rank's state is alive; .*none: no committed checkpoint"):
        checkpoint.recover({"x": torch.ones(2)}, alive=False, path=tmp_path / "none")
