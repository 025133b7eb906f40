"""What does one tensor-like thing of the state hold, and in which memory?

A *leaf* is the local memory and its layout. Everything that cannot be read or written as plain strided memory is refused here,
by name and with what to do instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ..core.catalog.specs import Ints, Replication, TensorSpec
from ..errors import UnsupportedError
from ..format.torch_dtypes import dtype_code
from .dtensor import dtensor_layout, local_tensor
from .layouts import Layout, whole
from .shards import FlatShard, LocalShard

TensorLike = torch.Tensor | LocalShard | FlatShard


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """The memory of a local tensor, and what it holds."""

    memory: torch.Tensor
    layout: Layout

    def spec(self, name: str) -> TensorSpec:
        """The leaf as `core` knows it."""
        layout, dtype, strides = self.layout, self.memory.dtype, self.memory.stride()
        known = _SPECS.get(name)
        if known is not None and known.layout is layout and known.dtype is dtype and known.strides == strides:
            return known.spec
        code = dtype_code(dtype, name)
        spec = TensorSpec(name, code, layout.shape, layout.pieces(self.memory), layout.replication, layout.placement)
        if len(_SPECS) >= _MAX_SPECS:
            _SPECS.clear()
        _SPECS[name] = _KnownSpec(layout, dtype, strides, spec)
        return spec


@dataclass(frozen=True, slots=True)
class _KnownSpec:
    """A spec and all that it follows from besides its name; no memory is held or trusted, so a wrong reuse cannot be."""

    layout: Layout
    dtype: torch.dtype
    strides: Ints
    spec: TensorSpec


_SPECS: dict[str, _KnownSpec] = {}
"""The last spec of each name: most saves describe what the one before did."""

_MAX_SPECS = 1 << 18


def is_tensor_like(value: object) -> TypeGuard[TensorLike]:
    """Whether a value is saved as a tensor."""
    return isinstance(value, torch.Tensor | LocalShard | FlatShard)


def local_tensor_of(value: TensorLike, name: str, replication: Replication = Replication.PLAIN) -> LocalTensor:
    """The leaf of a tensor, DTensor, LocalShard or FlatShard; `replication` is that of a plain tensor.

    Raises
    ------
    UnsupportedError
        There is no plain memory to read.
    LayoutError
        A DTensor's local tensor has another shape than its placements say.
    """
    if isinstance(value, LocalShard | FlatShard):
        return LocalTensor(plain_memory(value.tensor, name), value.layout)
    if isinstance(value, DTensor):
        memory = plain_memory(local_tensor(value), name)
        return LocalTensor(memory, dtensor_layout(value, tuple(memory.shape), name))
    memory = plain_memory(value, name)
    return LocalTensor(memory, whole(tuple(memory.shape), replication))


def plain_memory(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor without autograd, proved to be plain strided memory."""
    kind = type(tensor)
    if (kind is torch.Tensor or kind is torch.nn.Parameter) and _is_plain(tensor):
        return tensor.detach()
    if is_lazy(tensor):
        raise UnsupportedError(f"{name}: has no shape yet, as lazy modules have before their first forward; run one first")
    # Parameter and the like leave torch's dispatch alone; a class that overrides it keeps its data elsewhere.
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UnsupportedError(
            f"{name}: {type(tensor).__name__} keeps its data in other tensors; save those, or a plain tensor made from it"
        )
    if tensor.layout != torch.strided or tensor.is_nested:
        raise UnsupportedError(
            f"{name}: layout {tensor.layout} cannot be stored; save its indices and values as tensors, or to_dense()"
        )
    if tensor.is_meta or tensor.untyped_storage().device.type == "meta":
        raise UnsupportedError(
            f"{name}: is on the meta device and has no data; materialize it first, as with module.to_empty(device=...)"
        )
    if tensor.is_quantized:
        raise UnsupportedError(f"{name}: quantized tensors cannot be stored; save int_repr(), the scale and the zero point")
    return tensor.detach().resolve_conj().resolve_neg()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether nothing below can be wrong with it: a short way for nearly all tensors."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def check_writable(value: TensorLike, memory: torch.Tensor, name: str) -> None:
    """Refuse what cannot be loaded into in place: a lazily conjugated view, or several elements in one place of memory."""
    tensor = value.tensor if isinstance(value, LocalShard | FlatShard) else value
    if not isinstance(tensor, DTensor) and (tensor.is_conj() or tensor.is_neg()):
        raise UnsupportedError(f"{name}: is a lazily conjugated view, which cannot be loaded into; pass tensor.resolve_conj()")
    if memory.is_contiguous():
        return
    extent = 1
    for stride, size in sorted(zip(memory.stride(), memory.shape, strict=True)):
        if size > 1 and memory.numel():
            if stride < extent:
                raise UnsupportedError(
                    f"{name}: strides {memory.stride()} of shape {tuple(memory.shape)} put several elements in one place (an "
                    "expanded view?), which cannot be loaded into; pass tensor.contiguous()"
                )
            extent += stride * (size - 1)
