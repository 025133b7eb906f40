"""Balancing: divide data that several ranks hold over these ranks, so that all write (or send) nearly equally many bytes.

An *item* is a run of elements that the same ranks hold; a *replica group* is all items of one set of ranks.

1. Items that only one rank holds count as its load from the start.
2. An item that may not be split goes whole, largest first, to the rank of its group that has the least so far.
3. Items that may be split are laid end to end, one stream for each replica group, and cut where the ranks' loads come out level.
   Groups of few ranks are levelled first, because larger groups can still make up for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..geometry.columns import ColumnTable, concatenated
from ..geometry.runs import I64

ROW_ALIGN_BYTES = 256 << 10
"""A cut moves to the nearest edge between slices of an item's outermost dim, so that both parts are boxes, if a slice has at most
this many bytes, and at most 2 % of a rank's share."""


class ReplicaGroup(NamedTuple):
    """The items (runs of elements) that one set of ranks holds: those in `items` may be split, those in `solid` may not.

    Both are item indices.
    """

    ranks: I64
    items: I64
    solid: I64


@dataclass(frozen=True, slots=True)
class Assigned(ColumnTable):
    """The parts that ranks write, as columns: elements ``start : start + count``, counted within an item (a run of elements)."""

    item: I64
    rank: I64
    start: I64
    count: I64


def level_shares(loads: I64, total: int) -> I64:
    """Divide a total of bytes over ranks so that their loads end up as level as possible. Return each rank's share, (ranks,).

    >>> level_shares(np.array([0, 10, 4]), 10).tolist()
    [7, 0, 3]
    """
    order = np.argsort(loads, kind="stable")
    ordered = loads[order]
    # Water fills the lowest loads first. fill[k]: the water that it takes to raise the k lower loads to load k.
    # wet: how many loads the water reaches; height: its level; rest: units left over, one more for each of the first loads.
    fill = ordered * np.arange(1, len(loads) + 1) - np.cumsum(ordered)
    wet = int(np.searchsorted(fill, total, side="right"))
    height, rest = divmod(total + int(ordered[:wet].sum()), wet)
    share = np.zeros_like(loads)
    share[order[:wet]] = height - ordered[:wet]
    share[order[:rest]] += 1
    return share


def assign(groups: list[ReplicaGroup], num_elements: I64, item_bytes: I64, slice_elements: I64, loads: I64) -> Assigned:
    """Divide the items of each replica group over the ranks of the group, so that all ranks write about equally many bytes.

    Return the parts that each rank writes.

    Parameters
    ----------
    groups
        The replica groups; each has at least one rank.
    num_elements, item_bytes, slice_elements : (I,)
        For each item: its elements, the bytes of one element, the elements of one slice of its outermost dim.
    loads : (ranks,)
        Bytes that each rank writes already; updated in place.
    """
    parts = [Assigned.empty()]
    groups = sorted(groups, key=lambda group: (len(group.ranks), int(group.ranks[0])))
    # The solid items of all groups come first, because the streams can level out the loads that these cause.
    for group in groups:
        sizes = num_elements[group.solid] * item_bytes[group.solid]
        for i in group.solid[np.argsort(-sizes, kind="stable")].tolist():
            rank = group.ranks[np.argmin(loads[group.ranks])]
            loads[rank] += num_elements[i] * item_bytes[i]
            parts.append(Assigned(np.array([i]), np.array([rank]), np.array([0]), num_elements[i : i + 1]))
    for group in groups:
        if len(group.items):
            parts.append(_cut_stream(group, num_elements, item_bytes, slice_elements, loads))
    return concatenated(parts)


def _cut_stream(group: ReplicaGroup, num_elements: I64, item_bytes: I64, slice_elements: I64, loads: I64) -> Assigned:
    """Cut the items of a group, laid end to end, into parts for its ranks. Return the parts, and add their bytes to `loads`."""
    # first[i], ends[i]: the bytes of the stream before item i, and up to its end; quota: bytes for each rank; at: the cuts.
    items = group.items
    each, ends = item_bytes[items], np.cumsum(num_elements[items] * item_bytes[items])
    first = ends - num_elements[items] * each
    quota = level_shares(loads[group.ranks], int(ends[-1]))
    at = np.cumsum(quota)[:-1]
    # where[c]: the item in which cut c lies; element[c]: the element of that item before which it cuts.
    where = np.minimum(np.searchsorted(ends, at, side="right"), len(items) - 1)
    element = (at - first[where]) // each[where]
    # A cut moves to a multiple of `step` elements: a slice if slices are small enough, else one element.
    tolerance = min(ROW_ALIGN_BYTES, int(ends[-1]) // (50 * len(group.ranks)))
    slices = slice_elements[items[where]]
    step = np.where(slices * each[where] <= tolerance, slices, 1)
    element = np.minimum((element + step // 2) // step * step, num_elements[items[where]])
    at = first[where] + element * each[where]
    # A part lies between two neighbouring bounds, which are the beginnings of the items and the cuts.
    bounds = np.unique(np.concatenate([first, at, ends[-1:]]))
    begin, num_bytes = bounds[:-1], np.diff(bounds)
    part = np.searchsorted(ends, begin, side="right")
    rank = group.ranks[np.searchsorted(at, begin, side="right")]
    np.add.at(loads, rank, num_bytes)
    return Assigned(items[part], rank, (begin - first[part]) // each[part], num_bytes // each[part])
