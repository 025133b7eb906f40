"""What is saved and loaded: a GPT in mixed precision, on any mesh, whose every value is known from its name and its place.

1. bf16 parameters are sharded over tp and replicated over dp; fp32 master weights and Adam moments are sharded over both, as
   FSDP2 over tensor parallelism shards them, or replicated over dp too, as under DDP. A pipeline stage holds its own layers.
2. An element's bits are a function of its tensor's name and its global position, so that a load is checked on any layout.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # what FSDP2 makes of a dim that tp shards already

BYTES_PER_PARAMETER = 2 + 3 * 4
MOMENTS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter: its global shape and the dim that tensor parallelism shards."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None

    @property
    def num_bytes(self) -> int:
        """Of the parameter, its master weight and its moments."""
        return prod(self.shape) * BYTES_PER_PARAMETER


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh, and what dp does to the optimizer on it.

    Attributes
    ----------
    pp, dp, tp
        Sizes of the axes, outermost first.
    columns
        dp cuts the optimizer's matrices into columns.
    replicated
        dp cuts nothing, as under DDP.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    columns: bool = False
    replicated: bool = False

    def __str__(self) -> str:
        sizes = [f"{axis} {getattr(self, axis)}" for axis in ("pp", "dp", "tp") if getattr(self, axis) > 1]
        return (
            (" × ".join(sizes) or "1 rank") + (", columns" if self.columns else "") + (", replicated" if self.replicated else "")
        )


def gpt(gb: float) -> list[Weight]:
    """Return the parameters of a GPT whose training state has about this many gigabytes, over an even number of layers."""
    dim, vocab = (1024, 32768) if gb >= 1 else (512, 8192)
    layers = max(2, 2 * round((gb * 1e9 / BYTES_PER_PARAMETER - vocab * dim) / (24 * dim * dim)))
    weights = [Weight("embed.weight", (vocab, dim), 0)]
    for i in range(layers):
        weights += [
            Weight(f"layers.{i}.norm1.weight", (dim,), None),
            Weight(f"layers.{i}.attn.qkv.weight", (3 * dim, dim), 0),
            Weight(f"layers.{i}.attn.proj.weight", (dim, dim), 1),
            Weight(f"layers.{i}.norm2.weight", (dim,), None),
            Weight(f"layers.{i}.mlp.up.weight", (4 * dim, dim), 0),
            Weight(f"layers.{i}.mlp.down.weight", (dim, 4 * dim), 1),
        ]
    return [*weights, Weight("norm.weight", (dim,), None)]


def experts(gb: float) -> list[Weight]:
    """Return the parameters of layers of stacked experts: of their three dims, tensor parallelism cuts the middle or the last."""
    dim = 1024 if gb >= 1 else 256
    weights = []
    for i in range(max(1, round(gb * 1e9 / BYTES_PER_PARAMETER / (32 * dim * dim)))):
        weights += [
            Weight(f"layers.{i}.norm.weight", (dim,), None),
            Weight(f"layers.{i}.experts.up", (8, 2 * dim, dim), 1),
            Weight(f"layers.{i}.experts.down", (8, dim, 2 * dim), 2),
        ]
    return weights


def stage_of(weights: list[Weight], stage: int, stages: int) -> list[Weight]:
    """Return the parameters of one pipeline stage: an equal share of the layers; embedding first, last norm last."""
    num_layers = 1 + max(int(w.name.split(".")[1]) for w in weights if w.name.startswith("layers."))

    def belongs(weight: Weight) -> int:
        if weight.name.startswith("layers."):
            return int(weight.name.split(".")[1]) * stages // num_layers
        return 0 if weight.name.startswith("embed") else stages - 1

    return [weight for weight in weights if belongs(weight) == stage]


class MixedPrecisionAdam(torch.optim.Optimizer):
    """Holds bf16 parameters and, for each, fp32 master weight and moments of a layout of their own, as ZeRO-1 does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.95)})

    def step(self, closure: Any = None) -> None:  # never called: a benchmark of input and output does not train
        raise NotImplementedError


@dataclass(slots=True)
class State:
    """This rank's part: as this library takes it (`modules`), and the same tensors by name (`tensors`), as others do."""

    modules: dict[str, Any]
    tensors: dict[str, DTensor]
    boxes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    @property
    def held_bytes(self) -> int:
        return sum(local.nbytes for local in self.locals())

    def locals(self) -> Iterator[torch.Tensor]:
        for tensor in self.tensors.values():
            yield tensor.to_local()

    def fill(self) -> None:
        """Give every element its value."""
        for name, tensor in self.tensors.items():
            bits(tensor.to_local())[...] = expected(name, *self.boxes[name], tensor.dtype)

    def clear(self) -> None:
        """Overwrite every element, so that a load that does nothing is seen."""
        for local in self.locals():
            local.fill_(-1.0)

    def wrong(self) -> list[str]:
        """List the tensors with an element that is not what it should be."""
        return [
            name
            for name, tensor in self.tensors.items()
            if not np.array_equal(bits(tensor.to_local()), expected(name, *self.boxes[name], tensor.dtype))
        ]


def bits(local: torch.Tensor) -> np.ndarray:
    """Return a tensor's elements as integers."""
    return local.view(torch.int16 if local.dtype == torch.bfloat16 else torch.int32).numpy()


def expected(name: str, offsets: tuple[int, ...], lengths: tuple[int, ...], dtype: torch.dtype) -> np.ndarray:
    """Return the bits of a box of a tensor: finite positive numbers that differ from their neighbours."""
    out = np.full(lengths, zlib.crc32(name.encode()) & 0xFFFF, np.uint32)
    for dim, (offset, length, factor) in enumerate(zip(offsets, lengths, (2654435761, 40503, 2246822519), strict=False)):
        steps = (np.arange(offset, offset + length, dtype=np.uint64) * factor).astype(np.uint32)
        out += steps.reshape([-1 if d == dim else 1 for d in range(len(lengths))])
    out &= 0x3FFFFFFF
    return (out >> 15).astype(np.int16) & 0x3FFF if dtype == torch.bfloat16 else out.view(np.int32)


def build(weights: list[Weight], layout: Layout, rank: int) -> State:
    """Build this rank's part of the state on a layout of all ranks; its values are not yet set."""
    mesh = init_device_mesh("cpu", (layout.pp, layout.dp, layout.tp), mesh_dim_names=("pp", "dp", "tp"))
    mine = stage_of(weights, rank // (layout.dp * layout.tp), layout.pp) if layout.pp > 1 else weights
    coordinates = rank // layout.tp % layout.dp, rank % layout.tp
    model = nn.Module()
    state = State({"model": model}, {})
    parameters = []
    for weight in mine:
        name = f"model.{weight.name}"
        parameter = nn.Parameter(_local(state, name, weight, layout, coordinates, mesh["dp", "tp"], zero=False))
        state.tensors[name] = parameter.data
        _register(model, weight.name.split("."), parameter)
        parameters.append(parameter)
    optimizer = state.modules["optimizer"] = MixedPrecisionAdam(parameters)
    for weight, parameter in zip(mine, parameters, strict=True):
        for moment in MOMENTS:
            name = f"optimizer.{weight.name}.{moment}"
            zero = not layout.replicated
            tensor = state.tensors[name] = _local(state, name, weight, layout, coordinates, mesh["dp", "tp"], zero=zero)
            optimizer.state[parameter][moment] = tensor
    return state


def _local(
    state: State, name: str, weight: Weight, layout: Layout, at: tuple[int, int], mesh: DeviceMesh, *, zero: bool
) -> DTensor:
    offsets, lengths = [0] * len(weight.shape), list(weight.shape)

    def cut(dim: int, size: int, index: int) -> None:
        lengths[dim] //= size  # every size of this model divides
        offsets[dim] += lengths[dim] * index

    if weight.tp_dim is not None:
        cut(weight.tp_dim, layout.tp, at[1])
    zero_dim = len(weight.shape) - 1 if layout.columns else 0
    if zero:
        cut(zero_dim, layout.dp, at[0])
    over_tp = Replicate() if weight.tp_dim is None else Shard(weight.tp_dim)
    over_dp: Any = Shard(zero_dim) if zero else Replicate()
    if zero and weight.tp_dim == zero_dim and layout.tp > 1 and layout.dp > 1:
        over_dp = _StridedShard(zero_dim, split_factor=layout.tp)
    # Zeros that are written: memory that was never touched would cost whoever comes first.
    local = torch.empty(lengths, dtype=torch.float32 if name.startswith("optimizer.") else torch.bfloat16).fill_(0)
    state.boxes[name] = tuple(offsets), tuple(lengths)
    strides = tuple(prod(weight.shape[i + 1 :]) for i in range(len(weight.shape)))
    return DTensor.from_local(local, mesh, [over_dp, over_tp], run_check=False, shape=torch.Size(weight.shape), stride=strides)


def _register(module: nn.Module, parts: list[str], parameter: nn.Parameter) -> None:
    *above, last = parts
    for part in above:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, parameter)
