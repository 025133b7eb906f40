"""Classes by which frameworks and users declare what their tensors and values are.

`LocalShard` and `FlatShard` declare the part of a global tensor that a local tensor is. `Shards` declares that several local
tensors are parts of one global tensor. `PerRank` declares that each rank has a value of its own. Each may stand in the state in
place of a tensor or a value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from operator import index as as_int
from typing import Any, Final

import torch

from ..core.catalog.specs import Ints, Replication
from ..core.geometry.runs import pad_rows
from ..core.geometry.tiling import find_overlap
from ..core.report import type_in_words
from ..errors import LayoutError, UsageError
from ..format.catalog_check import MAX_BYTES
from .layouts import Layout, LocalBox


def _ints(label: str, values: Iterable[Any]) -> Ints:
    try:
        out = tuple(as_int(v) for v in values)
    except (TypeError, RuntimeError) as error:  # RuntimeError: of a tensor without data
        raise UsageError(f"{label}: wanted integers, got {values!r}") from error
    if any(v < 0 for v in out):
        raise LayoutError(f"{label}: {out} has a negative entry")
    return out


def _global_shape(kind: str, values: Iterable[Any], tensor: torch.Tensor) -> Ints:
    shape = _ints(f"{kind} global_shape", values)
    if prod(max(size, 1) for size in shape) * tensor.element_size() > MAX_BYTES:
        raise LayoutError(f"{kind}: global_shape {shape} of {tensor.dtype} is over {MAX_BYTES} bytes; correct it")
    return shape


def _inside(label: str, offsets: Ints, lengths: Ints, shape: Ints) -> None:
    if not len(offsets) == len(lengths) == len(shape):
        raise LayoutError(f"{label}: offsets {offsets} and lengths {lengths} do not have the {len(shape)} dims of shape {shape}")
    for dim, (offset, length, size) in enumerate(zip(offsets, lengths, shape, strict=True)):
        if offset + length > size:
            raise LayoutError(
                f"{label}: dim {dim} ends at {offset} + {length} = {offset + length}, past the size {size} of {shape}"
            )


def _disjoint(label: str, boxes: Sequence[tuple[Ints, Ints]]) -> None:
    """Raise LayoutError if two boxes overlap: two elements would have one place, and one of them would be lost."""
    held = [i for i, (_, lengths) in enumerate(boxes) if prod(lengths)]
    num_dims = max((len(boxes[i][0]) for i in held), default=0) or 1  # the box of a 0-dim tensor gets one dim, of size 1
    offsets = pad_rows((boxes[i][0] for i in held), num_dims, 0)
    pair = find_overlap(offsets, pad_rows((boxes[i][1] for i in held), num_dims, 1))
    if pair is not None:
        i, j = sorted(held[k] for k in pair)
        raise LayoutError(
            f"{label} {i} and {j} overlap: offsets {boxes[i][0]} lengths {boxes[i][1]} and offsets {boxes[j][0]} lengths "
            f"{boxes[j][1]}; each element must be in one piece"
        )


def _check_tensor(kind: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{kind}: wanted a torch.Tensor, got {type(tensor).__name__}")
    if hasattr(tensor, "placements") and hasattr(tensor, "device_mesh"):
        raise UsageError(f"{kind}: got a DTensor, whose placement says by itself what it holds; pass the DTensor as it is")


class LocalShard:
    """A local tensor that is one box of a global tensor, or several boxes.

    Ranks that declare the same box are replicas: they hold the same bytes and share the writing.

    Parameters
    ----------
    tensor
        The local tensor of this rank. It is read when saving and written in place when loading.
    global_shape
        The shape of the whole tensor.
    offsets
        Where the local tensor begins in the global one, for each dim. The box has the local tensor's shape.
    pieces
        Instead of `offsets`: ``(local_offsets, offsets, lengths)`` of each box, for a local tensor that consists of several boxes
        (fused QKV, SwiGLU). Boxes may not overlap, neither in the local tensor nor in the global one. Elements of the local
        tensor that no box covers are padding, which is neither saved nor loaded.

    Raises
    ------
    LayoutError
        A box does not fit, or boxes overlap.

    Examples
    --------
    The second of two tensor-parallel ranks holds rows [2, 4) of the gate and of the up projection, stacked:

    >>> shard = LocalShard(torch.zeros(4, 8), (8, 8), pieces=[((0, 0), (2, 0), (2, 8)), ((2, 0), (6, 0), (2, 8))])
    """

    __slots__ = ("layout", "tensor")

    def __init__(
        self,
        tensor: torch.Tensor,
        global_shape: Iterable[int],
        offsets: Iterable[int] | None = None,
        *,
        pieces: Iterable[tuple[Iterable[int], Iterable[int], Iterable[int]]] | None = None,
    ) -> None:
        _check_tensor("LocalShard", tensor)
        shape = _global_shape("LocalShard", global_shape, tensor)
        if (offsets is None) == (pieces is None):
            raise UsageError("LocalShard: give either offsets or pieces")
        if tensor.ndim != len(shape):
            raise LayoutError(
                f"LocalShard: the local tensor has {tensor.ndim} dims {tuple(tensor.shape)}, but global_shape={shape} has "
                f"{len(shape)}; give both the same number of dims"
            )
        local_shape = tuple(tensor.shape)
        if offsets is not None:
            boxes: tuple[LocalBox, ...] = (LocalBox((0,) * len(shape), _ints("LocalShard offsets", offsets), local_shape),)
            _inside("LocalShard piece 0 in the global tensor", boxes[0].offsets, local_shape, shape)
        else:
            boxes = _boxes("LocalShard", () if pieces is None else pieces, shape, local_shape)
        self.tensor: Final = tensor
        self.layout: Final = Layout(shape, local_shape, boxes, Replication.DECLARED)

    def __repr__(self) -> str:
        boxes = ", ".join(f"{b.offsets}+{b.lengths}" for b in self.layout.boxes)
        return f"LocalShard({tuple(self.tensor.shape)} of {self.layout.shape}: {boxes})"


def _boxes(kind: str, pieces: Iterable[Any], shape: Ints, local_shape: Ints | None) -> tuple[LocalBox, ...]:
    """Check the boxes that a user declares as pieces of a global tensor, and with `local_shape` of a local one; return them."""
    fields = ("local_offsets", "offsets", "lengths") if local_shape is not None else ("offsets", "lengths")
    boxes = []
    if not isinstance(pieces, Iterable):
        raise UsageError(f"{kind}: pieces={pieces!r:.200}: wanted a list of ({', '.join(fields)})")
    for i, piece in enumerate(pieces):
        what = f"{kind} piece {i}"
        try:
            named = dict(zip(fields, piece, strict=True))
        except (TypeError, ValueError) as error:
            raise UsageError(f"{what}: wanted ({', '.join(fields)}), got {piece!r}") from error
        box = LocalBox(**{"local_offsets": (), **{field: _ints(what, values) for field, values in named.items()}})
        _inside(f"{what} in the global tensor", box.offsets, box.lengths, shape)
        if local_shape is not None:
            _inside(f"{what} in the local tensor", box.local_offsets, box.lengths, local_shape)
        boxes.append(box)
    _disjoint(f"{kind}: in the global tensor, pieces", [(box.offsets, box.lengths) for box in boxes])
    if local_shape is not None:
        _disjoint(f"{kind}: in the local tensor, pieces", [(box.local_offsets, box.lengths) for box in boxes])
    return tuple(boxes)


class FlatShard:
    """A local tensor that is a run of a flattened tensor, as ZeRO and distributed optimizers hold it.

    Parameters
    ----------
    tensor
        The local tensor of this rank: 1-D, or contiguous. It is read when saving and written in place when loading.
    global_shape
        The shape of the whole tensor.
    start
        Where the run begins, in elements of the row-major concatenation of `pieces`.
    pieces
        ``(offsets, lengths)`` of each box that was flattened; by default the one box that is the whole tensor. A distributed
        optimizer over tensor parallelism flattens the tp-local shard: give that box here.
    local_shape
        The shape of the tensor that was flattened, if its boxes lie apart in the global tensor, as the halves of a fused weight
        do. `pieces` are then ``(local_offsets, offsets, lengths)`` of boxes in it, as for `LocalShard`, and `start` counts its
        elements.

    Raises
    ------
    LayoutError
        A box does not fit, boxes overlap, or the run ends past them.

    Examples
    --------
    Elements [5, 9) of a (4, 3) weight, which begin and end in the middle of a row:

    >>> FlatShard(torch.zeros(4), (4, 3), 5)
    FlatShard([5, 9) of 12 elements of (4, 3))
    """

    __slots__ = ("layout", "tensor")

    def __init__(
        self,
        tensor: torch.Tensor,
        global_shape: Iterable[int],
        start: int,
        *,
        pieces: Iterable[tuple[Iterable[int], ...]] | None = None,
        local_shape: Iterable[int] | None = None,
    ) -> None:
        _check_tensor("FlatShard", tensor)
        shape = _global_shape("FlatShard", global_shape, tensor)
        (first,) = _ints("FlatShard start", (start,))
        if local_shape is not None and pieces is None:
            raise UsageError("FlatShard: local_shape without pieces; give the pieces: (local_offsets, offsets, lengths) each")
        flat_shape = None if local_shape is None else _ints("FlatShard local_shape", local_shape)
        whole = (LocalBox((), (0,) * len(shape), shape),)
        boxes = whole if pieces is None else _boxes("FlatShard", pieces, shape, flat_shape)
        total = sum(prod(box.lengths) for box in boxes) if flat_shape is None else prod(flat_shape)
        if first + tensor.numel() > total:
            raise LayoutError(
                f"FlatShard: start {first} + {tensor.numel()} elements ends at {first + tensor.numel()}, past the {total} "
                f"elements that the pieces of {shape} have"
            )
        if tensor.ndim != 1 and not tensor.is_contiguous():
            raise LayoutError(
                f"FlatShard: a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not flat; pass a "
                "contiguous one"
            )
        self.tensor: Final = tensor
        self.layout: Final = Layout(
            shape, tuple(tensor.shape), boxes, Replication.DECLARED, flat_start=first, flat_shape=flat_shape
        )

    def __repr__(self) -> str:
        first = self.layout.flat_start or 0
        flat = self.layout.flat_shape
        total = sum(prod(b.lengths) for b in self.layout.boxes) if flat is None else prod(flat)
        return f"FlatShard([{first}, {first + self.tensor.numel()}) of {total} elements of {self.layout.shape})"


class Shards:
    """Several local tensors that are parts of one global tensor, such as a rank's layers of a weight with all layers stacked.

    Parameters
    ----------
    parts
        `LocalShard`s and `FlatShard`s of one global shape and dtype.

    Raises
    ------
    LayoutError
        Two parts have different global shapes, or there is none.

    Examples
    --------
    A pipeline stage with layers 2 and 3 of four:

    >>> weights = [torch.zeros(8, 8), torch.zeros(8, 8)]
    >>> shards = Shards(LocalShard(w[None], (4, 8, 8), (2 + i, 0, 0)) for i, w in enumerate(weights))
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Iterable[LocalShard | FlatShard]) -> None:
        if not isinstance(parts, Iterable):
            raise UsageError(f"Shards: wanted a list of LocalShards and FlatShards, got {type_in_words(parts)}")
        self.parts: Final = tuple(parts)
        for part in self.parts:
            if not isinstance(part, LocalShard | FlatShard):
                raise UsageError(f"Shards: wanted LocalShards and FlatShards, got {type_in_words(part)}")
        shapes = list(dict.fromkeys(part.layout.shape for part in self.parts))
        if len(shapes) != 1:
            seen = f"global shapes {shapes[0]} and {shapes[1]}" if shapes else "no part at all"
            raise LayoutError(f"Shards: {seen}; give parts of one tensor, an empty one where this rank holds nothing")

    def __repr__(self) -> str:
        return f"Shards({list(self.parts)})"


class PerRank:
    """A value that each rank has of its own: RNG state, a data loader's position.

    Parameters
    ----------
    value
        Any plain value, or an object with ``state_dict`` and ``load_state_dict``, or a ``torch.Generator``. After a load, `value`
        is the value of this rank (an object has received it through ``load_state_dict``).
    combine
        Called when the world size differs from the saved one, with all saved values in order of rank: either
        ``combine(values, rank, size)``, where rank and size are those of the loading job, or ``combine(values)``. It returns this
        rank's value. Without it, another world size is an error. For random number generators, return a different state on each
        rank: ranks with the same state draw the same numbers.

    Examples
    --------
    Each of four ranks has read every fourth sample; any number of ranks can go on from there:

    >>> position = PerRank(12, combine=lambda values, rank, size: min(values))
    """

    __slots__ = ("_takes_rank", "combine", "value")

    def __init__(self, value: Any, combine: Callable[..., Any] | None = None) -> None:
        self.value = value
        self.combine = combine
        self._takes_rank = combine is not None and _takes_rank(combine)

    def combined(self, values: Sequence[Any], rank: int, size: int) -> Any:
        """Call `combine` with the saved values of all ranks, and return this rank's value."""
        assert self.combine is not None
        return self.combine(list(values), rank, size) if self._takes_rank else self.combine(list(values))

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


def _takes_rank(combine: Callable[..., Any]) -> bool:
    if not callable(combine):
        raise UsageError(f"PerRank: combine is {type_in_words(combine)}, which cannot be called")
    try:
        signature = inspect.signature(combine)
    except ValueError:  # a builtin such as max: it tells nothing, and takes the values
        return False
    for takes_rank, arguments in ((True, ([], 0, 1)), (False, ([],))):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return takes_rank
    raise UsageError(f"PerRank: combine{signature} takes neither (values, rank, size) nor (values)")


class Value:
    """One value, the same on all ranks, that may have tensors in it. A load replaces it whole, whatever its tensors' shapes were.

    Parameters
    ----------
    value
        A plain value, with dense or sparse tensors anywhere in it, or an object with ``state_dict`` and ``load_state_dict``. It
        must be the same on all ranks that have it. After a load, `value` is the saved value, with its tensors on the CPU,
        whatever it was before (an object has received it through ``load_state_dict``).

    Examples
    --------
    A buffer of any number of samples needs no tensors of the right shapes to load into:

    >>> replay = Value({"samples": [torch.zeros(3), torch.zeros(5)]})
    """

    __slots__ = ("value",)

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Value({self.value!r})"


@dataclass(frozen=True, slots=True)
class PerRankValues:
    """The saved values of all ranks under one name, in order of rank. `values` may decode a value only when it is indexed.

    `lost` are ranks whose saved value no longer exists anywhere (after a failure): they keep the value that they have now.
    """

    values: Sequence[Any]
    lost: frozenset[int] = frozenset()
