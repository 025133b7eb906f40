"""The plan of the reads of a load: byte ranges of files that contain every wanted byte once, and few other bytes.

1. Each item touches byte runs of its file. Runs that lie close together count as one, so that a slice of short rows is one read.
2. If the blocks of a file are verified, ranges grow to whole blocks.
3. An item whose bytes are in order in the file and in memory *lands*: it is read straight into its destination, without a copy.
   Items that follow each other on both sides land as one run. All other items are copied to their place from the window's buffer.
4. Ranges of one window that meet, or nearly meet, merge into *extents*.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..geometry.columns import ColumnTable, is_new, running_max
from ..geometry.runs import I64, Mask, ranges, volumes
from .load_plan import LoadPlan

NEAR_BYTES = 64 << 10
"""Byte runs closer together than this are read as one, because reading such a gap costs less than another request."""

LAND_BYTES = 512
"""Smaller runs are copied from the window's buffer, because that is less work than one more buffer in the request."""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Windows, sorted by group, file and position, each with a range of extents, of runs that land, and of items to copy.

    Window w has the extents ``extent_start[w] : extent_start[w + 1]``; `run_start` and `item_start` are read alike. An extent is
    the bytes ``low : high`` of the file; run r lands ``run_bytes[r]`` bytes from ``run_src[r]`` in ``run_dest[r]``.
    """

    group: I64
    file: I64
    window: I64
    """The window's number in the load plan."""
    extent_start: I64
    low: I64
    high: I64
    run_start: I64
    run_src: I64
    run_bytes: I64
    run_dest: I64
    run_dst: I64
    """Where the run lands, in bytes from the destination's first element."""
    item_start: I64
    items: I64
    """The items to copy, as indices into the load plan."""

    @property
    def num_windows(self) -> int:
        return len(self.file)

    @property
    def num_bytes(self) -> int:
        """The bytes that will be read."""
        return int((self.high - self.low).sum())


@dataclass(frozen=True, slots=True)
class _Ranges(ColumnTable):
    """Byte ranges of windows; a range is read together with the one before it if the gap is at most ``near`` bytes."""

    window: I64
    low: I64
    high: I64
    near: I64


def item_spans(plan: LoadPlan) -> I64:
    """Return the bytes from the first to the last byte of each item in its file."""
    span: I64 = ((plan.lengths - 1) * plan.src_strides).sum(axis=1) + plan.item_bytes
    return span


def in_order(lengths: I64, strides: I64, unit: I64) -> Mask:
    """Tell for each region whether its elements are consecutive, with strides counted in the given unit.

    ``unit`` is an element's size in that unit: its bytes for byte strides, 1 for element strides.
    """
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
        Block size of each file, or 0 if its blocks are not verified.
    file_bytes : (files,)
        Size of each file.
    may_land : (dests,)
        Whether bytes may be read straight into this destination, which must be host memory of the same dtype.
    group : (items,), optional
        The group of each item. Items of different groups are never read together, because groups are loaded one after the other.
    """
    batch = np.zeros(len(plan.file), np.int64) if group is None else group
    # order: the items by group, file, window and position; lands, begins: for each item in this order.
    order = np.lexsort((plan.src, plan.window, plan.file, batch))
    lands = _lands(plan, order, may_land, is_new(batch[order], plan.file[order]))
    begins = is_new(batch[order], plan.file[order], plan.window[order])
    # number: the window of each item in order; window_of: the same, in the items' original order.
    number = np.cumsum(begins) - 1
    first, count = order[begins], int(begins.sum())
    window_of = np.empty_like(number)
    window_of[order] = number
    extent_of, low, high = _extents(plan, window_of, block_bytes, file_bytes)
    run_of, run_src, run_bytes, run_dest, run_dst = _runs(plan, order[lands], number[lands])
    return ReadPlan(
        group=batch[first],
        file=plan.file[first],
        window=plan.window[first],
        extent_start=_starts(extent_of, count),
        low=low,
        high=high,
        run_start=_starts(run_of, count),
        run_src=run_src,
        run_bytes=run_bytes,
        run_dest=run_dest,
        run_dst=run_dst,
        item_start=_starts(number[~lands], count),
        items=order[~lands],
    )


def _starts(window: I64, count: int) -> I64:
    """Find where the rows of each window begin among rows sorted by window; the last entry is their number."""
    return np.searchsorted(window, np.arange(count + 1))


def _extents(plan: LoadPlan, window_of: I64, block_bytes: I64, file_bytes: I64) -> tuple[I64, I64, I64]:
    """Find the extents: the window, the first byte and the end of each."""
    owner, low, high = _touched(plan)
    file = plan.file[owner]
    block = np.maximum(block_bytes[file], 1)
    # From here on a range consists of whole blocks if the blocks of its file are verified.
    ends = np.minimum(-(-high // block) * block, file_bytes[file])
    touched = _Ranges(window_of[owner], low // block * block, ends, np.where(block_bytes[file] > 0, 0, NEAR_BYTES))
    touched = touched.take(np.lexsort((touched.low, touched.window)))
    begins = is_new(touched.window)
    # reach[i]: largest end of the window's ranges up to i; fresh[i]: range i begins too far behind reach[i - 1].
    reach = running_max(touched.high, begins)
    fresh = begins.copy()
    fresh[1:] |= touched.low[1:] > reach[:-1] + touched.near[1:]
    # first, last: the first and the last range of each extent.
    first = np.flatnonzero(fresh)
    last = np.append(first[1:], len(fresh))[: len(first)] - 1
    return touched.window[first], touched.low[first], reach[last]


def _runs(plan: LoadPlan, items: I64, window: I64) -> tuple[I64, I64, I64, I64, I64]:
    """Join items that land, sorted by window and position, into runs.

    Returns
    -------
    window, first byte in the file, size in bytes, destination, first byte in the destination
        Of each run.
    """
    span, fresh = item_spans(plan)[items], ~_follows(plan, items) | is_new(window)
    first = np.flatnonzero(fresh)
    total = np.add.reduceat(span, first) if len(first) else span
    i = items[first]
    return window[first], plan.src[i], total, plan.dest[i], plan.dst[i] * plan.item_bytes[i]


def _follows(plan: LoadPlan, items: I64) -> Mask:
    """Mark the items that begin, in the file and in memory, just where the item before them ends; items come in order."""
    file, src, dest, span = plan.file[items], plan.src[items], plan.dest[items], item_spans(plan)[items]
    dst = plan.dst[items] * plan.item_bytes[items]
    follows = ~is_new(file, dest)
    follows[1:] &= (src[1:] == src[:-1] + span[:-1]) & (dst[1:] == dst[:-1] + span[:-1])
    return follows


def _touched(plan: LoadPlan) -> tuple[I64, I64, I64]:
    """List the byte ranges that each item touches: its runs, joined over every dim along which they lie near each other.

    Returns
    -------
    owner, low, high
        The item of each range, its first byte and its end.
    """
    # From the innermost dim outwards. span[i]: bytes of one joined run of item i; joined[i]: all dims so far could be joined.
    # repeats[i]: for each dim the number of runs along it, 1 if they are joined.
    span = plan.item_bytes.copy()
    joined = np.ones(len(span), bool)
    repeats = np.ones_like(plan.lengths)
    for dim in range(plan.lengths.shape[1] - 1, -1, -1):
        length, stride = plan.lengths[:, dim], plan.src_strides[:, dim]
        joined &= (length == 1) | (stride - span <= NEAR_BYTES)
        span = np.where(joined, span + (length - 1) * stride, span)
        repeats[:, dim] = np.where(joined, 1, length)
    # One entry for each run of each item; step is its number, whose mixed-radix digits are its indices.
    owner, step = ranges(volumes(repeats))
    low = plan.src[owner].copy()
    for dim in range(plan.lengths.shape[1] - 1, -1, -1):
        step, index = np.divmod(step, repeats[owner, dim])
        low += index * plan.src_strides[owner, dim]
    return owner, low, low + span[owner]


def _lands(plan: LoadPlan, items: I64, may_land: Mask, new: Mask) -> Mask:
    """Mark the items that may land; `new` marks the first item of each file and group."""
    src, span = plan.src[items], item_spans(plan)[items]
    lengths, unit = plan.lengths[items], plan.item_bytes[items]
    good = may_land[plan.dest[items]]
    good &= in_order(lengths, plan.src_strides[items], unit)
    good &= in_order(lengths, plan.dst_strides[items], np.ones_like(unit))
    # Bytes that two items want are read once, into the window's buffer, and copied to both, so neither item lands.
    ends = running_max(src + span, new)
    clash = ~new[1:] & (src[1:] < ends[:-1])
    good[1:] &= ~clash
    good[:-1] &= ~clash
    # The size of all items that land as one run counts, because windows cut rows at arbitrary places.
    follows = _follows(plan, items) & ~new
    follows[1:] &= good[1:] & good[:-1]
    run = np.cumsum(~follows) - 1
    good &= np.bincount(run, weights=span)[run] >= LAND_BYTES
    return good
