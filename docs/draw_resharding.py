"""Draws docs/resharding.svg, how a tensor is resharded, from what the planners return for one small tensor.

1. Three ranks hold flat ranges of an 8 × 10 tensor, as a ZeRO optimizer does; `plan_save` divides the writing, one file a rank.
2. A tensor-parallel job of two ranks wants columns; `plan_load` finds what its rank 1 reads.
3. Every coloured cell of the picture is an element of an item of that plan: where it lies in a file, and where it goes.

Run ``python docs/draw_resharding.py`` (it needs the extra ``plot``); another file, such as ``x.png``, may be named.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba

from reshard_ckpt.core.catalog.model import Catalog, FileEntry
from reshard_ckpt.core.catalog.specs import Piece, Replication, TensorSpec, box_piece, piece_columns, row_major_strides
from reshard_ckpt.core.planning.load_plan import LoadPlan, plan_load
from reshard_ckpt.core.planning.local_metadata import build_local_metadata
from reshard_ckpt.core.planning.save_plan import build_catalog, plan_save
from reshard_ckpt.engine.saving.messages import decode_metadata, encode_metadata
from reshard_ckpt.plotting.canvas import INK, PALETTE, SOFT, add_axes, draw_boxes, new_figure, png_bytes, styled, svg_bytes

SHAPE = (8, 10)
RUNS = [(0, 26), (26, 53), (53, 80)]
WANTED = ((0, 5), (8, 5))
"""Offsets and lengths of what rank 1 of the loading job holds."""

NAME = "optimizer.state.w.exp_avg"
FAINT = 0.25
CELL = 21.0
"""The side of an element, in points."""


def saved_catalog() -> Catalog:
    """The catalog of the flat ranges, as if each rank had written the items of its plan to a file without a header."""
    whole = box_piece((0, 0), SHAPE, 0, row_major_strides(SHAPE))
    runs = [Piece(whole.offsets, whole.lengths, start, stop - start, -start, whole.strides) for start, stop in RUNS]
    tensors, rows, _ = zip(*(encode_metadata(build_local_metadata([_spec(run)], 0, None)) for run in runs), strict=True)
    plan = plan_save(decode_metadata(tensors, rows))
    sizes = plan.part_count * 4
    first = np.array([int(sizes[: plan.items_of(rank).start].sum()) for rank in range(len(RUNS))])
    offset = np.cumsum(sizes) - sizes - first[plan.rank]
    sizes_by_rank = plan.bytes_by_rank().tolist()
    files = [FileEntry(f"rank{rank:05d}-0.safetensors", size, "", b"", "save", rank) for rank, size in enumerate(sizes_by_rank)]
    return build_catalog(plan, plan.rank, offset, files=files, values=(), save_id="save", created_s=0.0, metadata=b"")


def planned_load(catalog: Catalog) -> LoadPlan:
    """What rank 1 of the loading job reads."""
    offsets, lengths = WANTED
    wanted = piece_columns([_spec(box_piece(offsets, lengths, 0, row_major_strides(lengths)))])
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


@styled()
def draw(path: str | Path) -> None:
    """Draw the picture, as the suffix of the path says."""
    catalog = saved_catalog()
    chosen = cells(planned_load(catalog))
    figure = new_figure(760, 388)
    rows, columns = SHAPE
    saved, wanted = (add_axes(figure, x, 50, columns * CELL, rows * CELL) for x in (30, 290))
    local = add_axes(figure, 560, 50, WANTED[1][1] * CELL, rows * CELL)
    files = add_axes(figure, 100, 286, 27 * CELL, 4.4 * CELL)
    _draw_saved(saved)
    _draw_wanted(wanted, chosen)
    _title(local, "3  Its local tensor", f"{WANTED[1][0]} × {WANTED[1][1]}, every element once")
    _draw_local(local, chosen, 0)
    _frame(local, *WANTED[1])
    _draw_files(files, catalog, chosen)
    title = "How a tensor is resharded"
    Path(path).write_bytes(svg_bytes(figure, title) if str(path).endswith(".svg") else png_bytes(figure))


def _draw_saved(axes: Axes) -> None:
    _title(axes, "1  What the checkpoint has", "three flat ranges of an 8 × 10 tensor")
    for file, (start, stop) in enumerate(RUNS):
        _cells(axes, [(at % SHAPE[1], at // SHAPE[1]) for at in range(start, stop)], file)
        _plate(axes, 5, (start + stop) // 2 // SHAPE[1] + 0.5, f"rank {file}: [{start}, {stop})")
    _frame(axes, *SHAPE)


def _draw_wanted(axes: Axes, chosen: list[Cell]) -> None:
    (_, left), (_, columns) = WANTED
    _title(axes, "2  Where that meets what is wanted", f"rank 1 of tp 2 wants columns [{left}, {left + columns})")
    for file, (start, stop) in enumerate(RUNS):
        rest = [at for at in range(start, stop) if not left <= at % SHAPE[1] < left + columns]
        _cells(axes, [(at % SHAPE[1], at // SHAPE[1]) for at in rest], file, FAINT)
    _draw_local(axes, chosen, left)
    _frame(axes, *SHAPE)


def _draw_local(axes: Axes, chosen: list[Cell], left: int) -> None:
    """The local tensor, from a column on, with its items outlined and numbered."""
    rows, columns = WANTED[1]
    for file in range(len(RUNS)):
        _cells(axes, [(left + cell.dst % columns, cell.dst // columns) for cell in chosen if cell.file == file], file)
    for item in sorted({cell.item for cell in chosen}):  # each is a box wherever it lies
        at = np.array([(left + cell.dst % columns, cell.dst // columns) for cell in chosen if cell.item == item])
        (x, y), (width, height) = at.min(axis=0).tolist(), (np.ptp(at, axis=0) + 1).tolist()
        assert width * height == len(at)
        _item(axes, x, y, width, height, item)
    draw_boxes(axes, [(left, 0, columns, rows)], "none", edge=INK, width=2.5)


def _draw_files(axes: Axes, catalog: Catalog, chosen: list[Cell]) -> None:
    _title(axes, "4  Where it lies in the files", "each file holds a rank's range in order; the numbered elements are wanted")
    for file, entry in enumerate(catalog.files):
        y = 1.7 * file
        axes.text(-0.4, y + 0.5, f"rank {file}'s file", ha="right", va="center", size=10)
        mine = [cell for cell in chosen if cell.file == file]
        read = {cell.src for cell in mine}
        _cells(axes, [(at, y) for at in range(entry.size // 4) if at not in read], file, FAINT)
        _cells(axes, [(at, y) for at in sorted(read)], file)
        for first, last, item in _runs(mine):
            _item(axes, first, y, last - first + 1, 1, item)
    axes.set(xlim=(0, 27), ylim=(4.4, 0))
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


def _item(axes: Axes, x: float, y: float, width: float, height: float, item: int) -> None:
    draw_boxes(axes, [(x, y, width, height)], "none", edge=INK, width=1.4)
    _plate(axes, x + width / 2, y + height / 2, str(item))


def _plate(axes: Axes, x: float, y: float, text: str) -> None:
    plate = {"boxstyle": "round,pad=0.2,rounding_size=0.6", "facecolor": "white", "linewidth": 0}
    axes.text(x, y, text, ha="center", va="center_baseline", size=9, weight="bold", bbox=plate)


def _cells(axes: Axes, places: Iterable[Place], file: int, share: float = 1.0) -> None:
    draw_boxes(axes, [(x, y, 1, 1) for x, y in places], to_rgba(PALETTE[file], share))


def _title(axes: Axes, text: str, below: str) -> None:
    for lift, line, style in ((22, text, {"weight": "bold", "size": 11}), (7, below, {"color": SOFT, "size": 8.5})):
        axes.annotate(line, (0, 1), (0, lift), xycoords="axes fraction", textcoords="offset points", **style)


def _frame(axes: Axes, rows: int, columns: int) -> None:
    axes.set(xlim=(0, columns), ylim=(rows, 0))
    axes.set_xticks(np.arange(columns) + 0.5, np.arange(columns))
    axes.set_yticks(np.arange(rows) + 0.5, np.arange(rows))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("resharding.svg"))
