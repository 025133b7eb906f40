"""Placements of DTensors that torch does not have, which a user defines by two functions (`register_placement`).

1. `recognize` returns the dim that a placement cuts, and its numbers, which the catalog keeps.
2. `cut` returns the ranges that each coordinate keeps of that dim, or of the flattened rest.

Both become a kind in the table of `core.catalog.placements`, which saves, catalogs, offline resharding and pictures use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

from ..core.catalog.placements import KINDS, LocalRegion, PlacementKind
from ..core.catalog.specs import AxisPlacement, Ints
from ..core.geometry.runs import Range
from ..errors import LayoutError, UsageError

Recognize = Callable[[Any, Ints], tuple[int | None, Sequence[int]] | None]
Cut = Callable[[Sequence[Range], Ints, int, int], Sequence[Range]]


def register_placement(name: str, *, recognize: Recognize, cut: Cut, flattens: bool = False) -> None:
    """Teach this library a placement of DTensors that torch does not have, on one axis of a mesh.

    Parameters
    ----------
    name
        The word for the placement in catalogs, in rules of `checkpoint.reshard` and in reports: an identifier, such as
        ``"blocks"``. Rules write the dim, unless the placement flattens, and then the numbers: ``blocks(0, 2, 1, 1)``.
    recognize
        From ``(placement, shape)``, the placement on one mesh axis of a DTensor and the DTensor's global shape: None if the
        placement has another kind, else ``(dim, numbers)``. ``dim`` counts from 0, and is None if `flattens`. ``numbers`` are
        integers from which, with the size of the axis, `cut` knows everything.
    cut
        From ``(ranges, numbers, num, index)``: the part of ``ranges`` that coordinate ``index`` of ``num`` keeps. Both are lists
        of ``(first, length)`` in order: elements of the dim, or of the row-major flattening. All coordinates together keep all of
        it.
    flattens
        Whether it cuts the flattened rest, after all axes that cut dims. ``ranges`` is then one range, and the kept part is one
        range; the local tensor is contiguous, of any shape with so many elements. Otherwise the local tensor has the kept ranges
        of the dim in order.

    Raises
    ------
    UsageError
        The name is not an identifier, or another kind has it; or `recognize` or `cut` cannot be called.

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
    for option, function in (("recognize", recognize), ("cut", cut)):
        if not callable(function):
            raise UsageError(f"register_placement: {option}={function!r:.200}: pass a function")
    if not isinstance(name, str) or not name.isidentifier():
        raise UsageError(f"register_placement: {name!r:.80} is not an identifier; give it a name such as 'blocks'")
    new = _Registered(name, recognize, cut, flattens)
    registered = getattr(KINDS.setdefault(name, new.kind()).cut, "__self__", None)
    if not (isinstance(registered, _Registered) and registered.is_as(new)):
        raise UsageError(f"register_placement: {name!r} is a kind of placement already; give it another name")


@dataclass(frozen=True, slots=True, eq=False)
class _Registered:
    """A placement that a user registered; makes the functions of a `PlacementKind` from the user's two functions."""

    name: str
    recognize: Recognize
    cut: Cut
    flattens: bool

    def is_as(self, other: _Registered) -> bool:
        """Tell whether another registration has the same two functions.

        Identity counts: a user's class may define equality otherwise.
        """
        pairs = (self.recognize, other.recognize), (self.cut, other.cut)
        # Python makes a method anew each time it is asked for, and compares methods by the object that they are of.
        is_same = all(first is second or (isinstance(first, MethodType) and first == second) for first, second in pairs)
        return is_same and self.flattens == other.flattens

    def kind(self) -> PlacementKind:
        """Return this placement as a `PlacementKind`. On an axis of another size than the saved one, it has no equivalent."""
        return PlacementKind(
            name=self.name,
            form=f"{self.name}(number, …)" if self.flattens else f"{self.name}(dim, number, …)",
            cut=self.cut_region,
            parse=self.parse,
            spell=self.spell,
            flattens=self.flattens,
            recognize=self.axis_placement,
            resize=lambda placement, saved, num: placement if saved == num else None,
        )

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
        """Call the user's `cut`, and check that the ranges that it keeps lie within the given ranges; return them."""
        kept = [(int(first), int(length)) for first, length in self.cut(list(ranges), placement.coords, num, index)]
        inside = all(
            length >= 0 and (not length or any(low <= first and first + length <= low + size for low, size in ranges))
            for first, length in kept
        )
        if not inside or (self.flattens and len(kept) > 1):
            some = "one range" if self.flattens else "ranges"
            raise LayoutError(
                f"{self.spell(placement)}: its cut gives coordinate {index} of {num} {kept} of {list(ranges)}; return {some} "
                "within these"
            )
        return [part for part in kept if part[1]]

    def parse(self, axis: str, numbers: Ints, num: int) -> AxisPlacement:
        if self.flattens:
            return AxisPlacement(axis, self.name, None, numbers)
        if not numbers:
            raise ValueError(f"write {self.name}(dim, number, …)")
        return AxisPlacement(axis, self.name, numbers[0], numbers[1:])

    def spell(self, placement: AxisPlacement) -> str:
        numbers = [*([] if placement.dim is None else [placement.dim]), *placement.coords]
        return f"{self.name}({', '.join(map(str, numbers))})"
