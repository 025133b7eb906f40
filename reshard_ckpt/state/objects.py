"""Objects of other packages in a state: tensors that hold a part of a global one, and placements of DTensors.

A framework registers its `Objects` by an entry point of the group `GROUP`. They are loaded when a state first has a tensor or a
placement of a class that is not torch's and that nothing here knows, or a DTensor with a dim that several axes shard.

A placement of another package needs two functions (`register_placement`):

1. `recognize` returns the dim that a placement cuts, and its numbers, which the catalog keeps.
2. `cut` returns the ranges that each coordinate keeps of that dim, or of the flattened rest.

Both become a kind in the table of `core.catalog.placements`, which saves, catalogs, offline resharding and pictures use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MethodType
from typing import Any

from ..core.catalog.placements import KINDS, LocalRegion, PlacementKind, add_kind
from ..core.catalog.specs import AxisPlacement, Ints
from ..core.geometry.runs import Range
from ..engine.common.entry_points import load_all
from ..errors import LayoutError
from .shards import FlatShard, LocalShard

GROUP = "reshard_ckpt.objects"

OWN = {
    "megatron": "reshard_ckpt.families.megatron.objects:OBJECTS",
    "vescale": "reshard_ckpt.families.vescale.objects:OBJECTS",
}
"""The entry points of this package, as in pyproject.toml."""


def _lower_none(tensor: Any) -> Sequence[LocalShard | FlatShard]:
    return ()


def _recognize_none(axis: str, placement: Any, shape: Ints) -> AxisPlacement | None:
    return None


def _accept(mesh: Any, placements: Sequence[Any], name: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects of one framework.

    Attributes
    ----------
    name
        The name of the framework.
    lower
        Returns the shards over the memory of a tensor of the framework's own class; empty for any other tensor.
    recognize
        Takes the name of a mesh axis, a placement on it, and the shape of the tensor. Returns the placement as this library has
        it; None for a placement of another framework.
    check_mesh
        Takes the mesh and the placements of a DTensor with a dim that several axes shard, and its name. It raises `LayoutError`
        if the framework has noted at the mesh that these axes cut in another order than torch says.
    """

    name: str
    lower: Callable[[Any], Sequence[LocalShard | FlatShard]] = _lower_none
    recognize: Callable[[str, Any, Ints], AxisPlacement | None] = _recognize_none
    check_mesh: Callable[[Any, Sequence[Any], str], None] = _accept


@cache
def known_objects() -> tuple[Objects, ...]:
    """Load the objects of all frameworks."""
    return tuple(load_all(GROUP, OWN, Objects))


def lowered(tensor: Any) -> tuple[LocalShard | FlatShard, ...]:
    """Return the shards of a tensor of another framework's class; empty if no framework knows it."""
    if is_of_torch(tensor):
        return ()
    return next((tuple(shards) for one in known_objects() if (shards := one.lower(tensor))), ())


def recognized(axis: str, placement: Any, shape: Ints) -> AxisPlacement | None:
    """Return a placement of another framework's class as this library has it; None if no framework knows it."""
    if is_of_torch(placement):
        return None
    found = (one.recognize(axis, placement, shape) for one in known_objects())
    return next((one for one in found if one is not None), None)


def is_of_torch(value: Any) -> bool:
    """Tell whether torch itself brings the class of an object."""
    return type(value).__module__.partition(".")[0] == "torch"


Recognize = Callable[[Any, Ints], tuple[int | None, Sequence[int]] | None]
Cut = Callable[[Sequence[Range], Ints, int, int], Sequence[Range]]


def register_placement(name: str, *, recognize: Recognize, cut: Cut, flattens: bool = False) -> None:
    """Teach this library a placement of DTensors that torch does not have, on one axis of a mesh.

    Parameters
    ----------
    name
        Its word in catalogs, in rules of `checkpoint.reshard` and in reports: an identifier, such as ``"blocks"``. Rules write
        the dim, unless it flattens, and then the numbers: ``blocks(0, 2, 1, 1)``.
    recognize
        From ``(placement, shape)``, the placement on one mesh axis of a DTensor and the DTensor's global shape: None if the
        placement has another kind, else ``(dim, numbers)``. ``dim`` counts from 0, and is None if `flattens`. ``numbers`` are
        integers from which, with the size of the axis, `cut` knows everything.
    cut
        From ``(ranges, numbers, num, index)``: the part of ``ranges`` that coordinate ``index`` of ``num`` keeps. Both are
        lists of ``(first, length)`` in order: elements of the dim, or of the row-major flattening. All coordinates together keep
        all of it.
    flattens
        Whether it cuts the flattened rest, after all axes that cut dims. ``ranges`` is then one range, and the kept part is one
        range; the local tensor is contiguous, of any shape with so many elements. Otherwise the local tensor has the kept ranges
        of the dim in order.

    Raises
    ------
    UsageError
        The name is not an identifier, or another kind has it.

    Notes
    -----
    Call it on every rank, before the first save or load. veScale's ``RaggedShard`` is known without it. A checkpoint can be
    loaded without the placements that it was saved with: only a report about its layout needs them. On an axis of another size,
    an offline reshard replicates tensors with such a placement, unless a rule says otherwise.

    Examples
    --------
    Whole blocks of 4 elements of the flattened tensor, dealt out in the proportion that a placement of ours says:

    >>> from reshard_ckpt import register_placement
    >>> def recognize(placement, shape):
    ...     return (None, placement.blocks) if type(placement).__name__ == "Blocks" else None
    >>> def cut(ranges, blocks, num, index):
    ...     [(first, length)] = ranges
    ...     return [(first + 4 * sum(blocks[:index]), 4 * blocks[index])]
    >>> register_placement("blocks_of_4", recognize=recognize, cut=cut, flattens=True)
    """
    new = _Registered(name, recognize, cut, flattens)
    known = getattr(KINDS[name].cut, "__self__", None) if name in KINDS else None
    if not (isinstance(known, _Registered) and known.is_as(new)):
        add_kind(_kind(new))


@dataclass(frozen=True, slots=True, eq=False)
class _Registered:
    """A registered kind: makes the functions of the table from the two functions of the user."""

    name: str
    recognize: Recognize
    cut: Cut
    flattens: bool

    def is_as(self, other: _Registered) -> bool:
        """Tell whether another registration has these very functions, whatever equality a user's class defines."""
        pairs = (self.recognize, other.recognize), (self.cut, other.cut)
        # Python makes a method anew each time it is asked for, and compares methods by the object that they are of.
        same = all(one is two or (isinstance(one, MethodType) and one == two) for one, two in pairs)
        return same and self.flattens == other.flattens

    def axis_placement(self, axis: str, placement: Any, shape: Ints) -> AxisPlacement | None:
        found = self.recognize(placement, shape)
        if found is None:
            return None
        dim, numbers = found
        if (dim is None) != self.flattens or (dim is not None and not 0 <= dim < len(shape)):
            wanted = "None" if self.flattens else f"0 to {len(shape) - 1}"
            raise LayoutError(f"{placement!r} on axis {axis!r}: {self.name} was recognized on dim {dim}; it can be {wanted}")
        return AxisPlacement(axis, self.name, dim, tuple(map(int, numbers)))

    def cut_region(self, region: LocalRegion, placement: AxisPlacement, num: int, index: int) -> LocalRegion:
        if self.flattens:
            (kept,) = self._kept([region.flat or (0, region.num_elements)], placement, num, index) or [(0, 0)]
            return replace(region, flat=kept)
        dim = placement.dim
        if dim is None:
            raise LayoutError(f"{self.spell(placement)}: is of no dim; write {self.name}(dim, number, …)")
        ranges = self._kept(region.ranges[dim], placement, num, index)
        return replace(region, ranges=(*region.ranges[:dim], tuple(ranges), *region.ranges[dim + 1 :]))

    def _kept(self, ranges: Sequence[Range], placement: AxisPlacement, num: int, index: int) -> list[Range]:
        """Return the ranges that a coordinate keeps, once they are known to lie within the given ranges."""
        kept = [(int(first), int(length)) for first, length in self.cut(list(ranges), placement.coords, num, index)]
        inside = all(
            length >= 0 and (not length or any(low <= first and first + length <= low + size for low, size in ranges))
            for first, length in kept
        )
        if not inside or (self.flattens and len(kept) > 1):
            some = "one range" if self.flattens else "ranges"
            raise LayoutError(
                f"{self.spell(placement)}: its cut gives coordinate {index} of {num} {kept} of {list(ranges)}; keep {some} of it"
            )
        return [part for part in kept if part[1]]

    def parse(self, axis: str, numbers: Ints, num: int) -> AxisPlacement:
        if self.flattens:
            return AxisPlacement(axis, self.name, None, numbers)
        if not numbers:
            raise ValueError(f"write {self.name}(dim, number, …)")
        return AxisPlacement(axis, self.name, numbers[0], numbers[1:])

    def spell(self, placement: AxisPlacement) -> str:
        said = [*([] if placement.dim is None else [placement.dim]), *placement.coords]
        return f"{self.name}({', '.join(map(str, said))})"


def _kind(registered: _Registered) -> PlacementKind:
    name = registered.name
    return PlacementKind(
        name=name,
        form=f"{name}(number, …)" if registered.flattens else f"{name}(dim, number, …)",
        cut=registered.cut_region,
        parse=registered.parse,
        spell=registered.spell,
        flattens=registered.flattens,
        recognize=registered.axis_placement,
        resize=_unless_resized,
    )


def _unless_resized(placement: AxisPlacement, saved: int, num: int) -> AxisPlacement | None:
    return placement if saved == num else None
