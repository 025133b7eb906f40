"""Cuts runs of one box that overlap without being equal wherever any of them begins or ends, so that equal parts become replicas.

A flat optimizer over tensor-parallel ranks makes such runs. A weight that all of these ranks replicate lies at another place in
each rank's buffer if their other shards differ in size, so each rank cuts the weight elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .columns import ColumnTable
from .ordering import is_new, running_max
from .runs import I64, ranges


@dataclass(frozen=True, slots=True)
class CutRuns(ColumnTable):
    """Runs after cutting: the index of the run that each is a part of, and its elements of the box."""

    source: I64
    start: I64
    count: I64


def cut_overlaps(tensor: I64, box: I64, start: I64, count: I64, may_cut: NDArray[np.bool_]) -> CutRuns | None:
    """Cut runs of one box that overlap without being equal.

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
    """Cut each row at all bounds of its group that lie inside it; returns the row, start and end of each part."""
    # All groups are laid on one axis, one behind the other, so that one sorted array has the bounds of all.
    base = (np.cumsum(is_new(group)) - 1) * (int(end.max()) + 1)
    bounds = np.unique(np.concatenate([base + start, base + end]))
    low = np.searchsorted(bounds, base + start)
    high = np.searchsorted(bounds, base + end)
    # owner[i]: the row that part i is cut from; at[i]: the index of the bound where it begins.
    owner, offset = ranges(high - low)
    at = low[owner] + offset
    return rows[owner], bounds[at] - base[owner], bounds[at + 1] - base[owner]
