"""The plan of a load: the exact overlap of what is wanted with what the catalog has, as bytes of files.

1. Every wanted piece is cut into boxes.
2. Each meets the rows of its tensor whose bounds touch it (`geometry.meeting`).
3. These rows are cut where their bytes cross a *window* of their file, and into boxes; the overlaps are the items. So every
   item lies in one window, windows can be read independently, and no byte is read for two of them. Windows before the first
   wanted element of a row, and behind the last, are not looked at.

An item is a small n-dimensional copy: from ``src`` with byte strides ``src_strides`` in the file, to ``dst`` with element strides
``dst_strides`` in the memory of destination ``dest``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...errors import CorruptError
from ..catalog.model import Catalog
from ..geometry.columns import ColumnTable, batches
from ..geometry.dtypes import item_bytes_of
from ..geometry.meeting import TensorBoxes, meet
from ..geometry.runs import I64, bounds, decompose, pad_left, ranges, strides_of, volumes
from .local_metadata import PieceColumns

MAX_WINDOWS = 1 << 20
"""Windows of one row that may hold what is wanted: 1 TiB where they are of 1 MiB, more than a shard ever has. A damaged or
hostile catalog may claim more. So many are cut at once; that bounds memory, not the answer."""

MAX_WINDOWS_IN_ALL = 8 * MAX_WINDOWS
"""The same of all rows of one step: 8 TiB, which no rank reads."""

MAX_PAIRS = 1 << 20
"""Pairs of wanted box and row that are cut in one step; bounds memory, not the answer."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Columns over items (see the module); `covered` counts the elements found for each wanted piece."""

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
        """Bytes wanted."""
        return self.num_bytes_but_of(())

    def num_bytes_but_of(self, files: Sequence[int]) -> int:
        """Count the bytes wanted of all files but these."""
        size = volumes(self.lengths) * self.item_bytes
        return int(size[~np.isin(self.file, files)].sum() if len(files) else size.sum())


@dataclass(frozen=True, slots=True)
class _WantedBoxes:
    """The boxes of the wanted pieces: global offsets, and the affine place of their first element in memory."""

    tensor: I64
    piece: I64
    offsets: I64
    lengths: I64
    base: I64
    strides: I64


def plan_load(catalog: Catalog, source: I64, wanted: PieceColumns, window_bytes: int) -> LoadPlan:
    """Plan the reading of all wanted pieces.

    Parameters
    ----------
    source
        For each destination (``wanted.tensor``) the index of its tensor in the catalog.
    wanted
        Pieces, inside the shape of their tensor; padded to any width.
    window_bytes
        Items do not cross multiples of this many bytes in their file, unless one element does.
    """
    width = max(catalog.boxes.offsets.shape[1], wanted.offsets.shape[1])
    boxes = _wanted_boxes(catalog, source, wanted, width)
    item_bytes = item_bytes_of(catalog.tensors_table.dtype)
    pairs = _meet(catalog, boxes, item_bytes, width)
    parts = (slice(low, low + MAX_PAIRS) for low in range(0, len(pairs.box), MAX_PAIRS))
    found = [_cut(catalog, boxes, pairs.take(part), window_bytes, width) for part in parts]
    box, file, window, src, offset, lengths, src_strides = _joined(found, width)
    strides = boxes.strides[box]
    return LoadPlan(
        file=file,
        window=window,
        src=src,
        lengths=lengths,
        src_strides=src_strides,
        item_bytes=item_bytes[boxes.tensor[box]],
        dest=wanted.tensor[boxes.piece[box]],
        dst=boxes.base[box] + ((offset - boxes.offsets[box]) * strides).sum(axis=1),
        dst_strides=strides,
        covered=np.bincount(boxes.piece[box], weights=volumes(lengths), minlength=len(wanted.start)).astype(np.int64),
    )


def _joined(found: Sequence[Sequence[I64]], width: int) -> Sequence[I64]:
    """Join the columns of items that were found one after the other."""
    if len(found) == 1:
        return found[0]
    flat, wide = np.zeros(0, np.int64), np.zeros((0, width), np.int64)
    return [np.concatenate(column) for column in zip((flat, flat, flat, flat, wide, wide, wide), *found, strict=True)]


def _wanted_boxes(catalog: Catalog, source: I64, wanted: PieceColumns, width: int) -> _WantedBoxes:
    cut = decompose(wanted.lengths, wanted.start, wanted.count)
    strides = pad_left(wanted.strides, width, 0)[cut.parent]
    inner = pad_left(cut.offsets, width, 0)
    alias = catalog.tensors_table.alias[source]
    return _WantedBoxes(
        tensor=np.where(alias >= 0, alias, source)[wanted.tensor[cut.parent]],
        piece=cut.parent,
        offsets=pad_left(wanted.offsets, width, 0)[cut.parent] + inner,
        lengths=pad_left(cut.lengths, width, 1),
        base=wanted.base[cut.parent] + (inner * strides).sum(axis=1),
        strides=strides,
    )


@dataclass(frozen=True, slots=True)
class _Pairs(ColumnTable):
    """Pairs of a wanted box and a row of its tensor: the part of the row that is looked at, and bytes of an element."""

    box: I64
    row: I64
    start: I64
    count: I64
    item_bytes: I64


def _meet(catalog: Catalog, boxes: _WantedBoxes, item_bytes: I64, width: int) -> _Pairs:
    """Find the pairs of a wanted box and a row whose bounds touch it."""
    row_start, rows = catalog.tensors_table.row_start, catalog.rows
    tensors, number = boxes.tensor, np.arange(len(boxes.tensor))
    if not (tensors[1:] > tensors[:-1]).all():
        tensors, number = np.unique(tensors, return_inverse=True)
    # Each row once, whatever number of boxes its tensor is wanted in; `owner` numbers the tensors that are wanted.
    first = row_start[tensors]
    owner, step = ranges(row_start[tensors + 1] - first)
    row = first[owner] + step
    if not (filled := rows.count[row] > 0).all():
        owner, row = owner[filled], row[filled]
    low, high = bounds(*_row_boxes(catalog, row, width), rows.start[row], rows.count[row])
    box, at = meet(TensorBoxes(number, boxes.offsets, boxes.lengths), TensorBoxes(owner, low, high - low))
    row = row[at]
    return _Pairs(box, row, rows.start[row], rows.count[row], item_bytes[boxes.tensor[box]])


def _cut(catalog: Catalog, boxes: _WantedBoxes, pairs: _Pairs, window_bytes: int, width: int) -> tuple[I64, ...]:
    """Items of some pairs: box, file, window, src, global offsets, lengths, source strides."""
    offset = catalog.rows.offset[pairs.row]
    first, last = _windows_of(boxes, pairs, offset, *_row_boxes(catalog, pairs.row, width), window_bytes)
    found = [
        _items(catalog, boxes, pairs.take(few), (first[few], last[few]), window_bytes, width)
        for few in batches(last - first + 1, MAX_WINDOWS)
    ]
    return tuple(_joined(found, width))


def _items(
    catalog: Catalog, boxes: _WantedBoxes, pairs: _Pairs, windows: tuple[I64, I64], window_bytes: int, width: int
) -> tuple[I64, ...]:
    """Items of some pairs, in the windows of each from a first to a last one; columns as of `_cut`."""
    rows = catalog.rows
    # From here on a pair is of one window: a row that lies in several is in as many pairs, each with its part of the row.
    pairs = _cut_at_windows(pairs, rows.offset[pairs.row], *windows, window_bytes)
    offsets, lengths = _row_boxes(catalog, pairs.row, width)
    # A part may miss the wanted box that its row meets.
    if not (hit := _touching(boxes, pairs, offsets, lengths)).all():
        pairs, offsets, lengths = pairs.take(hit), offsets[hit], lengths[hit]
    # From here on a pair is of one box of its part: `cut.offsets` count from the row's box, whose own are `origin`.
    cut = decompose(lengths, pairs.start, pairs.count)
    pairs, origin, strides = pairs.take(cut.parent), offsets[cut.parent], strides_of(lengths)[cut.parent]
    low = np.maximum(origin + cut.offsets, boxes.offsets[pairs.box])
    high = np.minimum(origin + cut.offsets + cut.lengths, boxes.offsets[pairs.box] + boxes.lengths[pairs.box])
    if not (keep := (low < high).all(axis=1)).all():
        pairs, origin, strides, low, high = pairs.take(keep), origin[keep], strides[keep], low[keep], high[keep]
    # In elements of the row, of which the first stands at its offset in the file.
    position = ((low - origin) * strides).sum(axis=1) - rows.start[pairs.row]
    offset, each = rows.offset[pairs.row], pairs.item_bytes
    window = (offset + (pairs.start - rows.start[pairs.row]) * each) // window_bytes
    return pairs.box, rows.file[pairs.row], window, offset + position * each, low, high - low, strides * each[:, None]


def _row_boxes(catalog: Catalog, row: I64, width: int) -> tuple[I64, I64]:
    box = catalog.rows.box[row]
    return pad_left(catalog.boxes.offsets[box], width, 0), pad_left(catalog.boxes.lengths[box], width, 1)


def _touching(boxes: _WantedBoxes, pairs: _Pairs, offsets: I64, lengths: I64) -> NDArray[np.bool_]:
    """Mark the pairs where the bounds of the part meet the wanted box."""
    low, high = bounds(offsets, lengths, pairs.start, pairs.count)
    want_low = boxes.offsets[pairs.box]
    meets = (low < want_low + boxes.lengths[pairs.box]) & (want_low < high)
    return np.asarray(meets.all(axis=1))


def _windows_of(
    boxes: _WantedBoxes, pairs: _Pairs, offset: I64, offsets: I64, lengths: I64, window_bytes: int
) -> tuple[I64, I64]:
    """Find the first and the last window with something of the wanted box; rows begin at `offset` of their file.

    A row may miss the wanted box that its bounds touch: its last window is then before its first one.
    """
    low = np.maximum(offsets, boxes.offsets[pairs.box])
    high = np.minimum(offsets + lengths, boxes.offsets[pairs.box] + boxes.lengths[pairs.box])
    strides, each = strides_of(lengths), pairs.item_bytes
    # In elements of the row, from the first one that may be wanted to the last.
    begin = np.maximum(((low - offsets) * strides).sum(axis=1) - pairs.start, 0)
    end = np.minimum(((high - 1 - offsets) * strides).sum(axis=1) + 1 - pairs.start, pairs.count)
    first = (offset + begin * each) // window_bytes
    last = np.where(begin < end, (offset + end * each - 1) // window_bytes, first - 1)
    num = last - first + 1
    if num.max(initial=0) > MAX_WINDOWS or float(num.sum(dtype=np.float64)) > MAX_WINDOWS_IN_ALL + 2 * len(num):
        size = int((pairs.count * each).max())
        raise CorruptError(f"rows of {size} bytes are no shards that one rank reads; use another checkpoint")
    return first, last


def _cut_at_windows(pairs: _Pairs, offset: I64, first: I64, last: I64, window_bytes: int) -> _Pairs:
    """Cut rows, which begin at `offset` of their file, at windows; an element belongs to the window in which it begins.

    What is not in the windows from `first` to `last` is left out.
    """
    each, count = pairs.item_bytes, pairs.count
    # One entry for each window that a row reaches into, and where that window begins, in bytes from the row's first.
    of_pair, step = ranges(last - first + 1)
    bound = (first[of_pair] + step) * window_bytes - offset[of_pair]
    low = np.clip(-(-bound // each[of_pair]), 0, count[of_pair])
    high = np.clip(-(-(bound + window_bytes) // each[of_pair]), 0, count[of_pair])
    keep = np.flatnonzero(high > low)
    of_pair, low, high = of_pair[keep], low[keep], high[keep]
    cut = pairs.take(of_pair)
    return replace(cut, start=cut.start + low, count=high - low)
