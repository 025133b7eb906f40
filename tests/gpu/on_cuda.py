"""What ranks do that have a CUDA device, which they may share; `test_cuda` starts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from reshard_ckpt import LocalShard, checkpoint, dcp

WHOLE = torch.arange(3_000_000, dtype=torch.float32).reshape(3000, 1000)


def _differ(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in state.items() if not torch.equal(tensor.cpu(), expected[name].cpu())]


def rows_to_columns(path: Path, backend: str) -> list[str]:
    """Save DTensors cut by rows, and load them as columns and as replicas. Return the names of wrong tensors."""
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(0)
    mesh = init_device_mesh("cuda", (size,))

    def on_mesh(local: torch.Tensor, placement: Placement) -> DTensor:
        return DTensor.from_local(local.cuda(), mesh, [placement], run_check=False)

    saved = {"t": on_mesh(WHOLE.chunk(size)[rank], Shard(0)), "half": on_mesh(WHOLE.bfloat16().chunk(size)[rank], Shard(0))}
    saved["replica"] = on_mesh(WHOLE[:300], Replicate())
    handle = checkpoint.async_save(path, {"s": saved}, staging="lazy", hold="caller")
    handle.result(600)
    columns = WHOLE.chunk(size, 1)[rank]
    target = {"t": on_mesh(torch.zeros_like(columns), Shard(1)), "half": on_mesh(torch.zeros_like(WHOLE).bfloat16(), Replicate())}
    target["replica"] = on_mesh(torch.zeros_like(WHOLE[:300].chunk(size)[rank]), Shard(0))
    for read_once in (False, True):
        for tensor in target.values():
            tensor.to_local().fill_(-1)
        checkpoint.load(path, {"s": target}, read_once=read_once)
        expected = {"t": columns, "half": WHOLE.bfloat16(), "replica": WHOLE[:300].chunk(size)[rank]}
        if wrong := _differ({name: tensor.to_local() for name, tensor in target.items()}, expected):
            return wrong
    dist.destroy_process_group()
    return []


def live_rows_to_columns() -> list[str]:
    """Move rows to columns between ranks that share a device. Return the runs whose columns are wrong."""
    rank = dist.get_rank()
    wrong: list[str] = []
    rows, columns = WHOLE.chunk(2)[rank].cuda(), torch.zeros(3000, 500, device="cuda")
    src = {"t": LocalShard(rows, (3000, 1000), (1500 * rank, 0))}
    dst = {"t": LocalShard(columns, (3000, 1000), (0, 500 * rank))}
    job = checkpoint.LiveReshard(src, dst)
    for i in range(3):
        rows.add_(1)
        job.run()
        wrong += _differ({f"run {i}": columns}, {f"run {i}": WHOLE.chunk(2, 1)[rank] + i + 1})
    return wrong


class _Job:
    """FSDP2 with bf16 parameters in forward, AdamW and a schedule."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4))).cuda()
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        for layer in self.model:
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        self.data = torch.randn(64, 512, device="cuda")

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = (self.model(self.data) - self.data).square().mean()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return float(loss)

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}


def fsdp2_goes_on(path: Path, backend: str) -> dict[str, Any]:
    """Train, save lazily and train on; then load into a new job, which trains on too. Return both lists of losses."""
    torch.cuda.set_device(0)
    dist.init_process_group(backend)
    job = _Job()
    for _ in range(4):
        job.step()
    handle = checkpoint.async_save(path, job.state(), staging="lazy")
    expected = [job.step() for _ in range(4)]
    handle.result(600)
    again = _Job()
    again.step()
    checkpoint.load(path, again.state())
    resumed = [again.step() for _ in range(4)]
    third = _Job()
    checkpoint.reshard_live({"model": again.model}, {"model": third.model})
    now = {name: p.detach().to_local() for name, p in again.model.named_parameters()}  # type: ignore[attr-defined]
    live = _differ({name: p.detach().to_local() for name, p in third.model.named_parameters()}, now)  # type: ignore[attr-defined]
    dist.destroy_process_group()
    return {"expected": expected, "resumed": resumed, "live": live}


def dcp_calls(path: Path) -> list[str]:
    """Save and load by the calls of DCP on NCCL. Return the names of wrong tensors."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (1,))
    state = {"t": DTensor.from_local(WHOLE.cuda(), mesh, [Shard(0)]), "plain": WHOLE[0].cuda()}
    dcp.save(state, checkpoint_id=str(path))
    dcp.async_save(state, checkpoint_id=str(path / "async")).result()
    wrong = []
    for folder in (path, path / "async"):
        target = {
            "t": DTensor.from_local(torch.zeros_like(WHOLE).cuda(), mesh, [Shard(0)]),
            "plain": torch.zeros(1000, device="cuda"),
        }
        dcp.load(target, checkpoint_id=str(folder))
        wrong += _differ({"t": target["t"].to_local(), "plain": target["plain"]}, {"t": WHOLE, "plain": WHOLE[0]})  # type: ignore[attr-defined]
    dist.destroy_process_group()
    return wrong
