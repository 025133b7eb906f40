"""How is a tensor resharded? Draws docs/resharding.svg from what the planners return for one small tensor.

1. Three ranks hold flat ranges of an 8 × 10 tensor, as a ZeRO optimizer does;
   `plan_from_metadata` divides the writing, one file a rank.
2. A tensor-parallel job of two ranks wants columns; `plan_load` finds what its rank 1 reads.
3. Every coloured cell of the picture is an element of an item of that plan: where it lies in a file, and where it goes.

Run ``python docs/draw_resharding.py`` (it needs matplotlib); another file, such as ``x.png``, may be named.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, Rectangle

from reshard_ckpt.core.catalog.model import Catalog, FileEntry
from reshard_ckpt.core.catalog.specs import Piece, Replication, TensorSpec, box_piece, flat_run, row_major_strides
from reshard_ckpt.core.planning.build_catalog import WrittenItems, build_catalog
from reshard_ckpt.core.planning.load_plan import LoadPlan, plan_load
from reshard_ckpt.core.planning.local_metadata import build_local_metadata, piece_columns
from reshard_ckpt.engine.saving.agreement import plan_from_metadata
from reshard_ckpt.engine.saving.messages import encode_metadata

SHAPE = (8, 10)
RUNS = [(0, 26), (26, 53), (53, 80)]
WANTED = ((0, 5), (8, 5))
"""Offsets and lengths of what rank 1 of the loading job holds."""

NAME = "optimizer.state.w.exp_avg"
COLORS = ["#4477aa", "#c28f00", "#228833"]
INK, FAINT = "#222222", 0.22


def saved_catalog() -> Catalog:
    """The catalog of the flat ranges, as if each rank had written the items of its plan to a file without a header."""
    whole = box_piece((0, 0), SHAPE, 0, row_major_strides(SHAPE))
    job_metadata = [
        encode_metadata(build_local_metadata([_spec(flat_run(whole, start, stop - start))], 0, (), None)) for start, stop in RUNS
    ]
    plan = plan_from_metadata(
        [local_metadata.tensors for local_metadata in job_metadata], [local_metadata.rows for local_metadata in job_metadata]
    )
    sizes = plan.part_count * 4
    first = np.array([int(sizes[: plan.items_of(rank).start].sum()) for rank in range(len(RUNS))])
    written = WrittenItems(plan.rank, np.cumsum(sizes) - sizes - first[plan.rank])
    sizes_by_rank = plan.bytes_by_rank().tolist()
    files = [FileEntry(f"rank{rank:05d}-0.safetensors", size, "", b"", "save", rank) for rank, size in enumerate(sizes_by_rank)]
    return build_catalog(plan, written, files=files, values=(), save_id="save", created_s=0.0, metadata=b"")


def planned_load(catalog: Catalog) -> LoadPlan:
    """What rank 1 of the loading job reads."""
    offsets, lengths = WANTED
    wanted = piece_columns([_spec(box_piece(offsets, lengths, 0, row_major_strides(lengths)))], len(SHAPE))
    return plan_load(catalog, np.array([catalog.index(NAME)]), wanted, window_bytes=8 << 20)


def _spec(piece: Piece) -> TensorSpec:
    return TensorSpec(NAME, "F32", SHAPE, (piece,), Replication.DECLARED)


Place = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Cell:
    """One element that is read: its item, its file, its place there, and its place in the local tensor, in elements."""

    item: int
    file: int
    src: int
    dst: int


def cells(plan: LoadPlan) -> list[Cell]:
    """The elements of every item; items are numbered in order of file and place."""
    out = []
    for number, i in enumerate(np.lexsort((plan.src, plan.file)).tolist()):
        for x in product(*(range(n) for n in plan.lengths[i].tolist())):
            src = int(plan.src[i] + np.dot(x, plan.src_strides[i])) // int(plan.item_bytes[i])
            out.append(Cell(number + 1, int(plan.file[i]), src, int(plan.dst[i] + np.dot(x, plan.dst_strides[i]))))
    return out


def draw(path: str | Path) -> None:
    """Draw the picture, as the suffix of the path says."""
    catalog = saved_catalog()
    chosen = cells(planned_load(catalog))
    # Fixed ids and no date: the same plan gives the same bytes. Text as paths looks alike everywhere.
    matplotlib.rcParams.update({"svg.hashsalt": "reshard", "svg.fonttype": "path", "font.size": 10, "font.family": "DejaVu Sans"})
    figure = Figure(figsize=(11, 6.8), facecolor="white")
    top = figure.add_gridspec(1, 3, width_ratios=[10, 10, 5], left=0.04, right=0.97, top=0.86, bottom=0.41, wspace=0.2)
    saved, wanted, local = (figure.add_subplot(cell) for cell in top)
    strips = figure.add_subplot(figure.add_gridspec(1, 1, left=0.04, right=0.97, top=0.25, bottom=0.02)[0])
    _draw_saved(saved)
    _draw_wanted(wanted, chosen)
    _draw_local(local, chosen)
    _draw_files(strips, catalog, chosen)
    figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)


def _draw_saved(axes: Axes) -> None:
    _title(axes, "1  What the checkpoint has", "three flat ranges of an 8 × 10 tensor")
    for file, (start, stop) in enumerate(RUNS):
        _cells(axes, [(at % SHAPE[1], at // SHAPE[1]) for at in range(start, stop)], file)
        row = (start + stop) // 2 // SHAPE[1]
        axes.text(
            5,
            row + 0.5,
            f"rank {file}: [{start}, {stop})",
            ha="center",
            va="center_baseline",
            color=INK,
            weight="bold",
            bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "linewidth": 0},
        )
    _frame(axes, *SHAPE)


def _draw_wanted(axes: Axes, chosen: list[Cell]) -> None:
    (_, left), (rows, columns) = WANTED
    _title(axes, "2  Where that meets what is wanted", f"rank 1 of tp 2 wants columns [{left}, {left + columns})")
    for file, (start, stop) in enumerate(RUNS):
        rest = [at for at in range(start, stop) if not left <= at % SHAPE[1] < left + columns]
        _cells(axes, [(at % SHAPE[1], at // SHAPE[1]) for at in rest], file, alpha=FAINT)
        _cells(axes, [(left + cell.dst % columns, cell.dst // columns) for cell in chosen if cell.file == file], file)
    _number(axes, chosen, lambda cell: (left + cell.dst % columns, cell.dst // columns))
    axes.add_patch(Rectangle((left, 0), columns, rows, fill=False, edgecolor=INK, linewidth=2.5, zorder=3))
    _frame(axes, *SHAPE)


def _draw_local(axes: Axes, chosen: list[Cell]) -> None:
    rows, columns = WANTED[1]
    _title(axes, "3  Its local tensor", f"{rows} × {columns}, every element once")
    for file in range(len(RUNS)):
        _cells(axes, [(cell.dst % columns, cell.dst // columns) for cell in chosen if cell.file == file], file)
    _number(axes, chosen, lambda cell: (cell.dst % columns, cell.dst // columns))
    axes.add_patch(Rectangle((0, 0), columns, rows, fill=False, edgecolor=INK, linewidth=2.5, zorder=3))
    _frame(axes, rows, columns)


def _draw_files(axes: Axes, catalog: Catalog, chosen: list[Cell]) -> None:
    _title(axes, "4  Where it lies in the files", "each file holds a rank's range in order; the numbered elements are wanted")
    for file, entry in enumerate(catalog.files):
        num = entry.size // 4
        y = 1.7 * file
        axes.text(-0.4, y + 0.5, f"rank {file}'s file", ha="right", va="center")
        mine = [cell for cell in chosen if cell.file == file]
        read = {cell.src for cell in mine}
        _cells(axes, [(at, y) for at in range(num) if at not in read], file, alpha=FAINT)
        _cells(axes, [(at, y) for at in read], file)
        for first, last, item in _runs(mine):
            axes.add_patch(Rectangle((first, y), last - first + 1, 1, fill=False, edgecolor=INK, linewidth=1.4, zorder=3))
            _label(axes, (first + last + 1) / 2, y + 0.5, item)
    axes.set(xlim=(-4.6, 28.2), ylim=(1.7 * len(catalog.files), -0.2), aspect="equal", anchor="NW")
    axes.axis("off")


def _runs(chosen: list[Cell]) -> list[tuple[int, int, int]]:
    """Consecutive elements of one item in a file: first, last, item."""
    out: list[tuple[int, int, int]] = []
    for cell in sorted(chosen, key=lambda cell: cell.src):
        if out and out[-1][1:] == (cell.src - 1, cell.item):
            out[-1] = (out[-1][0], cell.src, cell.item)
        else:
            out.append((cell.src, cell.src, cell.item))
    return out


def _number(axes: Axes, chosen: list[Cell], place: Callable[[Cell], Place]) -> None:
    """Outline and number each item, which is a box wherever it lies."""
    for item in sorted({cell.item for cell in chosen}):
        at = np.array([place(cell) for cell in chosen if cell.item == item])
        (x, y), (width, height) = at.min(axis=0), np.ptp(at, axis=0) + 1
        assert prod((int(width), int(height))) == len(at)
        axes.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor=INK, linewidth=1.4, zorder=3))
        _label(axes, x + width / 2, y + height / 2, item)


def _label(axes: Axes, x: float, y: float, item: int) -> None:
    axes.add_patch(Ellipse((x, y), 0.74, 0.74, facecolor="white", linewidth=0, zorder=4))
    axes.text(x, y + 0.01, str(item), ha="center", va="center_baseline", color=INK, weight="bold", zorder=5)


def _cells(axes: Axes, places: Iterable[Place], file: int, alpha: float = 1.0) -> None:
    squares = [[(x, y), (x + 1, y), (x + 1, y + 1), (x, y + 1)] for x, y in places]
    axes.add_collection(PolyCollection(squares, facecolor=COLORS[file], edgecolor="white", linewidth=0.8, alpha=alpha))


def _title(axes: Axes, text: str, below: str) -> None:
    for lift, line, style in ((22, text, {"weight": "bold", "size": 12, "color": INK}), (6, below, {"color": "#555555"})):
        axes.annotate(line, (0, 1), (0, lift), xycoords="axes fraction", textcoords="offset points", **style)


def _frame(axes: Axes, rows: int, columns: int) -> None:
    axes.set(xlim=(-0.1, columns + 0.1), ylim=(rows + 0.1, -0.1), aspect="equal", anchor="NW")
    axes.set_xticks(np.arange(columns) + 0.5, np.arange(columns), size=8)
    axes.set_yticks(np.arange(rows) + 0.5, np.arange(rows), size=8)
    axes.tick_params(length=0, colors="#555555")
    for side in axes.spines.values():
        side.set_visible(False)


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("resharding.svg"))
