from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.launch import RanksFailed, on_ranks, run_ranks


def _sum_of_ranks(scale: int) -> tuple[int, int, str]:
    total = torch.tensor([dist.get_rank() * scale])
    dist.all_reduce(total)
    return dist.get_rank(), int(total), os.environ["WORLD_SIZE"]


def _one_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
    dist.barrier()


def _hangs() -> None:
    threading.Event().wait()


def test_every_rank_returns_its_own():
    assert run_ranks(_sum_of_ranks, 3, 10) == [(0, 30, "3"), (1, 30, "3"), (2, 30, "3")]


def test_error_of_a_rank_is_shown():
    with pytest.raises(RanksFailed, match="rank 1 has had enough"):
        run_ranks(_one_fails, 2)


@pytest.mark.parametrize("scale", [10])
@on_ranks(3)
def test_a_test_runs_on_each_rank_with_its_fixtures(tmp_path: Path, scale: int):
    (tmp_path / str(dist.get_rank())).touch()
    assert _sum_of_ranks(scale) == (dist.get_rank(), 3 * scale, "3")
    assert len([*tmp_path.iterdir()]) == 3


@on_ranks(2)
def _one_sees_another_value(seen: int):
    seen += dist.get_rank()
    assert seen == 7


def test_an_assertion_that_fails_on_a_rank_shows_the_values_that_it_saw():
    with pytest.raises(RanksFailed, match=r"rank 1 ---(?s:.*)assert seen == 7\n(?s:.*)seen = 8"):
        _one_sees_another_value(seen=7)


def test_hang_is_ended_and_its_stack_shown():
    with pytest.raises(RanksFailed, match="in _hangs"):
        run_ranks(_hangs, 2, timeout_s=2)
    assert run_ranks(_sum_of_ranks, 1, 10) == [(0, 0, "1")]
