"""Checkpoints of other libraries under real ranks: every rank opens the same, and reads its own part."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import CheckpointError
from tests.launch import run_ranks


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def wrong_in(model: nn.Module, reference: nn.Module) -> list[str]:
    wanted = dict(reference.named_parameters())
    return [name for name, p in model.named_parameters() if not torch.equal(whole(p.detach()), wanted[name])]


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 5))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.5)
    for _ in range(2):
        model(torch.randn(8, 7)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def optimizer_job(path: str) -> tuple[list[str], float, int]:
    reference, theirs = trained()
    model = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    extra: dict[str, Any] = {}
    checkpoint.load(path, {"model": model, "optimizer": optimizer, "extra": extra})
    wrong = wrong_in(model, reference)
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        wrong += [
            k for k in ("exp_avg", "exp_avg_sq") if not torch.equal(whole(optimizer.state[mine][k]), theirs.state[other][k])
        ]
    return wrong, optimizer.param_groups[0]["lr"], extra["step"]


def both_jobs(folder: str) -> tuple[Any, Any]:
    return optimizer_job(f"{folder}/x.pt"), node_job(folder)


def test_a_training_state_goes_on_over_ranks_and_ranks_that_find_different_files_all_say_so(tmp_path: Path):
    save_training(tmp_path)
    save_nodes(tmp_path)
    seen = run_ranks(both_jobs, 3, str(tmp_path))
    assert [optimizer for optimizer, _ in seen] == [([], 0.5, 2)] * 3
    for _, (same, other, absent, cut) in seen:
        assert same == "loaded"
        assert other.startswith("CorruptError")
        assert "reads another catalog than rank 0" in other
        assert absent.startswith("CheckpointNotFound")
        assert "no committed checkpoint" in absent
        assert cut.startswith("CorruptError")
        assert "model.safetensors: " in cut


def save_training(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": {"step": 2}}
    torch.save(state, tmp_path / "x.pt")


def node_job(folder: str) -> list[str]:
    """Each rank has a disk of its own, and looks at the same relative path there."""
    os.chdir(f"{folder}/node{dist.get_rank()}")
    seen = []
    for name in ("same", "other", "absent", "cut"):
        target = torch.zeros(4, 6)
        try:
            checkpoint.load(name, {"model": {"w": target}})
        except CheckpointError as error:
            seen.append(f"{type(error).__name__}: {error}" if not target.any() else "changed")
        else:
            seen.append("loaded" if target.sum() == 276 else "wrong")
    return seen


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
