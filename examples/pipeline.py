"""Save pipeline stages, load the whole model: ``torchrun --nproc-per-node 2 examples/pipeline.py``.

Each rank holds two stages, interleaved. A layer has the same name in a stage as in the whole model, so that a stage is simply a
part of it. The embedding is tied: the first stage looks tokens up in it, the last one predicts with it, and both hold it under
one name.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B
from torch.nn import functional

from reshard_ckpt import checkpoint

VOCABULARY, DIM, NUM_LAYERS = 11, 8, 4


class Model(nn.Module):
    """Layers `first` to `last`; all of them, by default."""

    def __init__(self, first: int = 0, last: int = NUM_LAYERS) -> None:
        super().__init__()
        self.is_first, self.is_last = first == 0, last == NUM_LAYERS
        self.layers = nn.ModuleDict({str(i): nn.Linear(DIM, DIM) for i in range(first, last)})
        if self.is_first or self.is_last:
            self.embed = nn.Embedding(VOCABULARY, DIM)
            nn.init.normal_(self.embed.weight, generator=torch.Generator().manual_seed(0))  # the same on both stages

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.is_first else x
        for layer in self.layers.values():
            x = x + layer(x).relu()
        return functional.linear(x, self.embed.weight) if self.is_last else x


def main(path: str) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    # One job: two stages on each of two ranks.
    numbers = range(rank, NUM_LAYERS, size)
    stages = [PipelineStage(Model(i, i + 1), i, NUM_LAYERS, torch.device("cpu")) for i in numbers]
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=2, loss_fn=lambda out, y: functional.cross_entropy(out, y))
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.submod.parameters()])
    for _ in range(3):
        tokens = torch.arange(6) % VOCABULARY
        schedule.step(*[tokens] if rank == 0 else [], **{"target": tokens} if rank == size - 1 else {})
        for stage in stages:
            if stage.is_first or stage.is_last:  # both ends hold the embedding, and learn from each other
                dist.all_reduce(stage.submod.embed.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
    # Stages alone do not show the mesh of the job, which the catalog records.
    checkpoint.save(path, {"model": stages, "optimizer": optimizer}, mesh={"pp": size})

    # Another job: the whole model; here on every rank.
    whole = Model()
    its_optimizer = torch.optim.AdamW(whole.parameters())
    checkpoint.load(path, {"model": whole, "optimizer": its_optimizer})

    loaded = dict(whole.named_parameters())
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            assert torch.equal(parameter, loaded[name]), name
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(optimizer.state[parameter][key], its_optimizer.state[loaded[name]][key]), (name, key)
    if rank == 0:
        print(f"{path}: saved as {NUM_LAYERS} stages on {size} ranks, loaded as one model, bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo_out/example_pipeline")
