"""A manager on real ranks: all fall back together, one rank prunes, a second job is refused on every rank."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.checkpoint import Manager
from reshard_ckpt.errors import UsageError
from reshard_ckpt.storage import LocalStorage, MissingKey
from tests.damage import flip
from tests.launch import on_ranks, run_ranks

SHAPE = (4, 5)


def rows(step: int, rank: int) -> torch.Tensor:
    """Two rows of each rank, whose values depend on step and place."""
    return torch.arange(20.0).reshape(SHAPE)[2 * rank : 2 * rank + 2] + 1000 * step


def state(tensor: torch.Tensor, rank: int) -> dict[str, Any]:
    return {"w": LocalShard(tensor, SHAPE, (2 * rank, 0))}


@on_ranks(2)
def test_all_ranks_fall_back_prune_and_are_refused_together(tmp_path: Path):
    rank = dist.get_rank()
    with Manager(tmp_path, keep_last=2) as manager:
        for step in (10, 20, 30):
            manager.async_save(step, state(rows(step, rank), rank))
    dist.barrier()
    assert manager.steps() == [20, 30]
    if rank == 0:
        flip(next(tmp_path.glob("step_30/*/rank00001-0.safetensors")))
    dist.barrier()
    into = torch.zeros(2, 5)
    with Manager(tmp_path, keep_last=1) as manager:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = manager.load_latest(state(into, rank))  # rank 1 alone reads what is damaged
        assert loaded.step == 20
        assert torch.equal(into, rows(20, rank))
        assert "rank00001-0.safetensors is damaged" in loaded.passed_over[0]
        manager.save(25, state(rows(25, rank), rank))
        dist.barrier()
        assert manager.steps() == [25]  # 20 was the last good one until 25 was; the run went on from 20, so 30 does not count
        assert (tmp_path / "step_30").exists()
        with pytest.raises(UsageError, match="has a manager of the checkpoints there already"):
            Manager(tmp_path)
    assert checkpoint.read(tmp_path / "step_25")["w"].shape == SHAPE


def incremental_saves(folder: str) -> list[int]:
    """Save three times; rank 1 sees no catalog, as on a network file system whose attributes it has cached."""
    rank, state, read = dist.get_rank(), {"w": torch.arange(1 << 17)}, LocalStorage.read

    def stale(self: LocalStorage, key: str, *limits: Any, **options: Any) -> bytes:
        if rank and key == "catalog.msgpack":
            raise MissingKey(f"{self.url}/{key}: is missing")
        return read(self, key, *limits, **options)

    with Manager(folder, incremental=True) as manager, mock.patch.object(LocalStorage, "read", stale):
        return [manager.save(step, state).bytes_referred for step in range(3)]


def test_rank_0_alone_chooses_the_base_of_an_incremental_save(tmp_path: Path):
    """Else all ranks of a large job read a catalog for each save, and differ where one does not see it yet."""
    first, second, third = map(sum, zip(*run_ranks(incremental_saves, 2, str(tmp_path)), strict=True))
    assert (first, second, third) == (0, 8 << 17, 8 << 17)


@on_ranks(2)
def test_a_root_whose_name_is_not_utf_8(tmp_path: Path):
    """Such as a folder of Latin-1, or any name with ``ü`` in a process whose encoding is ASCII."""
    rank, root = dist.get_rank(), Path(os.fsdecode(os.fsencode(tmp_path) + b"/L\xfcbeck"))
    checkpoint.save(root / "first", state(rows(1, rank), rank))
    checkpoint.save(root / "second", state(rows(2, rank), rank), base=root / "first")
    with Manager(root / "run") as manager:
        manager.save(3, state(rows(3, rank), rank))
        into = [torch.zeros(2, 5) for _ in range(3)]
        checkpoint.load(root / "first", state(into[0], rank))
        checkpoint.load(root / "second", state(into[1], rank), read_once=True)
        assert manager.load_latest(state(into[2], rank)).step == 3
    assert all(torch.equal(found, rows(step, rank)) for step, found in enumerate(into, 1))
    if rank == 0:
        checkpoint.convert(root / "first", root / "copy", to="reshard")
        assert torch.equal(checkpoint.read(root / "copy")["w"], torch.cat([rows(1, 0), rows(1, 1)]))
