"""Which boxes of the global tensor does the local tensor of a DTensor hold?

torch's own helpers answer this wrongly where FSDP2 meets tensor parallelism on sizes that do not divide, so the answer is worked
out here, and checked against the local tensor's shape:

1. Along each dim start from the whole range and let the mesh axes that shard it cut, each as ``torch.chunk`` does.
2. The axes cut in *shard order*: ``_StridedShard(dim, split_factor)`` on an axis means that later axes, whose sizes multiply to
   the split factor, cut before it. FSDP2 over tp 2 is ``_StridedShard(0, 2), Shard(0)``: tp cuts first.
3. Where no order explains the split factors (a flattened view can make such), the placement is strided in earnest: each axis,
   left to right, cuts what it is given into split-factor groups and takes its chunk of each group. That gives several ranges.
4. The boxes are the products of the ranges of all dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from ..core.catalog.specs import AxisPlacement, Ints, Replication
from ..core.geometry.chunks import Range, chunk, joined
from ..errors import LayoutError, UnsupportedError, UsageError
from .layouts import Layout, LocalBox
from .mesh import axis_names


@dataclass(frozen=True, slots=True)
class AxisCut:
    """A mesh axis of `num` ranks that shards one dim, at coordinate `index`."""

    num: int
    index: int
    split_factor: int = 1


def dtensor_layout(tensor: DTensor, local_shape: Ints, name: str) -> Layout:
    """The layout of a DTensor whose local tensor has shape `local_shape`; ranks outside its mesh hold nothing.

    Raises
    ------
    UnsupportedError
        A placement is ``Partial``, or of a kind unknown here.
    LayoutError
        The placements do not explain the local shape.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    known = _KNOWN.get((id(mesh), id(placements)))
    if known is None:
        if len(_KNOWN) >= _MAX_KNOWN:
            _KNOWN.clear()
        known = _KNOWN[id(mesh), id(placements)] = _Known(mesh, placements)
    shapes = tensor.shape, local_shape
    layout = known.layouts.get(shapes)
    if layout is None:
        layout = known.layouts[shapes] = _layout_on(mesh, tuple(placements), tuple(tensor.shape), local_shape, name)
    return layout


class _Known:
    """Layouts that follow from one mesh and one tuple of placements, by the tensor's shape and the local one.

    It holds both, so that no other object can have their identity while it is known. Neither ever changes, nor do the layouts.
    """

    def __init__(self, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
        self.held = mesh, placements
        self.layouts: dict[tuple[Ints, Ints], Layout] = {}


_KNOWN: dict[tuple[int, int], _Known] = {}
_MAX_KNOWN = 1 << 16


def _layout_on(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Ints, local_shape: Ints, name: str) -> Layout:
    coordinate = mesh.get_coordinate()
    where = None if coordinate is None else tuple(coordinate)
    kinds = tuple(map(type, placements))  # a subclass may be equal to its base, and cut otherwise
    try:
        return _layout(shape, local_shape, axis_names(mesh), placements, kinds, tuple(mesh.shape), where)
    except UsageError as error:
        raise type(error)(f"{name}: {error}") from None


@lru_cache(maxsize=4096)
def _layout(
    shape: Ints,
    local_shape: Ints,
    axes: tuple[str, ...],
    placements: tuple[Placement, ...],
    _kinds: tuple[type, ...],
    sizes: Ints,
    coordinate: Ints | None,
) -> Layout:
    """The layout, worked out once for all tensors alike: a model's layers are, and a save should not wait for each."""
    placement = tuple(_axis_placement(axis, p, len(shape)) for axis, p in zip(axes, placements, strict=True))
    if coordinate is None:
        return Layout(shape, local_shape, (), Replication.DECLARED, placement)
    cuts: list[list[AxisCut]] = [[] for _ in shape]
    for axis, p in enumerate(placements):
        dim = placement[axis].dim
        if dim is not None:
            cuts[dim].append(AxisCut(sizes[axis], coordinate[axis], int(getattr(p, "split_factor", 1))))
    ranges = [local_ranges(size, c) for size, c in zip(shape, cuts, strict=True)]
    expected = tuple(sum(length for _, length in r) for r in ranges)
    if 0 in expected and 0 in local_shape:  # FSDP2 gives an empty shard other sizes in the other dims
        return Layout(shape, local_shape, (), Replication.DECLARED, placement)
    if expected != local_shape:
        raise LayoutError(
            f"placements {placements} on a mesh of {sizes} give coordinate {coordinate} a local shape of {expected} of {shape}, "
            f"but the local tensor has {local_shape}; pass a LocalShard that says what it holds"
        )
    return Layout(shape, local_shape, _boxes(ranges), Replication.DECLARED, placement)


def local_ranges(size: int, cuts: Sequence[AxisCut]) -> list[Range]:
    """The ranges ``(first, length)`` of ``[0, size)`` that remain, in the order in which they lie in the local tensor.

    `cuts` are in the order of the mesh's axes.

    >>> local_ranges(13, [AxisCut(3, 2, split_factor=2), AxisCut(2, 0)])  # FSDP2 on 3, over tp 2: row 6 alone
    [(6, 1)]
    >>> local_ranges(12, [AxisCut(2, 1, split_factor=3)])  # the second half of each of three groups
    [(2, 2), (6, 2), (10, 2)]
    """
    ranges = [(0, size)]
    order = shard_order(cuts)
    for cut in cuts if order is None else [cuts[i] for i in order]:
        ranges = chunk(ranges, cut.num, cut.index) if order is not None else _strided_chunk(ranges, cut)
    return joined(ranges)


def shard_order(cuts: Sequence[AxisCut]) -> list[int] | None:
    """The order in which the axes cut, first to last, or None where no order explains the split factors.

    Read from the last axis to the first, each axis goes in where the axes before it multiply to its split factor.

    >>> shard_order([AxisCut(3, 0, split_factor=2), AxisCut(2, 0)])
    [1, 0]
    """
    order: list[int] = []
    for axis in reversed(range(len(cuts))):
        products = accumulate((cuts[i].num for i in order), lambda a, b: a * b, initial=1)
        at = next((k for k, p in enumerate(products) if p == cuts[axis].split_factor), None)
        if at is None:
            return None
        order.insert(at, axis)
    return order


def _strided_chunk(ranges: list[Range], cut: AxisCut) -> list[Range]:
    groups = (chunk(ranges, cut.split_factor, group) for group in range(cut.split_factor))
    return [r for group in groups for r in chunk(group, cut.num, cut.index)]


def _boxes(ranges: Sequence[Sequence[Range]]) -> tuple[LocalBox, ...]:
    starts = [[0, *accumulate(length for _, length in r)] for r in ranges]
    out = []
    for chosen in product(*(range(len(r)) for r in ranges)):
        local_offsets = tuple(starts[dim][k] for dim, k in enumerate(chosen))
        offsets = tuple(ranges[dim][k][0] for dim, k in enumerate(chosen))
        out.append(LocalBox(local_offsets, offsets, tuple(ranges[dim][k][1] for dim, k in enumerate(chosen))))
    return tuple(out)


def _axis_placement(axis: str, placement: Placement, ndim: int) -> AxisPlacement:
    if placement.is_partial():
        raise UnsupportedError(
            f"{placement!r} on axis {axis!r} is a reduction not yet done; redistribute the DTensor to Replicate() or "
            "Shard() first"
        )
    if placement.is_replicate():
        return AxisPlacement(axis, "replicate")
    # Only these two: a subclass of Shard may cut otherwise. `_StridedShard` is told by its name, for it is no public one, and
    # by torch 2.13 no subclass of Shard any more.
    if type(placement) is Shard or type(placement).__name__ == "_StridedShard":
        dim: int = placement.dim  # type: ignore[attr-defined]
        return AxisPlacement(axis, "shard", dim % ndim)
    raise UnsupportedError(f"placement {placement!r} on axis {axis!r} is unknown here; pass a LocalShard that says what it holds")


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """The local tensor, without autograd and without a collective still under way."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            local = tensor.to_local()
    else:
        local = tensor.to_local()
    wait = getattr(local, "wait", None)  # an asynchronous collective's result
    return local if wait is None else wait()
