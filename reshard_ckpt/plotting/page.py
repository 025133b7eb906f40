"""HTML pages: one picture, or a whole checkpoint: summary, balance, mesh, tensors by size, and the save's timeline.

A page is one file that needs no network and runs no script. It may load nothing but itself, and says so to the browser.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

from matplotlib.figure import Figure

from ..core.catalog.model import Catalog
from ..core.catalog.name_tree import Node
from ..core.catalog.summary import Summary
from ..core.timeline import Timeline
from ..engine.common.progress import size_text
from .canvas import FAINT, INK, SOFT, drawable, png_bytes, svg_bytes
from .ranks import MAX_CELLS, balance_words, draw_balance, draw_mesh, mesh_words
from .times import draw_timeline, timeline_words
from .treemap import draw_treemap

_STYLE = f"""
body{{margin:0;background:#fff;color:{INK};font:15px/1.5 system-ui,"DejaVu Sans",sans-serif}}
main{{max-width:1300px;margin:0 auto;padding:24px 20px 60px}}
h1{{font-size:22px;margin:0 0 2px;overflow-wrap:anywhere}}
h2{{font-size:16px;margin:36px 0 2px}}
p{{margin:0 0 12px;color:{SOFT}}}
dl{{display:grid;grid-template-columns:repeat(auto-fill,minmax(156px,1fr));gap:10px;margin:18px 0 0}}
dl div{{background:{FAINT};border-radius:6px;padding:9px 12px}}
dt{{font-size:12px;color:{SOFT}}}
dd{{margin:0;font-size:16px;font-weight:600;overflow-wrap:anywhere}}
"""


def report_page(
    title: str, catalog: Catalog, summary: Summary, tree: Sequence[Node], sizes: Sequence[int], timeline: Timeline | None
) -> str:
    """The page of a whole checkpoint; `sizes` are the bytes of each leaf of its tree of names."""
    sections = [_section("Bytes by rank", balance_words(catalog), draw_balance(catalog))]
    mesh = catalog.mesh
    if mesh is not None and mesh.axes:
        sections.append(_section("Mesh", mesh_words(mesh), draw_mesh(catalog, mesh) if mesh.size <= MAX_CELLS else None))
    alike = "Layers that are alike share a rectangle; point at one for its name."
    sections.append(_section("Tensors by size", alike, draw_treemap(tree, sizes)))
    if timeline is not None:
        sections.append(_section("Timeline of the save", timeline_words(timeline), draw_timeline(timeline)))
    return _page(title, f"<h1>{_words(title)}</h1>{_facts(catalog, summary)}{''.join(sections)}")


def rendered(figure: Figure, title: str, suffix: str) -> bytes:
    """A figure as a file: ``.png``, ``.svg``, or ``.html``, a page with one picture."""
    if suffix == ".png":
        return png_bytes(figure)
    return svg_bytes(figure, title) if suffix == ".svg" else _page(title, _element(figure, title)).encode()


def _page(title: str, body: str) -> str:
    # The pixels of a crowded picture are data of the page itself.
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{_words(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body><main>{body}</main></body></html>\n"
    )


def _section(title: str, below: str, figure: Figure | None) -> str:
    picture = "" if figure is None else _element(figure, title)
    return f"<section><h2>{title}</h2><p>{_words(below)}</p>{picture}</section>\n"


def _element(figure: Figure, title: str) -> str:
    """The figure's SVG without the line that a file of its own begins with."""
    return svg_bytes(figure, title).decode().partition("\n")[2]


def _words(text: str) -> str:
    return escape(drawable(text))


def _facts(catalog: Catalog, of: Summary) -> str:
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(of.created_s)) if of.created_s > 0 else None
    facts = {
        "step": None if of.step is None else f"{of.step:,}",
        "saved": when,
        "parameters": f"{of.num_parameters:,}",
        "tensors": f"{of.num_tensors:,}",
        "shards": f"{of.num_shards:,}",
        "bytes": size_text(of.num_bytes),
        "files": f"{of.num_files:,}",
        "values": f"{of.num_values:,}",
        "dtypes": ", ".join(of.dtypes) or None,
    }
    cells = "".join(f"<div><dt>{name}</dt><dd>{_words(fact)}</dd></div>" for name, fact in facts.items() if fact is not None)
    return f"<dl>{cells}</dl>"
