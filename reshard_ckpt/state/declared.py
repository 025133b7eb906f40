"""Tensors of others that say which part of a global one they hold, and what they are here: `LocalShard`s.

They are told by what they have, not by their class, so nothing is imported for them, and a class that newer releases of torch
bring is understood by older ones:

1. A tensor with `global_shape` and, for each of its boxes, `global_offsets`, `local_offsets` and `local_sizes`: torch 2.14's
   `CheckpointableTensor`. Where it has fewer dims than the global one, its rows are the leading dims, merged.
2. A `ShardedTensor`: a list of shards, each with its offsets.
3. A DTensor around a `LocalShardsWrapper`: the same, with two lists. One of Megatron-FSDP, whose local tensor lists its chunk.
4. A DTensor of another class than torch's, such as veScale's of 2024: it has `placements`, `device_mesh` and `to_local`.

Anything else that plans by itself for DCP (``__create_write_items__``, ``__create_chunk_list__``) holds a part that nobody here
knows, and is refused: saved as it looks, it would be whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch

from ..core.catalog.specs import Ints
from ..errors import LayoutError, UnsupportedError, UsageError
from .dtensor import dtensor_layout
from .shards import FlatShard, LocalShard, Shards
from .tensors import TensorLike
from .torch_classes import is_dtensor

_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
_DTENSOR = ("placements", "device_mesh", "to_local")
_CLAIMS = ("__create_write_items__", "__create_chunk_list__")


_Declared = tuple[torch.Tensor, Ints, list[tuple[Ints, Ints, Ints]]]
"""A local tensor, the shape of the global one, and the pieces of it that it holds, as a `LocalShard` takes them."""


def parts_of(value: TensorLike | Shards, name: str) -> tuple[TensorLike, ...]:
    """What is saved and loaded for a value: itself, or the shards that it says it is made of.

    Raises
    ------
    UnsupportedError
        It claims to be a part in a way that is not understood.
    LayoutError
        What it says of its parts does not fit.
    """
    if isinstance(value, Shards):
        return value.parts
    kind = type(value)
    if (kind is torch.Tensor or kind is torch.nn.Parameter) and not vars(value):
        return (value,)  # nearly all
    if isinstance(value, LocalShard | FlatShard):
        return (value,)
    try:
        return tuple(LocalShard(local, shape, pieces=pieces) for local, shape, pieces in _declared(value)) or (value,)
    except UsageError as error:
        raise type(error)(f"{name}: {error}") from None


def _declared(value: Any) -> Iterable[_Declared]:
    """Return the parts that a tensor says it is made of; none for one that says nothing."""
    if is_dtensor(value):
        # Private, but `to_local` makes an autograd node and waits for what is under way, for every tensor of every save.
        local: Any = getattr(value, "_local_tensor", None)
        local = value.to_local() if local is None else local
        if hasattr(local, "local_shards"):
            shards = list(zip(local.local_shards(), local.local_offsets(), strict=True))
            return _shards(tuple(value.shape), shards, local.dtype)
        return [_listed(local, tuple(value.shape))] if hasattr(local, _CLAIMS[1]) else ()
    if hasattr(value, _FIELDS[0]):
        return _checkpointable(value)
    if all(hasattr(value, field) for field in _DTENSOR):
        return [_placed(value)]
    if hasattr(value, "local_shards") and hasattr(value, "metadata"):
        metadata = value.metadata()
        shards = [(shard.tensor, shard.metadata.shard_offsets) for shard in value.local_shards()]
        return _shards(tuple(metadata.size), shards, metadata.tensor_properties.dtype)
    if any(hasattr(value, replication) for replication in _CLAIMS):
        raise UnsupportedError(
            f"{type(value).__name__} plans by itself for DCP which part of a tensor it is, which is unknown here; pass a "
            "LocalShard that says what it holds"
        )
    return ()


def _listed(local: Any, shape: Ints) -> _Declared:
    """The part of a DTensor of Megatron-FSDP: ranks hold uneven ones, and each has noted its own at its local tensor."""
    chunks = local.__create_chunk_list__()
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local.shape):
        sizes = [tuple(chunk.sizes) for chunk in chunks]
        raise LayoutError(
            f"its local tensor of shape {tuple(local.shape)} lists chunks of sizes {sizes}; list the one that it is"
        )
    return _one_box(local, shape, chunks[0].offsets) if local.numel() else (local, shape, [])


def _checkpointable(tensor: Any) -> Iterator[_Declared]:
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
        yield tensor, shape, list(zip(local_offsets, offsets, sizes, strict=True))
        return
    for at, first, size in zip(offsets, local_offsets, sizes, strict=True):
        yield _one_box(_unmerged(tensor, tuple(first), tuple(size)), shape, at)
    if not offsets:
        yield tensor.new_empty((0,) * len(shape)), shape, []


def _unmerged(tensor: torch.Tensor, first: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
    """Rows of a tensor whose first dim is several leading dims, merged, as a view that has them all."""
    num_merged = len(size) - tensor.ndim + 1
    rows = prod(size[:num_merged])
    fits = 0 < tensor.ndim < len(size) and len(first) == tensor.ndim and not any(first[1:])
    if not fits or size[num_merged:] != tuple(tensor.shape[1:]) or not 0 <= first[0] <= tensor.shape[0] - rows:
        raise LayoutError(
            f"local_sizes {size} at local_offsets {first} are no rows of the local tensor {tuple(tensor.shape)}, whose first dim "
            "would be the leading ones merged"
        )
    return tensor.detach().narrow(0, first[0], rows).view(size)  # to split a dim never copies


def _placed(tensor: Any) -> _Declared:
    """The boxes of a DTensor that is none of torch's, by its placements."""
    with torch.no_grad():
        local = tensor.to_local()
    layout = dtensor_layout(tensor, tuple(local.shape), "its DTensor")
    if layout.flat_start is not None:
        raise UnsupportedError(f"{tensor.placements} of a {type(tensor).__name__} cut it flattened; pass a FlatShard")
    return local, layout.shape, [(box.local_offsets, box.offsets, box.lengths) for box in layout.boxes]


def _shards(shape: Ints, shards: list[tuple[torch.Tensor, Any]], dtype: torch.dtype) -> Iterator[_Declared]:
    yield from (_one_box(local, shape, offsets) for local, offsets in shards)
    if not shards:  # this rank holds nothing, and still knows the shape
        yield torch.empty((0,) * len(shape), dtype=dtype, device="cpu"), shape, []


def _one_box(local: torch.Tensor, shape: Ints, offsets: Iterable[int]) -> _Declared:
    """The part of a tensor whose local one is one box of it, which begins at `offsets`."""
    return local, shape, [((0,) * local.ndim, tuple(offsets), tuple(local.shape))]
