"""What is a picture made of? Rectangles, lines and text, in pixels from the top left corner, drawn in order.

Colours are roles, which look different on light and on dark paper (`THEMES`), or ``#rrggbb``, the same on both.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

THEMES: dict[str, dict[str, str]] = {
    "light": {"paper": "#ffffff", "ink": "#1f2430", "soft": "#5d6575", "line": "#c9cfd9", "faint": "#eef1f5"},
    "dark": {"paper": "#14171d", "ink": "#e6e9ef", "soft": "#9aa3b2", "line": "#3d4554", "faint": "#20252e"},
}

SERIES = ("#4477aa", "#c28f00", "#228833", "#aa3377", "#2a9db5", "#cc5566", "#7a6fd0", "#8a8a3c", "#e07b39", "#5a8f69")
"""For few things that must be told apart, also by those who see few colours."""

GLYPH = 0.58
"""About how wide a letter is, in units of its size."""


@dataclass(frozen=True, slots=True)
class Rect:
    """A rectangle; `tip` is what a page shows when it is pointed at."""

    x: float
    y: float
    width: float
    height: float
    fill: str = "none"
    stroke: str = "none"
    stroke_width: float = 1.0
    opacity: float = 1.0
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """One line of text; `x` is where it is anchored (``start``, ``middle``, ``end``), `y` the middle of its height."""

    x: float
    y: float
    text: str
    size: float = 12.0
    fill: str = "ink"
    anchor: str = "start"
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    stroke: str = "line"
    stroke_width: float = 1.0


Shape: TypeAlias = Rect | Text | Line


@dataclass(frozen=True, slots=True)
class Scene:
    """A whole picture; `title` says what it shows to those who cannot see it."""

    width: float
    height: float
    title: str
    shapes: tuple[Shape, ...]


def moved(shapes: Sequence[Shape], x: float, y: float) -> list[Shape]:
    """The same shapes elsewhere."""
    out: list[Shape] = []
    for shape in shapes:
        if isinstance(shape, Line):
            out.append(replace(shape, x1=shape.x1 + x, x2=shape.x2 + x, y1=shape.y1 + y, y2=shape.y2 + y))
        else:
            out.append(replace(shape, x=shape.x + x, y=shape.y + y))
    return out


def framed(scene: Scene, margin: float) -> Scene:
    """The same picture with a margin."""
    shapes = tuple(moved(scene.shapes, margin, margin))
    return replace(scene, width=scene.width + 2 * margin, height=scene.height + 2 * margin, shapes=shapes)


def series(index: int, count: int) -> str:
    """The colour of one of `count` things: a hand-picked one if they are few, else one of as many hues as it takes."""
    if count <= len(SERIES):
        return SERIES[index % len(SERIES)]
    hue = (index * 0.61803398875) % 1.0  # neighbours far apart
    return _hex(*colorsys.hls_to_rgb(hue, 0.45 + 0.12 * (index % 3 - 1), 0.5))


def shade(part: float) -> str:
    """From pale to full, for a share between 0 and 1; readable on light and dark paper."""
    return _hex(*colorsys.hls_to_rgb(0.58, 0.80 - 0.45 * min(max(part, 0.0), 1.0), 0.55))


def _hex(red: float, green: float, blue: float) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))


def on(fill: str) -> str:
    """The colour of text that is readable on this one.

    >>> on("#ffffff"), on("#102030")
    ('#111111', '#ffffff')
    """
    red, green, blue = (int(fill[at : at + 2], 16) for at in (1, 3, 5))
    return "#111111" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def text_width(text: str, size: float) -> float:
    """About how wide a line of text is."""
    return len(text) * size * GLYPH


def fitted(text: str, size: float, width: float) -> str:
    """The text, or as much of its beginning as fits; nothing where hardly anything does.

    >>> fitted("layers.0-31", 10, 100), fitted("layers.0-31", 10, 40), fitted("layers", 10, 8)
    ('layers.0-31', 'layer…', '')
    """
    if text_width(text, size) <= width:
        return text
    room = int(width / (size * GLYPH)) - 1
    return f"{text[:room]}…" if room >= 2 else ""
