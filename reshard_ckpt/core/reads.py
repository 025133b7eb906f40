"""Which byte ranges are read, so that every wanted byte comes once and few others do?

1. An item touches byte runs of its file; runs that lie close together count as one, so that a slice of short rows is one read.
2. Where blocks are verified, ranges grow to whole blocks.
3. Ranges of one window that meet, or nearly meet, merge into *extents*.
4. An item whose bytes are in order on both sides may land in its destination *directly*, without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .geometry import I64, ranges, volumes
from .load_plan import LoadPlan

Mask = NDArray[np.bool_]

NEAR_BYTES = 64 << 10
"""Runs closer together than this are read as one: a gap of this size costs less than another request."""

DIRECT_BYTES = 16 << 10
"""Smaller items are copied from the window's buffer: less work than one more buffer in the request."""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Windows, each with a range of extents and of items, sorted by group, file and position."""

    group: I64
    file: I64
    extent_start: I64
    item_start: I64
    low: I64
    high: I64
    items: I64
    """Indices into the load plan."""
    direct: Mask
    """For each of `items`: its bytes may land in the destination."""

    @property
    def num_windows(self) -> int:
        return len(self.file)

    @property
    def num_bytes(self) -> int:
        """Bytes that will be read."""
        return int((self.high - self.low).sum())


def item_spans(plan: LoadPlan) -> I64:
    """Bytes from the first to the last of each item in its file."""
    span: I64 = ((plan.lengths - 1) * plan.src_strides).sum(axis=1) + plan.item_bytes
    return span


def in_order(lengths: I64, strides: I64, unit: I64) -> Mask:
    """Whether each region's elements are consecutive, for strides in the unit given."""
    step = unit.copy()
    good = np.ones(len(lengths), bool)
    for dim in range(lengths.shape[1] - 1, -1, -1):
        good &= (lengths[:, dim] == 1) | (strides[:, dim] == step)
        step = step * lengths[:, dim]
    return good


def plan_reads(plan: LoadPlan, block_bytes: I64, file_bytes: I64, may_land: Mask, group: I64 | None = None) -> ReadPlan:
    """Plan the requests for all items.

    Parameters
    ----------
    block_bytes : (files,)
        Block size of each file where its blocks are to be verified, 0 where they are not.
    file_bytes : (files,)
        Size of each file.
    may_land : (dests,)
        Whether bytes may be read straight into this destination (host memory of the same dtype).
    group : (items,), optional
        Items of different groups are never read together, as groups are wanted one after the other.
    """
    batch = np.zeros(len(plan.file), np.int64) if group is None else group
    owner, low, high = _touched(plan)
    file, window, of_group = plan.file[owner], plan.window[owner], batch[owner]
    block = np.maximum(block_bytes[file], 1)
    low = low // block * block
    high = np.minimum(-(-high // block) * block, file_bytes[file])
    order = np.lexsort((low, window, file, of_group))
    file, window, low, high, of_group = file[order], window[order], low[order], high[order], of_group[order]
    near = np.where(block_bytes[file] > 0, 0, NEAR_BYTES)
    begins = _changes(of_group, file, window)
    reach = _running_max(high, begins)
    fresh = begins.copy()
    fresh[1:] |= low[1:] > reach[:-1] + near[1:]
    first = np.flatnonzero(fresh)
    last = np.append(first[1:], len(order))[: len(first)] - 1
    new_window = begins[first]
    items = np.lexsort((plan.src, plan.window, plan.file, batch))
    new_item = _changes(batch[items], plan.file[items], plan.window[items])
    return ReadPlan(
        group=of_group[first[new_window]],
        file=file[first[new_window]],
        extent_start=np.append(np.flatnonzero(new_window), len(first)),
        item_start=np.append(np.flatnonzero(new_item), len(items)),
        low=low[first],
        high=reach[last],
        items=items,
        direct=_direct(plan, items, may_land, _changes(batch[items], plan.file[items])),
    )


def _changes(*columns: I64) -> Mask:
    """Where any of the columns has another value than one row before; the first row counts."""
    new = np.ones(len(columns[0]), bool)
    new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return new


def _touched(plan: LoadPlan) -> tuple[I64, I64, I64]:
    """Byte ranges that each item touches: its runs, joined over every dim along which they lie near each other."""
    span = plan.item_bytes.copy()
    joined = np.ones(len(span), bool)
    repeats = np.ones_like(plan.lengths)
    for dim in range(plan.lengths.shape[1] - 1, -1, -1):
        length, stride = plan.lengths[:, dim], plan.src_strides[:, dim]
        joined &= (length == 1) | (stride - span <= NEAR_BYTES)
        span = np.where(joined, span + (length - 1) * stride, span)
        repeats[:, dim] = np.where(joined, 1, length)
    owner, step = ranges(volumes(repeats))
    low = plan.src[owner].copy()
    for dim in range(plan.lengths.shape[1] - 1, -1, -1):
        step, index = np.divmod(step, repeats[owner, dim])
        low += index * plan.src_strides[owner, dim]
    return owner, low, low + span[owner]


def _running_max(values: I64, group: Mask) -> I64:
    """The largest value so far within each group (groups begin where `group` is true)."""
    if len(values) == 0:
        return values
    number = np.cumsum(group)
    step = int(values.max()) + 1
    reach: I64 = np.maximum.accumulate(values + number * step) - number * step
    return reach


def _direct(plan: LoadPlan, items: I64, may_land: Mask, new: Mask) -> Mask:
    """Which items may land directly; `new` says where those of another file, or group, begin."""
    src, span = plan.src[items], item_spans(plan)[items]
    lengths, unit = plan.lengths[items], plan.item_bytes[items]
    good = (span >= DIRECT_BYTES) & may_land[plan.dest[items]]
    good &= in_order(lengths, plan.src_strides[items], unit)
    good &= in_order(lengths, plan.dst_strides[items], np.ones_like(unit))
    # Bytes that two items want are read once, into the buffer from which both are copied.
    ends = _running_max(src + span, new)
    alone = np.ones(len(items), bool)
    clash = ~new[1:] & (src[1:] < ends[:-1])
    alone[1:] &= ~clash
    alone[:-1] &= ~clash
    return good & alone
