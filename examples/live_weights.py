"""Train on some ranks, generate on others: ``torchrun --nproc-per-node 6 examples/live_weights.py``.

Ranks 0 to 3 train under FSDP2 over tensor parallelism. Every few steps their weights go to an engine of two tensor-parallel
ranks, 4 and 5, which generates from them. No storage is involved: each rank of the engine gets just its own part of each weight,
from a trainer that holds it, and after the first time only the elements that changed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from reshard_ckpt import checkpoint

TRAINERS, ENGINE = [[0, 1], [2, 3]], [4, 5]
VOCABULARY, STEPS, PUSH_EVERY = 24, 12, 4
TEXT = torch.arange(96) * 5 % VOCABULARY  # each token follows from the one before


class NextToken(nn.Module):
    """Guess each token from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.up = nn.Linear(16, 48)
        self.down = nn.Linear(48, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.down(torch.relu(self.up(x))))


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {"embedding": RowwiseParallel(input_layouts=Replicate()), "up": ColwiseParallel(), "down": RowwiseParallel()}
    plan["head"] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, mesh, plan)


def generate(model: nn.Module, token: int, count: int) -> list[int]:
    out = [token]
    with torch.no_grad():
        for _ in range(count):
            out.append(int(model(torch.tensor(out[-1:]))[-1].argmax()))
    return out


def whole_weights(model: nn.Module) -> list[torch.Tensor]:
    """Gather the weights by torch itself, to compare with."""
    return [parameter.full_tensor() for parameter in model.state_dict().values()]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    trainers = DeviceMesh("cpu", TRAINERS, mesh_dim_names=("dp", "tp"))  # made by all ranks together
    engines = DeviceMesh("cpu", ENGINE, mesh_dim_names=("tp",))
    trains = rank not in ENGINE
    torch.manual_seed(0)  # the same on all trainers; the engine's values are replaced
    if trains:
        model = fully_shard(tensor_parallel(NextToken(), trainers["tp"]), mesh=trainers["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    else:
        model = tensor_parallel(NextToken(), engines)

    state = {"model": model}
    push = checkpoint.LiveReshard(state if trains else None, None if trains else state, delta=True)
    for step in range(1, STEPS + 1):
        if trains:
            loss = nn.functional.cross_entropy(model(TEXT[:-1]), TEXT[1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % PUSH_EVERY == 0:
            report = push.run()
            if not trains:
                tokens = generate(model, token=1, count=6)
                if rank == ENGINE[0]:
                    print(f"step {step}: {report.bytes_read} bytes came, and the engine says {tokens}", flush=True)

    mine = whole_weights(model)
    for weight in mine:
        other = weight.clone()
        dist.broadcast(other, 0)
        assert torch.equal(weight, other)
    if rank == 0:
        print("the engine has the weights of the trainers, bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
