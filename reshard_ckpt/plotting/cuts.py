"""One tensor's cuts over ranks, and which saved shard feeds which rank of another layout.

1. *Saved*: a table of the tensor, with a colour for each rank that wrote a part of it.
2. *Wanted*: the same table, outlined as the new ranks hold it; the colours still say which rank wrote what.
3. *Who feeds whom*: for each new rank, a row: how many bytes come from each saved one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from ..core.catalog.model import Catalog
from ..core.catalog.name_tree import spans
from ..core.catalog.specs import Ints, Mesh
from ..core.geometry.dtypes import ITEM_BYTES
from ..core.geometry.runs import I64, volumes
from ..engine.common.progress import size_text
from .canvas import (
    FAINT,
    INK,
    PALETTE,
    SOFT,
    add_axes,
    add_legend,
    draw_boxes,
    fitted,
    new_figure,
    on,
    series,
    set_ticks,
    styled,
    text_width,
    write_head,
    write_in,
)
from .feeds import Run, WantedPart, boxes_of, feeds
from .table import CellTable, lay_out

MAX_WIDTH, MAX_HEIGHT = 420.0, 320.0
"""Of a table, in points."""

MAX_GROUPS = 64
"""Rows and columns of who feeds whom; more ranks share one."""

HEAD, LEFT, GAP, FOOT = 112.0, 56.0, 62.0, 60.0


@dataclass(frozen=True, slots=True)
class Shown:
    """A table, and of each of its parts the colour and the tip."""

    table: CellTable
    colours: list[str]
    tips: list[str]

    @property
    def size(self) -> tuple[float, float]:
        """Return width and height on paper: in proportion, but neither a thread nor larger than its place."""
        ratio = min(max(float(self.table.columns[-1]) / max(float(self.table.rows[-1]), 1.0), 0.4), 8.0)
        width = min(MAX_WIDTH, MAX_HEIGHT * ratio)
        return width, width / ratio


@styled()
def draw_cuts(catalog: Catalog, name: str, wanted: Sequence[WantedPart] = (), mesh: Mesh | None = None) -> Figure:
    """Draw one tensor; with `wanted`, which the ranks of `mesh` hold, also who feeds whom."""
    view = catalog.tensor(name)
    shape, ranks = view.shape, [shard.file.rank for shard in view.shards]
    known = sorted(set(ranks))
    colour = dict(zip(known, series(len(known)), strict=True))
    runs: list[Run] = [(s.offsets, s.lengths, s.start, s.count) for s in view.shards]
    tips = [f"rank {rank}: {_region(run)}" for rank, run in zip(ranks, runs, strict=True)]
    saved = Shown(lay_out(shape, *boxes_of(runs, len(shape))), [colour[rank] for rank in ranks], tips)
    title = "Saved" if catalog.mesh is None or not catalog.mesh.axes else f"Saved on {_mesh(catalog.mesh)}"
    titles = [(title, "colour: the rank that wrote it")]
    if mesh is not None:
        titles.append((f"Wanted on {_mesh(mesh)}", "outline: a new rank's part; colour: who wrote it"))
    width, height = saved.size
    wide = [max(width, text_width(title, 10.5), text_width(below, 8.5)) + GAP for title, below in titles]
    heat_width = min(max(44.0 * min(len(known), MAX_GROUPS), 180.0), 320.0)
    right = LEFT + sum(wide) + (heat_width + 24 if mesh is not None else -20)
    tall = height if mesh is None else max(height, 120.0)
    figure = new_figure(max(right, 400.0), HEAD + tall + FOOT)  # at least room for some of the name
    write_head(figure, name, f"{view.dtype} {' × '.join(f'{n:,}' for n in shape) or 'scalar'}, {size_text(view.num_bytes)}")
    axes = add_axes(figure, LEFT, HEAD, width, height)
    _draw_table(axes, saved, shape, *titles[0])
    _label_parts(axes, saved.table, [[f"rank {rank}", str(rank)] for rank in ranks], saved.colours)
    few = [known[i] for i in np.unique(np.linspace(0, len(known) - 1, min(len(known), len(PALETTE))).astype(int))]
    add_legend(figure, {f"rank {rank}": colour[rank] for rank in few}, LEFT - 8, HEAD + tall + 18, 4)
    if mesh is not None:
        axes = add_axes(figure, LEFT + wide[0], HEAD, width, height)
        heat = add_axes(figure, LEFT + sum(wide), HEAD, heat_width, tall)
        _draw_feeds(axes, heat, catalog, name, wanted, titles[1], colour)
    return figure


def _mesh(mesh: Mesh) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in zip(mesh.axes, mesh.sizes, strict=True))


def _region(run: tuple[Sequence[int], Sequence[int], int, int]) -> str:
    """Spell a run as people write it.

    >>> _region(((0, 8), (4, 8), 0, 32)), _region(((0, 0), (8, 10), 26, 27))
    ('[0:4, 8:16]', 'elements 26 to 52 of [0:8, 0:10]')
    """
    offsets, lengths, start, count = run
    box = ", ".join(f"{offset}:{offset + length}" for offset, length in zip(offsets, lengths, strict=True))
    return f"[{box}]" if count == prod(lengths) else f"elements {start} to {start + count - 1} of [{box}]"


def _draw_table(axes: Axes, shown: Shown, shape: Ints, title: str, below: str) -> None:
    """Draw the parts in their colours, with the places of the cuts along the sides."""
    table = shown.table
    axes.set(xlim=(0, table.columns[-1]), ylim=(table.rows[-1], 0), facecolor=FAINT)
    boxes, parts = table.boxes()
    draw_boxes(axes, boxes, [shown.colours[part] for part in parts], [shown.tips[part] for part in parts])
    for edges, vertical in ((table.columns, False), (table.rows, True)):
        set_ticks(axes, edges.tolist(), [f"{at:,}" for at in edges.tolist()], vertical=vertical)
    dims = []
    for arrow, first, last in (("↓", 0, table.row_dims), ("→", table.row_dims, len(shape))):
        which = f"dim {first}" if last - first == 1 else f"dims {first}-{last - 1}"
        if last > first:
            dims.append(f"{arrow} {which}: {' × '.join(f'{n:,}' for n in shape[first:last])}")
    _title(axes, title, below, "   ".join(dims))


def _title(axes: Axes, title: str, below: str, last: str = "") -> None:
    soft: dict[str, Any] = {"size": 8.5, "color": SOFT}
    for lift, text, style in ((36, title, {"size": 10.5, "weight": "bold"}), (22, below, soft), (6, last, soft)):
        axes.annotate(text, (0, 1), (0, lift), xycoords="axes fraction", textcoords="offset points", **style)


def _label_parts(axes: Axes, table: CellTable, words: Sequence[Sequence[str]], colours: Sequence[str], **style: Any) -> None:
    """Write on the largest rectangle of each label its words, where they fit."""
    boxes, parts = table.boxes()
    across = axes.get_window_extent().width / table.columns[-1]
    down = axes.get_window_extent().height / table.rows[-1]
    labelled: set[str] = set()
    for i in np.argsort(-(boxes[:, 2] * boxes[:, 3]), kind="stable").tolist():
        (x, y, width, height), part = boxes[i].tolist(), int(parts[i])
        if words[part][0] not in labelled:
            labelled.add(words[part][0])
            write_in(
                axes, x + width / 2, y + height / 2, words[part], width * across, height * down, color=on(colours[part]), **style
            )


def _draw_feeds(
    axes: Axes,
    heat: Axes,
    catalog: Catalog,
    name: str,
    wanted: Sequence[WantedPart],
    titles: tuple[str, str],
    colour: Mapping[int, str],
) -> None:
    """Draw the wanted table over the saved colours, and beside it who feeds whom."""
    shape, names = catalog.shape(catalog.index(name)), [f"rank {spans(of.ranks)}" for of in wanted]
    fed = feeds(catalog, catalog.index(name), wanted)
    amounts = volumes(fed.lengths) * ITEM_BYTES[catalog.dtype(catalog.index(name))]
    tips = [
        f"{names[of]} reads {size_text(size)} of {_region((at, lengths, 0, prod(lengths)))} that rank {rank} wrote"
        for of, rank, size, at, lengths in zip(
            fed.wanted.tolist(), fed.saved.tolist(), amounts.tolist(), fed.offsets.tolist(), fed.lengths.tolist(), strict=True
        )
    ]
    table = lay_out(shape, fed.offsets, fed.lengths, np.arange(len(tips)))
    shown = Shown(table, [colour[rank] for rank in fed.saved.tolist()], tips)
    _draw_table(axes, shown, shape, *titles)
    # The same cells, by who wants them: where neighbours differ is an outline.
    parts = CellTable(table.rows, table.columns, table.row_dims, np.append(fed.wanted, -1)[table.parts])
    draw_boxes(axes, parts.boxes()[0], "none", edge=INK, width=1.5)
    plate = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": INK, "linewidth": 0.6}
    words = [[name, name.removeprefix("rank ")] for name in names]
    _label_parts(axes, parts, words, ["#ffffff"] * len(names), bbox=plate)
    _draw_matrix(heat, fed.wanted, fed.saved, amounts, names, list(colour))


def _draw_matrix(axes: Axes, wanted: I64, saved: I64, amounts: I64, names: Sequence[str], known: Sequence[int]) -> None:
    """Draw a row for each of the wanted, a column for each saved rank: the share of its bytes that comes from there."""
    rows, columns = min(len(names), MAX_GROUPS), min(len(known), MAX_GROUPS)
    size = np.zeros((rows, columns), np.int64)
    np.add.at(size, (wanted * rows // len(names), np.searchsorted(known, saved) * columns // len(known)), amounts)
    shares = size / np.maximum(size.sum(axis=1, keepdims=True), 1)
    to = [_group(i, rows, names) for i in range(rows)]
    of = [_group(j, columns, [str(rank) for rank in known]) for j in range(columns)]

    axes.set(xlim=(0, columns), ylim=(rows, 0))
    across, down = axes.get_window_extent().width / columns, axes.get_window_extent().height / rows
    cells = [(i, j, share) for (i, j), share in np.ndenumerate(shares)]
    colours = [to_hex(colormaps["Blues"](0.15 + 0.75 * share)) if share else FAINT for _, _, share in cells]
    tips = [f"{to[i]} reads {size_text(size[i, j])} that rank {of[j]} wrote" for i, j, _ in cells]
    for (i, j, share), colour in zip(cells, colours, strict=True):
        words = [f"{share:.0%}\n{size_text(size[i, j])}", f"{share:.0%}"] if share else []
        write_in(axes, j + 0.5, i + 0.5, words, across, down, size=8, color=on(colour))
    draw_boxes(axes, [(j, i, 1, 1) for i, j, _ in cells], colours, tips)
    set_ticks(axes, [i + 0.5 for i in range(rows)], [fitted(text, 8, 62) for text in to], vertical=True)
    set_ticks(axes, [j + 0.5 for j in range(columns)], of, vertical=False)
    axes.tick_params(length=0)
    axes.set_xlabel("from saved rank", size=8.5, color=SOFT)
    _title(axes, "Who feeds whom", "shade: share of the new rank's bytes")


def _group(at: int, groups: int, names: Sequence[str]) -> str:
    """Say what a row or column stands for: one name, or the first and the last of several."""
    first, last = -(-at * len(names) // groups), -(-(at + 1) * len(names) // groups) - 1
    return names[first] if first == last else f"{names[first]} … {names[last].removeprefix('rank ')}"
