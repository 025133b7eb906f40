"""How does a scene become SVG, alone or in a page? By itself it brings its colours, light or dark as the reader's screen is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape

from .scene import THEMES, Line, Rect, Scene, Shape, Text

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"

NARROWEST = 560.0

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")


def svg_document(scene: Scene) -> str:
    """A file of its own."""
    paper = Rect(0, 0, scene.width, scene.height, fill="paper")
    style = f"<style>{theme_css('svg')}</style>"
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{_svg(scene, style + _shape(paper))}\n'


def svg_element(scene: Scene) -> str:
    """A part of a page that has the colours: as wide as the screen at most, but never so small that nobody can read it."""
    narrowest = _number(min(scene.width, NARROWEST))
    return _svg(scene, "", f' style="display:block;max-width:100%;height:auto;min-width:{narrowest}px"')


def theme_css(selector: str) -> str:
    """The colours as variables, for the screen's own choice of light or dark."""
    light, dark = (f"{selector}{{{_variables(THEMES[theme])}}}" for theme in ("light", "dark"))
    return f"{light}@media(prefers-color-scheme:dark){{{dark}}}"


def _variables(theme: Mapping[str, str]) -> str:
    return ";".join(f"--{role}:{colour}" for role, colour in theme.items())


def _svg(scene: Scene, head: str, style: str = "") -> str:
    size = f'viewBox="0 0 {_number(scene.width)} {_number(scene.height)}" width="{_number(scene.width)}"'
    body = "".join(map(_shape, scene.shapes))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} height="{_number(scene.height)}" role="img" '
        f'font-family="{FONT}"{style}><title>{words(scene.title)}</title>{head}{body}</svg>'
    )


def words(text: str) -> str:
    """Text for a page; what XML cannot hold, as a hostile name may have it, becomes a box."""
    return escape(drawable(text))


def drawable(text: str) -> str:
    """Text without characters that nobody can draw."""
    return _CONTROL.sub("\ufffd", text)


def _shape(shape: Shape) -> str:
    if isinstance(shape, Rect):
        return _rect(shape)
    if isinstance(shape, Line):
        ends = f'x1="{_number(shape.x1)}" y1="{_number(shape.y1)}" x2="{_number(shape.x2)}" y2="{_number(shape.y2)}"'
        return f'<line {ends} style="stroke:{_colour(shape.stroke)}" stroke-width="{_number(shape.stroke_width)}"/>'
    return _text(shape)


def _rect(rect: Rect) -> str:
    where = f'x="{_number(rect.x)}" y="{_number(rect.y)}" width="{_number(rect.width)}" height="{_number(rect.height)}"'
    style = f"fill:{_colour(rect.fill)}"
    if rect.stroke != "none":
        style += f";stroke:{_colour(rect.stroke)};stroke-width:{_number(rect.stroke_width)}"
    if rect.opacity != 1.0:
        style += f";opacity:{_number(rect.opacity)}"
    if not rect.tip:
        return f'<rect {where} style="{style}"/>'
    return f'<rect {where} style="{style}"><title>{words(rect.tip)}</title></rect>'


def _text(text: Text) -> str:
    where = f'x="{_number(text.x)}" y="{_number(text.y)}" font-size="{_number(text.size)}"'
    anchor = "" if text.anchor == "start" else f' text-anchor="{text.anchor}"'
    weight = ' font-weight="600"' if text.bold else ""
    # A third of the size below the middle: the baseline, which every viewer knows.
    style = f"fill:{_colour(text.fill)};pointer-events:none"
    return f'<text {where} dy="0.35em"{anchor}{weight} style="{style}">{words(text.text)}</text>'


def _colour(colour: str) -> str:
    return f"var(--{colour})" if colour in THEMES["light"] else colour


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"
