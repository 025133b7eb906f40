"""Runs of boxes, cut into boxes and bounded by boxes; everything is vectorized over many runs at once.

A *run* is the elements ``[start, start + count)`` of the row-major order of a box. Runs are the one geometry of this package: a
plain shard is the run that is its whole box, a flat optimizer range is a run of the tensor that it flattens, and a replica's part
and a window of a file are runs too. `decompose` cuts each run into at most ``2 D - 1`` boxes, each of them contiguous in the run,
so that questions about runs become questions about boxes.

Arrays are ``(N, D)`` int64, with one run or box in each row; tensors of fewer dims are padded on the left with offset 0 and
length 1.

A `Range` is a part of one dim, ``(first, length)``. The ranges that a rank holds of a dim are in the order in which they lie in
its local tensor. A plain shard has one; there are several if sections of the dim (fused QKV) or groups (strided placements) are
cut separately. `chunk` cuts them as ``torch.chunk`` does, including uneven sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .columns import I64 as I64
from .columns import ColumnTable, concatenated
from .columns import Mask as Mask


def pad_left(rows: I64, width: int, fill: int) -> I64:
    """Widen an array ``(N, D)`` to ``(N, width)`` by leading columns of ``fill``.

    >>> pad_left(np.array([[5, 6]]), 3, 1).tolist()
    [[1, 5, 6]]
    """
    missing = width - rows.shape[1]
    return rows if missing == 0 else np.pad(rows, ((0, 0), (missing, 0)), constant_values=fill)


def pad_rows(rows: Iterable[tuple[int, ...]], width: int, fill: int) -> I64:
    """Stack tuples of different lengths into an array ``(N, width)``, with leading entries of ``fill``.

    >>> pad_rows([(5, 6), (7,)], 2, 1).tolist()
    [[5, 6], [1, 7]]
    """
    padded = [(fill,) * (width - len(row)) + tuple(row) for row in rows]
    return np.array(padded, np.int64).reshape(len(padded), width)


def strides_of(lengths: I64) -> I64:
    """Return the row-major strides of each box in elements, (N, D), from the lengths, (N, D).

    >>> strides_of(np.array([[2, 3, 4]])).tolist()
    [[12, 4, 1]]
    """
    strides = np.ones_like(lengths)
    # Column by column: reducing along short rows is several times slower.
    for dim in range(lengths.shape[1] - 1, 0, -1):
        np.multiply(strides[:, dim], lengths[:, dim], out=strides[:, dim - 1])
    return strides


def volumes(lengths: I64) -> I64:
    """Return the number of elements of each box, (N,), from the lengths, (N, D)."""
    total = np.ones(len(lengths), np.int64)
    for column in lengths.T:
        total *= column
    return total


def dot(indices: I64, strides: I64) -> I64:
    """Return the flat position of each index, (N,): the sum over dims of index times stride, both (N, D).

    >>> dot(np.array([[1, 2]]), np.array([[10, 1]])).tolist()
    [12]
    """
    places: I64 = np.einsum("ij,ij->i", indices, strides)
    return places


def all_less(low: I64, high: I64) -> Mask:
    """Return a mask of the rows, (N,), in which `low` is less than `high` in every dim; both are (N, D).

    >>> all_less(np.array([[0, 1], [0, 1]]), np.array([[2, 2], [2, 1]])).tolist()
    [True, False]
    """
    good = np.ones(len(low), bool)
    # Column by column: reducing along short rows is several times slower.
    for a, b in zip(low.T, high.T, strict=True):
        good &= a < b
    return good


@dataclass(frozen=True, slots=True)
class Boxes(ColumnTable):
    """The boxes that runs were cut into, in order of the runs.

    ``parent`` is the index of each box's run; offsets count from the run's box.
    """

    parent: I64
    offsets: I64
    lengths: I64


def decompose(lengths: I64, start: I64, count: I64) -> Boxes:
    """Cut each run of a box into at most ``2 D - 1`` boxes, in the order of the run.

    Write both ends of the run as mixed-radix digits over the box's lengths. They agree on the leading digits and first differ at
    some dim ``k``. The run then consists of three parts. *Head*: for each dim inside ``k``, from the innermost outwards, the rest
    of the row in which the run begins. *Middle*: along ``k``, the whole slices between. *Tail*: for each dim inside ``k``, from
    the outermost inwards, the beginning of the row in which the run ends.

    Parameters
    ----------
    lengths : (N, D)
        The boxes.
    start, count : (N,)
        The runs, in elements; an empty run gives no box.

    Returns
    -------
    Boxes
        ``(M, D)``, sorted by parent and then by position in the run.

    Examples
    --------
    Elements 1 to 9 of a 4 × 3 box: the end of row 0, rows 1 and 2, the first of row 3.

    >>> boxes = decompose(np.array([[4, 3]]), np.array([1]), np.array([9]))
    >>> np.hstack([boxes.offsets, boxes.lengths]).tolist()
    [[0, 1, 1, 2], [1, 0, 2, 3], [3, 0, 1, 1]]
    """
    # whole: runs that are their whole box need no cut; partial: the others, without empty runs.
    whole = (start == 0) & (count == volumes(lengths)) & (count > 0)
    if whole.all():
        return Boxes(np.arange(len(start)), np.zeros_like(lengths), lengths)
    partial = np.flatnonzero(~whole & (count > 0))
    cut = _cut(lengths[partial], start[partial], count[partial])
    keep = np.flatnonzero(whole)
    boxes = concatenated([Boxes(keep, np.zeros_like(lengths[keep]), lengths[keep]), replace(cut, parent=partial[cut.parent])])
    # A stable sort, so that the boxes of a run stay in the order of the run.
    return boxes.take(np.argsort(boxes.parent, kind="stable"))


def _digits(position: I64, strides: I64, lengths: I64) -> I64:
    """Write positions, (N,), as mixed-radix digits over the box's lengths, (N, D).

    The position behind the last element has no carry: its outermost digit equals the box's length.
    """
    digits = position[:, None] // strides
    digits[:, 1:] %= lengths[:, 1:]
    return digits


def _cut(lengths: I64, start: I64, count: I64) -> Boxes:
    """Cut each run into boxes, as `decompose` does; no run may be empty."""
    num, dims = lengths.shape
    strides = strides_of(lengths)
    first = _digits(start, strides, lengths)
    last = _digits(start + count, strides, lengths)
    # split[i]: the outermost dim on which the two ends of run i differ, ``k`` in `decompose`.
    split = np.argmax(first != last, axis=1)
    # begun[i, d]: the start of run i has a digit other than 0 on dim d or inside it, so it begins inside a slice of dim d - 1.
    begun = np.zeros((num, dims + 1), dtype=bool)
    inner_first = (first > 0)[:, ::-1]
    begun[:, :dims] = np.logical_or.accumulate(inner_first, axis=1)[:, ::-1]
    boxes: list[Boxes] = []

    def emit(mask: Mask, dim: int, digits: I64, low: I64, high: I64) -> None:
        """Add a box for each run in the mask: one index on dims before `dim`, ``low : high`` along it, and all of later dims."""
        rows = np.flatnonzero(mask & (high > low))
        offset = digits[rows].copy()
        offset[:, dim] = low[rows]
        offset[:, dim + 1 :] = 0
        size = np.ones((len(rows), dims), dtype=np.int64)
        size[:, dim] = (high - low)[rows]
        size[:, dim + 1 :] = lengths[rows, dim + 1 :]
        boxes.append(Boxes(rows, offset, size))

    # In the order of the run: head, middle, tail. next_whole[i, d]: the first slice of dim d that run i has from its beginning.
    next_whole = first + begun[:, 1:]
    for dim in range(dims - 1, 0, -1):
        emit((dim > split) & begun[:, dim], dim, first, next_whole[:, dim], lengths[:, dim])
    for dim in range(dims):
        emit(split == dim, dim, first, next_whole[:, dim], last[:, dim])
    for dim in range(1, dims):
        emit(dim > split, dim, last, np.zeros_like(start), last[:, dim])
    cut = concatenated(boxes)
    # A stable sort, so that each run keeps the order in which its boxes were added.
    return cut.take(np.argsort(cut.parent, kind="stable"))


def as_boxes(lengths: I64, start: I64, count: I64) -> tuple[Mask, I64, I64]:
    """Tell for each run of a box whether the run is itself a box; no run may be empty.

    Returns
    -------
    is_box, offsets, lengths
        (N,), (N, D) and (N, D): whether the run is exactly a box; if so, its offsets from the run's box, and its lengths.

    Examples
    --------
    >>> is_box, offsets, lengths = as_boxes(np.array([[4, 3], [4, 3]]), np.array([3, 4]), np.array([6, 6]))
    >>> is_box.tolist(), offsets[0].tolist(), lengths[0].tolist()
    ([True, False], [1, 0], [2, 3])
    """
    strides = strides_of(lengths)
    first, last = (_digits(element, strides, lengths) for element in (start, start + count - 1))
    # A box has all of each dim inside the outermost dim on which the first and the last element differ.
    differ = np.logical_or.accumulate(first != last, axis=1)
    is_whole = (first == 0) & (last == lengths - 1)
    return (is_whole[:, 1:] | ~differ[:, :-1]).all(axis=1), first, last - first + 1


def cut_boxes(offsets: I64, lengths: I64, item_bytes: I64, limit: I64) -> tuple[I64, I64, I64]:
    """Cut each box that has more bytes than its entry of `limit` along its outer dims.

    Return for each part the index of its box, and its offsets and lengths.

    Parts are in row-major order, and each is contiguous in its box. A part has at least one element, also if that is more than
    its limit.

    >>> box, low, size = cut_boxes(np.array([[0, 0]]), np.array([[3, 4]]), np.array([2]), np.array([20]))
    >>> low.tolist(), size.tolist()
    ([[0, 0], [2, 0]], [[2, 4], [1, 4]])
    """
    slices = strides_of(lengths) * item_bytes[:, None]
    # per[i, d]: slices of dim d in a part of box i, as many as the limit allows, at least one. Outside a dim that is cut it is
    # one.
    per = np.maximum(np.minimum(lengths, limit[:, None] // np.maximum(slices, 1)), 1)
    counts = -(-lengths // per)
    # One entry for each part; its number within the box, as mixed-radix digits, is its index along each dim.
    source, step = ranges(volumes(counts))
    index = np.empty((len(source), lengths.shape[1]), np.int64)
    for dim in range(lengths.shape[1] - 1, -1, -1):
        step, index[:, dim] = np.divmod(step, counts[source, dim])
    begin = index * per[source]
    return source, offsets[source] + begin, np.minimum(per[source], lengths[source] - begin)


def bounds(offsets: I64, lengths: I64, start: I64, count: I64) -> tuple[I64, I64]:
    """Return a box around each run: the run's own box, narrowed along its outermost dim that is longer than 1.

    Returns
    -------
    low, high : (N, D)
        In global coordinates; exact for runs that are whole boxes.
    """
    low, high = offsets.copy(), offsets + lengths
    partial = np.flatnonzero(count != volumes(lengths))
    if len(partial) == 0:
        return low, high
    size = lengths[partial]
    dim = np.argmax(size > 1, axis=1)
    stride = strides_of(size)[np.arange(len(partial)), dim]
    # first, last: the slice of that dim in which the run begins, and the one behind its end.
    first = start[partial] // stride
    last = -(-(start[partial] + count[partial]) // stride)
    high[partial, dim] = low[partial, dim] + last
    low[partial, dim] += first
    return low, high


def ranges(lengths: I64) -> tuple[I64, I64]:
    """Return the pairs ``(i, n)`` with n from 0 to ``lengths[i] - 1`` for each i, as two arrays.

    >>> [a.tolist() for a in ranges(np.array([2, 0, 3]))]
    [[0, 0, 2, 2, 2], [0, 1, 0, 1, 2]]
    """
    owner = np.repeat(np.arange(len(lengths)), lengths)
    first = np.cumsum(lengths) - lengths
    return owner, np.arange(len(owner)) - np.repeat(first, lengths)


Range = tuple[int, int]


def chunk(ranges: Sequence[Range], num: int, index: int) -> list[Range]:
    """Lay ranges end to end, cut them into `num` parts as ``torch.chunk`` does, and return the ranges of part `index`.

    >>> chunk([(0, 5), (10, 5)], 4, 1), chunk([(0, 5)], 4, 3)
    ([(3, 2), (10, 1)], [])
    """
    total = sum(length for _, length in ranges)
    step = -(-total // num)
    return narrow(ranges, min(index * step, total), min((index + 1) * step, total))


def narrow(ranges: Sequence[Range], start: int, stop: int) -> list[Range]:
    """Lay ranges end to end, and return the ranges that make up the elements ``[start, stop)`` of the result."""
    out: list[Range] = []
    position = 0
    for first, length in ranges:
        low = max(start, position)
        high = min(stop, position + length)
        if low < high:
            out.append((first + low - position, high - low))
        position += length
    return out


def joined(ranges: Sequence[Range]) -> list[Range]:
    """Merge ranges ``(first, length)`` where one begins exactly at the end of the one before it.

    >>> joined([(0, 2), (2, 3), (7, 1)])
    [(0, 5), (7, 1)]
    """
    out: list[Range] = []
    for first, length in ranges:
        if out and sum(out[-1]) == first:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((first, length))
    return out
