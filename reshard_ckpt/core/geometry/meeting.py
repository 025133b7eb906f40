"""Pairs of boxes of one tensor that share an element.

1. A box is compared with all other boxes of its tensor, which is fastest if there are few pairs.
2. A tensor with many more pairs than boxes is *crowded*. Its boxes are sorted along one dim, on which they begin at the most
   places, and a box is compared only with the boxes that it can reach along that dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .columns import batches
from .ordering import is_new, lex_order
from .runs import I64, ranges

MAX_PAIRS = 1 << 20
"""The most pairs compared in one step; bounds memory without changing the result."""

CROWDED = 8
"""A tensor is crowded if it has this many times more pairs than boxes: sorting its boxes is then faster than comparing all."""


@dataclass(frozen=True, slots=True)
class TensorBoxes:
    """Boxes of tensors; tensors are numbered from 0 without large gaps."""

    tensor: I64
    offsets: I64
    lengths: I64


def meet(one: TensorBoxes, other: TensorBoxes) -> tuple[I64, I64]:
    """Find the pairs of boxes of the same tensor that share an element; an empty box is in no pair.

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
    found = [_touching(one, other, right, first, last, part) for part in batches(last - first, MAX_PAIRS)]
    if len(found) == 1:
        return found[0]
    left, met = zip(*found, strict=True) if found else ((), ())
    empty = np.zeros(0, np.int64)
    return np.concatenate([empty, *left]), np.concatenate([empty, *met])


def _swept(
    one: TensorBoxes, other: TensorBoxes, right: I64, first: I64, last: I64, crowded: NDArray[np.bool_]
) -> tuple[I64, I64, I64]:
    """Sort the boxes of crowded tensors along a dim, and narrow the range of candidates of each box of `one`."""
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
    # asking: boxes of `one` of crowded tensors; own_low, own_high: their bounds along the same dim.
    asking = np.flatnonzero(crowded[one.tensor])
    mine = one.tensor[asking]
    own_low = one.offsets[asking, dim[mine]]
    own_high = own_low + one.lengths[asking, dim[mine]]
    # All tensors are laid on one axis, one behind the other. A coordinate is replaced by its rank among all coordinates, so that
    # no number on that axis is too large.
    coordinates = np.unique(np.concatenate([low, high, own_low, own_high]))

    def on_axis(tensors: I64, values: I64) -> I64:
        return tensors * len(coordinates) + np.searchsorted(coordinates, values)

    # reach[i]: the largest end of boxes 0 to i, ascending although ends are not, so that it can be bisected.
    reach = np.maximum.accumulate(on_axis(tensor, high))
    begin = np.searchsorted(reach, on_axis(mine, own_low), side="right")
    end = np.maximum(np.searchsorted(on_axis(tensor, low), on_axis(mine, own_high), side="left"), begin)
    # begin and end count among the boxes of crowded tensors; shift turns them into positions in right.
    shift = first[asking] - np.searchsorted(tensor, mine)
    first, last = first.copy(), last.copy()
    first[asking], last[asking] = begin + shift, end + shift
    return right, first, last


def _sweep_dims(boxes: TensorBoxes, chosen: I64, num: int) -> I64:
    """Choose the dim to sweep for each tensor: the dim on which the chosen boxes begin at the most places."""
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


def _touching(one: TensorBoxes, other: TensorBoxes, right: I64, first: I64, last: I64, part: slice) -> tuple[I64, I64]:
    """Compare some boxes of `one` with all their candidates; returns the pairs that share an element."""
    owner, step = ranges((last - first)[part])
    # One entry for each candidate pair: left[k] in `one`, met[k] in `other`; hit: the pairs that overlap on every dim.
    left, met = owner + part.start, right[first[part][owner] + step]
    low, high = one.offsets[left], other.offsets[met]
    hit = np.flatnonzero(((low < high + other.lengths[met]) & (high < low + one.lengths[left])).all(axis=1))
    return left[hit], met[hit]
