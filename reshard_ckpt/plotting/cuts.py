"""One tensor's cuts over ranks, and the saved ranks that feed each rank of another layout.

1. *Saved*: a table of the tensor, with a colour for each rank that wrote a part of it.
2. *Wanted*: the same table with an outline around the part of each new rank; the colours still show which rank wrote it.
3. *Who feeds whom*: a matrix with a row for each new rank: the bytes that come from each saved rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from ..core.catalog.model import Catalog, ShardView, TensorView
from ..core.catalog.name_tree import spans
from ..core.catalog.placements import KINDS, LocalRegion, local_region
from ..core.catalog.specs import ITEM_BYTES, Ints, Mesh, row_major_strides, unravel
from ..core.geometry.runs import I64, volumes
from ..core.timeline import rank_label
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
    rank_colour,
    set_ticks,
    styled,
    text_colour_on,
    text_width,
    write_head,
    write_in,
)
from .feeds import Fed, Run, WantedPart, boxes_of, feeds
from .table import CellTable, lay_out

MAX_WIDTH, MAX_HEIGHT = 420.0, 320.0
"""Largest size of a tensor's table in points. A table with many cells may be larger, so that a number fits into each."""

MAX_GROUPS = 64
"""The most rows and columns of the matrix "who feeds whom"; with more ranks, several share one. Tables get room for
labels in at most so many cells along a side."""

CELL_WIDTH, CELL_HEIGHT = 24.0, 14.0
SMALL_WIDTH, SMALL_HEIGHT = 120.0, 48.0
"""The size in points at which a scalar is drawn. A vector has this height, and this width for each of its parts."""

MAX_LABEL = 130.0
"""The largest width in points of a row's label in the matrix "who feeds whom"."""

MAX_LEGEND = 40
"""The most ranks that a legend lists in full; of more ranks it lists a few."""

MAX_MESH = 4096
"""The most ranks of a mesh for which the picture tells which ranks hold copies of a part."""

HEAD, LEFT, GAP, FOOT = 112.0, 56.0, 62.0, 46.0


@dataclass(frozen=True, slots=True)
class Shown:
    """A table of a tensor's parts, with the colour of each part, and the text that appears when the pointer is on it."""

    table: CellTable
    colours: list[str]
    tips: list[str]

    def size(self, ndim: int) -> tuple[float, float]:
        """Return the width and height in points at which to draw a tensor of `ndim` dims.

        They follow the tensor's own ratio, within limits, and leave room for each cell. A vector or a scalar gets a low strip.
        """
        rows, columns = (min(len(edges) - 1, MAX_GROUPS) for edges in (self.table.rows, self.table.columns))
        if ndim < 2:
            return max(min(SMALL_WIDTH * columns, MAX_WIDTH), CELL_WIDTH * columns), SMALL_HEIGHT
        ratio = min(max(float(self.table.columns[-1]) / max(float(self.table.rows[-1]), 1.0), 0.4), 8.0)
        width = min(MAX_WIDTH, MAX_HEIGHT * ratio)
        return max(width, CELL_WIDTH * columns), max(width / ratio, CELL_HEIGHT * rows)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor as the ranks of another mesh want it.

    ``shown`` is its table, coloured by the ranks that saved each part. ``parts`` is the same table, but each cell has the index
    of a `WantedPart`. ``fed`` are the boxes that go from saved ranks to wanted parts, and ``amounts`` their bytes.
    """

    shown: Shown
    parts: CellTable
    names: list[str]
    labels: list[str]
    """A name for the ranks that want each part; a single rank has its mesh coordinates in it."""
    fed: Fed
    amounts: I64


@styled()
def draw_cuts(catalog: Catalog, name: str, wanted: Sequence[WantedPart] = (), mesh: Mesh | None = None) -> Figure:
    """Draw one tensor; with `wanted`, its parts on the ranks of `mesh`, also draw these and the matrix "who feeds whom"."""
    view = catalog.tensor(name)
    shape, ranks = view.shape, [shard.file.rank for shard in view.shards]
    known = sorted(set(ranks))
    runs: list[Run] = [(s.offsets, s.lengths, s.start, s.count) for s in view.shards]
    copies = copies_of(view, catalog.mesh)
    tips = [
        f"rank {rank}: {_region(run)}{f', also on {_ranks(others)}' if others else ''}"
        for rank, run, others in zip(ranks, runs, copies, strict=True)
    ]
    saved = Shown(lay_out(shape, *boxes_of(runs, len(shape))), [rank_colour(rank) for rank in ranks], tips)
    title = "Saved" if catalog.mesh is None or not catalog.mesh.axes else f"Saved on {catalog.mesh}"
    titles = [(title, f"colour: the rank that wrote it{_copies_text(copies)}")]
    other = None if mesh is None else _wanted(catalog, name, wanted, mesh)
    if mesh is not None:
        titles.append((f"Wanted on {mesh}", "outline: a new rank's part; colour: who wrote it"))
    sizes = [shown.size(len(shape)) for shown in (saved, *([] if other is None else [other.shown]))]
    width, height = (max(of) for of in zip(*sizes, strict=True))
    wide = [max(width, text_width(title, 10.5), text_width(below, 8.5)) + GAP for title, below in titles]
    labels = 0.0 if other is None else min(max(text_width(text, 8) for text in other.labels), MAX_LABEL) - GAP / 2
    columns, rows = min(len(known), MAX_GROUPS), 0 if other is None else min(len(other.names), MAX_GROUPS)
    heat_width = max(min(max(44.0 * columns, 180.0), 320.0), 18.0 * columns)
    right = LEFT + sum(wide) + (max(labels, 0.0) + heat_width + 24 if mesh is not None else -20)
    tall = height if mesh is None else max(height, 120.0, CELL_HEIGHT * rows)
    right = max(right, 400.0)  # leave room for at least a part of the name
    legend = _legend(known, catalog.mesh)
    in_a_row = max(int((right - LEFT) / (max(text_width(text, 9) for text in legend) + 36)), 1) if legend else 1
    figure = new_figure(right, HEAD + tall + FOOT + 15.0 * -(-len(legend) // in_a_row))
    write_head(figure, name, f"{view.dtype} {' × '.join(f'{n:,}' for n in shape) or 'scalar'}, {size_text(view.num_bytes)}")
    axes = add_axes(figure, LEFT, HEAD, width, height)
    _draw_table(axes, saved, shape, *titles[0])
    words = [_words_of(rank, others, catalog.mesh) for rank, others in zip(ranks, copies, strict=True)]
    _label_parts(axes, saved.table, words, saved.colours)
    add_legend(figure, legend, LEFT - 8, HEAD + tall + 26, in_a_row)
    if other is not None:
        axes = add_axes(figure, LEFT + wide[0], HEAD, width, height)
        _draw_wanted(axes, other, shape, titles[1])
        heat = add_axes(figure, LEFT + sum(wide) + max(labels, 0.0), HEAD, heat_width, tall)
        _draw_matrix(heat, other, known)
    return figure


def copies_of(view: TensorView, mesh: Mesh | None) -> list[Ints]:
    """Return for each shard the other ranks that held the same bytes in the save, as far as the placement tells."""
    placement = view.placement
    if mesh is None or placement is None or mesh.size > MAX_MESH or len(placement) != len(mesh.axes):
        return [()] * len(view.shards)
    if any(axis.kind not in KINDS for axis in placement):
        return [()] * len(view.shards)
    # holders: the ranks that hold each region.
    regions = [local_region(view.shape, placement, mesh.sizes, mesh.coordinates(rank)) for rank in range(mesh.size)]
    holders: dict[LocalRegion | None, list[int]] = {}
    for rank, region in enumerate(regions):
        holders.setdefault(region, []).append(rank)
    return [
        tuple(rank for rank in holders[regions[wrote]] if rank != wrote)
        if wrote < mesh.size and _holds(regions[wrote], shard)
        else ()
        for shard in view.shards
        for wrote in [shard.file.rank]
    ]


def _holds(region: LocalRegion | None, shard: ShardView) -> bool:
    """Tell whether a rank's region contains the first element of a shard.

    It should, unless the catalog's placement is not that of the ranks that wrote.
    """
    if region is None or not shard.count:
        return False
    at = [o + i for o, i in zip(shard.offsets, unravel(shard.start, shard.lengths), strict=True)]
    for (offsets, lengths), start, count in region.runs():
        inside = [x - o for x, o in zip(at, offsets, strict=True)]
        if all(0 <= i < n for i, n in zip(inside, lengths, strict=True)):
            element = sum(i * stride for i, stride in zip(inside, row_major_strides(lengths), strict=True))
            return start <= element < start + count
    return False


def _copies_text(copies: Sequence[Ints]) -> str:
    """Return text that says how many ranks held each part; empty if each part was on one rank."""
    counts = sorted({len(others) + 1 for others in copies})
    if counts in ([], [1]):
        return ""
    return f"; {counts[0] if len(counts) == 1 else f'{counts[0]}-{counts[-1]}'} ranks hold each part"


def _ranks(ranks: Sequence[int]) -> str:
    """Write ranks as text, such as ``ranks 0-3,5``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def _words_of(rank: int, others: Sequence[int], mesh: Mesh | None) -> list[str]:
    """List the possible labels of a part, the longest first. Each names the rank that wrote the part."""
    full = rank_label(rank, mesh)
    where = full.removeprefix(f"rank {rank}").strip()
    also = f"also on {_ranks(others)}" if others else ""
    lines = [f"rank {rank}", *filter(None, [where, also])]
    short = f"rank {rank}\n+{spans(others)}" if others else full
    words = ["\n".join(lines), " ".join(filter(None, [full, f"({also})" if also else ""])), short, full, lines[0], str(rank)]
    return list(dict.fromkeys(words))


def _legend(known: Sequence[int], mesh: Mesh | None) -> dict[str, str]:
    """Map the names of ranks to their colours. If there are too many ranks, show only as many as the palette has colours."""
    listed = known
    if len(known) > MAX_LEGEND:
        listed = [known[i] for i in np.unique(np.linspace(0, len(known) - 1, len(PALETTE)).astype(int))]
    return {rank_label(rank, mesh): rank_colour(rank) for rank in listed}


def _region(run: tuple[Sequence[int], Sequence[int], int, int]) -> str:
    """Write a run of a tensor as text: its box, or its elements in a box.

    >>> _region(((0, 8), (4, 8), 0, 32)), _region(((0, 0), (8, 10), 26, 27))
    ('[0:4, 8:16]', 'elements 26 to 52 of [0:8, 0:10]')
    """
    offsets, lengths, start, count = run
    box = ", ".join(f"{offset}:{offset + length}" for offset, length in zip(offsets, lengths, strict=True))
    return f"[{box}]" if count == prod(lengths) else f"elements {start} to {start + count - 1} of [{box}]"


def _draw_table(axes: Axes, shown: Shown, shape: Ints, title: str, below: str) -> None:
    """Draw the table of a tensor: its parts in their colours, and the coordinates of the cuts along the sides."""
    table = shown.table
    axes.set(xlim=(0, table.columns[-1]), ylim=(table.rows[-1], 0), facecolor=FAINT)
    boxes, parts = table.boxes()
    draw_boxes(axes, boxes, [shown.colours[part] for part in parts], [shown.tips[part] for part in parts])
    for edges, vertical in ((table.columns, False), (table.rows, True)):
        set_ticks(axes, edges.tolist(), [f"{at:,}" for at in edges.tolist()], vertical=vertical)
    dims = []
    for arrow, first, last in (("↓", 0, table.row_dims), ("→", table.row_dims, len(shape))):
        dims_text = f"dim {first}" if last - first == 1 else f"dims {first}-{last - 1}"
        if last > first:
            dims.append(f"{arrow} {dims_text}: {' × '.join(f'{n:,}' for n in shape[first:last])}")
    _title(axes, title, below, "   ".join(dims))


def _title(axes: Axes, title: str, below: str, last: str = "") -> None:
    """Write a title above the axes, with two smaller lines below it."""
    soft: dict[str, Any] = {"size": 8.5, "color": SOFT}
    for lift, text, style in ((36, title, {"size": 10.5, "weight": "bold"}), (22, below, soft), (6, last, soft)):
        axes.annotate(text, (0, 1), (0, lift), xycoords="axes fraction", textcoords="offset points", **style)


def _label_parts(axes: Axes, table: CellTable, words: Sequence[Sequence[str]], colours: Sequence[str], **style: Any) -> None:
    """Label each part once, on the largest of its rectangles, with the longest of the part's texts (`words`) that fits."""
    boxes, parts = table.boxes()
    across = axes.get_window_extent().width / table.columns[-1]
    down = axes.get_window_extent().height / table.rows[-1]
    labelled: set[str] = set()
    for i in np.argsort(-(boxes[:, 2] * boxes[:, 3]), kind="stable").tolist():
        (x, y, width, height), part = boxes[i].tolist(), int(parts[i])
        if words[part][0] not in labelled:
            labelled.add(words[part][0])
            centre, room = (x + width / 2, y + height / 2), (width * across, height * down)
            write_in(axes, *centre, words[part], *room, color=text_colour_on(colours[part]), **style)


def _wanted(catalog: Catalog, name: str, wanted: Sequence[WantedPart], mesh: Mesh) -> Wanted:
    """Describe a tensor on another mesh for the picture: its parts there, and the saved ranks that feed each of them."""
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
    # The same cells by the part that wants them, whose borders become the outlines.
    parts = CellTable(table.rows, table.columns, table.row_dims, np.append(fed.wanted, -1)[table.parts])
    full = [rank_label(of.ranks[0], mesh) if len(of.ranks) == 1 else text for of, text in zip(wanted, names, strict=True)]
    return Wanted(Shown(table, [rank_colour(rank) for rank in fed.saved.tolist()], tips), parts, names, full, fed, amounts)


def _draw_wanted(axes: Axes, of: Wanted, shape: Ints, titles: tuple[str, str]) -> None:
    """Draw the wanted table in the colours of the saved ranks, with an outline and a label for each new rank."""
    _draw_table(axes, of.shown, shape, *titles)
    draw_boxes(axes, of.parts.boxes()[0], "none", edge=INK, width=1.5)
    plate = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": INK, "linewidth": 0.6}
    words = [[label, name, name.removeprefix("rank ")] for label, name in zip(of.labels, of.names, strict=True)]
    _label_parts(axes, of.parts, words, ["#ffffff"] * len(words), bbox=plate)


def _draw_matrix(axes: Axes, of_wanted: Wanted, known: Sequence[int]) -> None:
    """Draw the matrix "who feeds whom": a row for each new rank, a column for each saved one, shaded by the share of bytes."""
    names, amounts, wanted, saved = of_wanted.names, of_wanted.amounts, of_wanted.fed.wanted, of_wanted.fed.saved
    rows, columns = min(len(names), MAX_GROUPS), min(len(known), MAX_GROUPS)
    # size[i, j]: bytes that the ranks of row i take from the ranks of column j; shares: the same as a share of the row.
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
        write_in(axes, j + 0.5, i + 0.5, words, across, down, size=8, color=text_colour_on(colour))
    draw_boxes(axes, [(j, i, 1, 1) for i, j, _ in cells], colours, tips)
    labels = of_wanted.labels if rows == len(names) else to
    set_ticks(axes, [i + 0.5 for i in range(rows)], [fitted(text, 8, MAX_LABEL) for text in labels], vertical=True)
    set_ticks(axes, [j + 0.5 for j in range(columns)], of, vertical=False)
    axes.tick_params(length=0)
    axes.set_xlabel("from saved rank", size=8.5, color=SOFT)
    _title(axes, "Who feeds whom", "shade: share of the new rank's bytes")


def _group(at: int, groups: int, names: Sequence[str]) -> str:
    """Name row or column number `at` of the matrix: by its only rank, or by the first and the last of the ranks that share it."""
    first, last = -(-at * len(names) // groups), -(-(at + 1) * len(names) // groups) - 1
    return names[first] if first == last else f"{names[first]} … {names[last].removeprefix('rank ')}"
