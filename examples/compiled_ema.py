"""Compiled, checkpointed layers and an average of their weights: ``torchrun --nproc-per-node 4 examples/compiled_ema.py``.

Compiling and activation checkpointing wrap the layers, and put steps of their own into the names of the parameters. The average,
a dict, has keys such as ``0._orig_mod._checkpoint_wrapped_module.up.weight``. None of that is in the checkpoint, so any layout
loads it, and a plain model takes the average as its weights.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from reshard_ckpt import checkpoint

DECAY = 0.9


class Block(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def make_model(dp: int, tp: int) -> nn.Module:
    """The same model over dp × tp ranks: tensor parallel, then checkpointed, compiled and sharded, layer by layer."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(Block(), Block())
    for i, block in enumerate(model):
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        # The backend "eager" needs no C++ compiler; leave it out where there is one.
        model[i] = torch.compile(checkpoint_wrapper(block), backend="eager")
        fully_shard(model[i], mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, average: dict[str, Tensor], num_steps: int) -> None:
    for _ in range(num_steps):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                average[name].lerp_(parameter, 1 - DECAY)


def average_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(path: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = make_model(dp=2, tp=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = average_of(model)
    train(model, optimizer, average, 3)
    checkpoint.save(path, {"model": model, "optimizer": optimizer, "ema": average})

    torch.manual_seed(1)
    other = make_model(dp=1, tp=4)
    its_optimizer, its_average = torch.optim.AdamW(other.parameters()), average_of(other)
    checkpoint.load(path, {"model": other, "optimizer": its_optimizer, "ema": its_average})
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(a), whole(b))
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(whole(optimizer.state[a][key]), whole(its_optimizer.state[b][key]))
    assert all(torch.equal(whole(average[name]), whole(its_average[name])) for name in average)
    train(other, its_optimizer, its_average, 1)  # compiled anew, for this layout

    plain = nn.Sequential(Block(), Block())
    checkpoint.load(path, {"ema": plain})  # under the key of the average
    assert all(torch.equal(p, whole(a)) for p, a in zip(plain.parameters(), average.values(), strict=True))
    if dist.get_rank() == 0:
        print(f"{path}: saved on dp 2 × tp 2, loaded on tp 4, and the average as a plain model, bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo_out/example_compiled_ema")
