"""Jobs of DeepSpeed's MoE, whose experts are divided among ranks, and what their live optimizers hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.families.deepspeed import jobs

CASES = {f"{stage}-{dtype}": (stage, dtype) for stage, dtype in ((0, "fp32"), (0, "bf16"), (1, "bf16"), (1, "fp32"), (2, "fp16"))}
"""ZeRO stages and precisions; that of stage 1 in bf16 is BF16_Optimizer."""

LOCAL = "deepspeed_moe.experts.deepspeed_experts."


class Expert(nn.Module):
    """What is divided: with a buffer, so that this too is each expert's own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6, bias=False)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) * self.scale.mean()


class Net(nn.Module):
    """Two layers of experts, of which the first divides four among two ranks, and the second has both of its own on each rank."""

    def __init__(self) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        size = min(2, dist.get_world_size())
        self.emb = nn.Embedding(11, 6)
        self.first = MoE(6, Expert(), num_experts=4, ep_size=size, capacity_factor=4.0, use_rts=False, min_capacity=0)
        self.second = MoE(6, Expert(), num_experts=2, ep_size=1, capacity_factor=4.0, use_rts=False, min_capacity=0)
        self.out = nn.Linear(6, 11, bias=False)
        rank = dist.get_rank() % size
        for moe, begin in ((self.first, rank * 4 // size), (self.second, 0)):
            for local, expert in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
                fill(expert, begin + local)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(x)
        for moe in (self.first, self.second):
            hidden = hidden + moe(hidden)[0]
        return nn.functional.cross_entropy(self.out(hidden).float(), y)


def fill(expert: nn.Module, number: int) -> None:
    """Give an expert values of its own, by its number in the whole model."""
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for tensor in (*expert.parameters(), *expert.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))


def engine_of(case: str, seed: int = 0) -> Any:
    stage, dtype = CASES[case]
    deepspeed = jobs.import_deepspeed()
    torch.manual_seed(seed)
    model = Net()
    if seed:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
    wanted = jobs.config(stage, dtype)
    params = [{"params": list(model.parameters()), "name": "all"}]
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    return deepspeed.initialize(model=model, model_parameters=split(params), config=wanted)[0]


def live(engine: Any) -> dict[str, str]:
    """The digests of all that an engine holds, of all ranks, by the names of the whole model."""
    from deepspeed.utils import groups

    found: dict[str, str] = {}
    size = min(2, dist.get_world_size())
    begin = groups._get_expert_parallel_rank(f"ep_size_{size}") * 4 // size

    def global_name(name: str) -> str:
        if not name.startswith(f"first.{LOCAL}"):
            return name
        number, _, rest = name.removeprefix(f"first.{LOCAL}").partition(".")
        return f"first.{LOCAL}{int(number) + begin}.{rest}"

    names = {local: global_name(local) for local, _ in engine.module.named_parameters()}
    for key, value in jobs.unpartitioned_here(engine).items():
        local = next(local for local in names if f".{local}." in f"{key}.")
        found[key.replace(local, names[local])] = value
    found |= {f"model.{global_name(local)}": jobs.digest(buffer) for local, buffer in engine.module.named_buffers()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    merged: dict[str, str] = {}
    for of_rank in every:
        for name, value in of_rank.items():
            assert merged.setdefault(name, value) == value, name  # ranks that have the same have it alike
    return merged
