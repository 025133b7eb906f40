"""Make the committed checkpoint of a format version; run once for each version, and never again.

``torchrun --nproc-per-node 4 -m tests.data.make tests/data/v2``

The state is dp 2 × tp 2: tensor-parallel weights, flat ranges of them over dp, a fused weight in two pieces, a bf16 and an fp8
tensor, a 0-dim and an empty one, tied names, and values of every way of keeping them. `expected` says what must come back.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from reshard_ckpt import FlatShard, LocalShard, checkpoint

SHAPES = {"up": (12, 10), "down": (7, 12), "fused": (8, 6)}


def whole(name: str) -> torch.Tensor:
    """A tensor whose values depend on its name and on the position."""
    shape = SHAPES[name]
    size = shape[0] * shape[1]
    return (torch.arange(size, dtype=torch.float32) * 0.5 + 1000 * sorted(SHAPES).index(name)).reshape(shape)


def expected() -> dict[str, Any]:
    """Every tensor and value of the checkpoint, whole."""
    up, down, fused = whole("up"), whole("down"), whole("fused")
    return {
        "model.up": up,
        "model.down": down,
        "model.fused": fused,
        "model.tied": up.bfloat16(),
        "model.untied": up.bfloat16(),
        "model.fp8": torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "model.scalar": torch.tensor(3, dtype=torch.int64),
        "model.empty": torch.zeros(0, 5),
        "optimizer.state.up.exp_avg": up + 0.25,
        "extra.step": 42,
        "optimizer.param_groups": [{"lr": 0.5, "params": ["up"]}],
        "extra.nested.lr": 0.1,
        "extra.nested.7": (1, 2, None),
        "extra.large": list(range(3000)),
        "extra.rank": [0, 1, 2, 3],
    }


def state(rank: int) -> dict[str, Any]:
    """What one of the four ranks holds."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = divmod(rank, 2)
    want = expected()

    def sharded(name: str, dim: int) -> DTensor:
        part = whole(name).chunk(2, dim=dim)[tp].contiguous()
        return DTensor.from_local(part, mesh, [Replicate(), Shard(dim)], shape=whole(name).shape, stride=whole(name).stride())

    # The tp-local half of `up`, flattened, and cut over dp in the middle of a row.
    local = want["optimizer.state.up.exp_avg"].chunk(2)[tp].flatten()
    start, stop = ((0, 23), (23, 60))[dp]
    flat = FlatShard(local[start:stop].clone(), (12, 10), start, pieces=[((6 * tp, 0), (6, 10))])
    gate, up = whole("fused").chunk(2)
    fused = LocalShard(
        torch.cat([gate.chunk(2)[tp], up.chunk(2)[tp]]),
        (8, 6),
        pieces=[((0, 0), (2 * tp, 0), (2, 6)), ((2, 0), (4 + 2 * tp, 0), (2, 6))],
    )
    tied = want["model.tied"]
    return {
        "model": {
            "up": sharded("up", 0),
            "down": sharded("down", 1),
            "fused": fused,
            "tied": tied,
            "untied": tied,
            "fp8": want["model.fp8"],
            "scalar": want["model.scalar"],
            "empty": want["model.empty"],
        },
        "optimizer": {"state": {"up": {"exp_avg": flat}}, "param_groups": [{"lr": 0.5, "params": ["up"]}]},
        "extra": {
            "step": 42,
            "nested": {"lr": 0.1, 7: (1, 2, None)},
            "large": list(range(3000)),
            "rank": checkpoint.PerRank(rank),
        },
    }


def main() -> None:
    dist.init_process_group("gloo")
    checkpoint.save(sys.argv[1], state(dist.get_rank()), mesh={"dp": 2, "tp": 2}, metadata={"made": "for the tests"})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
