"""How does a scene become a PNG? Drawn by matplotlib, which is imported here alone."""

from __future__ import annotations

from io import BytesIO
from itertools import groupby
from typing import Any

from ...errors import UsageError
from .scene import THEMES, Line, Rect, Scene, Shape, Text
from .svg import drawable

_SCALE = 2.0
"""Pixels for each unit of the scene: sharp on today's screens."""

_POINTS = 72


def png_bytes(scene: Scene) -> bytes:
    """The picture on light paper.

    Raises
    ------
    UsageError
        matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "a .png needs matplotlib: pip install 'reshard-ckpt[plot]', or write a .svg or .html, which needs nothing"
        ) from error
    figure = Figure(figsize=(scene.width / _POINTS, scene.height / _POINTS), dpi=_POINTS * _SCALE, facecolor=_colour("paper"))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, scene.width), ylim=(scene.height, 0))
    axes.axis("off")
    for order, (kind, shapes) in enumerate(groupby(scene.shapes, type)):
        _DRAW[kind](axes, list(shapes), order + 1)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _colour(colour: str) -> str:
    return THEMES["light"].get(colour, colour)


def _rects(axes: Any, rects: list[Rect], order: int) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgba

    corners = [[(r.x, r.y), (r.x + r.width, r.y), (r.x + r.width, r.y + r.height), (r.x, r.y + r.height)] for r in rects]
    faces = [to_rgba(_colour(r.fill), 0.0 if r.fill == "none" else r.opacity) for r in rects]
    edges = [to_rgba(_colour(r.stroke), 0.0 if r.stroke == "none" else r.opacity) for r in rects]
    widths = [0.0 if r.stroke == "none" else r.stroke_width for r in rects]
    axes.add_collection(PolyCollection(corners, facecolors=faces, edgecolors=edges, linewidths=widths, zorder=order))


def _lines(axes: Any, lines: list[Line], order: int) -> None:
    from matplotlib.collections import LineCollection

    ends = [[(line.x1, line.y1), (line.x2, line.y2)] for line in lines]
    colours, widths = [_colour(line.stroke) for line in lines], [line.stroke_width for line in lines]
    axes.add_collection(LineCollection(ends, colors=colours, linewidths=widths, zorder=order))


def _texts(axes: Any, texts: list[Text], order: int) -> None:
    side = {"start": "left", "middle": "center", "end": "right"}
    for text in texts:
        axes.text(
            text.x,
            text.y,
            drawable(text.text),
            size=text.size * 0.92,  # DejaVu Sans is wider than what browsers use
            color=_colour(text.fill),
            ha=side[text.anchor],
            va="center_baseline",
            weight="bold" if text.bold else "normal",
            zorder=order,
            parse_math=False,
        )


_DRAW: dict[type[Shape], Any] = {Rect: _rects, Line: _lines, Text: _texts}
