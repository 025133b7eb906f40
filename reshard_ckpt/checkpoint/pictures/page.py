"""How does a whole checkpoint fit on one page? Summary, balance, mesh, tensors by size, and the save's timeline, as one file.

The page needs no network and runs no script: what it may load is nothing, and it says so to the browser.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ...core.catalog.model import Catalog
from ...core.catalog.name_tree import Node
from ...core.catalog.summary import Summary
from ...core.timeline import Timeline
from ...engine.common.progress import size_text
from .ranks import balance_words, draw_balance, draw_mesh, mesh_words
from .scene import Scene
from .svg import FONT, svg_element, theme_css, words
from .times import draw_timeline, timeline_words
from .treemap import draw_treemap

_STYLE = f"""
{theme_css(":root")}
:root{{color-scheme:light dark}}
body{{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 {FONT}}}
main{{max-width:1000px;margin:0 auto;padding:24px 20px 60px}}
h1{{font-size:22px;margin:0 0 2px;overflow-wrap:anywhere}}
h2{{font-size:16px;margin:36px 0 2px}}
p{{margin:0 0 12px;color:var(--soft)}}
dl{{display:grid;grid-template-columns:repeat(auto-fill,minmax(156px,1fr));gap:10px;margin:18px 0 0}}
dl div{{background:var(--faint);border-radius:6px;padding:9px 12px}}
dt{{font-size:12px;color:var(--soft)}}
dd{{margin:0;font-size:16px;font-weight:600;overflow-wrap:anywhere}}
.picture{{overflow-x:auto}}
"""


def report_page(
    title: str, catalog: Catalog, summary: Summary, tree: Sequence[Node], sizes: Sequence[int], timeline: Timeline | None
) -> str:
    """The page of a whole checkpoint; `sizes` are the bytes of each leaf of its tree of names."""
    mesh = catalog.mesh
    sections = [
        _section("Bytes by rank", balance_words(catalog), draw_balance(catalog)),
        _section("Mesh", mesh_words(mesh), draw_mesh(catalog)) if mesh is not None and mesh.axes else "",
        _section(
            "Tensors by size", "Layers that are alike share a rectangle; point at one for its name.", draw_treemap(tree, sizes)
        ),
        "" if timeline is None else _section("Timeline of the save", timeline_words(timeline), draw_timeline(timeline)),
    ]
    return _page(title, f"<h1>{words(title)}</h1>{_facts(catalog, summary)}{''.join(sections)}")


def picture_page(scene: Scene) -> str:
    """A page with one picture."""
    return _page(scene.title, f'<div class="picture">{svg_element(scene)}</div>')


def _page(title: str, body: str) -> str:
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{words(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body><main>{body}</main></body></html>\n"
    )


def _section(title: str, below: str, scene: Scene | None) -> str:
    picture = "" if scene is None else f'<div class="picture">{svg_element(scene)}</div>'
    return f"<section><h2>{title}</h2><p>{words(below)}</p>{picture}</section>\n"


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
    cells = "".join(f"<div><dt>{name}</dt><dd>{words(fact)}</dd></div>" for name, fact in facts.items() if fact is not None)
    return f"<dl>{cells}</dl>"
