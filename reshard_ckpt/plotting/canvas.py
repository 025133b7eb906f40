"""The common parts of all pictures: style, boxes with tips, labels that fit, and the conversion of a figure to a file.

A tip is the text that SVG and HTML show when the pointer is on a box. matplotlib can attach a link to each box of a collection;
`svg_bytes` turns these links into SVG titles, which browsers show as tips.
"""

from __future__ import annotations

import re
import unicodedata
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import hsv_to_rgb, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text

INK, SOFT, FAINT = "#1f2430", "#5d6575", "#eef1f5"

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
"""The colours of the first eight ranks: Okabe and Ito's palette, which can be told apart with any colour vision."""

_SHADES = ((0.0, 0.0), (1.0, 0.35), (0.0, 0.35), (1.0, 0.6), (0.0, 0.55))
"""How the palette changes after every eight ranks: the grey level to mix in (1.0 is white, 0.0 black), and its share."""

MAX_BOXES = 3000
"""The most boxes that SVG draws one by one. More boxes become one image in it, without edges and tips."""

_STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana"],  # both have the same widths
    "text.color": INK,
    "text.parse_math": False,  # a `$` in a tensor's name is just a dollar sign
    "axes.edgecolor": SOFT,
    "axes.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "none",  # write text as text, not as paths
    "svg.hashsalt": "reshard_ckpt",  # equal pictures get equal ids
}
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_UNDRAWABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ufffe\uffff\ud800-\udfff]")
ElementTree.register_namespace("", _SVG[1:-1])
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")


@contextmanager
def styled() -> Iterator[None]:
    """Draw in this package's style in the ``with`` block. Letters that the font lacks become boxes, without a warning."""
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph |Matplotlib currently does not support")
        yield


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure; all sizes in this module are in points of 1/72 inch."""
    return Figure(figsize=(width / 72, height / 72), dpi=72, facecolor="white")


def add_axes(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Add axes to a figure. All lengths are in points; `left` and `top` count from its upper left corner."""
    across, down = figure.get_size_inches() * 72
    axes = figure.add_axes((left / across, 1 - (top + height) / down, width / across, height / down))
    axes.tick_params(length=2)
    return axes


def draw_boxes(
    axes: Axes, boxes: Any, colours: Any, tips: Sequence[str] = (), *, edge: str = "white", width: float = 0.8
) -> PolyCollection:
    """Draw boxes as one matplotlib collection.

    Parameters
    ----------
    boxes : (N, 4)
        ``x, y, width, height`` of each box, in data coordinates.
    colours
        The colour of each box.
    tips
        The text of each box that appears when the pointer is on it.
    """
    x, y, w, h = np.asarray(boxes, float).reshape(-1, 4).T
    corners = np.stack([np.stack([x, x + w, x + w, x], 1), np.stack([y, y, y + h, y + h], 1)], 2)
    extent, (left, right), (bottom, top) = axes.get_window_extent(), axes.get_xlim(), axes.get_ylim()
    # short: the shorter side of each box, in points.
    short = np.minimum(w * extent.width / (right - left), h * extent.height / abs(top - bottom))
    many = len(corners) > MAX_BOXES
    drawn = PolyCollection(
        list(corners),
        facecolors=colours,
        edgecolors=edge,
        # Edges must not cover small boxes, so they get thinner, down to none.
        linewidths=np.where(short < 2, 0, np.minimum(width, short / 5)).tolist() or [0],
        rasterized=many,
        clip_on=False,
    )
    if not many:
        drawn.set_urls([drawable(tip) for tip in tips])
    axes.add_collection(drawn, autolim=False)
    return drawn


def write_in(
    axes: Axes, x: float, y: float, texts: Sequence[str], width: float, height: float, size: float = 9, **style: Any
) -> None:
    """Write the longest of several texts that fits around a point into `width` × `height` points; write nothing if none fits.

    `texts` begins with the longest one. Each is also tried in letters that are 2 points smaller.
    """
    for text in texts:
        lines = text.split("\n")
        for letters in (size, size - 2):
            if 1.25 * letters * len(lines) <= height and max(text_width(line, letters) for line in lines) <= width - 4:
                axes.text(x, y, text, size=letters, ha="center", va="center", **style)
                return


def set_ticks(axes: Axes, at: Any, labels: Sequence[str], *, vertical: bool) -> None:
    """Label an axis at the ascending positions `at`, and leave out labels that would overlap others.

    The last label always stays; the first one is preferred to all others.
    """
    span, extent = axes.get_ylim()[0] if vertical else axes.get_xlim()[1], axes.get_window_extent()
    unit = (extent.height if vertical else extent.width) / max(span, 1e-9)
    # needs: points that each label takes along the axis; kept: ticks that do not overlap the ones before.
    needs = [12.0 if vertical else text_width(label, 8) + 6 for label in labels]
    kept: list[int] = []
    last = len(labels) - 1
    for i in dict.fromkeys((last, 0, *range(last)) if labels else ()):
        if all(abs(at[i] - at[k]) * unit >= max(needs[i], needs[k]) for k in kept):
            kept.append(i)
    kept.sort()
    (axes.set_yticks if vertical else axes.set_xticks)([at[i] for i in kept], [labels[i] for i in kept])


def rank_colour(rank: int) -> str:
    """Choose the colour of a rank: from the palette, then lighter and darker shades of it, then any hue; always the same.

    >>> rank_colour(0) == PALETTE[0], rank_colour(8)
    (True, '#59a3cd')
    """
    shade, index = divmod(rank, len(PALETTE))
    if shade < len(_SHADES):
        mixed, share = _SHADES[shade]
        red, green, blue = ((1 - share) * of + share * mixed for of in to_rgb(PALETTE[index]))
    else:
        red, green, blue = hsv_to_rgb((rank * 0.618034 % 1, (0.45, 0.8)[rank % 2], (0.95, 0.6)[rank // 2 % 2])).tolist()
    return to_hex((red, green, blue))


def text_colour_on(fill: str) -> str:
    """Choose a colour for text on a background of the colour `fill`, so that the text is readable.

    >>> text_colour_on("#ffffff"), text_colour_on("#102030")
    ('#1f2430', '#ffffff')
    """
    red, green, blue = to_rgb(fill)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "#ffffff"


def text_width(text: str, size: float) -> float:
    """Estimate the width of a line of text in points, at letters of this size."""
    return size * sum(1.0 if unicodedata.east_asian_width(letter) in "WF" else 0.62 for letter in text)


def fitted(text: str, size: float, width: float) -> str:
    """Return the text, or as much of its beginning and end as fits; empty if hardly anything fits.

    >>> fitted("layers.0-31", 10, 100), fitted("layers.0-31", 10, 40), fitted("layers", 10, 8)
    ('layers.0-31', 'lay…31', '')
    """
    if text_width(text[:1000], size) <= width:
        return text
    room = int(width / max(text_width(text[:1000], size) / len(text[:1000]), 1)) - 1
    return f"{text[: room - room // 2]}…{text[len(text) - room // 2 :]}" if room >= 2 else ""


def drawable(text: str) -> str:
    """Replace the characters that no font can draw or no XML file can contain."""
    return _UNDRAWABLE.sub("\ufffd", text)


@styled()
def png_bytes(figure: Figure) -> bytes:
    """Write the figure as a PNG, at twice the usual resolution."""
    return _saved(figure, "png", {"Software": None})


@styled()
def svg_bytes(figure: Figure, title: str) -> bytes:
    """Write the figure as SVG, without a date; `title` describes it for people who cannot see it."""
    root = ElementTree.fromstring(_saved(figure, "svg", dict.fromkeys(("Date", "Creator", "Format", "Type"))))
    # Turn each link into a group with a title, which browsers show as a tip.
    for box in list(root.iter(f"{_SVG}a")):
        tip = ElementTree.Element(f"{_SVG}title")
        tip.text = box.get(_LINK)
        box.tag, box.attrib = f"{_SVG}g", {}
        box.insert(0, tip)
    name = ElementTree.Element(f"{_SVG}title")
    name.text = drawable(title)
    root.insert(0, name)
    root.attrib.update(role="img", style="max-width:100%;height:auto")
    return b'<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode").encode() + b"\n"


def write_head(figure: Figure, title: str, below: str = "") -> None:
    """Write a title into the top left corner, shortened to fit, and a line below it."""
    width, height = figure.get_size_inches() * 72
    # Bold letters are wider, so measure the title at a larger size.
    bold = fitted(title, 15, width - 32)
    figure.text(16 / width, 1 - 18 / height, bold, size=12, weight="bold", va="center_baseline")
    figure.text(16 / width, 1 - 38 / height, below, color=SOFT, va="center_baseline")


def add_legend(figure: Figure, colours: Mapping[str, str], left: float, top: float, columns: int) -> None:
    """Add a legend with a coloured square for each name. `left` and `top` are points from the figure's upper left corner."""
    width, height = figure.get_size_inches() * 72
    swatches = [Patch(color=colour, label=fitted(name, 9, 180)) for name, colour in colours.items()]
    place = (left / width, 1 - top / height)
    figure.legend(
        handles=swatches, loc="upper left", bbox_to_anchor=place, ncols=columns, handlelength=1, handleheight=1, columnspacing=1.2
    )


def _saved(figure: Figure, form: str, metadata: dict[str, Any]) -> bytes:
    """Render a figure as bytes of the format `form`; characters that cannot be drawn are replaced in all of its text."""
    for text in figure.findobj(Text):
        text.set_text(drawable(text.get_text()))
    buffer = BytesIO()
    figure.savefig(buffer, format=form, dpi=144, metadata=metadata)
    return buffer.getvalue()
