"""The plan of a load: the overlaps of wanted pieces with saved rows, as byte ranges of files and places in memory.

1. Cut every wanted piece into boxes.
2. Pair each box with the saved rows of its tensor whose bounds touch it (`geometry.tiling`).
3. Join the inner dims of a pair that its row and its wanted box hold whole and in order. Most pairs are left with one dim.
4. Cut these rows where their bytes cross a *window* of their file (a part of fixed size), and then into boxes. The overlaps of
   these with the wanted boxes are the *items*. So every item lies in one window, windows can be read independently, and no byte
   is read for two windows. Windows of a row before its first wanted element, or behind the last, are skipped.

An item is a small n-dimensional copy: from byte ``src`` of the file with byte strides ``src_strides``, to element ``dst`` of the
memory of destination ``dest`` with element strides ``dst_strides``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...errors import CorruptError
from ..catalog.model import Catalog
from ..catalog.specs import PieceColumns, item_bytes_of
from ..geometry.columns import ColumnTable, batches
from ..geometry.runs import I64, all_less, bounds, decompose, dot, pad_left, ranges, strides_of, volumes
from ..geometry.tiling import TensorBoxes, meet

MAX_WINDOWS = 1 << 20
"""The most windows that one row may span between its first and its last wanted element: 1 TiB if a window has 1 MiB, more than a
shard ever has. If a damaged or hostile catalog claims more, the load raises CorruptError. Rows are also cut in batches of
about this many windows, to bound memory."""

MAX_WINDOWS_IN_ALL = 8 * MAX_WINDOWS
"""The most windows that all rows of one batch may span: 8 TiB if a window has 1 MiB, more than a rank ever reads."""

MAX_PAIRS = 1 << 17
"""The number of pairs of a wanted box and a row that are cut at once. It bounds memory, and keeps the arrays in the processor's
cache."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The reads of a load, as columns with one entry for each item, a box that is copied from a file to memory (see the module).

    ``covered`` has an entry for each wanted piece: the number of its elements that the catalog has.
    """

    file: I64
    window: I64
    src: I64
    lengths: I64
    src_strides: I64
    item_bytes: I64
    dest: I64
    dst: I64
    dst_strides: I64
    covered: I64

    @property
    def num_bytes(self) -> int:
        """The size of all items in bytes."""
        return self.num_bytes_outside(())

    def num_bytes_outside(self, files: Sequence[int]) -> int:
        """Return the size in bytes of the items that lie in other files than these."""
        size = volumes(self.lengths) * self.item_bytes
        return int(size[~np.isin(self.file, files)].sum() if len(files) else size.sum())


class _WantedBoxes(NamedTuple):
    """The boxes that the wanted pieces were cut into, as columns.

    ``offsets`` are global, ``base`` is the element of the destination's memory where the box begins, and ``strides`` are the
    element strides of that memory.
    """

    tensor: I64
    piece: I64
    offsets: I64
    lengths: I64
    base: I64
    strides: I64


def plan_load(catalog: Catalog, source: I64, wanted: PieceColumns, window_bytes: int) -> LoadPlan:
    """Plan the reads for all wanted pieces: byte ranges of files, and the places in memory where they go.

    Raise `CorruptError` if the wanted rows span more windows than a rank can read (`MAX_WINDOWS`, `MAX_WINDOWS_IN_ALL`).

    Parameters
    ----------
    source
        For each wanted tensor (a number in ``wanted.tensor``) its index in the catalog.
    wanted
        The wanted pieces. They lie inside the shape of their tensor, and may be padded to any number of dims.
    window_bytes
        Size of a window. No item crosses a multiple of this many bytes in its file, except with its last element.
    """
    width = max(catalog.boxes.offsets.shape[1], wanted.offsets.shape[1])
    boxes = _wanted_boxes(catalog, source, wanted, width)
    item_bytes = item_bytes_of(catalog.tensors_table.dtype)
    pairs = _meet(catalog, boxes, item_bytes, width)
    found: list[tuple[I64, ...]] = []
    for begin in range(0, len(pairs.box), MAX_PAIRS):
        some = pairs.take(slice(begin, begin + MAX_PAIRS))
        regions = _regions(catalog, boxes, some, width)
        first, last = _windows_of(some, regions, catalog.rows.offset[some.row], window_bytes)
        for few in batches(last - first + 1, MAX_WINDOWS):
            found.append(_items(catalog, some.take(few), regions.take(few), (first[few], last[few]), window_bytes))
    if len(found) != 1:
        flat, wide = np.zeros(0, np.int64), np.zeros((0, width), np.int64)
        found = [tuple(map(np.concatenate, zip((flat, flat, flat, flat, flat, wide, wide, wide), *found, strict=True)))]
    # box[i]: index of the wanted box that item i fills.
    [(box, file, window, src, dst, lengths, src_strides, dst_strides)] = found
    return LoadPlan(
        file=file,
        window=window,
        src=src,
        lengths=lengths,
        src_strides=src_strides,
        item_bytes=item_bytes[boxes.tensor[box]],
        dest=wanted.tensor[boxes.piece[box]],
        dst=dst,
        dst_strides=dst_strides,
        covered=np.bincount(boxes.piece[box], weights=volumes(lengths), minlength=len(wanted.start)).astype(np.int64),
    )


def _wanted_boxes(catalog: Catalog, source: I64, wanted: PieceColumns, width: int) -> _WantedBoxes:
    """Cut the wanted pieces into boxes, and look up the tensor of each in the catalog; an alias is replaced by its source."""
    cut = decompose(wanted.lengths, wanted.start, wanted.count)
    # Row i of each array from here on is box i; inner[i]: its offsets in the box of its piece.
    strides = pad_left(wanted.strides, width, 0)[cut.parent]
    inner = pad_left(cut.offsets, width, 0)
    return _WantedBoxes(
        tensor=catalog.sources(source)[wanted.tensor[cut.parent]],
        piece=cut.parent,
        offsets=pad_left(wanted.offsets, width, 0)[cut.parent] + inner,
        lengths=pad_left(cut.lengths, width, 1),
        base=wanted.base[cut.parent] + dot(inner, strides),
        strides=strides,
    )


@dataclass(frozen=True, slots=True)
class _Pairs(ColumnTable):
    """Pairs of a wanted box and a saved row that may overlap, as columns.

    ``start, count`` are the elements of the row's box that the pair covers, and ``item_bytes`` is the size of an element.
    """

    box: I64
    row: I64
    start: I64
    count: I64
    item_bytes: I64


def _meet(catalog: Catalog, boxes: _WantedBoxes, item_bytes: I64, width: int) -> _Pairs:
    """Pair each wanted box with the saved rows of its tensor that may hold elements of it."""
    row_start, rows = catalog.tensors_table.row_start, catalog.rows
    # tensors: the distinct wanted tensors; number[i]: the position of box i's tensor among them.
    tensors, number = boxes.tensor, np.arange(len(boxes.tensor))
    if not (tensors[1:] > tensors[:-1]).all():
        tensors, number = np.unique(tensors, return_inverse=True)
    # row[i]: the rows of all wanted tensors, each once however many boxes want it; owner[i]: the number of its tensor.
    first = row_start[tensors]
    owner, step = ranges(row_start[tensors + 1] - first)
    row = first[owner] + step
    if not (filled := rows.count[row] > 0).all():
        owner, row = owner[filled], row[filled]
    # low, high: a box around each row; box[k] and at[k]: the wanted box and the place in row of pair k.
    low, high = bounds(*_row_boxes(catalog, row, width), rows.start[row], rows.count[row])
    box, at = meet(TensorBoxes(number, boxes.offsets, boxes.lengths), TensorBoxes(owner, low, high - low))
    row = row[at]
    return _Pairs(box, row, rows.start[row], rows.count[row], item_bytes[boxes.tensor[box]])


@dataclass(frozen=True, slots=True)
class _Regions(ColumnTable):
    """The two boxes of each pair, as columns: the box of its row, and its wanted box.

    Element 0 of the wanted box lies at element ``base`` of the destination's memory, which has element strides ``strides``.
    """

    offsets: I64
    lengths: I64
    wanted_offsets: I64
    wanted_lengths: I64
    base: I64
    strides: I64


def _regions(catalog: Catalog, boxes: _WantedBoxes, pairs: _Pairs, width: int) -> _Regions:
    """Look up the boxes of each pair, and join inner dims in which both boxes are equal and memory is in order.

    Elements keep their order in both boxes. Otherwise a window, whose borders are within rows, would cut a matrix into a part
    of a row, whole rows, and a part of a row.
    """
    offsets, lengths = _row_boxes(catalog, pairs.row, width)
    wanted_offsets, wanted_lengths, strides = boxes.offsets[pairs.box], boxes.lengths[pairs.box], boxes.strides[pairs.box]
    # joined: the pairs whose dims behind `dim` are all joined in the last one.
    joined = np.arange(len(pairs.box))
    for dim in range(width - 2, -1, -1):
        inner, step = lengths[joined, -1], strides[joined, -1]
        equal = (inner == wanted_lengths[joined, -1]) & (offsets[joined, -1] == wanted_offsets[joined, -1])
        joins = equal & ((wanted_lengths[joined, dim] == 1) | (strides[joined, dim] == inner * step))
        joined, inner = joined[joins], inner[joins]
        for column, rest in ((offsets, 0), (lengths, 1), (wanted_offsets, 0), (wanted_lengths, 1)):
            column[joined, -1] = column[joined, dim] * inner
            column[joined, dim] = rest
    return _Regions(offsets, lengths, wanted_offsets, wanted_lengths, boxes.base[pairs.box], strides)


def _items(catalog: Catalog, pairs: _Pairs, regions: _Regions, windows: tuple[I64, I64], window_bytes: int) -> tuple[I64, ...]:
    """Cut pairs of a wanted box and a saved row at windows of the file, and into boxes.

    Return the columns of the resulting items: index of the wanted box, file, window, `src`, `dst`, lengths, `src_strides` and
    `dst_strides`; `src` and its strides are in bytes. `windows` has the first and the last window of each pair.
    """
    rows, (first, last) = catalog.rows, windows
    # A pair's row has one part in each window. part[i]: the pair of part i; bound[i]: where its window begins, in bytes from the
    # first byte of the row.
    part, step = ranges(last - first + 1)
    window = first[part] + step
    bound, each, count = window * window_bytes - rows.offset[pairs.row[part]], pairs.item_bytes[part], pairs.count[part]
    # begin, end: the elements of the row that begin in the window; windows in which none begins are dropped.
    begin, end = np.clip(-(-bound // each), 0, count), np.clip(-(-(bound + window_bytes) // each), 0, count)
    filled = np.flatnonzero(end > begin)
    part, window, begin, count = part[filled], window[filled], begin[filled], (end - begin)[filled]
    # Each part is cut into boxes. From here on, entry i of each array is box i; cut.offsets are relative to the row's box.
    cut = decompose(regions.lengths[part], pairs.start[part] + begin, count)
    part, window = part[cut.parent], window[cut.parent]
    pairs, regions = pairs.take(part), regions.take(part)
    strides = strides_of(regions.lengths)
    # low, high: the bounds of the overlap of the box with the wanted one; empty overlaps are dropped.
    low = np.maximum(regions.offsets + cut.offsets, regions.wanted_offsets)
    high = np.minimum(regions.offsets + cut.offsets + cut.lengths, regions.wanted_offsets + regions.wanted_lengths)
    if not (keep := all_less(low, high)).all():
        pairs, regions, window = pairs.take(keep), regions.take(keep), window[keep]
        strides, low, high = strides[keep], low[keep], high[keep]
    # position[i]: where the overlap begins in its row, in elements from the row's first one, which is at rows.offset of its file.
    position = dot(low - regions.offsets, strides) - rows.start[pairs.row]
    src = rows.offset[pairs.row] + position * pairs.item_bytes
    dst = regions.base + dot(low - regions.wanted_offsets, regions.strides)
    return pairs.box, rows.file[pairs.row], window, src, dst, high - low, strides * pairs.item_bytes[:, None], regions.strides


def _row_boxes(catalog: Catalog, row: I64, width: int) -> tuple[I64, I64]:
    """Return the global offsets and lengths of the boxes of these rows, each (N, width)."""
    box = catalog.rows.box[row]
    return pad_left(catalog.boxes.offsets[box], width, 0), pad_left(catalog.boxes.lengths[box], width, 1)


def _windows_of(pairs: _Pairs, regions: _Regions, offset: I64, window_bytes: int) -> tuple[I64, I64]:
    """Find, for each pair, the first and the last window of the file with bytes of the pair's row that lie in the wanted box.

    The pair's row begins at byte ``offset[i]`` of its file. A row may miss the wanted box although its bounds touch it: its last
    window is then before its first one.
    """
    # low, high: the overlap of the row's box with the wanted box.
    offsets = regions.offsets
    low = np.maximum(offsets, regions.wanted_offsets)
    high = np.minimum(offsets + regions.lengths, regions.wanted_offsets + regions.wanted_lengths)
    strides, each = strides_of(regions.lengths), pairs.item_bytes
    # begin, end: the first wanted element and the one behind the last, counted from the row's first element.
    begin = np.maximum(dot(low - offsets, strides) - pairs.start, 0)
    end = np.minimum(dot(high - 1 - offsets, strides) + 1 - pairs.start, pairs.count)
    first = (offset + begin * each) // window_bytes
    last = np.where(begin < end, (offset + end * each - 1) // window_bytes, first - 1)
    num = last - first + 1
    if num.max(initial=0) > MAX_WINDOWS or float(num.sum(dtype=np.float64)) > MAX_WINDOWS_IN_ALL + 2 * len(num):
        size = int((pairs.count * each).max())
        raise CorruptError(f"rows of {size} bytes are more than one rank can read; use another checkpoint")
    return first, last
