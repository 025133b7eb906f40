"""Declare what a framework of one's own holds: ``torchrun --nproc-per-node 4 examples/custom_framework.py``.

The framework of this example knows no DTensor. It fuses the gate and the up projection of a SwiGLU layer into one weight, shards
it over tp, and splits the optimizer's momentum into flat ranges over dp. tp rank i then holds rows of both halves::

    global weight:  [ gate_0 gate_1 … | up_0 up_1 … ]        tp rank i:  [ gate_i | up_i ]

`LocalShard` declares the weight, and `FlatShard` the momentum: a range of the row-major order of [gate_i | up_i].
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from reshard_ckpt import FlatShard, LocalShard, checkpoint

HIDDEN, DIM = 20, 7
SHAPE = (2 * HIDDEN, DIM)

WEIGHT = torch.arange(2.0 * HIDDEN * DIM).view(SHAPE)
"""What a whole weight would be: each element is another, so that a misplaced one shows."""
MOMENTUM = -WEIGHT


class Rank:
    """What one rank of dp × tp holds, as plain tensors."""

    def __init__(self, dp: int, tp: int) -> None:
        self.dp, self.tp = dp, tp
        self.dp_rank, self.tp_rank = divmod(dist.get_rank(), tp)
        rows = HIDDEN // tp
        gate, up = self.tp_rank * rows, HIDDEN + self.tp_rank * rows
        self.boxes = [((gate, 0), (rows, DIM)), ((up, 0), (rows, DIM))]
        chunk = -(-2 * rows * DIM // dp)
        self.start, self.stop = self.dp_rank * chunk, min((self.dp_rank + 1) * chunk, 2 * rows * DIM)
        self.weight = torch.zeros(2 * rows, DIM)
        self.momentum = torch.zeros(self.stop - self.start)

    def expected(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of a whole tensor."""
        return torch.cat([whole[row : row + num_rows] for (row, _), (num_rows, _) in self.boxes])

    def state(self) -> dict[str, Any]:
        """Declare which part of the global tensors this rank holds."""
        rows = HIDDEN // self.tp
        pieces = [((number * rows, 0), offsets, lengths) for number, (offsets, lengths) in enumerate(self.boxes)]
        weight = LocalShard(self.weight, SHAPE, pieces=pieces)
        momentum = FlatShard(self.momentum, SHAPE, self.start, pieces=self.boxes)
        # Below "optimizer": a name for each parameter and each kind of state, as for torch's own optimizers.
        return {"model": {"mlp.weight": weight}, "optimizer": {"state": {"mlp.weight": {"momentum": momentum}}}}


def main(path: str) -> None:
    dist.init_process_group("gloo")

    saving = Rank(dp=2, tp=2)
    saving.weight.copy_(saving.expected(WEIGHT))
    saving.momentum.copy_(saving.expected(MOMENTUM).flatten()[saving.start : saving.stop])
    # Plain tensors do not show the mesh of the job, which the catalog records.
    checkpoint.save(path, saving.state(), mesh={"dp": 2, "tp": 2})

    for dp, tp in ((1, 4), (4, 1)):
        loading = Rank(dp, tp)
        checkpoint.load(path, loading.state())
        assert torch.equal(loading.weight, loading.expected(WEIGHT))
        assert torch.equal(loading.momentum, loading.expected(MOMENTUM).flatten()[loading.start : loading.stop])
        if dist.get_rank() == 0:
            print(f"{path}: saved on dp 2 × tp 2, loaded on dp {dp} × tp {tp}, bit for bit")

    # Any tool reads whole tensors, without the framework and without a process group.
    assert torch.equal(checkpoint.read(path)["model.mlp.weight"], WEIGHT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo_out/example_custom_framework")
