from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist

from tests.launch import RanksFailed, run_ranks


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


def test_hang_is_ended_and_its_stack_shown():
    with pytest.raises(RanksFailed, match="in _hangs"):
        run_ranks(_hangs, 2, timeout_s=2)
    assert run_ranks(_sum_of_ranks, 1, 10) == [(0, 0, "1")]
