"""How is a tensor cut over ranks, and which saved shard feeds which rank of another layout?

1. *Cut*: a table of the tensor, with a colour for each rank that wrote a part of it.
2. *Fed*: the same table, cut as the new ranks hold it; the colours still say which rank saved what.
3. *Matrix*: for each new rank, a row: how many bytes come from each saved one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ...core.catalog.model import Catalog
from ...core.catalog.name_tree import spans
from ...core.catalog.specs import Ints, Mesh
from ...core.geometry.dtypes import ITEM_BYTES
from ...core.geometry.runs import I64, decompose, pad_left, strides_of, volumes
from ...core.planning.load_plan import plan_load
from ...core.planning.local_metadata import PieceColumns
from ...core.words import plural
from ...engine.common.progress import size_text
from .flatten import Cells, Flat, flatten
from .scene import Rect, Scene, Shape, Text, fitted, moved, on, series, shade, text_width

TABLE_WIDTH, TABLE_HEIGHT = 420.0, 320.0
MARGIN = 24.0
HEAD = 84.0
MAX_LEGEND = 24
MAX_MATRIX = 128


@dataclass(frozen=True, slots=True)
class Wanted:
    """What some ranks of another layout hold of a tensor, all the same: runs, as ``(offsets, lengths, start, count)``."""

    ranks: Ints
    runs: tuple[tuple[Ints, Ints, int, int], ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One part of the picture, under its title."""

    title: str
    below: str
    shapes: Sequence[Shape]
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Fed:
    """Boxes of which each comes from one saved rank to one of the `Wanted`, by its number."""

    offsets: I64
    lengths: I64
    saved: I64
    wanted: I64


def draw_cuts(catalog: Catalog, name: str, wanted: Sequence[Wanted] | None = None, mesh: Mesh | None = None) -> Scene:
    """The picture of one tensor; with `wanted`, which the ranks of `mesh` hold, of who feeds whom too."""
    tensor = catalog.index(name)
    shape = catalog.shape(tensor)
    offsets, lengths, ranks = _saved(catalog, tensor)
    known = np.unique(ranks).tolist()
    colours = {rank: series(i, len(known)) for i, rank in enumerate(known)}
    head = f"{catalog.dtype(tensor)} {' × '.join(map(str, shape)) or 'scalar'}, {size_text(_bytes(catalog, tensor))}"
    saved_mesh = f" on {_mesh(catalog.mesh)}" if catalog.mesh is not None and catalog.mesh.axes else ""
    flat = flatten(shape, offsets, lengths, ranks)
    panels = [Panel(f"Saved{saved_mesh}", f"colour: the rank that wrote it{_at_points(flat)}", *_table(flat, shape, colours))]
    if wanted is not None and mesh is not None:
        fed = feeds(catalog, tensor, wanted)
        below = "outline: a new rank's part; colour: who wrote it"
        panels.append(Panel(f"Wanted on {_mesh(mesh)}", below, *_fed_table(shape, fed, wanted, colours)))
        matrix = _matrix(fed, wanted, known, ITEM_BYTES[catalog.dtype(tensor)])
        panels.append(Panel("Who feeds whom", "shade: share of the new rank's bytes", *matrix))
    return _arranged(name, head, panels, colours)


def _arranged(name: str, head: str, panels: Sequence[Panel], colours: dict[int, str]) -> Scene:
    """The panels side by side, under the name and over the legend."""
    shapes: list[Shape] = [Text(MARGIN, 26, name, 16, bold=True), Text(MARGIN, 47, head, 12, "soft")]
    x = MARGIN
    for panel in panels:
        shapes += [Text(x, HEAD - 6, panel.title, 13, bold=True), Text(x, HEAD + 11, panel.below, 11, "soft")]
        shapes += moved(panel.shapes, x, HEAD + 26)
        x += max(panel.width, text_width(panel.title, 13), text_width(panel.below, 11)) + MARGIN
    width = max(x, 2 * MARGIN + text_width(name, 17), 2 * MARGIN + text_width(head, 12))
    bottom = HEAD + 26 + max(panel.height for panel in panels) + 16
    legend, height = _legend(colours, width - 2 * MARGIN)
    return Scene(width, bottom + height + 12, f"How {name} is cut over ranks", (*shapes, *moved(legend, MARGIN, bottom)))


def _bytes(catalog: Catalog, tensor: int) -> int:
    return prod(catalog.shape(tensor)) * ITEM_BYTES[catalog.dtype(tensor)]


def _mesh(mesh: Mesh) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in zip(mesh.axes, mesh.sizes, strict=True))


def _saved(catalog: Catalog, tensor: int) -> tuple[I64, I64, I64]:
    """The boxes of a tensor's rows, and the rank that wrote each."""
    table, rows = catalog.tensors_table, catalog.rows
    first, last = table.row_start[catalog.source(tensor) : catalog.source(tensor) + 2].tolist()
    ndim, width = int(table.ndim[tensor]), catalog.boxes.offsets.shape[1]
    box = rows.box[first:last]
    offsets, lengths = catalog.boxes.offsets[box, width - ndim :], catalog.boxes.lengths[box, width - ndim :]
    rank_of = np.array([file.rank for file in catalog.files] or [0], np.int64)
    ranks = rank_of[rows.file[first:last]]
    if ndim == 0:
        return offsets, lengths, ranks
    cut = decompose(lengths, rows.start[first:last], rows.count[first:last])
    return offsets[cut.parent] + cut.offsets, cut.lengths, ranks[cut.parent]


def feeds(catalog: Catalog, tensor: int, wanted: Sequence[Wanted]) -> Fed:
    """Which boxes of a tensor go from which saved rank to which of the wanted: the load plan of all of them."""
    shape = catalog.shape(tensor)
    runs = [(number, *run) for number, of in enumerate(wanted) for run in of.runs]
    ndim = max(len(shape), 1)
    whole = np.array([shape or (1,)], np.int64)
    offsets = np.array([run[1] or (0,) for run in runs], np.int64).reshape(len(runs), ndim)
    lengths = np.array([run[2] or (1,) for run in runs], np.int64).reshape(len(runs), ndim)
    strides = strides_of(whole)
    # As if each piece lay where it lies in the whole tensor: then the place of an item there is its place in the tensor.
    pieces = PieceColumns(
        tensor=np.array([run[0] for run in runs], np.int64),
        offsets=offsets,
        lengths=lengths,
        start=np.array([run[3] for run in runs], np.int64),
        count=np.array([run[4] for run in runs], np.int64),
        base=(offsets * strides).sum(axis=1),
        strides=np.repeat(strides, len(runs), axis=0),
    )
    plan = plan_load(catalog, np.full(len(wanted), tensor), pieces, window_bytes=1 << 62)
    rank_of = np.array([file.rank for file in catalog.files] or [0], np.int64)
    place = plan.dst[:, None] // strides % whole
    width = plan.lengths.shape[1]
    return Fed(place, pad_left(plan.lengths, max(width, ndim), 1)[:, max(width, ndim) - ndim :], rank_of[plan.file], plan.dest)


def _table(flat: Flat, shape: Ints, colours: dict[int, str]) -> tuple[list[Shape], float, float]:
    """A table with a colour and, where it fits, a label for each part."""
    width, height = _size(flat)
    shapes: list[Shape] = [Rect(0, 16, width, height, fill="faint")]
    placed = [(cells, _place(cells, flat, width, height)) for cells in flat.cells]
    edge = "none" if flat.is_grid else "paper"
    for cells, (x, y, w, h) in placed:
        tip = f"rank {cells.part}: rows {_span(cells.row, cells.rows)}, columns {_span(cells.column, cells.columns)}"
        stroke = edge if min(w, h) > 4 else "none"
        shapes.append(Rect(x, y, w, h, colours[cells.part], stroke, 1, tip=tip))
    shapes += _labels(placed, {rank: f"rank {rank}" for rank in colours}, colours)
    return [*shapes, Rect(0, 16, width, height, stroke="soft"), *_dims(flat, shape, width)], width, height + 16


def _span(begin: int, length: int) -> str:
    return f"[{begin:,}, {begin + length:,})"


def _size(flat: Flat) -> tuple[float, float]:
    """A table's size on paper: as it is, but neither a thread nor larger than its place."""
    ratio = min(max(flat.columns / max(flat.rows, 1), 0.4), 8.0)
    width = min(TABLE_WIDTH, TABLE_HEIGHT * ratio)
    return width, width / ratio


def _place(cells: Cells, flat: Flat, width: float, height: float) -> tuple[float, float, float, float]:
    across, down = width / max(flat.columns, 1), height / max(flat.rows, 1)
    return cells.column * across, 16 + cells.row * down, cells.columns * across, cells.rows * down


def _labels(
    placed: Sequence[tuple[Cells, tuple[float, float, float, float]]], words: dict[int, str], colours: dict[int, str]
) -> list[Shape]:
    """On the largest rectangle of each part, its name, or its number, or nothing."""
    largest: dict[int, tuple[float, float, float, float]] = {}
    for cells, where in placed:
        if cells.part not in largest or where[2] * where[3] > largest[cells.part][2] * largest[cells.part][3]:
            largest[cells.part] = where
    out: list[Shape] = []
    for part, (x, y, w, h) in largest.items():
        size = min(12.0, h - 2)
        fits = [text for text in (words[part], words[part].removeprefix("rank ")) if text_width(text, size) <= w - 4]
        if size >= 7 and fits:
            out.append(Text(x + w / 2, y + h / 2, fits[0], size, on(colours[part]), "middle"))
    return out


def _dims(flat: Flat, shape: Ints, width: float) -> list[Shape]:
    """Which dims go down, and which across."""
    down = " × ".join(f"{n:,}" for n in shape[: flat.row_dims])
    across = " × ".join(f"{n:,}" for n in shape[flat.row_dims :])
    names = [
        f"dim{'s' if b - a > 1 else ''} {a if b - a == 1 else f'{a}-{b - 1}'}"
        for a, b in ((0, flat.row_dims), (flat.row_dims, len(shape)))
    ]
    text = "  ".join(f"{arrow} {which}: {n}" for arrow, which, n in (("↓", names[0], down), ("→", names[1], across)) if n)
    return [Text(0, 7, text, 10.5, "soft")] if text else []


def _fed_table(shape: Ints, fed: Fed, wanted: Sequence[Wanted], colours: dict[int, str]) -> tuple[list[Shape], float, float]:
    """The table as the new ranks cut it, in the colours of the saved ones."""
    ndim = len(shape)
    flat = flatten(shape, fed.offsets[:, :ndim], fed.lengths[:, :ndim], fed.saved)
    shapes, width, height = _table(flat, shape, colours)
    filled = [s for s in shapes if not (isinstance(s, Text) and s.anchor == "middle")]
    outlines = flatten(shape, *_boxes_of(wanted, ndim))
    placed = [(cells, _place(cells, outlines, width, height - 16)) for cells in outlines.cells]
    if not outlines.is_grid:
        filled += [Rect(x, y, w, h, stroke="ink", stroke_width=1.5) for _, (x, y, w, h) in placed]
    names = {number: f"rank {spans(of.ranks)}" for number, of in enumerate(wanted)}
    plates: list[Shape] = []
    for label in _labels(placed, names, dict.fromkeys(names, "#ffffff")):
        assert isinstance(label, Text)
        wide = text_width(label.text, label.size) + 8
        plates += [Rect(label.x - wide / 2, label.y - label.size * 0.75, wide, label.size * 1.5, "paper", "ink", 0.8)]
        plates += [Text(label.x, label.y, label.text, label.size, "ink", "middle")]
    return [*filled, *plates], width, height


def _boxes_of(wanted: Sequence[Wanted], ndim: int) -> tuple[I64, I64, I64]:
    """The boxes of the wanted runs, and which of the wanted each is of."""
    runs = [(number, *run) for number, of in enumerate(wanted) for run in of.runs]
    number = np.array([run[0] for run in runs], np.int64)
    offsets, lengths = (np.array([run[i] for run in runs], np.int64).reshape(len(runs), ndim) for i in (1, 2))
    if ndim == 0:
        return offsets, lengths, number
    cut = decompose(lengths, np.array([run[3] for run in runs], np.int64), np.array([run[4] for run in runs], np.int64))
    return offsets[cut.parent] + cut.offsets, cut.lengths, number[cut.parent]


def _matrix(fed: Fed, wanted: Sequence[Wanted], known: Sequence[int], item_bytes: int) -> tuple[list[Shape], float, float]:
    """A row for each of the wanted, a column for each saved rank: the bytes that go from one to the other."""
    column = {rank: i for i, rank in enumerate(known)}
    amounts = np.zeros((len(wanted), len(known)), np.int64)
    columns = np.array([column[rank] for rank in fed.saved.tolist()], np.int64)
    np.add.at(amounts, (fed.wanted, columns), volumes(fed.lengths) * item_bytes)
    if max(amounts.shape) > MAX_MATRIX:
        return [Text(0, 24, f"{amounts.shape[0]:,} × {amounts.shape[1]:,} ranks: too many to show", 11, "soft")], 260.0, 40.0
    cell = min(34.0, 380.0 / max(amounts.shape))
    names = [f"rank {spans(of.ranks)}" for of in wanted]
    left = min(max((text_width(name, 10.5) for name in names), default=0.0), 140.0) + 8
    total = np.maximum(amounts.sum(axis=1), 1)
    shapes: list[Shape] = [Text(left, 7, "from saved rank", 10.5, "soft")]
    step = max(round(14 / cell), 1)
    for j, rank in enumerate(known):
        if j % step == 0:
            shapes.append(Text(left + (j + 0.5) * cell, 24, str(rank), 10, "soft", "middle"))
    for i, name in enumerate(names):
        if i % step == 0:
            shapes.append(Text(left - 6, 34 + (i + 0.5) * cell, fitted(name, 10.5, 140), 10.5, "soft", "end"))
        for j, rank in enumerate(known):
            amount = int(amounts[i, j])
            fill = shade(amount / int(total[i])) if amount else "faint"
            tip = f"{name} reads {size_text(amount)} that rank {rank} wrote"
            shapes.append(Rect(left + j * cell, 34 + i * cell, cell, cell, fill, "paper", 1, tip=tip))
            if amount and cell >= 30:
                shapes.append(
                    Text(left + (j + 0.5) * cell, 34 + (i + 0.5) * cell, f"{amount / int(total[i]):.0%}", 9.5, on(fill), "middle")
                )
    return shapes, left + cell * len(known), 34 + cell * len(wanted)


def _legend(colours: dict[int, str], width: float) -> tuple[list[Shape], float]:
    """A swatch for each rank that wrote a part, in lines of this width; not for more than can be told apart."""
    if len(colours) > MAX_LEGEND:
        return [Text(0, 6, f"{plural(len(colours), 'rank')} wrote parts of it", 11, "soft")], 16
    shapes: list[Shape] = []
    x = y = 0.0
    for rank, colour in colours.items():
        wide = text_width(f"rank {rank}", 11) + 30
        if x and x + wide > width:
            x, y = 0.0, y + 20
        shapes += [Rect(x, y, 12, 12, colour), Text(x + 18, y + 6, f"rank {rank}", 11, "soft")]
        x += wide
    return shapes, y + 16


def _at_points(flat: Flat) -> str:
    return " at each of the points of a grid" if flat.is_grid else ""
