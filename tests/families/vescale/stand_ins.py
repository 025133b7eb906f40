"""Stand-ins for veScale's classes of 2024, with the attributes that its source gives them; no code of it.

`LegacyDTensor`: ``legacy/vescale/dtensor/dtensor.py``. `Shard`, `InterleavedShard`: ``placement_types.py``. `StateSpec`, `Range`
and `DistributedOptimizer`: ``legacy/vescale/optim/distributed_optimizer.py``; of the latter what `state_dict` and
`load_state_dict` do with an fp32 master of 16-bit weights, whose flat ranges dp ranks divide.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

MASTER = "shard_casted_float16_groups"


class _Placement:
    def is_partial(self) -> bool:
        return False

    def is_replicate(self) -> bool:
        return False


@dataclass(frozen=True)
class Shard(_Placement):
    dim: int


@dataclass(frozen=True)
class InterleavedShard(_Placement):
    dim: int
    interleaved_size: int


@dataclass(frozen=True)
class Replicate(_Placement):
    def is_replicate(self) -> bool:
        return True


for _kind in (Shard, InterleavedShard, Replicate):
    _kind.__module__ = "vescale.dtensor.placement_types"


class LegacyDTensor(torch.Tensor):
    """A tensor subclass that is none of torch's DTensor."""

    _local_tensor: torch.Tensor
    device_mesh: Any
    placements: Any

    @staticmethod
    def __new__(cls, local: torch.Tensor, mesh: Any, placements: Any, shape: Any) -> LegacyDTensor:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made._local_tensor, made.device_mesh, made.placements = local, mesh, placements
        return made

    def to_local(self) -> torch.Tensor:
        return self._local_tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            (tensor,) = args
            return LegacyDTensor(tensor._local_tensor, tensor.device_mesh, tensor.placements, tensor.shape)
        raise NotImplementedError(f"{func} of a DTensor")


def tp_local(whole: torch.Tensor, placement: Any, num: int, index: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """What a tp rank has of a tensor, and where it begins."""
    if isinstance(placement, InterleavedShard):
        parts = whole.chunk(placement.interleaved_size, placement.dim)
        return torch.cat([part.chunk(num, placement.dim)[index] for part in parts], placement.dim), ()
    if isinstance(placement, Replicate):
        return whole.clone(), (0,) * whole.ndim
    parts = whole.chunk(num, placement.dim)
    start = sum(part.shape[placement.dim] for part in parts[:index])
    return parts[index].clone(), tuple(start if d == placement.dim else 0 for d in range(whole.ndim))


def legacy(whole: torch.Tensor, mesh: DeviceMesh, placement: Any) -> LegacyDTensor:
    """A DTensor that the axis ``tp`` cuts and ``dp`` replicates."""
    local, _ = tp_local(whole, placement, mesh.shape[1], (mesh.get_coordinate() or [0, 0])[1])
    return LegacyDTensor(local.contiguous(), mesh, (Replicate(), placement), whole.shape)


@dataclass
class Range:
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass
class StateSpec:
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    local_tensor: torch.Tensor
    dp_ranks_ranges: dict[int, Range] | None


class DistributedOptimizer:
    """Adam's state of the ranges of one gradient buffer that this dp rank has."""

    def __init__(self, net: nn.Module, mesh: DeviceMesh, *, fill: Any) -> None:
        self.param_to_name: dict[Any, tuple[int, str]] = {}
        self.model_param_group_index_map: dict[Any, tuple[int, int]] = {}
        self.groups = [{"lr": 0.5, "betas": (0.9, 0.95), "params": [0]}, {"lr": 0.125, "betas": (0.9, 0.95), "params": [1, 2]}]
        self.state: dict[str, dict[str, Any]] = {}
        self.where: dict[str, tuple[Any, ...]] = {}
        tp = (mesh.get_coordinate() or [0, 0])[1]
        params = dict(net.named_parameters())
        locals_ = {name: tp_local(fill(name, "", p.shape), p.placements[1], mesh.shape[1], tp) for name, p in params.items()}
        total = sum(local.numel() for local, _ in locals_.values())
        each, at = -(-total // mesh.shape[0]), 0
        for i, (name, (local, offset)) in enumerate(locals_.items()):
            ranges = {}
            for other in range(mesh.shape[0]):
                low, high = max(each * other, at) - at, min(each * (other + 1), at + local.numel()) - at
                if low < high:
                    ranges[int(mesh.mesh[other, tp])] = Range(low, high)
            at += local.numel()
            if dist.get_rank() not in ranges:
                continue
            mine = ranges[dist.get_rank()]
            self.param_to_name[params[name]] = (0, name)
            self.model_param_group_index_map[params[name]] = (min(i, 1), 0)
            self.where[name] = (params[name].shape, local.shape, offset, ranges if len(ranges) > 1 else None, mine)
            placement = params[name].placements[1]
            held = {key: tp_local(fill(name, key, ()), placement, mesh.shape[1], tp)[0] for key in ("exp_avg", MASTER)}
            self.state[name] = {key: box.flatten()[mine.start : mine.end].clone() for key, box in held.items()}
            self.state[name]["step"] = fill(name, "step", ())

    def state_dict(self) -> dict[Any, Any]:
        entries = {}
        for name, state in self.state.items():
            shape, local_shape, offset, ranges, _ = self.where[name]
            entries[0, name] = {
                key: StateSpec(tuple(shape), tuple(local_shape), offset, value, ranges) if value.dim() else value
                for key, value in state.items()
            }
        return {"param_group_meta": [dict(group) for group in self.groups], torch.float32: entries}

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.groups = state["param_group_meta"]
        for name in self.state:
            _, local_shape, _, ranges, mine = self.where[name]
            for key, value in state[torch.float32][0, name].items():
                if isinstance(value, StateSpec):
                    assert tuple(value.local_tensor.shape) == tuple(local_shape)
                    flat = value.local_tensor.flatten()
                    assert flat.numel() == prod(local_shape)
                    self.state[name][key] = flat[mine.start : mine.end] if ranges else flat
                else:
                    self.state[name][key] = value
