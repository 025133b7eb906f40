"""The layout of a DTensor: the boxes of the global tensor that its local tensor holds.

torch's own helpers are wrong if FSDP2 meets tensor parallelism on sizes that do not divide, so the boxes are computed here, and
checked against the local tensor's shape:

1. Recognize the placement on each mesh axis: one of torch's kinds, or a kind that another package added to
   `core.catalog.placements`.
2. Find the *turn* of each axis among the axes that shard one dim, from torch's split factors: ``_StridedShard(dim,
   split_factor)`` on an axis means that later axes, whose sizes multiply to the split factor, cut before it. FSDP2 over tp 2 is
   ``_StridedShard(0, 2), Shard(0)``: tp cuts first.
3. If no order explains the split factors (a flattened view can cause this), the axes cut left to right, and the split factor of
   each is its number of *sections*.
4. Cut the tensor, axis by axis (`local_region`). The boxes remain.

A framework with classes of its own for placements or tensors registers its `Objects` by an entry point of the group `GROUP`.
These are loaded when a state first has a placement or a tensor of a class that is not torch's and that nothing here knows, or a
DTensor with a dim that several axes shard.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import accumulate, product
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..core.catalog.placements import KINDS, cut_ranges, local_region
from ..core.catalog.specs import AxisPlacement, Ints, Replication
from ..core.geometry.runs import Range, chunk
from ..engine.common.entry_points import load_all
from ..errors import LayoutError, UnsupportedError, UsageError
from .layouts import Layout, LocalBox, axis_names
from .shards import FlatShard, LocalShard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

GROUP = "reshard_ckpt.objects"

OWN = {
    "megatron": "reshard_ckpt.families.megatron.objects:OBJECTS",
    "vescale": "reshard_ckpt.families.vescale.objects:OBJECTS",
}
"""The entry points for `Objects` in this package, the same as in pyproject.toml."""


@dataclass(frozen=True, slots=True)
class Objects:
    """The functions by which this library understands a framework's own classes of tensors and placements.

    Attributes
    ----------
    name
        The name of the framework.
    lower
        Takes a tensor. Returns the shards that it consists of, over its own memory; empty if it is not of the framework's class.
    recognize
        Takes the name of a mesh axis, a placement on it, and the shape of the tensor. Returns the placement as an
        `AxisPlacement`; None for a placement of another framework.
    check_mesh
        Takes the mesh and the placements of a DTensor with a dim that several axes shard, and its name. It raises `LayoutError`
        if the framework has noted at the mesh that these axes cut in another order than torch says.
    """

    name: str
    lower: Callable[[Any], Sequence[LocalShard | FlatShard]] = lambda tensor: ()
    recognize: Callable[[str, Any, Ints], AxisPlacement | None] = lambda axis, placement, shape: None
    check_mesh: Callable[[Any, Sequence[Any], str], None] = lambda mesh, placements, name: None


@cache
def known_objects() -> tuple[Objects, ...]:
    """Load the registered `Objects` of all frameworks, once in a process."""
    return tuple(load_all(GROUP, OWN, Objects))


def lowered(tensor: Any) -> tuple[LocalShard | FlatShard, ...]:
    """Return the shards of a tensor of a framework's own class, from its `Objects`; empty for torch's and unknown classes."""
    if is_of_torch(tensor):
        return ()
    return next((tuple(shards) for objects in known_objects() if (shards := objects.lower(tensor))), ())


def recognized(axis: str, placement: Any, shape: Ints) -> AxisPlacement | None:
    """Return a placement of a framework's own class as an `AxisPlacement`; None for torch's and unknown classes."""
    if is_of_torch(placement):
        return None
    found = (objects.recognize(axis, placement, shape) for objects in known_objects())
    return next((axis_placement for axis_placement in found if axis_placement is not None), None)


def is_of_torch(value: Any) -> bool:
    """Tell whether the class of an object is defined in torch."""
    return type(value).__module__.partition(".")[0] == "torch"


def known_class(module: str, name: str) -> Any:
    """Return a class from a module of torch without importing it; () if nobody has imported the module.

    ``isinstance(value, ())`` is False, as it should be: no object of the class can exist yet. An import of DTensor or FSDP1
    brings sympy and a quarter of torch's modules, a second of CPU time for each process.
    """
    return getattr(sys.modules.get(module), name, ())


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Tell whether an object is a DTensor of torch, or of a class derived from it.

    >>> is_dtensor(3)
    False
    """
    return isinstance(value, dtensor_class())


_DTENSOR: Any = ()


def dtensor_class() -> Any:
    """Return the class DTensor, or () if nobody has imported it yet."""
    global _DTENSOR
    _DTENSOR = _DTENSOR or known_class("torch.distributed.tensor", "DTensor")
    return _DTENSOR


def _shard_class() -> Any:
    return known_class("torch.distributed.tensor", "Shard")


def placement_of(kind: str, dim: Any, split_factor: Any) -> Placement | None:
    """Make a placement of torch from the name of its class and its fields; return None if they are unknown."""
    from torch.distributed.tensor import Replicate, Shard, placement_types

    if kind == "Replicate":
        return Replicate()
    if kind == "Shard" and type(dim) is int:
        return Shard(dim)
    if kind == "_StridedShard" and type(dim) is int and type(split_factor) is int:
        strided: Placement = getattr(placement_types, kind)(dim, split_factor=split_factor)
        return strided
    return None


@dataclass(frozen=True, slots=True)
class AxisCut:
    """How one mesh axis shards a dim: over `num` ranks; this rank has coordinate `index`. `split_factor` is torch's."""

    num: int
    index: int
    split_factor: int = 1


def dtensor_layout(tensor: Any, local_shape: Ints, name: str) -> Layout:
    """Return the layout of a DTensor whose local tensor has shape `local_shape`; ranks outside its mesh hold nothing.

    `tensor` may be any object that has `shape`, `placements` and `device_mesh`.

    Raises
    ------
    UnsupportedError
        A placement is ``Partial``, or of a kind unknown here.
    LayoutError
        The placements do not explain the local shape.
    """
    mesh, placements, shape = tensor.device_mesh, tensor.placements, tensor.shape
    try:
        return _KNOWN[id(mesh), id(placements)][1][shape, local_shape]
    except KeyError:
        layout = _layout_on(mesh, tuple(placements), tuple(shape), local_shape, name)
    if len(_KNOWN) >= _MAX_KNOWN:
        _KNOWN.clear()
    _KNOWN.setdefault((id(mesh), id(placements)), ((mesh, placements), {}))[1][shape, local_shape] = layout
    return layout


_KNOWN: dict[tuple[int, int], tuple[tuple[DeviceMesh, tuple[Placement, ...]], dict[tuple[Ints, Ints], Layout]]] = {}
"""The cached layouts of DTensors by the ids of mesh and placements: these two objects, and the layouts by global and local shape.

The objects are kept alive, so that no others can get their ids. They never change."""

_MAX_KNOWN = 1 << 16


@dataclass(frozen=True, slots=True)
class RecognizedPlacements:
    """The placements of a DTensor, recognized as `AxisPlacement`s, and the facts about its mesh from which its layout follows.

    `sizes` are the sizes of the mesh's axes; `coordinate` is this rank's place, or None outside the mesh. `placements`, as torch
    gives them, are for messages alone, and not compared: a user's placement may call itself equal to another one that cuts
    differently.
    """

    axes: tuple[AxisPlacement, ...]
    split_factors: tuple[int | None, ...]
    sizes: Ints
    coordinate: Ints | None
    placements: tuple[Any, ...] = field(compare=False)


def recognize(
    placements: Sequence[Any], shape: Ints, names: Sequence[str], sizes: Ints, coordinate: Ints | None
) -> RecognizedPlacements:
    """Recognize the placement on each axis of a mesh, whose axes have these names and sizes."""
    axes = tuple(_axis_placement(axis, p, shape) for axis, p in zip(names, placements, strict=True))
    factors = tuple(None if (factor := getattr(p, "split_factor", None)) is None else int(factor) for p in placements)
    return RecognizedPlacements(axes, factors, sizes, coordinate, tuple(placements))


def _layout_on(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Ints, local_shape: Ints, name: str) -> Layout:
    shard = _shard_class()
    dims = [p.dim for p, size in zip(placements, mesh.shape, strict=True) if isinstance(p, shard) and size > 1]
    if len(set(dims)) < len(dims):
        for objects in known_objects():
            objects.check_mesh(mesh, placements, name)
    coordinate = mesh.get_coordinate()
    where = None if coordinate is None else tuple(coordinate)
    try:
        return layout_of(shape, local_shape, recognize(placements, shape, axis_names(mesh), tuple(mesh.shape), where))
    except UsageError as error:
        raise type(error)(f"{name}: {error}") from None


@lru_cache(maxsize=4096)
def layout_of(shape: Ints, local_shape: Ints, found: RecognizedPlacements) -> Layout:
    """Return the layout of a DTensor on this rank, from its recognized placements.

    Cached, as a model's layers have equal tensors.
    """
    sizes, coordinate, placements = found.sizes, found.coordinate, found.placements
    # A rank outside of the mesh declares the placement of the first rank inside, so that all ranks declare the same.
    where = coordinate if coordinate is not None else (0,) * len(sizes)
    placement = _placement(shape, found, where)
    nothing = Layout(shape, local_shape, (), Replication.DECLARED, placement)
    region = None if coordinate is None else local_region(shape, placement, sizes, where)
    if region is None:
        return nothing
    _check_flattened(placement, found, region.num_elements)
    if region.flat is not None:  # an axis cuts the tensor in its flattened form
        start, count = region.flat
        if prod(local_shape) != count:
            raise LayoutError(
                f"placements {placement} give it {count} elements of {shape}, but the local tensor has {local_shape}; pass a "
                "FlatShard that says what it holds"
            )
        boxes = tuple(LocalBox((), offsets, lengths) for offsets, lengths in region.boxes())
        return Layout(shape, local_shape, boxes, Replication.DECLARED, placement, flat_start=start)
    expected = tuple(sum(length for _, length in ranges) for ranges in region.ranges)
    if 0 in expected and 0 in local_shape:  # FSDP2 gives an empty shard other sizes in the other dims
        return nothing
    if expected != local_shape:
        raise LayoutError(
            f"placements {placements} on a mesh of {sizes} give coordinate {coordinate} a local shape of {expected} of {shape}, "
            f"but the local tensor has {local_shape}; pass a LocalShard that says what it holds"
        )
    return Layout(shape, local_shape, _boxes(region.ranges), Replication.DECLARED, placement)


def _check_flattened(placement: tuple[AxisPlacement, ...], found: RecognizedPlacements, num_elements: int) -> None:
    """Refuse placements for which it is not certain how they cut the flattened tensor."""
    placements, sizes = found.placements, found.sizes
    flattening = [i for i, p in enumerate(placement) if KINDS[p.kind].flattens]
    if len(flattening) > 1:
        raise UnsupportedError(f"placements {placements} cut it flattened on several axes; pass a FlatShard for what it holds")
    for i in flattening:
        p, units = placement[i], sum(placement[i].coords)
        if p.kind == "ragged" and num_elements % units and max(p.coords) < units:
            raise LayoutError(f"{placements[i]} divides {num_elements} elements by {units} units; give it units that divide them")
        # The split factor of `_StridedRaggedShard` says how many coordinates later axes have that cut a dim of it first. All do.
        factor = found.split_factors[i]
        later = [(sizes[j], placement[j].dim) for j in range(i + 1, len(sizes)) if placement[j].kind == "shard"]
        possible = {prod(n for n, dim in later if dim == 0), prod(n for n, dim in later if (dim or 0) <= (p.dim or 0))}
        if factor is not None and factor not in possible:
            raise LayoutError(
                f"{placements[i]} has split factor {factor}, but later axes cut the same dims into {max(possible)}; pass a "
                "FlatShard that says what it holds"
            )


def _placement(shape: Ints, recognized: RecognizedPlacements, where: Ints) -> tuple[AxisPlacement, ...]:
    """Return the placement of a DTensor with the order in which axes shard each dim (turns) and the sections filled in."""
    found, placements, sizes = list(recognized.axes), recognized.placements, recognized.sizes
    for dim, size in enumerate(shape):
        cutting = [i for i, p in enumerate(found) if p.dim == dim and not KINDS[p.kind].flattens]
        factors = {i: recognized.split_factors[i] for i in cutting}
        cuts = [AxisCut(sizes[i], where[i], 1 if factor is None else factor) for i, factor in factors.items()]
        # special: axes that `dim_cuts` cannot explain by sections, because they are no plain shards or have sections already
        special = [i for i in cutting if found[i].kind != "shard" or found[i].sections]
        if special and shard_order(cuts) is None:
            raise UnsupportedError(f"{placements[special[0]]!r} beside {placements} has no known order; pass a LocalShard")
        for i, (turn, sections) in zip(cutting, dim_cuts(size, cuts), strict=True):
            if found[i].sections and turn:
                raise UnsupportedError(
                    f"{placements[i]!r} on axis {found[i].axis!r} divides dim {dim} into sections after another axis has cut it; "
                    "pass a LocalShard"
                )
            found[i] = replace(found[i], turn=turn, sections=found[i].sections or sections)
    return tuple(found)


def dim_cuts(size: int, cuts: Sequence[AxisCut]) -> list[tuple[int, Ints]]:
    """Return, for each mesh axis that shards a dim of `size` elements, its turn in the order of cutting and its sections.

    Sections are consecutive parts of the dim, given by their sizes; the axis cuts each of them separately. Most axes have none.

    >>> dim_cuts(13, [AxisCut(3, 2, split_factor=2), AxisCut(2, 0)])  # FSDP2 over tp: the inner axis cuts first
    [(1, ()), (0, ())]
    >>> dim_cuts(12, [AxisCut(2, 1, split_factor=3)])  # half of each of three groups
    [(0, (4, 4, 4))]
    """
    order = shard_order(cuts)
    if order is not None:
        return [(order.index(axis), ()) for axis in range(len(cuts))]
    out: list[tuple[int, Ints]] = []
    ranges: Sequence[Range] = [(0, size)]
    for turn, cut in enumerate(cuts):
        given = [(0, sum(length for _, length in ranges))]
        groups = (chunk(given, cut.split_factor, group) for group in range(cut.split_factor))
        sections = tuple(length for group in groups for _, length in group) if cut.split_factor > 1 else ()
        out.append((turn, sections))
        ranges = cut_ranges(ranges, sections, cut.num, cut.index)
    return out


def shard_order(cuts: Sequence[AxisCut]) -> list[int] | None:
    """Return the indices of the axes that shard a dim, in cutting order; None if no order explains the split factors.

    Axes are inserted from the last to the first, each after axes whose sizes multiply to its split factor. Axes of size 1 change
    no product; they count as first, as in FSDP2 over tensor parallelism on another mesh.

    >>> shard_order([AxisCut(3, 0, split_factor=2), AxisCut(2, 0)])
    [1, 0]
    """
    order: list[int] = []
    for axis in reversed(range(len(cuts))):
        products = list(accumulate((cuts[i].num for i in order), lambda a, b: a * b, initial=1))
        fitting = [k for k, p in enumerate(products) if p == cuts[axis].split_factor]
        if not fitting:
            return None
        order.insert(fitting[-1], axis)
    return order


def _boxes(ranges: Sequence[Sequence[Range]]) -> tuple[LocalBox, ...]:
    starts = [[0, *accumulate(length for _, length in r)] for r in ranges]
    out = []
    for chosen in product(*(range(len(r)) for r in ranges)):
        local_offsets = tuple(starts[dim][k] for dim, k in enumerate(chosen))
        offsets = tuple(ranges[dim][k][0] for dim, k in enumerate(chosen))
        out.append(LocalBox(local_offsets, offsets, tuple(ranges[dim][k][1] for dim, k in enumerate(chosen))))
    return tuple(out)


def _axis_placement(axis: str, placement: Placement, shape: Ints) -> AxisPlacement:
    """Return the placement on one mesh axis as an `AxisPlacement`.

    Refuse a placement that is not known, and ``Partial``, a reduction not yet done.
    """
    # Only these two: a subclass of Shard may cut differently. `_StridedShard` is told by its name, because it is not public, and
    # does not derive from Shard in torch 2.13.
    if type(placement) is _shard_class() or type(placement).__name__ == "_StridedShard":
        dim: int = placement.dim  # type: ignore[attr-defined]
        if not -len(shape) <= dim < len(shape):  # `DTensor.from_local` takes any
            raise LayoutError(f"{placement!r} on axis {axis!r} cuts dim {dim}, which shape {shape} does not have; correct it")
        return AxisPlacement(axis, "shard", dim % len(shape))
    # Before any of its methods is called: torch 2.13's base class is in C++, and crashes if a subclass did not initialize it.
    added = (kind.recognize(axis, placement, shape) for kind in KINDS.values() if kind.recognize is not None)
    found = next((p for p in added if p is not None), None) or recognized(axis, placement, shape)
    if found is not None:
        return found
    if placement.is_partial():
        raise UnsupportedError(
            f"{placement!r} on axis {axis!r} is a reduction not yet done; redistribute the DTensor to Replicate() or "
            "Shard() first"
        )
    if placement.is_replicate():
        return AxisPlacement(axis, "replicate")
    raise UnsupportedError(f"placement {placement!r} on axis {axis!r} is unknown here; pass a LocalShard that says what it holds")


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """Return the local tensor of a DTensor without autograd; wait for a collective that still computes it."""
    # Private, but `to_local` enters three functions more, for every tensor of every save.
    local: torch.Tensor | None = getattr(tensor, "_local_tensor", None)
    if type(local) is torch.Tensor:
        return local
    with torch.no_grad():
        local = tensor.to_local()
    wait = getattr(local, "wait", None)  # an asynchronous collective's result
    return local if wait is None else wait()


def local_of(tensor: Any) -> Any:
    """Return the local tensor of a DTensor, without autograd; return any other object as it is."""
    return local_tensor(tensor) if is_dtensor(tensor) else tensor


def local_tensors(tensors: Sequence[Any]) -> list[Any]:
    """Return the local tensor of each DTensor, without waiting for collectives; return other objects as they are."""
    dtensor = dtensor_class()
    # Private, as in `local_tensor`. Without it the DTensor stands for itself.
    return [getattr(tensor, "_local_tensor", tensor) if type(tensor) is dtensor else tensor for tensor in tensors]
