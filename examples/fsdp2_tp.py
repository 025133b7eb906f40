"""Save under FSDP2 over tensor parallelism, load on other meshes: ``torchrun --nproc-per-node 4 examples/fsdp2_tp.py``.

The sizes (13 and 7) divide by nothing: shards are uneven, and some ranks hold none of a tensor.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from reshard_ckpt import checkpoint


def make_model(dp: int, tp: int) -> nn.Module:
    """Make the same model, laid out over dp × tp ranks."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 7))
    if tp > 1:
        # DTensors between the two layers: a plain local tensor would forget that 13 is no multiple of tp.
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


def whole_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Gather the tensors by torch itself, to compare with."""
    out: dict[str, torch.Tensor] = {}
    for name, parameter in model.state_dict(keep_vars=True).items():
        out[name] = parameter.full_tensor()
        for key in ("exp_avg", "exp_avg_sq"):
            out[f"{name}.{key}"] = optimizer.state[parameter][key].full_tensor()
    return out


def main(path: str) -> None:
    dist.init_process_group("gloo")

    model = make_model(dp=2, tp=2)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(0)
    for _ in range(3):
        model(torch.randn(8, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(path, {"model": model, "optimizer": optimizer})
    saved = whole_tensors(model, optimizer)

    for dp, tp in ((4, 1), (1, 4)):
        torch.manual_seed(dp)
        other = make_model(dp, tp)
        its_optimizer = torch.optim.AdamW(other.parameters())
        checkpoint.load(path, {"model": other, "optimizer": its_optimizer})
        loaded = whole_tensors(other, its_optimizer)
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)
        if dist.get_rank() == 0:
            print(f"{path}: saved on dp 2 × tp 2, loaded on dp {dp} × tp {tp}, bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo_out/example_fsdp2_tp")
