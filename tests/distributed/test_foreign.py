"""Checkpoints of other libraries under real ranks: every rank opens the same, and reads its own part."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import CheckpointNotFound, CorruptError
from tests.launch import on_ranks


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 5))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.5)
    for _ in range(2):
        model(torch.randn(8, 7)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@on_ranks(3)
def test_a_training_state_goes_on_over_ranks(tmp_path: Path):
    reference, theirs = trained()
    path, model = tmp_path / "x.pt", nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 5))
    if dist.get_rank() == 0:
        torch.save({"model": reference.state_dict(), "optimizer": theirs.state_dict(), "extra": {"step": 2}}, path)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    extra: dict[str, Any] = {}
    dist.barrier()
    checkpoint.load(path, {"model": model, "optimizer": optimizer, "extra": extra})
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(mine.detach()), other)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(whole(optimizer.state[mine][key]), theirs.state[other][key])
    assert (optimizer.param_groups[0]["lr"], extra["step"]) == (0.5, 2)


@on_ranks(3)
def test_ranks_that_find_different_files_all_say_so(tmp_path: Path):
    """Each rank has a disk of its own, and looks at the same relative path there."""
    if dist.get_rank() == 0:
        save_nodes(tmp_path)
    dist.barrier()
    os.chdir(tmp_path / f"node{dist.get_rank()}")
    for name, error, says in (
        ("other", CorruptError, "reads another catalog than rank 0"),
        ("absent", CheckpointNotFound, "no committed checkpoint"),
        ("cut", CorruptError, "model.safetensors: "),
    ):
        target = torch.zeros(4, 6)
        with pytest.raises(error, match=says):
            checkpoint.load(name, {"model": {"w": target}})
        assert not target.any()
    checkpoint.load("same", {"model": {"w": target}})
    assert torch.equal(target, torch.arange(24.0).reshape(4, 6))


def save_nodes(tmp_path: Path) -> None:
    for name in ("same", "other", "absent", "cut"):
        (tmp_path / "node0" / name).mkdir(parents=True)
        save_file({"w": torch.arange(24.0).reshape(4, 6)}, tmp_path / "node0" / name / "model.safetensors")
    shutil.copytree(tmp_path / "node0", tmp_path / "node1")
    os.utime(tmp_path / "node1" / "same" / "model.safetensors", (1, 1))  # a copy of another time is the same checkpoint
    other = {"v": torch.ones(1), "w": torch.arange(24.0).reshape(4, 6)}
    save_file(other, tmp_path / "node1" / "other" / "model.safetensors")
    shutil.rmtree(tmp_path / "node1" / "absent")
    with open(tmp_path / "node1" / "cut" / "model.safetensors", "r+b") as file:
        file.truncate(100)
    shutil.copytree(tmp_path / "node0", tmp_path / "node2")
