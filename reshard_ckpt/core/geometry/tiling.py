"""Overlaps and gaps: pairs of boxes that share an element, and the check that runs cover each tensor exactly once.

Pairs of boxes (`meet`):

1. A box is compared with all other boxes of its tensor, which is fastest if there are few pairs.
2. A tensor with many more pairs than boxes is *crowded*. Its boxes are sorted along one dim, on which they begin at the most
   places, and a box is compared only with the boxes that it can reach along that dim.

Places where runs do not tile their tensor (`find_faults`):

1. Line up the runs of each box: consecutive runs are joined, and an overlap is a fault. A box that its runs fill counts as a box.
2. Cut the runs of partly filled boxes into boxes (`decompose`).
3. Slabs that lie one behind the other from the beginning of their tensor to its end tile it. Most tensors are cut so, and all of
   them are checked together. The boxes of another tensor tile it if no two overlap and their volumes add up to its size. Such
   tensors with the same shape and boxes, as in equal layers, are checked once.

Runs that overlap without being equal are cut wherever any of them begins or ends, so that equal parts become replicas
(`cut_overlaps`). A flat optimizer over tensor-parallel ranks makes such runs: a weight replicated on these ranks lies at a
different place in each rank's flat buffer if the ranks' other shards differ in size, so each rank's buffer cuts the weight
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ...errors import UnsupportedError
from .columns import ColumnTable, batches, group_bounds, is_new, lex_order, running_max
from .runs import I64, Mask, all_less, bounds, decompose, ranges, volumes

MAX_PAIRS = 1 << 20
"""The most pairs of boxes compared in one numpy step; bounds memory without changing the result."""

CROWDED = 8
"""A tensor is *crowded* if it has this many times more pairs than boxes: then sorting its boxes is faster than comparing all
pairs."""

MAX_SWEPT = 1 << 29
"""The most pairs of boxes compared for one tensor. No layout of a job comes near it (half a million boxes in a grid need fewer),
but a hostile catalog could keep a reader busy for hours."""


class TensorBoxes(NamedTuple):
    """Boxes of many tensors: the number of the tensor, (N,), offsets and lengths, (N, D).

    Tensors are numbered from 0 without large gaps.
    """

    tensor: I64
    offsets: I64
    lengths: I64


def meet(one: TensorBoxes, other: TensorBoxes) -> tuple[I64, I64]:
    """Find all pairs of a box in `one` and a box in `other` that belong to the same tensor and share an element.

    Returns
    -------
    left, right
        For each pair the index of its box in `one`, ascending, and in `other`.

    Examples
    --------
    >>> row = np.array([[0, 0], [2, 0]]), np.array([[2, 4], [2, 4]])
    >>> column = np.array([[0, 0], [0, 2]]), np.array([[4, 2], [4, 2]])
    >>> zero = np.zeros(2, np.int64)
    >>> [a.tolist() for a in meet(TensorBoxes(zero, *row), TensorBoxes(zero, *column))]
    [[0, 0, 1, 1], [0, 1, 0, 1]]
    """
    num = int(max(one.tensor.max(initial=-1), other.tensor.max(initial=-1))) + 1
    # right: the boxes of `other`, sorted by tensor, without empty ones; the boxes of tensor t end at end[t].
    right, tensor = np.arange(len(other.tensor)), other.tensor
    if not (solid := other.lengths > 0).all():
        right = right[solid.all(axis=1)]
        tensor = tensor[right]
    if (tensor[1:] < tensor[:-1]).any():
        right = right[lex_order(tensor)]
    # count[t], asked[t]: boxes of tensor t in `other` and in `one`.
    count = np.bincount(tensor, minlength=num)
    asked = np.bincount(one.tensor, minlength=num)
    end = np.cumsum(count)
    # Candidates for box i of `one` are right[first[i] : last[i]].
    first, last = (end - count)[one.tensor], end[one.tensor]
    crowded = count * asked > CROWDED * (count + asked)
    if crowded.any():
        right, first, last = _swept(one, other, right, first, last, crowded)
    if not (solid := one.lengths > 0).all():
        last = np.where(solid.all(axis=1), last, first)  # an empty box of `one` has no candidates
    found: list[tuple[I64, I64]] = []
    for part in batches(last - first, MAX_PAIRS):
        owner, step = ranges((last - first)[part])
        # One entry for each candidate pair: left[k] in `one`, met[k] in `other`; hit: the pairs that overlap on every dim.
        left, met = owner + part.start, right[first[part][owner] + step]
        low, high = one.offsets[left], other.offsets[met]
        hit = np.flatnonzero(all_less(low, high + other.lengths[met]) & all_less(high, low + one.lengths[left]))
        found.append((left[hit], met[hit]))
    if len(found) == 1:
        return found[0]
    empty = np.zeros(0, np.int64)
    return np.concatenate([empty, *(left for left, _ in found)]), np.concatenate([empty, *(met for _, met in found)])


def _swept(one: TensorBoxes, other: TensorBoxes, right: I64, first: I64, last: I64, crowded: Mask) -> tuple[I64, I64, I64]:
    """Sort the boxes of crowded tensors along a dim, so that each box of `one` is compared with fewer boxes of `other`.

    These are ``right[first[i] : last[i]]`` for box i.
    """
    # place: positions in right of boxes of crowded tensors; low, high: their bounds along the dim of their tensor.
    place = np.flatnonzero(crowded[other.tensor[right]])
    boxes = right[place]
    tensor, dim = other.tensor[boxes], _sweep_dims(other, boxes, len(crowded))
    low = other.offsets[boxes, dim[tensor]]
    high = low + other.lengths[boxes, dim[tensor]]
    order = lex_order(tensor, low)
    right = right.copy()
    right[place] = boxes[order]
    tensor, low, high = tensor[order], low[order], high[order]
    # asking: boxes of `one` of crowded tensors; asked: their tensors; own_low, own_high: their bounds along the same dim.
    asking = np.flatnonzero(crowded[one.tensor])
    asked = one.tensor[asking]
    own_low = one.offsets[asking, dim[asked]]
    own_high = own_low + one.lengths[asking, dim[asked]]
    # All tensors are laid on one axis, one behind the other. A coordinate is replaced by its rank among all coordinates, so that
    # no number on that axis is too large.
    coordinates = np.unique(np.concatenate([low, high, own_low, own_high]))

    def on_axis(tensors: I64, values: I64) -> I64:
        return tensors * len(coordinates) + np.searchsorted(coordinates, values)

    # reach[i]: the largest end of boxes 0 to i, ascending although ends are not, so that it can be bisected.
    reach = np.maximum.accumulate(on_axis(tensor, high))
    begin = np.searchsorted(reach, on_axis(asked, own_low), side="right")
    end = np.maximum(np.searchsorted(on_axis(tensor, low), on_axis(asked, own_high), side="left"), begin)
    # begin and end count among the boxes of crowded tensors; shift turns them into positions in right.
    shift = first[asking] - np.searchsorted(tensor, asked)
    first, last = first.copy(), last.copy()
    first[asking], last[asking] = begin + shift, end + shift
    return right, first, last


def _sweep_dims(boxes: TensorBoxes, chosen: I64, num: int) -> I64:
    """Choose one dim for each tensor: the dim on which the chosen boxes begin at the most distinct coordinates."""
    tensor = boxes.tensor[chosen]
    places = np.zeros((num, boxes.offsets.shape[1]), np.int64)
    for dim in range(boxes.offsets.shape[1]):
        begin = boxes.offsets[chosen, dim]
        order = lex_order(tensor, begin)
        # places[t, d]: the number of distinct coordinates on dim d where boxes of tensor t begin.
        new = is_new(tensor[order], begin[order])
        places[:, dim] = np.bincount(tensor[order][new], minlength=num)
    dims: I64 = places.argmax(axis=1)
    return dims


class Fault(NamedTuple):
    """A place where runs do not tile a tensor: a region without a run, or two runs that overlap (their indices are `rows`)."""

    tensor: int
    rows: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    missing: int
    """The number of elements that no run covers; 0 for an overlap."""


@dataclass(frozen=True, slots=True)
class _Runs(ColumnTable):
    """Runs of boxes, as columns; ``row`` is the index of the run in the input (for a joined run, of one of the runs joined)."""

    tensor: I64
    box: I64
    start: I64
    count: I64
    row: I64


def find_faults(
    shapes: I64, box_offsets: I64, box_lengths: I64, tensor: I64, box: I64, start: I64, count: I64
) -> Iterator[Fault]:
    """Find the tensors that their runs do not tile; yield an overlap or a gap of each.

    Parameters
    ----------
    shapes : (T, D)
        Global shapes.
    box_offsets, box_lengths : (B, D)
        Distinct boxes, within their tensors.
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
    clashing, begin = np.unique(runs.tensor[clash], return_index=True)  # one overlap of each tensor is enough to report
    for i in clash[begin].tolist():
        yield _overlap(boxes, runs.take([i, i + 1]))
    # Consecutive runs without a gap are joined; last: the last run of each joined one.
    new = np.append(True, ~(same & (gap == 0))) if len(runs.row) else np.zeros(0, bool)
    first, end = group_bounds(new)
    joined, last = runs.take(first), runs.take(end - 1)
    joined = replace(joined, count=last.start + last.count - joined.start)
    joined = joined.take(~np.isin(joined.tensor, clashing))
    yield from _box_faults(shapes, boxes, joined, frozenset(clashing.tolist()))


def _overlap(boxes: tuple[I64, I64], pair: _Runs) -> Fault:
    """Return the fault for two runs of a tensor that overlap. Its region is the overlap of the boxes around the two runs."""
    # lows, highs (2, D): the box around each of the two runs.
    lows, highs = bounds(boxes[0][pair.box], boxes[1][pair.box], pair.start, pair.count)
    low = lows.max(axis=0)
    high = np.maximum(highs.min(axis=0), low)
    return Fault(int(pair.tensor[0]), tuple(pair.row.tolist()), tuple(low.tolist()), tuple(high.tolist()), missing=0)


def _box_faults(shapes: I64, boxes: tuple[I64, I64], joined: _Runs, reported: frozenset[int]) -> Iterator[Fault]:
    """Find overlaps and gaps between the boxes of each tensor, except for tensors in `reported`."""
    cut = decompose(boxes[1][joined.box], joined.start, joined.count)
    # The cut boxes stay in order of tensor: the boxes of tensor t are first[t] : first[t + 1].
    tensor = joined.tensor[cut.parent]
    low = boxes[0][joined.box[cut.parent]] + cut.offsets
    first = np.searchsorted(tensor, np.arange(len(shapes) + 1))
    sizes, num = volumes(shapes), np.diff(first)
    slabs = _are_slabs(shapes, tensor, low, cut.lengths)
    verified: set[bytes] = set()
    for t in np.flatnonzero(((sizes > 0) | (num > 0)) & ~slabs).tolist():
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


def _are_slabs(shapes: I64, tensor: I64, low: I64, lengths: I64) -> Mask:
    """Mark the tensors that are cut along one dim only, into boxes that follow each other from their beginning to their end."""
    # lacking[b]: the number of dims on which box b is shorter than its tensor. dim[b]: the last of them.
    lacking, dim = np.zeros((2, len(tensor)), np.int64)
    for d in range(shapes.shape[1]):
        lacks = lengths[:, d] != shapes[tensor, d]
        lacking += lacks
        dim[lacks] = d
    row = np.arange(len(tensor))
    order = lex_order(tensor, low[row, dim])
    tensor, dim = tensor[order], dim[order]
    begin, size = low[order, dim], shapes[tensor, dim]
    end = begin + lengths[order, dim]
    # first[b], last[b]: box b is the first or the last of its tensor. A box that is neither touches the one before it.
    first = is_new(tensor)
    last = np.append(first[1:], True)[: len(first)]
    touches = np.where(first, begin == 0, (begin == np.append(0, end)[:-1]) & (dim == np.append(0, dim)[:-1]))
    wrong = (lacking > 1)[order] | ~touches | (last & (end != size))
    boxes, faults = np.bincount(tensor, minlength=len(shapes)), np.bincount(tensor[wrong], minlength=len(shapes))
    slabs: Mask = (boxes > 0) & (faults == 0)
    return slabs


def find_overlap(offsets: I64, lengths: I64) -> tuple[int, int] | None:
    """Find two boxes that share an element; return their indices, or None if no two do.

    Only boxes that meet along one dim are compared: the dim on which the fewest do. Raise `UnsupportedError` if more than
    `MAX_SWEPT` pairs meet on every dim.
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
        a, b = offsets[left], offsets[right]
        hit = np.flatnonzero(all_less(a, b + lengths[right]) & all_less(b, a + lengths[left]))
        if len(hit):
            return int(left[hit[0]]), int(right[hit[0]])
    return None


def _sweep(offsets: I64, lengths: I64, dim: int) -> tuple[I64, I64]:
    """Sort boxes by where they begin along a dim.

    Return the order, and for each box how many following ones begin before its end.
    """
    order = np.argsort(offsets[:, dim], kind="stable")
    begin = offsets[order, dim]
    until = np.searchsorted(begin, begin + lengths[order, dim], side="left")
    return order, np.maximum(until - np.arange(len(order)) - 1, 0)


def find_gap(shape: I64, offsets: I64, lengths: I64) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Find a box of the tensor that none of these disjoint boxes touches. The boxes must not fill the tensor.

    The tensor is cut in two at a face of some box, again and again, until a part is free.

    >>> find_gap(np.array([4, 2]), np.array([[0, 0], [3, 0]]), np.array([[2, 2], [1, 2]]))
    ((2, 0), (3, 2))
    """
    low, high = np.zeros_like(shape), shape.copy()
    while True:
        # begin, end: the boxes clipped to the region low : high; none inside means that the region is free.
        begin, end = np.maximum(offsets, low), np.minimum(offsets + lengths, high)
        inside = np.flatnonzero(all_less(begin, end))
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
    """Return a dim and coordinate at which to halve a region: the median of the boxes' edges inside, on the dim with most."""
    faces = []
    for dim in range(len(low)):
        first, last = begin[:, dim], end[:, dim]
        faces.append(np.concatenate([first[first > low[dim]], last[last < high[dim]]]))
    dim = max(range(len(faces)), key=lambda d: len(faces[d]))
    assert len(faces[dim]), "a box fills the region, so nothing of it is uncovered"
    middle = len(faces[dim]) // 2
    return dim, int(np.partition(faces[dim], middle)[middle])


@dataclass(frozen=True, slots=True)
class CutRuns(ColumnTable):
    """Runs after cutting. For each part: the run that it comes from (`source`), and its elements ``start, count`` of the box."""

    source: I64
    start: I64
    count: I64


def cut_overlaps(tensor: I64, box: I64, start: I64, count: I64, may_cut: Mask) -> CutRuns | None:
    """Cut runs of a box that overlap without being equal, so that every two parts are equal or disjoint.

    Parameters
    ----------
    tensor, box, start, count : (R,)
        Runs in the order of their tensor, box and start.
    may_cut : (R,)
        Whether a run may be written in parts. If a box has a run that may not, none of its runs are cut.

    Returns
    -------
    CutRuns or None
        All runs, cut or not; None if nothing is to be cut.

    Examples
    --------
    Two ranks hold elements 0 to 5 and 4 to 9 of a box; both hold 4 and 5.

    >>> zero = np.zeros(2, np.int64)
    >>> cut = cut_overlaps(zero, zero, np.array([0, 4]), np.array([6, 6]), zero == 0)
    >>> list(zip(cut.source.tolist(), cut.start.tolist(), cut.count.tolist()))
    [(0, 0, 4), (0, 4, 2), (1, 4, 2), (1, 6, 4)]
    """
    if len(tensor) == 0:
        return None
    end = start + count
    # group[i]: the number of run i's pair of tensor and box. unequal[i]: run i differs from the run before it in the same box.
    first = is_new(tensor, box)
    group = np.cumsum(first) - 1
    unequal = ~first & is_new(start, count)
    # Starts ascend within a group, so a run overlaps an earlier one exactly if it begins before the largest end so far.
    clash = unequal[1:] & (start[1:] < running_max(end, first)[:-1])
    if not clash.any():
        return None
    # chosen: the groups to cut, with all of their runs, so that equal parts of any two runs become equal runs.
    chosen = np.zeros(int(group[-1]) + 1, bool)
    chosen[group[1:][clash]] = True
    chosen[group[~may_cut]] = False
    rows = np.flatnonzero(chosen[group])
    if len(rows) == 0:
        return None
    rest = np.flatnonzero(~chosen[group])
    source, low, high = _cut_at_bounds(rows, group[rows], start[rows], end[rows])
    return CutRuns(
        source=np.concatenate([rest, source]),
        start=np.concatenate([start[rest], low]),
        count=np.concatenate([count[rest], high - low]),
    )


def _cut_at_bounds(rows: I64, group: I64, start: I64, end: I64) -> tuple[I64, I64, I64]:
    """Cut each run at all starts and ends of the other runs in its group. Return the input row, start and end of each part."""
    # All groups are laid on one axis, one behind the other, so that one sorted array has the bounds of all.
    base = (np.cumsum(is_new(group)) - 1) * (int(end.max()) + 1)
    bounds = np.unique(np.concatenate([base + start, base + end]))
    low = np.searchsorted(bounds, base + start)
    high = np.searchsorted(bounds, base + end)
    # owner[i]: the row that part i is cut from; at[i]: the index of the bound where it begins.
    owner, offset = ranges(high - low)
    at = low[owner] + offset
    return rows[owner], bounds[at] - base[owner], bounds[at + 1] - base[owner]
