"""Buffers that ranks hold differently: the lowest rank's are saved, with a warning, under FSDP as under DDP."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import LayoutError
from tests.launch import run_ranks


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


def saved_on_ranks(folder: str, how: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            checkpoint.save(folder, {"model": normalised(how)})
        except LayoutError as error:
            return [str(error)]
    return [str(one.message) for one in caught if "buffers differ" in str(one.message)]


WRAPPED = ("ddp", "root", "inner")


def job(folder: str) -> list[list[str]]:
    return [saved_on_ranks(f"{folder}/{how}", how) for how in (*WRAPPED, "plain")]


def test_the_lowest_ranks_buffers_are_saved_with_a_warning_and_without_a_wrapper_refused(tmp_path: Path) -> None:
    first, other = run_ranks(job, 2, str(tmp_path))
    name = "model.1.0.running_mean"
    for how, (line,) in zip(WRAPPED, first, strict=False):
        assert line.startswith(f"buffers differ between ranks; rank 0's are saved: {name}"), how
        assert checkpoint.read(tmp_path / how, [name])[name].tolist() == [1.0] * 4
    for *_, (line,) in (first, other):
        assert name in line
