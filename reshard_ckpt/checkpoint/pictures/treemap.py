"""What takes the space? A treemap: each tensor a rectangle as large as its bytes, in the rectangle of what is above it.

Layers that are alike are one rectangle (`core.tree`). Rectangles are laid out in strips that keep them near squares (the
squarified treemaps of Bruls, Huizing and van Wijk, 2000).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.catalog.name_tree import Node
from ...engine.common.progress import size_text
from .scene import Rect, Scene, Shape, Text, fitted, on, series

WIDTH, HEIGHT = 960.0, 460.0
TITLE = 17.0
GAP = 2.0
MIN_SIDE = 3.0


@dataclass(frozen=True, slots=True)
class Place:
    """A rectangle on paper."""

    x: float
    y: float
    width: float
    height: float

    @property
    def short(self) -> float:
        return min(self.width, self.height)


def draw_treemap(tree: Sequence[Node], sizes: Sequence[int]) -> Scene:
    """The treemap of a folded tree; `sizes` are the bytes of each leaf."""
    area = Place(0, 0, WIDTH, HEIGHT)
    shapes: list[Shape] = []
    held = [(node, _total(node, sizes)) for node in tree]
    ordered = sorted([item for item in held if item[1]], key=lambda item: -item[1])
    for i, ((node, total), place) in enumerate(zip(ordered, squarify([n for _, n in ordered], area), strict=True)):
        shapes += _draw(node, total, place, series(i, len(ordered)), node.label, sizes, 0)
    return Scene(WIDTH, HEIGHT, "Tensors by size", tuple(shapes))


def _total(node: Node, sizes: Sequence[int]) -> int:
    return sum(sizes[leaf] for leaf in node.leaves) + sum(_total(child, sizes) for child in node.children)


def _draw(node: Node, total: int, place: Place, colour: str, name: str, sizes: Sequence[int], depth: int) -> list[Shape]:
    """A node and what is below it, as far as that can be seen."""
    tip = f"{name}{f' (×{node.count})' if node.count > 1 else ''}: {size_text(total)}"
    opacity = max(1.0 - 0.13 * depth, 0.5)
    shapes: list[Shape] = [Rect(place.x, place.y, place.width, place.height, colour, "paper", 1.0, opacity, tip=tip)]
    inner = Place(place.x + GAP, place.y + TITLE, place.width - 2 * GAP, place.height - TITLE - GAP)
    room = inner.short > 4 * MIN_SIDE
    children = sorted([(c, n) for c in node.children if (n := _total(c, sizes))], key=lambda item: -item[1])
    if not children or not room:
        return [*shapes, *_centred(node.label, total, place, colour)]
    shapes.append(
        Text(place.x + 5, place.y + TITLE / 2 + 0.5, fitted(node.label, 11, place.width - 8), 11, on(colour), bold=True)
    )
    own = sum(sizes[leaf] for leaf in node.leaves)
    amounts = [n for _, n in children] + ([own] if own else [])
    for (child, n), where in zip(children, squarify(amounts, inner), strict=False):
        if where.short >= MIN_SIDE:
            shapes += _draw(child, n, where, colour, f"{name}.{child.label}", sizes, depth + 1)
    return shapes


def _centred(label: str, total: int, place: Place, colour: str) -> list[Shape]:
    """The label, and below it the size where both fit."""
    text, size = fitted(label, 11, place.width - 6), size_text(total)
    if place.height < 13 or not text:
        return []
    x, y = place.x + place.width / 2, place.y + place.height / 2
    if place.height < 32 or fitted(size, 10, place.width - 6) != size:
        return [Text(x, y, text, 11, on(colour), "middle")]
    return [Text(x, y - 7, text, 11, on(colour), "middle"), Text(x, y + 8, size, 10, on(colour), "middle")]


def squarify(amounts: Sequence[float], area: Place) -> list[Place]:
    """Rectangles as large as these amounts, the largest first, that fill an area and are near squares.

    >>> [(p.width, p.height) for p in squarify([2, 1, 1], Place(0, 0, 4, 2))]
    [(2.0, 2.0), (2.0, 1.0), (2.0, 1.0)]
    """
    total = sum(amounts)
    scale = area.width * area.height / total if total else 0.0
    out: list[Place] = []
    first = 0
    while first < len(amounts):
        last, strip = first + 1, [amounts[first] * scale]
        while last < len(amounts) and _worst([*strip, amounts[last] * scale], area.short) <= _worst(strip, area.short):
            strip.append(amounts[last] * scale)
            last += 1
        places, area = _lay(strip, area)
        out += places
        first = last
    return out


def _worst(strip: Sequence[float], side: float) -> float:
    """The ratio of the sides of the least square rectangle of a strip."""
    total = sum(strip)
    if total <= 0 or side <= 0:
        return float("inf")
    thick = total / side
    return max(max(thick * thick / a, a / (thick * thick)) if a > 0 else float("inf") for a in strip)


def _lay(strip: Sequence[float], area: Place) -> tuple[list[Place], Place]:
    """The rectangles of a strip along the shorter side of an area, and what is left of that."""
    wide, total = area.width >= area.height, sum(strip)
    side, depth = (area.height, area.width) if wide else (area.width, area.height)
    thick = min(total / side, depth) if side > 0 else 0.0  # rounding must not lead outside
    at, out = 0.0, []
    for amount in strip:
        length = min(amount / thick, side - at) if thick > 0 else 0.0
        place = (area.x, area.y + at, thick, length) if wide else (area.x + at, area.y, length, thick)
        out.append(Place(*place))
        at += length
    if wide:
        return out, Place(area.x + thick, area.y, max(area.width - thick, 0.0), area.height)
    return out, Place(area.x, area.y + thick, area.width, max(area.height - thick, 0.0))
