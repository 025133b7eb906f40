"""The tensors of a state: find the local memory of each, and the part of the global tensor that it holds.

A tensor is a plain one, a DTensor, a `LocalShard` or a `FlatShard`. Tensors of other classes that say which part they are become
`LocalShard`s. They are recognized by their attributes and not by their class, so nothing is imported for them, and a class of a
newer release of torch works with older releases:

1. A tensor with `global_shape` and, for each of its boxes, `global_offsets`, `local_offsets` and `local_sizes`: torch 2.14's
   `CheckpointableTensor`. If it has fewer dims than the global tensor, its rows are the leading dims, merged.
2. A `ShardedTensor`: a list of shards, each with its offsets.
3. A DTensor around a `LocalShardsWrapper`: the same, with two lists. Or a DTensor whose local tensor lists its chunk, as
   Megatron-FSDP has it.
4. A tensor of another framework's class, which the framework's `Objects` lower to shards (`dtensor`).
5. A tensor that is made of others, as torchao's quantized weights are: ``__tensor_flatten__`` lists these. Each is saved under a
   name of its own (``weight.qdata``, ``weight.scale``). In a DTensor, a tensor of the same dims is cut where the whole is, at a
   multiple of the block that each of its elements stands for; a tensor of one element is the same on all ranks.

Any other tensor that plans for DCP by itself (``__create_write_items__``, ``__create_chunk_list__``) holds an unknown part, and
is refused: saved like a plain tensor, it would be whole. Memory that is not plain and strided is refused too, by name and with
advice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.nn.parameter import is_lazy

from ..core.catalog.specs import Ints, Replication
from ..core.trees import Path
from ..errors import LayoutError, UnsupportedError, UsageError
from .dtensor import dtensor_class, dtensor_layout, is_dtensor, known_class, local_tensor, lowered
from .entries import Entry, Kind
from .layouts import Layout, whole
from .shards import FlatShard, LocalShard, Shards

if TYPE_CHECKING:
    from .parameters import Owner

TensorLike = torch.Tensor | LocalShard | FlatShard

TORCH_CLASSES = (torch.Tensor, torch.nn.Parameter)
"""Tensor classes that keep torch's dispatch, and whose objects are plain tensors without a layout of their own."""

_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
_CLAIMS = ("__create_write_items__", "__create_chunk_list__")


def is_tensor_like(value: object) -> TypeGuard[TensorLike]:
    """Tell whether a value is saved as a tensor: a tensor of any class, or a declared shard."""
    return isinstance(value, TensorLike)


def plain_local(value: Any) -> torch.Tensor | None:
    """Return a tensor itself if it is plain, or the local tensor of torch's own DTensor around a plain one; None for any other.

    A tensor with attributes, which could declare a layout, is not plain.
    """
    local = value
    if type(value) not in TORCH_CLASSES and type(value) is dtensor_class():
        local = getattr(value, "_local_tensor", value)  # private, as in `_declared`
    return local if type(local) in TORCH_CLASSES and not local.__dict__ else None


def find_memory(rows: Iterable[Entry], *, writes: bool = False) -> None:
    """Set the memory and the layout of each row that is a tensor; `writes` as for `local_memory`."""
    for row in rows:
        if row.kind is Kind.TENSOR and row.memory is None:
            row.memory, row.layout = local_memory(row.value, row.name, row.replication, row.owner, writes=writes)


def local_memory(
    value: TensorLike,
    name: str,
    replication: Replication = Replication.PLAIN,
    owner: Owner | None = None,
    *,
    writes: bool = False,
) -> tuple[torch.Tensor, Layout]:
    """Return the local memory (a tensor without autograd) and the layout of a tensor, DTensor, LocalShard or FlatShard.

    Call it under ``torch.no_grad()``. Raise `UnsupportedError` if there is no plain memory to read, or to write; or the place of
    an optimizer's state in a global tensor is unknown. Raise `LayoutError` if a DTensor's local tensor has another shape than its
    placements say.

    Parameters
    ----------
    replication, owner
        The layout of a plain tensor, which does not show it itself: whole, and replicated as declared; or like the parameter
        `owner` whose state it is.
    writes
        Whether to refuse memory that a load cannot write in place.
    """
    tensor: Any = plain_local(value)
    layout: Layout | None = None
    if tensor is None:
        value = value if owner is None else _single_part(value, name)
        if isinstance(value, LocalShard | FlatShard):
            tensor, layout = value.tensor, value.layout
        else:
            tensor = local_tensor(value) if is_dtensor(value) else value
    if layout is None and tensor is not value:
        layout = dtensor_layout(value, tuple(tensor.shape), name)
        if layout.flat_start is not None and tensor.ndim != 1 and not tensor.is_contiguous():
            raise LayoutError(f"{name}: its placement cuts it flattened, but its local tensor is not contiguous; make it so")
    is_plain = (
        type(tensor) in TORCH_CLASSES
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized or tensor.is_neg())
        and not (tensor.dtype.is_complex and tensor.is_conj())
    )
    memory = tensor.detach() if is_plain else _unusual_memory(tensor, name, writes)
    if writes and not memory.is_contiguous():
        _refuse_overlap(memory, name)
    if layout is None:
        shape = tuple(memory.shape)
        layout = whole(shape, replication) if owner is None else owner.layout_of_state(shape, name)
    return memory, layout


def _unusual_memory(tensor: torch.Tensor, name: str, writes: bool) -> torch.Tensor:
    """Return a copy of a lazily conjugated or negated view, or the memory of a tensor of an unknown class.

    With `writes`, refuse such a view. Refuse a tensor whose data cannot be read as plain memory, such as a nested, meta, fake or
    quantized one.
    """
    if is_lazy(tensor):
        raise UnsupportedError(f"{name}: has no shape yet, as lazy modules have before their first forward; run one first")
    if tensor.is_nested:
        raise UnsupportedError(
            f"{name}: is a nested tensor, whose parts have shapes of their own; save its parts as a list, tensor.unbind()"
        )
    if isinstance(tensor, known_class("torch._subclasses.fake_tensor", "FakeTensor")):
        raise UnsupportedError(
            f"{name}: is a FakeTensor, which has a shape and no data; pass a state that was made outside of FakeTensorMode"
        )
    # Parameter and the like leave torch's dispatch alone; a class that overrides it keeps its data elsewhere.
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UnsupportedError(
            f"{name}: {type(tensor).__name__} keeps its data in other tensors; save those, or a plain tensor made from it"
        )
    if tensor.layout != torch.strided:
        raise UnsupportedError(
            f"{name}: layout {tensor.layout} cannot be stored; save its indices and values as tensors, or to_dense()"
        )
    if tensor.is_meta or tensor.untyped_storage().device.type == "meta":
        raise UnsupportedError(
            f"{name}: is on the meta device and has no data; materialize it first, as with module.to_empty(device=...)"
        )
    if tensor.is_quantized:
        raise UnsupportedError(f"{name}: quantized tensors cannot be stored; save int_repr(), the scale and the zero point")
    if writes and (tensor.is_conj() or tensor.is_neg()):
        raise UnsupportedError(f"{name}: is a lazily conjugated view, which cannot be loaded into; pass tensor.resolve_conj()")
    return tensor.detach().resolve_conj().resolve_neg()


def _refuse_overlap(memory: torch.Tensor, name: str) -> None:
    """Refuse a tensor whose strides put several elements in one place, as expanded views do."""
    extent, may_overlap, repeats = 1, False, False
    for stride, size in sorted(zip(memory.stride(), memory.shape, strict=True)):
        if size > 1 and memory.numel():
            may_overlap, repeats = may_overlap or stride < extent, repeats or stride == 0
            extent += stride * (size - 1)
    if not may_overlap:
        return
    # Strides may interleave without meeting. Mark the place of each element: as many marks as elements mean that none meet.
    marks = torch.zeros(extent, dtype=torch.bool, device="cpu")
    if not repeats:
        marks.as_strided(memory.shape, memory.stride()).fill_(True)
    if int(marks.sum()) < memory.numel():
        raise UnsupportedError(
            f"{name}: strides {memory.stride()} of shape {tuple(memory.shape)} put several elements in one place (an "
            "expanded view?), which cannot be loaded into; pass tensor.contiguous()"
        )


def _single_part(value: TensorLike, name: str) -> TensorLike:
    """Return the tensor to save or load for a tensor of optimizer state. Refuse one that consists of several local shards."""
    value, *more = parts_of(value, name)
    if more:
        raise UnsupportedError(
            f"{name}: is {len(more) + 1} local shards, of which the state of one parameter can have one; save the optimizer's "
            "state_dict() by FQN instead"
        )
    return value


def parts_of(value: TensorLike | Shards, name: str) -> tuple[TensorLike, ...]:
    """Return the tensors to save or load for one tensor of the state: the tensor itself, or the shards that it declares.

    Raise `UnsupportedError` if it claims to be a part of a tensor in an unknown way, and `LayoutError` if the parts that it
    declares do not fit.
    """
    if isinstance(value, Shards):
        return value.parts
    if plain_local(value) is not None or isinstance(value, LocalShard | FlatShard):
        return (value,)
    try:
        found = tuple(_declared(value)) or lowered(value)
    except UsageError as error:
        raise type(error)(f"{name}: {error}") from None
    if not found and not is_dtensor(value) and any(hasattr(value, claim) for claim in _CLAIMS):
        raise UnsupportedError(
            f"{name}: {type(value).__name__} plans by itself for DCP which part of a tensor it is, which is unknown here; pass a "
            "LocalShard that says what it holds"
        )
    return found or (value,)


def named_parts(value: TensorLike | Shards, name: str, path: Path) -> Iterator[tuple[str, Path, TensorLike]]:
    """Yield the name, the path and the tensor of each tensor to save or load for one tensor of the state.

    There are several if it declares shards (`parts_of`), or if it consists of inner tensors, as quantized weights of torchao do.
    Raise `UnsupportedError` if the place of an inner tensor is unknown.
    """
    parts = parts_of(value, name)
    # Private, as in `_declared`: a class of others need not have the view that `to_local` makes.
    local: Any = getattr(value, "_local_tensor", value) if is_dtensor(value) else value
    kind = type(local)
    # torch's own classes, such as results of collectives, are known by other signs.
    lists_others = (
        hasattr(kind, "__tensor_flatten__")
        and kind.__module__.partition(".")[0] != "torch"
        and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    )
    if not lists_others or len(parts) != 1 or parts[0] is not value:
        yield from ((name, path, part) for part in parts)
        return
    layout = dtensor_layout(value, tuple(local.shape), name) if is_dtensor(value) else None
    for key in local.__tensor_flatten__()[0]:
        below, inner = f"{name}.{key}", getattr(local, key)
        if layout is not None and inner.numel() != 1:
            inner = _cut_like(inner, tuple(local.shape), layout, below)
        yield from named_parts(inner, below, (*path, key))


def _cut_like(inner: torch.Tensor, local_shape: Ints, layout: Layout, name: str) -> LocalShard:
    """Return an inner tensor of a DTensor's local tensor as a shard, cut where the outer tensor is cut.

    Each element of it stands for a block of the outer tensor, whose layout is `layout`. Along a dim of one element it stands for
    the whole dim, and is the same on all ranks that share it.
    """
    shape = tuple(inner.shape)
    # blocks: for each dim, how many elements of the outer tensor an inner element stands for; 0 for the whole dim
    fits = len(shape) == len(local_shape) and all(n and size % n == 0 for size, n in zip(local_shape, shape, strict=True))
    blocks = [0 if n == 1 else size // n for size, n in zip(local_shape, shape, strict=True)] if fits else []
    corners = [corner for box in layout.boxes for corner in (box.local_offsets, box.offsets, box.lengths)]
    fits = fits and not any(n % b for corner in corners for n, b in zip(corner, blocks, strict=True) if b)
    if not fits or layout.flat_start is not None:
        raise UnsupportedError(
            f"{name}: has shape {shape} in a shard of shape {local_shape} of {layout.shape}, so its place in the whole is "
            "unknown; shard it in whole blocks, or save the weight dequantized and quantize it after the load"
        )

    def in_blocks(numbers: Ints, of_whole: int) -> Ints:
        return tuple(n // b if b else of_whole for n, b in zip(numbers, blocks, strict=True))

    pieces = [(in_blocks(box.local_offsets, 0), in_blocks(box.offsets, 0), in_blocks(box.lengths, 1)) for box in layout.boxes]
    return LocalShard(inner, in_blocks(layout.shape, 1), pieces=pieces)


def _declared(value: Any) -> Iterable[LocalShard]:
    """Return the parts of a global tensor that a tensor declares by its attributes; empty if it declares nothing."""
    if is_dtensor(value):
        # Private, but `to_local` makes an autograd node and waits for collectives, for every tensor of every save.
        local: Any = getattr(value, "_local_tensor", None)
        local = value.to_local() if local is None else local
        if hasattr(local, "local_shards"):
            shards = list(zip(local.local_shards(), local.local_offsets(), strict=True))
            return _shards(tuple(value.shape), shards, local.dtype)
        return [_listed(local, tuple(value.shape))] if hasattr(local, _CLAIMS[1]) else ()
    if hasattr(value, _FIELDS[0]):
        return _checkpointable(value)
    if hasattr(value, "local_shards") and hasattr(value, "metadata"):
        metadata = value.metadata()
        shards = [(shard.tensor, shard.metadata.shard_offsets) for shard in value.local_shards()]
        return _shards(tuple(metadata.size), shards, metadata.tensor_properties.dtype)
    return ()


def _listed(local: Any, shape: Ints) -> LocalShard:
    """Return this rank's part of a DTensor of Megatron-FSDP. Parts are uneven, so the local tensor itself says where it lies."""
    chunks = local.__create_chunk_list__()
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local.shape):
        sizes = [tuple(chunk.sizes) for chunk in chunks]
        raise LayoutError(
            f"its local tensor of shape {tuple(local.shape)} lists chunks of sizes {sizes}; have its __create_chunk_list__ "
            "return one chunk, of that shape"
        )
    return LocalShard(local, shape, chunks[0].offsets) if local.numel() else LocalShard(local, shape, pieces=[])


def _checkpointable(tensor: Any) -> Iterator[LocalShard]:
    missing = [field for field in _FIELDS if not hasattr(tensor, field)]
    if missing:
        raise UnsupportedError(
            f"has {_FIELDS[0]} {tensor.global_shape}, as a part of a tensor would, and no {missing[0]}; set all of "
            f"{', '.join(_FIELDS)}, or pass a LocalShard"
        )
    shape, boxes = tuple(tensor.global_shape), [tuple(getattr(tensor, field)) for field in _FIELDS[1:]]
    if len({len(column) for column in boxes}) > 1:
        raise LayoutError(
            f"has {len(boxes[0])} global_offsets, {len(boxes[1])} local_offsets and {len(boxes[2])} local_sizes; give one of "
            "each for each box"
        )
    offsets, local_offsets, sizes = boxes
    if tensor.ndim == len(shape):
        # One shard of the tensor itself, so that an optimizer's parameter is still that object.
        yield LocalShard(tensor, shape, pieces=zip(local_offsets, offsets, sizes, strict=True))
        return
    for at, first, size in zip(offsets, local_offsets, sizes, strict=True):
        yield LocalShard(_unmerged(tensor, tuple(first), tuple(size)), shape, at)
    if not offsets:
        yield LocalShard(tensor.new_empty((0,) * len(shape)), shape, pieces=[])


def _unmerged(tensor: torch.Tensor, first: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
    """View some rows of a tensor, whose first dim is several leading dims merged, as a box of shape `size` with all dims."""
    num_merged = len(size) - tensor.ndim + 1
    rows = prod(size[:num_merged])
    fits = 0 < tensor.ndim < len(size) and len(first) == tensor.ndim and not any(first[1:])
    if not fits or size[num_merged:] != tuple(tensor.shape[1:]) or not 0 <= first[0] <= tensor.shape[0] - rows:
        raise LayoutError(
            f"local_sizes {size} at local_offsets {first} are not rows of the local tensor {tuple(tensor.shape)}, whose first "
            "dim would be the leading dims merged"
        )
    return tensor.detach().narrow(0, first[0], rows).view(size)  # to split a dim never copies


def _shards(shape: Ints, shards: list[tuple[torch.Tensor, Any]], dtype: torch.dtype) -> Iterator[LocalShard]:
    yield from (LocalShard(local, shape, offsets) for local, offsets in shards)
    if not shards:  # this rank holds nothing, and still knows the shape
        yield LocalShard(torch.empty((0,) * len(shape), dtype=dtype, device="cpu"), shape, pieces=[])
