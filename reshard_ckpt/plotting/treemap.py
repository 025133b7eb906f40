"""What takes the space: each tensor a rectangle as large as its bytes, in the rectangle of what is above it.

Layers that are alike are one rectangle (`core.tree`).
squarify lays out the squarified treemaps of Bruls, Huizing and van Wijk (2000).
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from squarify import squarify

from ..core.catalog.name_tree import Node
from ..engine.common.progress import size_text
from .canvas import add_axes, draw_boxes, fitted, new_figure, on, paler, series, styled, text_width, write_in

WIDTH, HEIGHT = 960.0, 460.0
TITLE, GAP, MIN_SIDE = 17.0, 2.0, 3.0
MAX_CHILDREN = 100
MIN_SHARE = 1e-4
"""What is smaller beside its siblings, or comes after so many of them, is left blank: its place is kept."""

Box = tuple[float, float, float, float]


@styled()
def draw_treemap(tree: Sequence[Node], sizes: Sequence[int]) -> Figure:
    """Draw the treemap of a folded tree; `sizes` are the bytes of each leaf."""
    figure = new_figure(WIDTH, HEIGHT)
    axes = add_axes(figure, 0, 0, WIDTH, HEIGHT)
    axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axes.axis("off")
    placed = _lay_out(tree, sum(_total(node, sizes) for node in tree), (0, 0, WIDTH, HEIGHT), sizes)
    boxes: list[tuple[Box, str, str]] = []
    for (node, box), colour in zip(placed, series(len(placed)), strict=True):
        _draw(axes, boxes, node, node.label, box, colour, sizes)
    draw_boxes(axes, [box for box, _, _ in boxes], [colour for _, colour, _ in boxes], [tip for _, _, tip in boxes])
    return figure


def _total(node: Node, sizes: Sequence[int]) -> int:
    return sum(sizes[leaf] for leaf in node.leaves) + sum(_total(child, sizes) for child in node.children)


def _lay_out(nodes: Sequence[Node], whole: int, box: Box, sizes: Sequence[int]) -> list[tuple[Node, Box]]:
    """Give each node its share of a box that stands for the `whole`, the largest first."""
    x, y, width, height = box
    held = sorted(((_total(node, sizes), i) for i, node in enumerate(nodes)), key=lambda item: (-item[0], item[1]))
    shown = [(total, i) for total, i in held[:MAX_CHILDREN] if total > MIN_SHARE * whole]
    places = squarify([total * width * height / whole for total, _ in shown], x, y, width, height)
    boxes = [(place["x"], place["y"], place["dx"], place["dy"]) for place in places]
    return [(nodes[i], where) for (_, i), where in zip(shown, boxes, strict=True)]


def _draw(
    axes: Axes, boxes: list[tuple[Box, str, str]], node: Node, name: str, box: Box, colour: str, sizes: Sequence[int]
) -> None:
    """Add a box with its colour and tip for a node and what is below it, as far as that can be seen, and label them."""
    x, y, width, height = box
    if min(width, height) < MIN_SIDE:
        return
    total = _total(node, sizes)
    size = size_text(total)
    boxes.append((box, colour, f"{name}{f' (×{node.count})' if node.count > 1 else ''}: {size}"))
    inner = (x + GAP, y + TITLE, width - 2 * GAP, height - TITLE - GAP)
    if not node.children or min(inner[2:]) < 4 * MIN_SIDE:
        label = fitted(node.label, 9, width - 6)
        write_in(axes, x + width / 2, y + height / 2, [f"{label}\n{size}", label], width, height, color=on(colour))
        return
    label = f"{node.label}  {size}"
    if text_width(label, 9) > width - 10:
        label = fitted(node.label, 9, width - 10)
    axes.text(x + 5, y + TITLE / 2, label, size=9, weight="bold", color=on(colour), va="center_baseline")
    for child, where in _lay_out(node.children, total, inner, sizes):
        _draw(axes, boxes, child, f"{name}.{child.label}", where, paler(colour, 0.86), sizes)
