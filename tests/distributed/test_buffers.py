"""Buffers that ranks hold differently: the lowest rank's are saved, with a warning, under FSDP as under DDP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import LayoutError
from tests.distributed.outcomes import outcome
from tests.launch import on_ranks


def normalised(how: str) -> nn.Module:
    """A model with statistics of its own on each rank."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4)))
    nn.init.ones_(module[0].weight)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if how == "root":
        fully_shard(module, mesh=mesh)
    elif how == "inner":
        fully_shard(module[1], mesh=mesh)
    elif how == "ddp":
        module = DistributedDataParallel(module)
    (module.module if how == "ddp" else module)[1][0].running_mean.fill_(dist.get_rank() + 1.0)
    return module


@on_ranks(2)
def test_the_lowest_ranks_buffers_are_saved_with_one_warning_and_without_a_wrapper_refused(tmp_path: Path) -> None:
    rank, name = dist.get_rank(), "model.1.0.running_mean"
    for how in ("root", "inner", "ddp"):
        model = normalised(how)
        said = outcome(lambda: checkpoint.save(tmp_path / how, {"model": model}))  # noqa: B023 (called at once)
        assert said.error == ""
        lines = [line for line in said.warned if "buffers differ" in line]
        assert len(lines) == (rank == 0), (how, lines)
        for line in lines:
            assert line.startswith(f"buffers differ between ranks; rank 0's are saved: {name}"), how
            assert "num_batches_tracked" not in line  # these do not differ
        assert checkpoint.read(tmp_path / how, [name])[name].tolist() == [1.0] * 4
    with torch.no_grad():
        model.module[0].weight[1, 1] += rank
    with pytest.raises(LayoutError, match=r"model.0.weight: ranks 0 and 1"):  # DDP says of parameters that they do not differ
        checkpoint.save(tmp_path / "ddp", {"model": model})
    with pytest.raises(LayoutError, match=name):
        checkpoint.save(tmp_path / "plain", {"model": normalised("plain")})
