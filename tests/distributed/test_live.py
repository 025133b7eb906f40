"""Live resharding: every layout to others, bit for bit, and no byte crosses that its rank holds."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from reshard_ckpt import FlatShard, LocalShard, checkpoint
from reshard_ckpt.checkpoint import live_job
from reshard_ckpt.comm import StoreComm
from reshard_ckpt.core.catalog.specs import Replication
from reshard_ckpt.engine.common.mover import Mover
from reshard_ckpt.engine.common.rounds import Buffers
from reshard_ckpt.errors import LayoutError, MismatchError, PeerError, UsageError
from reshard_ckpt.state import capture
from tests.deadlines import over_when
from tests.distributed.cases import Case
from tests.distributed.net import Layout, blank, share_device
from tests.distributed.test_limits import Peak, only_linux
from tests.distributed.test_matrix import LAYOUTS as LARGE
from tests.helpers import places, position_values
from tests.launch import on_ranks, run_ranks
from tests.machines import Machines
from tests.tries import is_long, pairs

LAYOUTS = (
    Layout("plain"),
    Layout("dp", dp=2, data="ddp"),
    Layout("dp", dp=2, data="copies"),
    Layout("dp", dp=2),
    Layout("dp", dp=3),
    Layout("dp", dp=3, data="ddp"),
    Layout("dp", dp=4),
    Layout("dp", dp=4, data="ddp"),
    Layout("dp", dp=4, data="copies"),
    Layout("hsdp", rep=2, dp=2),
    Layout("tp", tp=2),
    Layout("tp", tp=3),
    Layout("tp", tp=4),
    Layout("pp", pp=2),
    Layout("pp", pp=2, stages_per_rank=2),
    Layout("pp", pp=3, stages_per_rank=2),
    Layout("pp", pp=4),
    Layout("dp×tp", dp=2, tp=2),
    Layout("dp×tp", dp=2, tp=2, data="copies"),
    Layout("dp×pp", pp=2, dp=2),
    Layout("dp×pp", pp=2, dp=2, data="ddp", stages_per_rank=2),
    Layout("dp×pp", pp=2, dp=2, data="copies"),
    Layout("tp×pp", pp=2, tp=2),
    Layout("tp×pp", pp=2, tp=2, stages_per_rank=3),
    Layout("flat", flat=True, data="copies"),
    Layout("flat", dp=2, flat=True, data="ddp"),
    Layout("flat", dp=3, flat=True, data="copies"),
    Layout("flat", dp=4, flat=True, data="ddp"),
    Layout("flat", dp=2, tp=2, flat=True, data="copies"),
    Layout("flat", pp=2, dp=2, flat=True, data="copies"),
)


@dataclass(frozen=True)
class Held:
    """A tensor that this rank has: which of its elements, by the plainest means; of two stages, each has its own."""

    name: str
    mask: np.ndarray
    item_bytes: int
    alias_of: str | None
    is_buffer: bool
    """Whether it is one under DDP."""


def held_by(state: dict[str, Any]) -> list[Held]:
    """What this rank has of a state."""
    held = []
    for spec, memory in capture(state).tensors:
        mask = np.zeros(spec.shape, bool)
        for piece in spec.pieces:
            mask[places(piece)[1]] = True
        held.append(Held(spec.name, mask, memory.element_size(), spec.alias_of, spec.replication is Replication.BUFFER))
    return held


def tied_everywhere(held: list[Held]) -> set[str]:
    """The names that every rank that has them says are tied to an earlier one."""
    of_ranks: list[dict[str, str | None]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, {one.name: one.alias_of for one in held})
    return {name for one in of_ranks for name in one if all(other.get(name, "") is not None for other in of_ranks)}


def missing_bytes(held: list[Held], wanted: list[Held]) -> int:
    """How many bytes a rank wants and does not hold."""
    total = 0
    for one in wanted:
        own = [other.mask for other in held if other.name == one.name]
        total += one.item_bytes * int((one.mask & ~np.logical_or.reduce([*own, np.zeros_like(one.mask)])).sum())
    return total


def matrix_job(layouts: tuple[Layout, ...], chosen: list[tuple[int, int]]) -> list[str]:
    share_device()  # some sixty groups follow
    cases = [Case(layout) for layout in layouts]
    sources = [case.saved_state() if case.place.mine else {} for case in cases]
    wants = [held_by(source) for source in sources]
    holds = [[one for one in held if dist.get_rank() == 0 or not one.is_buffer] for held in wants]  # rank 0's buffers count
    ties = [tied_everywhere(held) for held in wants]
    wrong: list[str] = []
    crossed, least = 0, 0
    machines, size = Machines(), dist.get_world_size()
    for number, (saved, loaded) in enumerate(chosen):
        per_machine = (size, 2, 1)[number % 3]
        machines.of_rank = [rank // per_machine for rank in range(size)]
        case, target = cases[loaded], {}
        if case.place.mine:
            blank(case.target)
            optimizers = case.optimizers(case.target, full=False)
            target = {"model": case.place.model(case.target), "optimizer": optimizers}
        report = checkpoint.reshard_live(sources[saved], target, staged=(saved + loaded) % 3 == 0)
        crossed += report.bytes_read
        # What is tied on both sides comes once; else both of its sources do, as they must be the same.
        least += missing_bytes(
            holds[saved], [one for one in wants[loaded] if one.alias_of is None or one.name not in ties[saved]]
        )
        if case.place.mine:
            problems = [*case.wrong_model(), *(case.wrong_flat(optimizers) if case.layout.flat else case.wrong_adam(optimizers))]
            wrong += [f"{layouts[saved]} to {layouts[loaded]}: rank {dist.get_rank()}: {problem}" for problem in problems]
    if crossed != least:
        wrong.append(f"rank {dist.get_rank()}: {crossed} bytes came, {least} were not there")
    return wrong


def check_matrix(ranks: int, layouts: tuple[Layout, ...], chosen: list[tuple[int, int]]) -> None:
    wrong = [line for rank in run_ranks(matrix_job, ranks, layouts, chosen, timeout_s=1800) for line in rank]
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong[:40]])


@pytest.mark.slow
def test_layouts_become_each_other_on_1_and_2_ranks():
    for ranks in (1, 2):
        layouts = tuple(layout for layout in LAYOUTS if layout.size <= ranks)
        check_matrix(ranks, layouts, pairs(range(len(layouts))))


@pytest.mark.slow
def test_layouts_of_8_ranks_become_each_other():
    layouts = tuple(layout for layout in LARGE if layout.size == 8)
    check_matrix(8, layouts, [(saved, loaded) for saved, loaded in pairs(range(len(layouts))) if is_long() or saved != loaded])


@pytest.mark.slow
def test_every_layout_becomes_others_on_4_ranks():
    """Each layout becomes one of another kind, seven lines below, and one of each kind itself; in a long run, each every one."""
    first = {layout.kind: i for i, layout in reversed([*enumerate(LAYOUTS)])}.values()
    chosen = pairs([(7 * i) % len(LAYOUTS) for i in range(len(LAYOUTS))])
    check_matrix(4, LAYOUTS, [(saved, to) for saved, to in chosen if is_long() or saved != to or saved in first])


SHAPE = (24, 10)
NAMES = ("fused", "flat", "turned")


def wholes() -> dict[str, torch.Tensor]:
    return {name: position_values(SHAPE, salt=i) for i, name in enumerate(NAMES)}


def trainer_shards(rank: int) -> dict[str, Any]:
    """What trainer 0 or 1 holds: rows of each section of a fused weight, a ragged flat range, and columns that lie transposed."""
    whole, cut = wholes(), (0, 101, 240)
    sections = [(0, 6 * rank, 6), (6, 12 + 3 * rank, 3), (9, 18 + 3 * rank, 3)]
    fused = torch.cat([whole["fused"][low : low + num] for _, low, num in sections])
    columns = whole["turned"][:, 5 * rank : 5 * rank + 5].t().contiguous().t()
    return {
        "fused": LocalShard(fused, SHAPE, pieces=[((at, 0), (low, 0), (num, 10)) for at, low, num in sections]),
        "flat": FlatShard(whole["flat"].flatten()[cut[rank] : cut[rank + 1]].clone(), SHAPE, cut[rank]),
        "turned": LocalShard(columns, SHAPE, (0, 5 * rank)),
    }


def engine_shards(at: int) -> dict[str, LocalShard]:
    """Half of the rows of each, with nothing in them yet."""
    return {name: LocalShard(torch.full((12, 10), -1.0), SHAPE, (12 * at, 0)) for name in NAMES}


@on_ranks(4)
def test_trainers_and_engines_on_other_ranks_exchange_any_shards():
    """Trainers 0 and 1 give to engines 2 and 3, which change what they got, and give it back."""
    rank, whole = dist.get_rank(), wholes()
    trainer = {"m": trainer_shards(rank)} if rank < 2 else None
    engine = {"m": engine_shards(rank - 2)} if rank >= 2 else None
    assert checkpoint.reshard_live(trainer, engine, staged=True).bytes_read == (3 * 120 * 4 if engine else 0)
    for name, shard in engine["m"].items() if engine else ():
        assert torch.equal(shard.tensor, whole[name].chunk(2)[rank - 2])
        shard.tensor.mul_(2)
    checkpoint.reshard_live(engine, trainer)
    before = trainer_shards(rank) if trainer else {}
    assert all(torch.equal(trainer["m"][name].tensor, 2 * shard.tensor) for name, shard in before.items())


@on_ranks(4)
def test_kept_reshard_follows_values_and_memory_until_a_layout_changes():
    """Values, steps and weights change from run to run; then a layout does."""
    rank = dist.get_rank()
    net = nn.Linear(6, 4) if rank < 2 else None
    optimizer = torch.optim.AdamW(net.parameters()) if net else None
    src = {"model": net, "optimizer": optimizer, "step": 0} if net else {}
    fresh = nn.Linear(6, 4)
    dst = {"model": fresh, "optimizer": torch.optim.AdamW(fresh.parameters(), lr=9.0), "step": -1} if rank >= 2 else {}

    def train() -> None:
        if net and optimizer:
            optimizer.zero_grad()
            net(torch.ones(6)).sum().backward()
            optimizer.step()
            src["step"] += 1

    def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        state = optimizer.state[model.weight]
        return [model.weight.detach(), *(state[key] for key in ("exp_avg", "exp_avg_sq", "step"))]

    def right(step: int) -> bool:
        own = tensors(net, optimizer) if net and optimizer else [torch.zeros(shape) for shape in ((4, 6), (4, 6), (4, 6), ())]
        wanted = [tensor.clone() for tensor in own]
        for tensor in wanted:
            dist.broadcast(tensor, 0)
        if not dst:
            return src["step"] == step
        got = tensors(dst["model"], dst["optimizer"])
        same = all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))
        return same and dst["optimizer"].param_groups[0]["lr"] == 1e-3 and dst["step"] == step

    torch.manual_seed(0)
    if net:
        for p in net.parameters():
            nn.init.normal_(p)
    train()
    live = checkpoint.LiveReshard(src, dst)
    for step in (2, 3, 4):
        train()
        live.run()
        assert right(step)
    if rank == 3:  # other memory of the same layout
        dst["model"].weight = nn.Parameter(torch.zeros(4, 6))
        dst["optimizer"] = torch.optim.AdamW(dst["model"].parameters())
    live.run()
    assert right(4)
    if rank == 1:
        src["more"] = torch.zeros(2)
    with pytest.raises(UsageError, match="has changed since this LiveReshard was made") as raised:
        live.run()
    assert str(raised.value).startswith("rank 1: ") == (rank != 1)
    assert right(4)


def turned(whole: torch.Tensor) -> tuple[LocalShard, LocalShard, torch.Tensor]:
    """Return the rows of a tensor that this rank gives, columns that it takes, and what these must become."""
    rank, size, shape = dist.get_rank(), dist.get_world_size(), tuple(whole.shape)
    rows, columns = whole.chunk(size)[rank].clone(), whole.chunk(size, 1)[rank].clone()
    taken = LocalShard(torch.full_like(columns, -1), shape, (0, rank * columns.shape[1]))
    return LocalShard(rows, shape, (rank * len(rows), 0)), taken, columns


@pytest.mark.parametrize("staged", [False, True])
@on_ranks(4)
def test_rank_that_fails_in_the_middle_is_the_same_error_on_all(staged: bool):
    """Rank 1 fails in the middle of the rounds; afterwards all goes on."""
    rank = dist.get_rank()
    rows, columns, wanted = turned(position_values((1 << 16, 16)))
    live = checkpoint.LiveReshard({"w": rows}, {"w": columns}, memory_bytes=1 << 20, staged=staged)
    unpack, calls = Mover.unpack, iter(range(1000))

    def failing(self: Mover, number: int, *args: Any) -> None:
        if rank == 1 and next(calls) == 2:
            raise MemoryError("no room")
        unpack(self, number, *args)

    with mock.patch.object(Mover, "unpack", failing), pytest.raises(PeerError) as raised:
        live.run()
    after = "no tensor was changed" if staged else "already overwritten, wholly or in part: w"
    assert str(raised.value) == f"{'' if rank == 1 else 'rank 1: '}MemoryError: no room; {after}"
    assert bool((columns.tensor != -1).any()) is not staged
    live.run()
    assert torch.equal(columns.tensor, wanted)


@on_ranks(2)
def test_sessions_are_opened_only_where_values_have_changed_and_disagreement_is_refused_each_time():
    rank, opened, open_session = dist.get_rank(), [], StoreComm.open
    rows, columns, wanted = turned(position_values((8, 6)))
    first = rows.tensor.clone()
    src: dict[str, Any] = {"w": rows, "step": 1}
    dst: dict[str, Any] = {"w": columns, "step": 0}
    live = checkpoint.LiveReshard(src, dst)

    def counted(self: StoreComm, *args: Any, **kwargs: Any) -> bool:
        opened.append(1)
        return open_session(self, *args, **kwargs)

    def runs(times: int, *, step: int, sessions: list[int], refused: bool = False) -> None:
        for number in range(times):
            rows.tensor.copy_(first + number)
            opened.clear()
            with pytest.raises(LayoutError, match="step") if refused else nullcontext():
                live.run()
            # Refused before anything is moved, so what came before is still there: the values of another run.
            assert torch.equal(columns.tensor, wanted + number) is not refused
            assert (len(opened), dst["step"]) == (sessions[number], step)

    with mock.patch.object(StoreComm, "open", counted):
        runs(3, step=1, sessions=[0, 0, 0])
        src["step"] = 2
        runs(2, step=2, sessions=[1, 0])
        if rank:
            src["step"] = 3
        runs(1, step=2, sessions=[1], refused=True)
        runs(1, step=2, sessions=[1], refused=True)  # they still do
        src["step"] = 3
        runs(2, step=3, sessions=[1, 0])


class Stubborn:
    """A value with a way in of its own, which may fail."""

    def __init__(self) -> None:
        self.fails = False

    def state_dict(self) -> dict[str, Any]:
        return {"at": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fails:
            raise ValueError("not now")


@pytest.mark.parametrize("staged", [False, True])
@on_ranks(2)
def test_what_fails_first_or_last_on_one_rank_is_the_same_error_on_all(staged: bool):
    """What fails when values go in, on one rank; buffers that cannot be had, on one rank; then all goes on."""
    rank, stubborn = dist.get_rank(), Stubborn()
    rows, columns, wanted = turned(position_values((8, 6)))
    src, dst = {"w": rows, "other": Stubborn()}, {"w": columns, "other": stubborn}
    live = checkpoint.LiveReshard(src, dst, staged=staged)
    live.run()
    stubborn.fails = rank == 1
    told = "other: (?s:.*)load_state_dict refused the loaded state: not now(?s:.*); already overwritten, wholly or in part: w$"
    with pytest.raises(MismatchError, match=f"^{'' if rank == 1 else 'rank 1: '}{told}"):
        live.run()
    stubborn.fails = False
    live.run()
    columns.tensor.zero_()
    Machines().of_rank = [0, 1]  # so that bytes travel in messages
    live, original = checkpoint.LiveReshard(src, dst, staged=staged), Buffers.get

    def get(self: Buffers, which: int, num_bytes: int) -> torch.Tensor:
        if rank == 0 and which == 2:
            raise MemoryError("no room")
        return original(self, which, num_bytes)

    with mock.patch.object(Buffers, "get", get), pytest.raises(PeerError) as raised:
        live.run()
    assert str(raised.value) == f"{'' if rank == 0 else 'rank 0: '}MemoryError: no room; no tensor was changed"
    assert not columns.tensor.any()
    live.run()
    assert torch.equal(columns.tensor, wanted)


@on_ranks(2)
def test_ranks_that_call_different_things_or_come_late_are_told_and_all_goes_on_later(tmp_path: Path):
    """Rank 1 saves where rank 0 runs a kept reshard, or does not come in time; afterwards all goes on."""
    rank = dist.get_rank()
    rows, columns, wanted = turned(position_values((8, 6)))
    src, dst = {"w": rows}, {"w": columns}
    live = checkpoint.LiveReshard(src, dst)
    live.run()
    columns.tensor.zero_()
    with pytest.raises(PeerError, match="rank 0: reshard_live ''; rank 1: save"):
        checkpoint.save(tmp_path / "x", src) if rank else live.run()
    hasty = checkpoint.LiveReshard(src, dst)
    if rank:
        dist.barrier()
    with nullcontext() if rank else over_when(lambda: True), pytest.raises(PeerError) as raised:
        hasty.run()
    assert "rank 1 did not arrive within 600 s" in str(raised.value)
    assert raised.value.ranks == (1,)
    if not rank:
        dist.barrier()
    assert not columns.tensor.any()
    for one in (live, checkpoint.LiveReshard(src, dst)):
        columns.tensor.zero_()
        one.run()
        assert torch.equal(columns.tensor, wanted)


@on_ranks(2)
def test_overlaps_and_states_that_do_not_fit_are_refused_by_name_on_all_ranks():
    rank = dist.get_rank()
    part = LocalShard(torch.arange(6.0) + 6 * rank, (12,), (6 * rank,))
    same, memory = position_values((12,)), torch.zeros(20)
    of_both, own = "a: its memory in dst is also that of a in src", LocalShard(part.tensor, (12,), (6 * (1 - rank),))

    def refused(error: type[Exception], says: str, src: dict[str, Any], dst: dict[str, Any], **options: Any) -> None:
        with pytest.raises(error, match=says):
            checkpoint.reshard_live(src, dst, **options)

    two = {"a": same, "b": same + 1}
    refused(UsageError, of_both, {"a": part}, {"a": own})
    refused(UsageError, of_both, {"a": memory[:12]}, {"a": memory[8:]})
    refused(UsageError, "shares a part of its memory with", two, {"a": memory[:12], "b": memory[8:]})
    refused(MismatchError, "tied to(?s:.*)no tensor was changed", two, {"a": memory[:12], "b": memory[:12]})
    assert not memory.any()
    more = {"a": torch.zeros(12), "c": torch.zeros(2)} if rank else {}
    refused(MismatchError, "c: not in src", {"a": part}, more)
    refused(LayoutError, r"no rank holds \[0:6\]", {"a": part} if rank else {}, {"a": torch.zeros(12)})
    refused(UsageError, "memory_bytes=1000", {"a": part}, {"a": torch.zeros(12)}, memory_bytes=1000)
    tied = torch.zeros(12)
    checkpoint.reshard_live({"a": same, "b": same.clone()}, {"a": tied, "b": tied})
    assert torch.equal(tied, same)
    checkpoint.reshard_live({"a": part, "b": same}, {"a": part, "b": memory[:12]})  # itself is no overlap
    assert torch.equal(part.tensor, torch.arange(6.0) + 6 * rank)


@on_ranks(2)
def test_a_cast_to_a_smaller_dtype_is_made_before_the_bytes_travel():
    """Weights go under other names to one rank alone."""
    rank = dist.get_rank()
    whole = position_values((64, 8)) / 3
    src = {"model": {"w": LocalShard(whole.chunk(2)[rank].clone(), (64, 8), (32 * rank, 0))}}
    dst = {"engine": {"w": torch.zeros(64, 8, dtype=torch.bfloat16)}} if rank else {}
    report = checkpoint.reshard_live(src, dst, cast=["engine"], rename={"model": "engine"})
    assert report.bytes_read == (32 * 8 * 2 if rank else 0)
    assert not rank or torch.equal(dst["engine"]["w"], whole.bfloat16())


@only_linux
@on_ranks(4)
def test_messages_stay_within_the_memory_that_is_set():
    """Rows become columns of a tensor of 64 MB, with 8 MiB for messages."""
    size = 4096
    rows, columns, wanted = turned(torch.arange(size).float()[:, None] + torch.arange(size) / size)
    checkpoint.reshard_live({"warm": torch.zeros(3)}, {"warm": torch.zeros(3)})  # imports and connections are there from now on
    with Peak() as peak:
        checkpoint.LiveReshard({"w": rows}, {"w": columns}, memory_bytes=8 << 20).run()
    assert torch.equal(columns.tensor, wanted)
    assert peak.grown < 24 << 20, f"{peak.grown / 2**20:.1f} MiB, 8 for messages, and as much of what others share is mapped"


@on_ranks(2)
def test_one_shot_reshards_use_the_memory_of_the_last_one_where_all_ranks_have_enough():
    share = Buffers.share
    made: list[bool] = []
    Buffers.share = lambda self, *args: (made.append(self._shared is None), share(self, *args))[1]  # type: ignore[method-assign]

    def move(size: int, fill: int, *, is_made: bool, **options: Any) -> None:
        rows, columns, wanted = turned(torch.arange(size * size).view(size, size) + fill)
        made.clear()
        checkpoint.reshard_live({"w": rows}, {"w": columns}, **options)
        assert torch.equal(columns.tensor, wanted)
        assert made == [is_made], (size, fill)

    move(512, 0, is_made=True)
    move(512, 5, is_made=False)  # the same layout
    move(64, 7, is_made=False)  # a smaller one fits too
    move(1024, 9, is_made=True)  # a larger one does not
    move(64, 11, is_made=True, memory_bytes=1 << 20)  # more is kept than this call may have
    move(64, 13, is_made=False)
    if dist.get_rank():
        live_job._KEPT.clear()  # as after a call that failed on one rank alone
    move(64, 15, is_made=True)
    move(64, 17, is_made=False)


@on_ranks(2)
def test_one_shot_reshards_use_the_plan_of_the_last_one_where_nothing_has_changed_on_any_rank():
    rank, planned, plan = dist.get_rank(), [], live_job.plan_moves
    live_job.plan_moves = lambda *args: (planned.append(True), plan(*args))[1]  # type: ignore[assignment]
    alive: list[weakref.ref[torch.Tensor]] = []

    def move(
        what: str, size: int, fill: int, step: Any, more: dict[str, Any] | None = None, *, plans: bool = True, **options: Any
    ) -> None:
        rows, columns, wanted = turned(torch.arange(size * size).view(size, size) + fill)
        same = torch.full((5,), fill)
        src = {"w": rows, "same": same, "step": step}
        dst = {"w": columns, "same": same - 1, "step": -1, **(more or {})}
        planned.clear()
        checkpoint.reshard_live({"s": src}, {"s": dst}, **options)
        assert torch.equal(columns.tensor, wanted), what
        assert torch.equal(dst["same"], same), what
        assert (dst["step"], bool(planned)) == (step, plans), what
        alive[:] = [weakref.ref(tensor) for tensor in (rows.tensor, columns.tensor, same)]

    move("first", 64, 1, 1)
    gc.collect()
    assert not any(tensor() is not None for tensor in alive)
    move("the same layout", 64, 2, 1, plans=False)
    move("another value", 64, 3, 2, plans=False)
    move("another size", 128, 4, 2)
    move("that size again", 128, 5, 2, plans=False)
    move("another option", 128, 6, 2, replicas="trust")
    move("that option again", 128, 7, 2, plans=False, replicas="trust")
    move("another option on one rank", 128, 8, 2, rename={"no": "name"} if rank else None, replicas="trust")
    move("a value that may be missing", 128, 9, 2, {"new": 3}, allow_missing=["s.new"])
    move("it may be missing again", 128, 10, 2, {"new": 3}, plans=False, allow_missing=["s.new"])
    with pytest.raises(MismatchError, match="s.new: not in src"):
        move("too much", 128, 11, 2, {"new": 3} if rank else None)
    move("after an error", 128, 12, 2)
    move("after that", 128, 13, 2, plans=False)


def test_a_quantized_tensor_is_cast_or_refused_as_in_a_load(tmp_path: Path):
    quantized = torch.arange(4.0).to(torch.float8_e4m3fn)
    for name, scale, refusal in (("alone", {}, None), ("scaled", {"w_scale_inv": torch.ones(1)}, "with the scale .*w_scale_inv")):
        src = {"model": {"w": quantized, **scale}}
        checkpoint.save(tmp_path / name, src)
        for call in (checkpoint.load, checkpoint.reshard_live):
            dst = {"model": {"w": torch.zeros(4), **{key: torch.zeros(1) for key in scale}}}
            refused = pytest.raises(MismatchError, match=refusal) if refusal else nullcontext()
            with refused:
                call(tmp_path / name if call is checkpoint.load else src, dst, cast=True)
            assert dst["model"]["w"].tolist() == ([0.0] * 4 if refusal else quantized.float().tolist())


def test_errors_name_the_live_states():
    src = {"model": {"w": torch.arange(3.0), "extra": torch.ones(2), "scale": torch.ones(5)}}
    with pytest.raises(MismatchError) as caught:
        checkpoint.reshard_live(src, {"model": {"v": torch.zeros(3), "scales": torch.ones(5)}, "ema": {"w": torch.zeros(3)}})
    said = str(caught.value)
    assert "checkpoint" not in said
    for line in (
        "model.v: not in src",
        "model.scales: not in src (did you mean model.scale?)",
        "model.w: in src, but not in dst",
        "src has nothing under 'ema'",
        "where src may lack some",
    ):
        assert line in said


def test_a_kept_reshard_runs_where_a_value_may_be_missing():
    src, dst = {"s": {"w": torch.ones(4)}}, {"s": {"w": torch.zeros(4), "new": 3}}
    kept = checkpoint.LiveReshard(src, dst, allow_missing=["s.new"])
    for fill in (1.0, 2.0):
        src["s"]["w"].fill_(fill)
        assert kept.run().kept == ("s.new: not in src",)
        assert dst["s"]["w"].tolist() == [fill] * 4
        assert dst["s"]["new"] == 3


@on_ranks(2)
def test_replicas_that_drifted_apart_are_moved_only_where_they_are_trusted():
    """Move rows that rank 0 and rank 1 hold as the same, and of which one element differs, into the other order of ranks."""
    rank = dist.get_rank()
    held = torch.zeros(300_000, 4)
    src = {"m": {"w": LocalShard(held, (300_000, 4), (0, 0))}}
    dst = {"m": {"w": torch.full((300_000, 4), -1.0)}}
    kept = checkpoint.LiveReshard(src, dst, replicas="verify")
    kept.run()
    held[7, 1] = rank
    for call in (kept.run, lambda: checkpoint.reshard_live(src, dst)):
        with pytest.raises(LayoutError, match="m.w: ranks 0 and 1 hold it as the same, but their values differ"):
            call()
    assert int(dst["m"]["w"].sum()) == 0
    with pytest.raises(PeerError, match=r"reshard_live\(replicas='verify'\)"):
        checkpoint.reshard_live(src, dst, replicas="trust" if rank else "verify")
    checkpoint.reshard_live(src, dst, replicas="trust")
    assert int(dst["m"]["w"].sum()) == rank
