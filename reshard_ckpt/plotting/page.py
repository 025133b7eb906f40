"""HTML pages: one picture, or a whole checkpoint with summary, bytes by rank, tensors by size, and the save's timeline.

A page is one file that needs no network and runs no script. Its content security policy forbids the browser to load anything.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

from matplotlib.figure import Figure

from ..core.catalog.model import Catalog
from ..core.catalog.name_tree import Node
from ..core.catalog.summary import Summary
from ..core.report import plural
from ..core.timeline import Timeline, rank_label
from ..engine.common.progress import size_text
from .canvas import FAINT, INK, PALETTE, SOFT, drawable, fitted, png_bytes, rank_colour, svg_bytes
from .times import draw_timeline, timeline_words

MAX_RANKS, MAX_CHILDREN = 256, 100
"""The most ranks that get a bar, and the most lines that a line of the tree opens to."""

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
details>*{{margin-left:18px}}
.bar{{font-size:13px}}
.bar i{{display:inline-block;height:10px;margin-right:6px}}
"""


def report_page(
    title: str, catalog: Catalog, summary: Summary, tree: Sequence[Node], sizes: Sequence[int], timeline: Timeline | None
) -> str:
    """Make the page of a whole checkpoint; `sizes` has the bytes of each leaf of `tree`."""
    alike = "Layers that are alike share a line. A line opens to show what is below it."
    sections = [
        _section("Bytes by rank", _balance(catalog), _rank_bars(catalog)),
        _section("Tensors by size", alike, _size_bars(tree, sizes, max(sum(sizes), 1))),
    ]
    if timeline is not None:
        title_of_it = "Timeline of the save"
        sections.append(_section(title_of_it, timeline_words(timeline), _element(draw_timeline(timeline), title_of_it)))
    return _page(title, f"<h1>{_words(title)}</h1>{_facts(summary)}{''.join(sections)}")


def rendered(figure: Figure, title: str, suffix: str) -> bytes:
    """Render a figure as the bytes of a file: ``.png``, ``.svg``, or ``.html``, a page with this one picture."""
    if suffix == ".png":
        return png_bytes(figure)
    return svg_bytes(figure, title) if suffix == ".svg" else _page(title, _element(figure, title)).encode()


def _page(title: str, body: str) -> str:
    """Make a complete HTML page from the HTML of its body."""
    # Images may come from data: URLs, because svg_bytes embeds the pixels of a crowded picture that way.
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{_words(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body><main>{body}</main></body></html>\n"
    )


def _section(title: str, below: str, content: str) -> str:
    """Make an HTML section: a heading, a sentence below it, and the HTML `content`."""
    return f"<section><h2>{title}</h2><p>{_words(below)}</p>{content}</section>\n"


def _element(figure: Figure, title: str) -> str:
    """Return the figure's SVG without the XML declaration in its first line."""
    return svg_bytes(figure, title).decode().partition("\n")[2]


def _words(text: str) -> str:
    """Escape text for HTML."""
    return escape(drawable(text))


def bytes_by_rank(catalog: Catalog) -> dict[int, int]:
    """Sum the bytes of the shard files of each rank; a rank of the mesh that wrote no file has 0."""
    held = dict.fromkeys(range(catalog.mesh.size if catalog.mesh else 0), 0)
    for file in catalog.files:
        held[file.rank] = held.get(file.rank, 0) + file.size
    return dict(sorted(held.items()))


def _balance(catalog: Catalog) -> str:
    """Return a sentence on how evenly the ranks wrote: their number, mesh, and the least and the most bytes of one rank."""
    sizes = list(bytes_by_rank(catalog).values())
    if not sum(sizes):
        return "No rank wrote any bytes."
    axes = () if catalog.mesh is None else catalog.mesh.by_axis.items()
    mesh = " × ".join(f"{axis} {size}" for axis, size in axes)
    times = max(sizes) * len(sizes) / sum(sizes)
    return (
        f"{f'{mesh} = ' if mesh else ''}{plural(len(sizes), 'rank')} wrote {size_text(sum(sizes))}: the least "
        f"{size_text(min(sizes))}, the most {size_text(max(sizes))}, which is {times:.2f} times the mean."
    )


def _rank_bars(catalog: Catalog) -> str:
    """Return HTML with a bar for each rank. If there are too many ranks, it has bars for the ranks that wrote the most."""
    held = bytes_by_rank(catalog)
    most = max(held.values(), default=0) or 1
    shown = sorted(sorted(held, key=lambda rank: -held[rank])[:MAX_RANKS])
    bars = [f"<div>{_bar(rank_label(rank, catalog.mesh), held[rank], most, rank_colour(rank))}</div>" for rank in shown]
    more = f"<p>Ranks that wrote less: {len(held) - len(shown):,}.</p>" if len(held) > len(shown) else ""
    return "".join(bars) + more


def _size_bars(nodes: Sequence[Node], sizes: Sequence[int], whole: int, above: str = "") -> str:
    """Return HTML with a bar for each node of the tree, the largest first. A bar opens to show those of its children."""
    totals = sorted(((_total(node, sizes), i) for i, node in enumerate(nodes)), key=lambda item: (-item[0], item[1]))
    lines = []
    for total, i in totals[:MAX_CHILDREN]:
        node = nodes[i]
        name = fitted(f"{above}{node.label}", 9, 900)
        bar = _bar(f"{name} (×{node.count})" if node.count > 1 else name, total, whole)
        below = _size_bars(node.children, sizes, whole, f"{name}.")
        lines.append(f"<details><summary>{bar}</summary>{below}</details>" if below else f"<div>{bar}</div>")
    rest = totals[MAX_CHILDREN:]
    if rest:
        lines.append(f"<div>{_bar(f'{len(rest):,} smaller ones', sum(total for total, _ in rest), whole)}</div>")
    return "".join(lines)


def _total(node: Node, sizes: Sequence[int]) -> int:
    """Return the bytes of all leaves of a node and of the nodes below it; `sizes` has the bytes of each leaf."""
    return sum(sizes[leaf] for leaf in node.leaves) + sum(_total(child, sizes) for child in node.children)


def _bar(label: str, size: int, most: int, colour: str = PALETTE[0]) -> str:
    """Return HTML of a bar with a label and its bytes. A bar of `most` bytes is 500 pixels long."""
    bar = f'<i style="background:{colour};width:{500 * size / most:.1f}px"></i>'
    return f'<span class="bar">{bar}{_words(label)}: {size_text(size)}</span>'


def _facts(of: Summary) -> str:
    """Return HTML with a list of a summary's numbers; unknown ones are left out."""
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
