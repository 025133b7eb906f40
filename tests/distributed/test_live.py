"""Live resharding: every layout to every other, bit for bit, and no byte crosses that its rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from reshard_ckpt import FlatShard, LocalShard, checkpoint
from reshard_ckpt.core.catalog.specs import Replication
from reshard_ckpt.state import capture
from tests.distributed.cases import Case
from tests.distributed.net import Layout, blank
from tests.distributed.outcomes import outcome
from tests.distributed.test_matrix import LAYOUTS as LARGE
from tests.helpers import places, position_values
from tests.launch import run_ranks

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


def held_by(state: dict[str, Any], *, buffers: bool = True) -> list[Held]:
    """What this rank has of a state; `buffers` counts those under DDP."""
    held = []
    for spec, memory in capture(state).tensors:
        if spec.replication is Replication.BUFFER and not buffers:
            continue
        mask = np.zeros(spec.shape, bool)
        for piece in spec.pieces:
            mask[places(piece)[1]] = True
        held.append(Held(spec.name, mask, memory.element_size(), spec.alias_of))
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


def matrix_job(layouts: tuple[Layout, ...], pairs: list[tuple[int, int]]) -> list[str]:
    cases = [Case(layout) for layout in layouts]
    sources = [case.saved_state() if case.place.mine else {} for case in cases]
    holds = [held_by(source, buffers=dist.get_rank() == 0) for source in sources]  # rank 0's count
    ties = [tied_everywhere(held_by(source)) for source in sources]
    wants = [held_by(source) for source in sources]
    wrong: list[str] = []
    crossed, least = 0, 0
    for saved, loaded in pairs:
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


def check_matrix(ranks: int, layouts: tuple[Layout, ...], pairs: list[tuple[int, int]]) -> None:
    wrong = [line for rank in run_ranks(matrix_job, ranks, layouts, pairs, timeout_s=300) for line in rank]
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong[:40]])


def test_layouts_become_each_other_on_1_and_2_ranks():
    for ranks in (1, 2):
        layouts = tuple(layout for layout in LAYOUTS if layout.size <= ranks)
        check_matrix(ranks, layouts, list(product(range(len(layouts)), repeat=2)))


def test_layouts_of_8_ranks_become_each_other():
    layouts = tuple(layout for layout in LARGE if layout.size == 8)
    pairs = [(i, (i + step) % len(layouts)) for i in range(len(layouts)) for step in (1, 3)]
    check_matrix(8, layouts, pairs)


def test_every_layout_becomes_every_other_on_4_ranks():
    check_matrix(4, LAYOUTS, list(product(range(len(LAYOUTS)), repeat=2))[::13])


def shards_job() -> list[Any]:
    """Fused weights, ragged flat ranges and transposed memory on trainers 0 and 1; plain parts on engines 2 and 3; then back."""
    rank, trains = dist.get_rank(), dist.get_rank() < 2
    fused, flat, turned = (position_values((24, 10), salt=i) for i in range(3))

    def fused_part(at: int) -> LocalShard:
        rows = [r for section in (0, 12, 18) for r in range(section, section + (6 if section == 0 else 3))]
        mine = [r + at * (6 if r < 12 else 3) for r in rows]
        pieces = [((6 * at, 0), (6, 10)), ((12 + 3 * at, 0), (3, 10)), ((18 + 3 * at, 0), (3, 10))]
        return LocalShard(fused[mine].clone(), (24, 10), pieces=pieces)

    cut = (0, 101, 240)
    trainer: dict[str, Any] = {}
    if trains:
        trainer = {
            "fused": fused_part(rank),
            "flat": FlatShard(flat.flatten()[cut[rank] : cut[rank + 1]].clone(), (24, 10), cut[rank]),
            "turned": LocalShard(turned[:, 5 * rank : 5 * rank + 5].t().contiguous().t(), (24, 10), (0, 5 * rank)),
        }
    at = rank - 2
    engine: dict[str, Any] = {}
    if not trains:
        engine = {name: LocalShard(torch.full((12, 10), -1.0), (24, 10), (12 * at, 0)) for name in ("fused", "flat", "turned")}
    report = checkpoint.reshard_live({"m": trainer} if trains else None, {"m": engine} if engine else None, staged=True)
    answers: list[Any] = [report.bytes_read]
    if engine:
        wanted = dict(zip(("fused", "flat", "turned"), (fused, flat, turned), strict=True))
        answers.append(all(torch.equal(engine[name].tensor, wanted[name][12 * at : 12 * at + 12]) for name in engine))
        for shard in engine.values():
            shard.tensor.mul_(2)
    checkpoint.reshard_live({"m": engine} if engine else {}, {"m": trainer} if trains else {})
    if trains:
        back = {
            "fused": fused_part(rank).tensor,
            "flat": flat.flatten()[cut[rank] : cut[rank + 1]],
            "turned": turned[:, 5 * rank :],
        }
        answers.append(
            all(
                torch.equal(shard.tensor, 2 * back[name][:, :5] if name == "turned" else 2 * back[name])
                for name, shard in trainer.items()
            )
        )
    return answers


def test_trainers_and_engines_on_other_ranks_exchange_any_shards():
    assert run_ranks(shards_job, 4) == [[0, True], [0, True], [3 * 120 * 4, True], [3 * 120 * 4, True]]
