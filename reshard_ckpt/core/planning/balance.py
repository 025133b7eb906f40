"""Balancing: what each rank of a replica group writes, so that all write nearly the same number of bytes.

1. What only one rank holds is written by it.
2. What may not be split goes whole, largest first, to the rank of its group that has least so far.
3. What may be split is laid end to end, one stream a replica group, and cut where the ranks' loads come out level; groups of few
   ranks are levelled first, since larger ones can still make up for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..geometry.columns import ColumnTable
from ..geometry.runs import I64

ROW_ALIGN_BYTES = 256 << 10
"""A cut moves to the nearest slice of the outermost dim where such a slice is smaller than this, and than 2 % of a rank's
share: the parts then are boxes."""


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Items held by the same ranks: `items` may be split, `solid` may not; both are item indices."""

    ranks: I64
    items: I64
    solid: I64


@dataclass(frozen=True, slots=True)
class Assigned(ColumnTable):
    """Who writes what: elements ``[start, start + count)`` of the item, counted from the item's own beginning."""

    item: I64
    rank: I64
    start: I64
    count: I64


def level(loads: I64, total: int) -> I64:
    """Shares of ``total`` that bring the loads as level as can be.

    >>> level(np.array([0, 10, 4]), 10).tolist()
    [7, 0, 3]
    """
    order = np.argsort(loads, kind="stable")
    ordered = loads[order]
    # Water reaches the k-th lowest load after filling all lower ones up to it.
    fill = ordered * np.arange(1, len(loads) + 1) - np.cumsum(ordered)
    wet = int(np.searchsorted(fill, total, side="right"))
    height, rest = divmod(total + int(ordered[:wet].sum()), wet)
    share = np.zeros_like(loads)
    share[order[:wet]] = height - ordered[:wet]
    share[order[:rest]] += 1
    return share


def assign(groups: list[ReplicaGroup], num_elements: I64, item_bytes: I64, slice_elements: I64, loads: I64) -> Assigned:
    """Divide every group's items over its ranks.

    Parameters
    ----------
    groups
        Each with at least one rank; processed in order of size.
    num_elements, item_bytes, slice_elements : (I,)
        Of each item: its elements, bytes of one element, elements of one slice of its outermost dim.
    loads : (ranks,)
        Bytes that each rank writes already; updated in place.
    """
    parts: list[tuple[I64, I64, I64, I64]] = []
    groups = sorted(groups, key=lambda group: (len(group.ranks), int(group.ranks[0])))
    for group in groups:
        sizes = num_elements[group.solid] * item_bytes[group.solid]
        for i in group.solid[np.argsort(-sizes, kind="stable")].tolist():
            rank = group.ranks[np.argmin(loads[group.ranks])]
            loads[rank] += num_elements[i] * item_bytes[i]
            parts.append((np.array([i]), np.array([rank]), np.array([0]), num_elements[i : i + 1]))
    for group in groups:
        if len(group.items):
            parts.append(_cut_stream(group, num_elements, item_bytes, slice_elements, loads))
    if not parts:
        empty = np.zeros(0, np.int64)
        return Assigned(empty, empty, empty, empty)
    item, rank, start, count = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Assigned(item, rank, start, count)


def _cut_stream(
    group: ReplicaGroup, num_elements: I64, item_bytes: I64, slice_elements: I64, loads: I64
) -> tuple[I64, I64, I64, I64]:
    items = group.items
    ends = np.cumsum(num_elements[items] * item_bytes[items])
    quota = level(loads[group.ranks], int(ends[-1]))
    at = np.cumsum(quota)[:-1]
    where = np.minimum(np.searchsorted(ends, at, side="right"), len(items) - 1)
    cut_item = items[where]
    begin = ends[where] - num_elements[cut_item] * item_bytes[cut_item]
    element = (at - begin) // item_bytes[cut_item]
    tolerance = min(ROW_ALIGN_BYTES, int(ends[-1]) // (50 * len(group.ranks)))
    step = np.where(slice_elements[cut_item] * item_bytes[cut_item] <= tolerance, slice_elements[cut_item], 1)
    element = np.minimum((element + step // 2) // step * step, num_elements[cut_item])
    # Parts lie between neighbouring bounds: the ends of the items and the cuts, each with the number of cuts before it.
    bound_item = np.concatenate([np.arange(len(items)), where])
    bound_element = np.concatenate([np.zeros(len(items), np.int64), element])
    turn = np.concatenate([np.zeros(len(items), np.int64), np.arange(1, len(at) + 1)])
    order = np.lexsort((turn, bound_element, bound_item))
    bound_item, bound_element = bound_item[order], bound_element[order]
    turn = np.maximum.accumulate(turn[order])
    next_item = np.append(bound_item[1:], -1)
    stop = np.where(next_item == bound_item, np.append(bound_element[1:], 0), num_elements[items[bound_item]])
    count = stop - bound_element
    keep = count > 0
    item, rank = items[bound_item[keep]], group.ranks[turn[keep]]
    np.add.at(loads, rank, count[keep] * item_bytes[item])
    return item, rank, bound_element[keep], count[keep]
