"""The local memory of tensors, DTensors and declared shards, and which part of the global tensor it holds.

What cannot be read as plain strided memory is refused here, by name and with what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch.nn.parameter import is_lazy

from ..core.catalog.specs import Ints, Replication, StateLink, TensorSpec
from ..core.words import check_text
from ..engine.common.tensor_bytes import LocalTensor
from ..errors import LayoutError, UnsupportedError
from ..format.torch_dtypes import dtype_code
from .dtensor import dtensor_layout, local_tensor
from .layouts import Layout, whole
from .shards import FlatShard, LocalShard
from .torch_classes import is_dtensor

TensorLike = torch.Tensor | LocalShard | FlatShard


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """The memory of a local tensor, and which part of the global one it holds."""

    memory: torch.Tensor
    layout: Layout

    def named(self, name: str, link: StateLink | None = None) -> LocalTensor:
        """Describe the memory as the local part of the tensor of this name; `link` says of which parameter it is state."""
        layout, dtype, strides = self.layout, self.memory.dtype, self.memory.stride()
        known = _SPECS.get(name)
        if (
            known is not None
            and known.layout is layout
            and known.dtype is dtype
            and known.strides == strides
            and known.spec.link == link
        ):
            return LocalTensor(known.spec, self.memory)
        check_text(name, "a name")
        code = dtype_code(dtype, name)
        spec = TensorSpec(name, code, layout.shape, layout.pieces(self.memory), layout.replication, layout.placement, link=link)
        if len(_SPECS) >= _MAX_SPECS:
            _SPECS.clear()
        _SPECS[name] = _KnownSpec(layout, dtype, strides, spec)
        return LocalTensor(spec, self.memory)


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
    """Tell whether a value is saved as a tensor."""
    return isinstance(value, torch.Tensor | LocalShard | FlatShard)


class LocalMemories:
    """The local memory of every tensor of one state, each looked up once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Replication], LocalMemory] = {}

    def of(self, value: TensorLike, name: str, replication: Replication = Replication.PLAIN) -> LocalMemory:
        """Find the memory of a tensor that lives as long as this; `replication` is that of a plain tensor."""
        key = id(value), replication
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = local_memory(value, name, lambda shape: whole(shape, replication))
        return known


def _whole(shape: Ints) -> Layout:
    return whole(shape, Replication.PLAIN)


def local_memory(value: TensorLike, name: str, layout_of_plain: Callable[[Ints], Layout] = _whole) -> LocalMemory:
    """Find the memory of a tensor, DTensor, LocalShard or FlatShard.

    Parameters
    ----------
    layout_of_plain
        Gives the layout of a plain tensor, which does not show one itself, by its shape.

    Raises
    ------
    UnsupportedError
        There is no plain memory to read.
    LayoutError
        A DTensor's local tensor has another shape than its placements say.
    """
    if is_dtensor(value):
        local = local_tensor(value)
        layout = dtensor_layout(value, tuple(local.shape), name)
        if layout.flat_start is not None and local.ndim != 1 and not local.is_contiguous():
            raise LayoutError(f"{name}: its placement cuts it flattened, but its local tensor is not contiguous; make it so")
        return LocalMemory(plain_memory(local, name), layout)
    if isinstance(value, LocalShard | FlatShard):
        return LocalMemory(plain_memory(value.tensor, name), value.layout)
    memory = plain_memory(value, name)
    return LocalMemory(memory, layout_of_plain(tuple(memory.shape)))


def plain_memory(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return the tensor without autograd, once it is known to be plain strided memory."""
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
    """Tell whether none of the refusals can apply: a short way for nearly all tensors."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def check_writable(value: TensorLike, memory: torch.Tensor, name: str) -> None:
    """Refuse what cannot be loaded into in place: a lazily conjugated view, or several elements in one place of memory."""
    tensor = value.tensor if isinstance(value, LocalShard | FlatShard) else value
    tensor = local_tensor(tensor) if is_dtensor(tensor) else tensor
    if tensor.is_conj() or tensor.is_neg():
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
