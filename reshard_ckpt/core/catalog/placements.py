"""The kinds of placement of a tensor along a mesh axis (sharded, replicated, flat, …): a table with one entry for each kind.

A rank holds the part of a tensor that is left after each mesh axis has taken its cut:

1. Begin with the whole tensor: one range on each dim.
2. Apply the axes that cut dims, in the order of their `turn`.
3. Lay the boxes that remain end to end, each in row-major order, and apply the axes that cut this flat sequence. The rank then
   holds one range of it.

Everything that depends on the kind of a placement is in its `PlacementKind`, so a new kind is one more entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from math import prod
from typing import Any

from ...errors import LayoutError
from ..geometry.runs import Range, chunk, joined, narrow
from .name_tree import spans
from .specs import AxisPlacement, Ints

Box = tuple[Ints, Ints]
"""The offsets and the lengths of a box, a rectangular part of a tensor."""


@dataclass(frozen=True, slots=True)
class LocalRegion:
    """The part of a tensor that one rank holds: one or several boxes, or one run of their elements.

    Attributes
    ----------
    ranges
        For each dim the ranges (first index, length) that the rank holds. Each choice of one range per dim is a box.
    flat
        The first element and the length of the run, counted over all boxes laid end to end in row-major order; None: all
        elements.
    """

    ranges: tuple[tuple[Range, ...], ...]
    flat: Range | None = None

    @property
    def num_elements(self) -> int:
        """The number of elements in all boxes, as if `flat` were None."""
        return prod(sum(length for _, length in of_dim) for of_dim in self.ranges)

    def boxes(self) -> Iterator[Box]:
        """Yield the boxes as offsets and lengths, in row-major order of their ranges."""
        for chosen in product(*self.ranges):
            yield tuple(first for first, _ in chosen), tuple(length for _, length in chosen)

    def runs(self) -> Iterator[tuple[Box, int, int]]:
        """Yield each box that the flat range touches, with the first element and the number of elements in the range."""
        first, length = self.flat or (0, self.num_elements)
        position = 0
        for box in self.boxes():
            size = prod(box[1])
            start, stop = max(first - position, 0), min(first + length - position, size)
            if start < stop:
                yield box, start, stop - start
            position += size


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementKind:
    """One kind of placement on a mesh axis, as functions without state.

    Parameters
    ----------
    name
        The word for this kind in catalogs and in users' rules.
    form
        The syntax of this kind in a rule, for messages: ``shard(dim)``.
    cut
        Returns the part of a region that coordinate `index` of `num` keeps, from ``(region, placement, num, index)``; None if it
        holds nothing, not even an empty tensor.
    parse
        Returns the placement of a rule, from ``(axis, numbers, num)``: the numbers in its parentheses and the size of the axis.
        Raises a ValueError that says which numbers are wanted.
    spell
        Returns the placement in words, as in ``shard(0)``.
    flattens
        Whether this kind cuts the flattened region, and so applies after all placements that cut dims.
    recognize
        Returns the placement for a DTensor's placement object, from ``(axis, placement, shape)``; None if the object is of
        another kind.
    resize
        Returns the placement on an axis of `num` coordinates for one that was saved on an axis of `saved`, from
        ``(placement, saved, num)``; None if nothing is equivalent. Kinds without this function stay unchanged.
    """

    name: str
    form: str
    cut: Callable[[LocalRegion, AxisPlacement, int, int], LocalRegion | None]
    parse: Callable[[str, Ints, int], AxisPlacement]
    spell: Callable[[AxisPlacement], str]
    flattens: bool = False
    recognize: Callable[[str, Any, Ints], AxisPlacement | None] | None = None
    resize: Callable[[AxisPlacement, int, int], AxisPlacement | None] | None = None


def local_region(shape: Ints, axes: Sequence[AxisPlacement], sizes: Ints, where: Ints) -> LocalRegion | None:
    """Return the part of a tensor that the rank at some coordinates of a mesh holds; None if it holds nothing at all.

    Parameters
    ----------
    axes, sizes, where
        For each axis of the mesh the placement, the size, and the rank's coordinate.

    Examples
    --------
    FSDP2 on 3 over tensor parallelism on 2: tp cuts 13 rows first, and rank 4 holds row 6 alone.

    >>> axes = AxisPlacement("dp", "shard", 0, turn=1), AxisPlacement("tp", "shard", 0, turn=0)
    >>> local_region((13,), axes, (3, 2), (2, 0))
    LocalRegion(ranges=(((6, 1),),), flat=None)
    """
    region: LocalRegion | None = LocalRegion(tuple(((0, size),) for size in shape))
    for i in cut_order(axes):
        if region is not None:
            region = KINDS[axes[i].kind].cut(region, axes[i], sizes[i], where[i])
    return region


def cut_order(axes: Sequence[AxisPlacement]) -> list[int]:
    """Return the indices of the axes in the order in which they cut the tensor.

    Without turns, inner axes cut first (FSDP2 over tp).
    """
    return sorted(range(len(axes)), key=lambda i: (KINDS[axes[i].kind].flattens, axes[i].turn or 0, -i))


def cut_ranges(ranges: Sequence[Range], sections: Ints, num: int, index: int) -> tuple[Range, ...]:
    """Return the part of a dim that coordinate `index` of `num` keeps, cut as ``torch.chunk`` does.

    `ranges` are the ranges of the dim that are left so far; they are cut end to end as one. With `sections`, each section is cut
    on its own.

    >>> cut_ranges([(0, 12)], (6, 3, 3), 3, 0)
    ((0, 2), (6, 1), (9, 1))
    """
    if not sections:
        return tuple(joined(chunk(ranges, num, index)))
    parts = (narrow(ranges, end - size, end) for end, size in zip(accumulate(sections), sections, strict=True))
    return tuple(joined([r for part in parts for r in chunk(part, num, index)]))


def same_placement(a: Sequence[AxisPlacement] | None, b: Sequence[AxisPlacement] | None) -> bool:
    """Tell whether two placements are the same.

    The order in which axes cut a dim, and its sections, are compared only if both have recorded the order.
    """
    if a is None or b is None or len(a) != len(b):
        return a == b
    unsaid = [x.turn is None or y.turn is None for x, y in zip(a, b, strict=True)]
    return all(
        x == y or (none and replace(x, turn=None, sections=()) == replace(y, turn=None, sections=()))
        for x, y, none in zip(a, b, unsaid, strict=True)
    )


def spell_axis(placement: AxisPlacement) -> str:
    """Write a placement on one mesh axis as text, such as ``tp=shard(0)``; of an unknown kind only the name."""
    kind = KINDS.get(placement.kind)
    return f"{placement.axis}={placement.kind if kind is None else kind.spell(placement)}"


# --- the table ------------------------------------------------------------------------------------------------------------------


def _cut_dim(region: LocalRegion, placement: AxisPlacement, num: int, index: int) -> LocalRegion:
    """Return the region with only the part of one dim that belongs to coordinate `index` of `num` on this mesh axis."""
    dim = placement.dim
    assert dim is not None, placement
    ranges = cut_ranges(region.ranges[dim], placement.sections, num, index)
    return replace(region, ranges=(*region.ranges[:dim], ranges, *region.ranges[dim + 1 :]))


def _cut_flat(region: LocalRegion, placement: AxisPlacement, num: int, index: int) -> LocalRegion:
    """Return the region with only the flat range of coordinate `index`: one of `num` chunks of equal size."""
    kept = chunk([region.flat or (0, region.num_elements)], num, index)
    return replace(region, flat=kept[0] if kept else (0, 0))


def _cut_ragged(region: LocalRegion, placement: AxisPlacement, num: int, index: int) -> LocalRegion:
    """Return the region with only the flat range of coordinate `index`; ranges are in proportion to the coordinates' units."""
    units = placement.coords
    if len(units) != num or not any(units):
        raise LayoutError(
            f"{spell_axis(placement)} has {len(units)} numbers of units for {num} coordinates; give one for each, not all 0"
        )
    first, length = region.flat or (0, region.num_elements)
    start, stop = (length * sum(units[:end]) // sum(units) for end in (index, index + 1))
    return replace(region, flat=(first + start, stop - start))


def _resize_ragged(placement: AxisPlacement, saved: int, num: int) -> AxisPlacement | None:
    """Spread the units of a ragged placement evenly over `num` coordinates, without cutting a unit; None if it cannot be done.

    A tensor that is whole on one coordinate becomes resident there.
    """
    units = placement.coords
    if len(units) != saved or not any(units):
        return None
    if num == saved:
        return placement
    if sum(map(bool, units)) == 1:  # whole on one coordinate: such tensors are divided by size, as resident ones are
        return AxisPlacement(placement.axis, "resident", None, (next(i for i, unit in enumerate(units) if unit),))
    ends = [sum(units) * i // num for i in range(num + 1)]
    return replace(placement, coords=tuple(b - a for a, b in pairwise(ends)))


def _parse_ragged(axis: str, numbers: Ints, num: int) -> AxisPlacement:
    if len(numbers) != num or min(numbers) < 0 or not any(numbers):
        raise ValueError(f"write the units of each of the {num} coordinates, not all 0")
    return AxisPlacement(axis, "ragged", -1, numbers)


def _spell_ragged(placement: AxisPlacement) -> str:
    flattened = "" if placement.dim is None else f"{'0-' if placement.dim else ''}{placement.dim}; "
    return f"ragged({flattened}{'+'.join(map(str, placement.coords))})"


def _parse_word(kind: str) -> Callable[[str, Ints, int], AxisPlacement]:
    """Return a parser of rules for a placement kind that takes no numbers in parentheses."""

    def parse(axis: str, numbers: Ints, num: int) -> AxisPlacement:
        if numbers:
            raise ValueError(f"{kind} takes no numbers")
        return AxisPlacement(axis, kind)

    return parse


def _parse_shard(axis: str, numbers: Ints, num: int) -> AxisPlacement:
    if len(numbers) != 1:
        raise ValueError("an axis shards one dim; write shard(dim)")
    return AxisPlacement(axis, "shard", numbers[0])


def _parse_resident(axis: str, numbers: Ints, num: int) -> AxisPlacement:
    if not numbers or any(not 0 <= n < num for n in numbers):
        raise ValueError(f"coordinates of this axis are 0 to {num - 1}")
    return AxisPlacement(axis, "resident", None, tuple(sorted(set(numbers))))


def _spell_shard(placement: AxisPlacement) -> str:
    sections = f"; {'+'.join(map(str, placement.sections))}" if placement.sections else ""
    return f"shard({placement.dim}{sections})"


_KINDS = (
    PlacementKind(name="shard", form="shard(dim)", cut=_cut_dim, parse=_parse_shard, spell=_spell_shard),
    PlacementKind(
        name="replicate",
        form="replicate",
        cut=lambda region, placement, num, index: region,
        parse=_parse_word("replicate"),
        spell=lambda placement: "replicate",
    ),
    PlacementKind(
        name="flat", form="flat", cut=_cut_flat, parse=_parse_word("flat"), spell=lambda placement: "flat", flattens=True
    ),
    PlacementKind(
        name="ragged",
        form="ragged(unit, …)",
        cut=_cut_ragged,
        parse=_parse_ragged,
        spell=_spell_ragged,
        flattens=True,
        resize=_resize_ragged,
    ),
    PlacementKind(
        name="resident",
        form="resident(i, …)",
        cut=lambda region, placement, num, index: region if index in placement.coords else None,
        parse=_parse_resident,
        spell=lambda placement: f"on({spans(placement.coords)})",
    ),
)

KINDS: dict[str, PlacementKind] = {kind.name: kind for kind in _KINDS}
"""The placement kinds by name. Another package that has its own kinds adds them before it saves or loads."""
