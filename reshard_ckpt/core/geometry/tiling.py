"""Check that runs cover their tensors exactly once, and find the place where they do not.

1. Line up the runs of each box: consecutive runs are joined, and an overlap is a fault. A box that its runs fill counts as a box.
2. Cut the runs of partly filled boxes into boxes (`decompose`).
3. The boxes of a tensor tile it if no two overlap and their volumes add up to its size. Tensors with the same shape and boxes,
   such as those of equal layers, are checked once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...errors import UnsupportedError
from .columns import ColumnTable, batches, is_new, lex_order
from .runs import I64, bounds, decompose, ranges, volumes

MAX_PAIRS = 1 << 21
"""The most pairs of boxes compared in one step; bounds memory without changing the result."""

MAX_SWEPT = 1 << 29
"""The most pairs compared in all for one tensor. No layout of a job comes near it: a grid of half a million boxes has fewer. A
catalog that is made to have more would keep a reader busy for hours."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A place where tiling fails: two runs that overlap (`rows` has their indices in the input), or a region without a run."""

    tensor: int
    rows: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    missing: int
    """Elements that no run covers; 0 for an overlap."""


@dataclass(frozen=True, slots=True)
class _Runs(ColumnTable):
    """Runs; ``row`` is the index in the input, for joined runs that of one of them."""

    tensor: I64
    box: I64
    start: I64
    count: I64
    row: I64


def find_faults(
    shapes: I64, box_offsets: I64, box_lengths: I64, tensor: I64, box: I64, start: I64, count: I64
) -> Iterator[Fault]:
    """Yield the faults of every tensor that its runs do not tile.

    Parameters
    ----------
    shapes : (T, D)
        Global shapes.
    box_offsets, box_lengths : (B, D)
        Distinct boxes.
    tensor, box, start, count : (R,)
        For each run its tensor, its box and its elements; in any order.
    """
    runs = _Runs(tensor, box, start, count, np.arange(len(tensor)))
    runs = runs.take(lex_order(tensor, box, start))
    runs = runs.take(runs.count > 0)
    boxes = box_offsets, box_lengths
    # same[i]: runs i and i + 1 are of one box. gap[i]: the elements between them; negative if they overlap.
    same = ~is_new(runs.tensor, runs.box)[1:]
    gap = runs.start[1:] - (runs.start + runs.count)[:-1]
    clash = np.flatnonzero(same & (gap < 0))
    clashing, one = np.unique(runs.tensor[clash], return_index=True)  # one overlap of each tensor is enough to report
    for i in clash[one].tolist():
        yield _overlap(boxes, runs.take([i, i + 1]))
    # Consecutive runs without a gap are joined; first and last are the first and the last run of each joined one.
    new = np.append(True, ~(same & (gap == 0))) if len(runs.row) else np.zeros(0, bool)
    first = np.flatnonzero(new)
    last = runs.take(np.append(first[1:], len(new))[: len(first)] - 1)
    joined = runs.take(first)
    joined = replace(joined, count=last.start + last.count - joined.start)
    joined = joined.take(~np.isin(joined.tensor, clashing))
    yield from _box_faults(shapes, boxes, joined, frozenset(clashing.tolist()))


def _overlap(boxes: tuple[I64, I64], pair: _Runs) -> Fault:
    """Describe two overlapping runs of a tensor; the region is the overlap of the boxes around them."""
    lows, highs = bounds(boxes[0][pair.box], boxes[1][pair.box], pair.start, pair.count)
    low = lows.max(axis=0)
    high = np.maximum(highs.min(axis=0), low)
    return Fault(int(pair.tensor[0]), tuple(pair.row.tolist()), tuple(low.tolist()), tuple(high.tolist()), missing=0)


def _box_faults(shapes: I64, boxes: tuple[I64, I64], joined: _Runs, reported: frozenset[int]) -> Iterator[Fault]:
    """Yield the faults of all tensors except the reported ones."""
    cut = decompose(boxes[1][joined.box], joined.start, joined.count)
    # The cut boxes stay in order of tensor: the boxes of tensor t are first[t] : first[t + 1].
    tensor = joined.tensor[cut.parent]
    low = boxes[0][joined.box[cut.parent]] + cut.offsets
    first = np.searchsorted(tensor, np.arange(len(shapes) + 1))
    sizes, num = volumes(shapes), np.diff(first)
    # whole[t]: tensor t has one box, which is the whole tensor, so it needs no other check.
    whole = np.zeros(len(shapes), bool)
    single = np.flatnonzero(num == 1)
    at = first[single]
    at_origin = (low[at] == 0).all(axis=1)
    whole[single] = at_origin & (cut.lengths[at] == shapes[single]).all(axis=1)
    verified: set[bytes] = set()
    for t in np.flatnonzero(((sizes > 0) | (num > 0)) & ~whole).tolist():
        if t in reported:
            continue
        part = slice(first[t], first[t + 1])
        # Tensors with equal shapes and boxes share one check.
        layout = shapes[t].tobytes() + low[part].tobytes() + cut.lengths[part].tobytes()
        if layout in verified:
            continue
        pair = find_overlap(low[part], cut.lengths[part])
        if pair is not None:
            yield _overlap(boxes, joined.take(cut.parent[part][list(pair)]))
            continue
        missing = int(sizes[t] - volumes(cut.lengths[part]).sum())
        if missing:
            gap_low, gap_high = find_gap(shapes[t], low[part], cut.lengths[part])
            yield Fault(t, (), gap_low, gap_high, missing)
            continue
        verified.add(layout)


def find_overlap(offsets: I64, lengths: I64) -> tuple[int, int] | None:
    """Find two boxes that share an element; returns None if no two do.

    Boxes are swept along the dim on which the fewest pairs meet.
    """
    if len(offsets) < 2:
        return None
    sweeps = (_sweep(offsets, lengths, dim) for dim in range(offsets.shape[1]))
    order, meets = min(sweeps, key=lambda sweep: int(sweep[1].sum()))
    if meets.sum() > MAX_SWEPT:
        raise UnsupportedError(
            f"{len(offsets)} shards of one tensor lie so that it takes too long to check that none overlap; use fewer ones"
        )
    for part in batches(meets, MAX_PAIRS):
        # One entry for each pair of a box and a following one that meets it on this dim; clash: do they meet on all dims?
        owner, step = ranges(meets[part])
        left = order[owner + part.start]
        right = order[owner + part.start + 1 + step]
        clash = (offsets[left] < offsets[right] + lengths[right]) & (offsets[right] < offsets[left] + lengths[left])
        hit = np.flatnonzero(clash.all(axis=1))
        if len(hit):
            return int(left[hit[0]]), int(right[hit[0]])
    return None


def _sweep(offsets: I64, lengths: I64, dim: int) -> tuple[I64, I64]:
    """Sort boxes by their beginning along a dim; returns the order, and how many following boxes begin before each ends."""
    order = np.argsort(offsets[:, dim], kind="stable")
    begin = offsets[order, dim]
    until = np.searchsorted(begin, begin + lengths[order, dim], side="left")
    return order, np.maximum(until - np.arange(len(order)) - 1, 0)


def find_gap(shape: I64, offsets: I64, lengths: I64) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Find a box of the tensor that none of these disjoint boxes touches, by halving the tensor again and again.

    >>> find_gap(np.array([4, 2]), np.array([[0, 0], [3, 0]]), np.array([[2, 2], [1, 2]]))
    ((2, 0), (3, 2))
    """
    low, high = np.zeros_like(shape), shape.copy()
    while True:
        # begin, end: the boxes clipped to the region low : high; none inside means that the region is free.
        begin, end = np.maximum(offsets, low), np.minimum(offsets + lengths, high)
        inside = np.flatnonzero((begin < end).all(axis=1))
        if len(inside) == 0:
            return tuple(low.tolist()), tuple(high.tolist())
        # Cut along a face of some box. The left half is kept if its boxes do not fill it, else the right one, which has the gap
        # then.
        begin, end = begin[inside], end[inside]
        offsets, lengths = begin, end - begin
        dim, at = _face(low, high, begin, end)
        left_high, right_low = high.copy(), low.copy()
        left_high[dim], right_low[dim] = at, at
        left = volumes(np.maximum(np.minimum(offsets + lengths, left_high) - offsets, 0)).sum()
        if left < volumes((left_high - low)[None])[0]:
            high = left_high
        else:
            low = right_low


def _face(low: I64, high: I64, begin: I64, end: I64) -> tuple[int, int]:
    """Find the place to halve a region: on the dim with the most coordinates inside where boxes begin or end, the middle one."""
    faces = []
    for dim in range(len(low)):
        first, last = begin[:, dim], end[:, dim]
        faces.append(np.concatenate([first[first > low[dim]], last[last < high[dim]]]))
    dim = max(range(len(faces)), key=lambda d: len(faces[d]))
    assert len(faces[dim]), "a box fills the region, so nothing of it is uncovered"
    middle = len(faces[dim]) // 2
    return dim, int(np.partition(faces[dim], middle)[middle])


def describe_region(low: Sequence[int], high: Sequence[int], ndim: int) -> str:
    """Spell a region as people write it, without padding.

    >>> describe_region((0, 2, 0), (1, 3, 4), 2)
    '[2:3, 0:4]'
    """
    dims = list(zip(low, high, strict=True))[len(low) - ndim :]
    return "[" + ", ".join(f"{a}:{b}" for a, b in dims) + "]"
