"""Save under DDP, load under FSDP2: ``torchrun --nproc-per-node 2 examples/ddp.py``.

DDP holds everything on every rank; the ranks share the writing, so each byte is written once. `fully_shard` holds a part of each
tensor on each rank; a rank reads just the bytes of its parts.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from reshard_ckpt import checkpoint


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 33), nn.GELU(), nn.Linear(33, 5))


def main(path: str) -> None:
    dist.init_process_group("gloo")

    # One job: train under DDP, and save.
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(dist.get_rank())  # each rank has data of its own
    for _ in range(3):
        model(torch.randn(8, 10)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(path, {"model": model, "optimizer": optimizer, "extra": {"step": 3}})

    # Another job: other values to begin with, an optimizer that never stepped, another layout.
    sharded = make_model()
    fully_shard(sharded)
    its_optimizer = torch.optim.AdamW(sharded.parameters())
    extra = {"step": 0}
    checkpoint.load(path, {"model": sharded, "optimizer": its_optimizer, "extra": extra})

    # Every tensor is the one that was saved, bit for bit.
    assert extra["step"] == 3
    for saved, loaded in zip(model.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(saved, loaded.full_tensor())
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[saved][key], its_optimizer.state[loaded][key].full_tensor())
    if dist.get_rank() == 0:
        print(f"{path}: saved under DDP, loaded under FSDP2 on {dist.get_world_size()} ranks, bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo_out/example_ddp")
