"""What ranks do that have the simulated device; `test_ranks` starts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from reshard_ckpt import checkpoint
from reshard_ckpt.engine.common.lanes import lane_of
from reshard_ckpt.engine.loading.read import Reader
from reshard_ckpt.errors import CheckpointError
from tests import device as simulated

WHOLE = torch.arange(3_000_000, dtype=torch.float32).reshape(3000, 1000)


def on_own_device() -> str:
    """Have each rank use the device of its own number, as training jobs do."""
    simulated.load()
    name = f"sim:{dist.get_rank()}"
    torch.accelerator.set_stream(torch.accelerator.current_stream(name))
    simulated.reset()
    return name


def tensors(*, filled: bool) -> dict[str, DTensor]:
    """Replicas and shards on a mesh of simulated devices."""
    mesh, rank = init_device_mesh("sim", (dist.get_world_size(),)), dist.get_rank()
    half = WHOLE[rank * 1500 : (rank + 1) * 1500]
    local = {"replica": WHOLE, "shard": half, "small": WHOLE[0]}
    placements: dict[str, Any] = {"replica": Replicate(), "shard": Shard(0), "small": Replicate()}
    there = {name: (value if filled else torch.full_like(value, -2)).to(f"sim:{rank}") for name, value in local.items()}
    return {name: DTensor.from_local(value, mesh, [placements[name]], run_check=False) for name, value in there.items()}


def dtensors(path: Path) -> tuple[list[str], set[int]]:
    """Save and load DTensors; the names of those that are wrong, and the devices that this rank's threads made current."""
    on_own_device()
    checkpoint.async_save(path, {"s": tensors(filled=True)}, staging="lazy", hold="caller").result(60)
    target = tensors(filled=False)
    checkpoint.load(path, {"s": target})
    expected = tensors(filled=True)
    wrong = [name for name in target if not torch.equal(target[name].to_local().cpu(), expected[name].to_local().cpu())]
    return wrong, simulated.devices_set()


def replicas_that_differ(path: Path) -> str:
    """Save what claims to be a replica, and is none; what the save says."""
    device = on_own_device()
    mesh = init_device_mesh("sim", (dist.get_world_size(),))
    wrong = torch.full((100,), float(dist.get_rank())).to(device)
    try:
        checkpoint.save(path, {"s": {"t": DTensor.from_local(wrong, mesh, [Replicate()], run_check=False)}})
    except CheckpointError as error:
        return str(error)
    return ""


def read_once(path: Path) -> bool:
    """Load with ``read_once`` on a stream that is held, with a change of the target queued on it; whether the load wins."""
    device = on_own_device()
    checkpoint.save(path, {"s": {"t": WHOLE}})
    target = torch.zeros(1000, 3000, device=device)
    torch.accelerator.set_stream(torch.Stream(device=device))
    let_go = simulated.hold_stream()
    target.fill_(-1)
    finish = Reader.finish

    def opened(self: Reader) -> None:
        simulated.let_run(lane_of(target.device).link)
        assert let_go(), "the load has waited before all was queued"
        torch.accelerator.current_stream().synchronize()
        finish(self)

    with mock.patch.object(Reader, "finish", opened):
        checkpoint.load(path, {"s": {"t": target.t()}}, read_once=True)
    return torch.equal(target.t().cpu(), WHOLE)
