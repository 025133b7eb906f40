"""The plans kept between saves, on real ranks: used again for an unchanged layout, never for any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.engine.saving import agreement
from reshard_ckpt.errors import LayoutError
from tests.launch import on_ranks, run_ranks

RANKS = 4
ROWS = 8


def whole(step: int) -> torch.Tensor:
    return torch.arange(ROWS * 3, dtype=torch.float32).reshape(ROWS, 3) + 1000 * step


def state(step: int, bounds: list[int]) -> dict[str, Any]:
    """Rows ``bounds[rank]`` to ``bounds[rank + 1]`` of a tensor on each rank, a replica, and values, all of this step."""
    rank = dist.get_rank()
    low, high = bounds[rank], bounds[rank + 1]
    shard = LocalShard(whole(step)[low:high].clone(), (ROWS, 3), (low, 0))
    rng = checkpoint.PerRank([rank, step])
    return {"t": {"cut": shard, "same": LocalShard(whole(-step), (ROWS, 3), (0, 0))}, "extra": {"step": step, "rng": rng}}


class Saver:
    """Saves under a number, and tells for each save how many plans this rank made and how many assignments it was sent."""

    def __init__(self, folder: str) -> None:
        self.folder, self.step = folder, 0
        self.counts: list[tuple[int, int]] = []

    def save(self, bounds: list[int]) -> None:
        self.step += 1
        with count("plan_save") as plans, count("decode_assignment") as assignments:
            checkpoint.save(Path(self.folder, str(self.step)), state(self.step, bounds))
        self.counts.append((plans.call_count, assignments.call_count))


def count(name: str) -> Any:
    original: Callable[..., Any] = getattr(agreement, name)
    return patch.object(agreement, name, wraps=original)


def saves(folder: str) -> list[tuple[int, int]]:
    saver = Saver(folder)
    even, uneven = [0, 2, 4, 6, 8], [0, 2, 4, 5, 8]  # ranks 0 and 1 hold the same in both
    saver.save(even)
    saver.save(even)
    saver.save(uneven)
    saver.save(even)
    saver.save(uneven)
    if dist.get_rank() == 1:
        agreement.PLANS.assignments = agreement.PlanCache().assignments
    saver.save(uneven)
    if dist.get_rank() == 0:
        agreement.PLANS.plans = agreement.PlanCache().plans
    saver.save(uneven)
    return saver.counts


def test_plans_are_used_again_for_the_same_layout_of_all_ranks_alone(tmp_path: Path) -> None:
    by_rank = run_ranks(saves, RANKS, str(tmp_path))
    # Rank 0 plans: at first, when ranks 2 and 3 changed, and when it has lost its plans.
    assert [plans for plans, _ in by_rank[0]] == [1, 0, 1, 0, 0, 0, 1]
    assert all(plans == 0 for counts in by_rank[1:] for plans, _ in counts)
    # Of the two plans, ranks 0 and 1 keep the assignment of the last one, since their own layout is the same in both; ranks 2
    # and 3 keep both. Rank 1 lost its own before the sixth save.
    assert [sent for _, sent in by_rank[0]] == [1, 0, 1, 1, 1, 0, 1]
    assert [sent for _, sent in by_rank[1]] == [1, 0, 1, 1, 1, 1, 1]
    for rank in (2, 3):
        assert [sent for _, sent in by_rank[rank]] == [1, 0, 1, 0, 0, 0, 1]
    for step in range(1, 8):
        found = checkpoint.read(tmp_path / str(step))
        assert torch.equal(found["t.cut"], whole(step))
        assert torch.equal(found["t.same"], whole(-step))
        assert found["extra.step"] == step
        assert found["extra.rng"] == [[rank, step] for rank in range(RANKS)]
        assert checkpoint.verify(tmp_path / str(step)).ok


@on_ranks(RANKS)
def test_values_are_compared_at_every_save(tmp_path: Path) -> None:
    """A value that differs on one rank is found with a kept plan too, and the next save is none the worse."""
    saver, even = Saver(str(tmp_path)), [0, 2, 4, 6, 8]
    saver.save(even)
    wrong = state(2, even)
    if dist.get_rank() == 3:
        wrong["extra"]["step"] = 99
    with pytest.raises(LayoutError, match="extra.step: rank 0 has 2, rank 3 has 99"):
        checkpoint.save(tmp_path / "wrong", wrong)
    assert not (tmp_path / "wrong" / "catalog.msgpack").exists()
    saver.save(even)
    assert saver.counts[-1][0] == 0
    assert checkpoint.read(tmp_path / "2")["extra.step"] == 2


@on_ranks(RANKS)
def test_process_groups_have_their_own_plans(tmp_path: Path) -> None:
    """Halves of the job save at the same time: each has its own ranks, and so its own plans."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half, is_first = dist.get_rank() // 2, dist.get_rank() % 2 == 0
    for step in range(2):
        path, tensor = tmp_path / f"{half}-{step}", torch.full((4,), float(10 * half + step))
        part = tensor[: 2 + half] if is_first else tensor[2 + half :]
        with count("plan_save") as counted:
            shard = LocalShard(part.clone(), (4,), (0 if is_first else 2 + half,))
            checkpoint.save(path, {"t": {"x": shard}}, process_group=halves[half])
        assert counted.call_count == (is_first and step == 0)
        assert torch.equal(checkpoint.read(path)["t.x"], tensor)
