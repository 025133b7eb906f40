"""ZeRO-1 AdamW: each data-parallel rank owns a flat range of all parameters, wherever tensors begin and end in it.

1. The tensor-parallel shards of all parameters on this rank, end to end, are one long vector.
2. Data-parallel rank r of n owns the r-th n-th of it: some shards whole, and parts that begin or end in the middle of others.
3. A step sums the gradients over the data-parallel ranks, updates what this rank owns, and gathers the parameters.

Only what a rank owns has optimizer state. `state_dict` declares each such range as a `FlatShard`: where it starts, in the
row-major order of which box of the global tensor. That is all that a load on another layout needs.

After Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from reshard_ckpt import FlatShard

Ints = tuple[int, ...]
DEFAULTS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


@dataclass(frozen=True, slots=True)
class Owned:
    """Elements `start` to `stop` of the flattened local shard of one parameter."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    group: dict[str, Any]


class ZeroAdamW:
    """AdamW whose state is split over the ranks of `process_group`; the parameters are replicated there.

    Parameters
    ----------
    groups
        As for torch's optimizers, with named parameters: ``[{"params": [(FQN, parameter), ...], "lr": ..., ...}, ...]``.
    process_group
        The data-parallel group.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], process_group: dist.ProcessGroup, **defaults: Any) -> None:
        self.process_group = process_group
        self.param_groups = [{**DEFAULTS, **defaults, **group} for group in groups]
        self.total = sum(local(p).numel() for _, p in self.named_parameters())
        self.chunk = -(-self.total // dist.get_world_size(process_group))
        self.first = dist.get_rank(process_group) * self.chunk
        self.owned = list(self._own())
        self.state: dict[str, dict[str, Tensor]] = {
            part.name: {"step": torch.tensor(0.0), "exp_avg": self._zeros(part), "exp_avg_sq": self._zeros(part)}
            for part in self.owned
        }

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return (named for group in self.param_groups for named in group["params"])

    def _own(self) -> Iterator[Owned]:
        """Return the part of each parameter that falls into ``[first, first + chunk)`` of the long vector."""
        position = 0
        for group in self.param_groups:
            for name, parameter in group["params"]:
                size = local(parameter).numel()
                start, stop = max(self.first - position, 0), min(self.first + self.chunk - position, size)
                if start < stop:
                    yield Owned(name, parameter, start, stop, group)
                position += size

    def _zeros(self, part: Owned) -> Tensor:
        return torch.zeros(part.stop - part.start)

    @torch.no_grad()
    def step(self) -> None:
        gradients = torch.cat([local_gradient(p).flatten() for _, p in self.named_parameters()])
        dist.all_reduce(gradients, group=self.process_group)
        gradients /= dist.get_world_size(self.process_group)
        position = self.first
        for part in self.owned:
            size = part.stop - part.start
            values = local(part.parameter).view(-1)[part.start : part.stop]
            adamw(values, gradients[position : position + size], self.state[part.name], part.group)
            position += size
        self._spread()

    def _spread(self) -> None:
        """Send the parameters that this rank owns to the others, and receive theirs."""
        mine = [local(part.parameter).view(-1)[part.start : part.stop] for part in self.owned]
        flat = self.gather(mine)
        for _, parameter in self.named_parameters():
            shard = local(parameter)
            shard.copy_(flat[: shard.numel()].view_as(shard))
            flat = flat[shard.numel() :]

    def gather(self, mine: Sequence[Tensor]) -> Tensor:
        """Gather the long vector, of which this rank gives the tensors that lie in its range."""
        padded = torch.cat([*mine, torch.zeros(self.chunk - sum(len(part) for part in mine))])
        flat = torch.empty(self.chunk * dist.get_world_size(self.process_group))
        dist.all_gather(list(flat.split(self.chunk)), padded, group=self.process_group)
        return flat

    def zero_grad(self) -> None:
        for _, parameter in self.named_parameters():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        state = {part.name: {key: declare(part, value) for key, value in self.state[part.name].items()} for part in self.owned}
        groups = [{**group, "params": [name for name, _ in group["params"]]} for group in self.param_groups]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for name, state in self.state.items():
            for key, value in state.items():
                source = saved["state"][name][key]
                value.copy_(source.tensor if isinstance(source, FlatShard) else source)
        for group, values in zip(self.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})


def declare(part: Owned, value: Tensor) -> Any:
    """What `value` is of the whole tensor: a flat range of this rank's tensor-parallel box; the step count is what it is."""
    if value.dim() == 0:
        return value
    return FlatShard(value, tuple(part.parameter.shape), part.start, pieces=[local_box(part.parameter)])


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard; it shares memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of this rank's shard; autograd may leave it laid out in another way than the parameter."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    return local(gradient)


def local_box(tensor: Tensor) -> tuple[Ints, Ints]:
    """Return offsets and lengths of this rank's shard in the whole tensor; torch shards as `Tensor.chunk` splits."""
    offsets, lengths = [0] * tensor.dim(), list(tensor.shape)
    if isinstance(tensor, DTensor):
        (placement,) = tensor.placements
        if isinstance(placement, Shard):
            dim, size = placement.dim, tensor.shape[placement.dim]
            chunk = -(-size // tensor.device_mesh.size())
            offsets[dim] = min(tensor.device_mesh.get_local_rank() * chunk, size)
            lengths[dim] = min(chunk, size - offsets[dim])
    return tuple(offsets), tuple(lengths)


def adamw(values: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """Take one step of AdamW (Loshchilov and Hutter, 2019) in place, in torch's order of operations."""
    beta1, beta2 = group["betas"]
    state["step"] += 1
    step = float(state["step"])
    values.mul_(1 - group["lr"] * group["weight_decay"])
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = state["exp_avg_sq"].sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    values.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - beta1**step))
