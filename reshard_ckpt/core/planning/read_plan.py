"""The plan of the reads of a load: byte ranges of files that contain every wanted byte once, and few other bytes.

An *item* of the load plan is a box that is copied from a file to a destination's memory, inside one *window* (part) of the file.

1. Each item touches byte runs of its file. Runs that lie close together count as one, so that a slice of short rows is one read.
2. If the blocks of a file are verified, ranges grow to whole blocks.
3. Items whose bytes are in order in the file and in memory are *runs*. A large run *lands*: it is read straight into its
   destination. Small runs are copied there from the window's buffer. Other items are copied from the buffer too, strided or cast.
4. Ranges of one window that meet, or nearly meet, merge into *extents*.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..geometry.columns import ColumnTable, group_bounds, is_new, running_max
from ..geometry.runs import I64, Mask, dot, ranges, volumes
from .load_plan import LoadPlan

NEAR_BYTES = 64 << 10
"""The largest gap in bytes that is read over: reading so few bytes costs less than another request."""

LAND_BYTES = 16 << 10
"""The least size in bytes of a run that is read straight into its destination. Copying a smaller one costs less than another
buffer."""


@dataclass(frozen=True, slots=True)
class Runs(ColumnTable):
    """Byte runs, as columns: ``size[r]`` bytes from byte ``src[r]`` of the file go to byte ``dst[r]`` of destination ``dest[r]``.

    `dst` counts from the first element of the destination's memory.
    """

    src: I64
    size: I64
    dest: I64
    dst: I64


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The windows (parts of files) to read, by group, file and position; each has byte ranges to read, and copies to make.

    Window w has the extents (byte ranges) ``extent_start[w] : extent_start[w + 1]``, and in the same way its landing runs (read
    straight into place), its copied runs and its items. Extent i is the bytes ``low[i] : high[i]`` of the file. A window's
    landing runs are sorted by their place in the file, its copied runs by destination.
    """

    group: I64
    file: I64
    window: I64
    """The number of each window within its file, as in the load plan."""
    extent_start: I64
    low: I64
    high: I64
    landing_start: I64
    landing: Runs
    copied_start: I64
    copied: Runs
    item_start: I64
    items: I64
    """The items that are copied element by element (strided or cast), as indices into the load plan."""
    may_land: Mask
    """For each destination, whether bytes may be read straight into its memory."""

    @property
    def num_windows(self) -> int:
        return len(self.file)

    @property
    def num_bytes(self) -> int:
        """The number of bytes that will be read: the size of all extents."""
        return int((self.high - self.low).sum())

    def targets(self, plan: LoadPlan, window: int, low: int = 0, high: int = 1 << 62, *, lands: bool | None = None) -> set[int]:
        """Return the destinations that need some of the bytes ``[low, high)`` of a window's file.

        A strided item counts with the bytes in its gaps. With ``lands=True``, return only destinations of runs that are read
        straight into place; with False, only the others.
        """
        found: set[int] = set()
        for runs, start, landing in ((self.landing, self.landing_start, True), (self.copied, self.copied_start, False)):
            if lands is None or lands is landing:
                part = runs.take(slice(*start[window : window + 2]))
                found.update(part.dest[(part.src < high) & (part.src + part.size > low)].tolist())
        if lands is not True:
            items = self.items[slice(*self.item_start[window : window + 2])]
            src = plan.src[items]
            found.update(plan.dest[items[(src < high) & (src + item_spans(plan)[items] > low)]].tolist())
        return found


def item_spans(plan: LoadPlan) -> I64:
    """Return the number of bytes from the first to the last byte of each item in its file, (items,)."""
    return dot(plan.lengths - 1, plan.src_strides) + plan.item_bytes


def in_order(lengths: I64, strides: I64, unit: I64) -> Mask:
    """Tell for each region, (N,), whether its elements are consecutive in row-major order.

    `strides` are in bytes or in elements, and ``unit`` is the size of an element in the same unit.
    """
    step = unit.copy()
    good = np.ones(len(lengths), bool)
    for dim in range(lengths.shape[1] - 1, -1, -1):
        good &= (lengths[:, dim] == 1) | (strides[:, dim] == step)
        step = step * lengths[:, dim]
    return good


def plan_reads(plan: LoadPlan, block_bytes: I64, file_bytes: I64, may_land: Mask, group: I64 | None = None) -> ReadPlan:
    """Plan which byte ranges of files to read for all items of a load plan.

    Parameters
    ----------
    block_bytes : (files,)
        Block size of each file, or 0 if its blocks are not verified.
    file_bytes : (files,)
        Size of each file.
    may_land : (dests,)
        Whether bytes may be read straight into this destination, which must be host memory of the same dtype.
    group : (items,), optional
        The group of each item, by default 0. Items of different groups are never read together: groups are loaded one after the
        other.
    """
    batch = np.zeros(len(plan.file), np.int64) if group is None else group
    # order: the items by group, file, window and position; plain, lands, begins: for each item in this order.
    order = np.lexsort((plan.src, plan.window, plan.file, batch))
    file, dst = plan.file[order], (plan.dst * plan.item_bytes)[order]
    spans = Runs(plan.src[order], item_spans(plan)[order], plan.dest[order], dst)
    unit = plan.item_bytes
    plain = may_land[plan.dest] & in_order(plan.lengths, plan.src_strides, unit)
    plain = (plain & in_order(plan.lengths, plan.dst_strides, np.ones_like(unit)))[order]
    lands = _landing(spans, plain, is_new(batch[order], file))
    begins = is_new(batch[order], file, plan.window[order])
    # number: the window of each item in order; window_of: the same, in the items' original order.
    number = np.cumsum(begins) - 1
    first, count = order[begins], int(begins.sum())
    window_of = np.empty_like(number)
    window_of[order] = number
    extent_of, low, high = _extents(plan, window_of, block_bytes, file_bytes)
    small = np.flatnonzero(plain & ~lands)
    small = small[np.lexsort((spans.dest[small], number[small]))]
    return ReadPlan(
        group=batch[first],
        file=file[begins],
        window=plan.window[first],
        extent_start=_starts(extent_of, count),
        low=low,
        high=high,
        landing_start=_starts(number[lands], count),
        landing=spans.take(lands),
        copied_start=_starts(number[small], count),
        copied=spans.take(small),
        item_start=_starts(number[~plain], count),
        items=order[~plain],
        may_land=may_land,
    )


def _starts(window: I64, count: int) -> I64:
    """Return the index of the first row of each of `count` windows, for rows sorted by window.

    A last entry has the number of rows.
    """
    return np.searchsorted(window, np.arange(count + 1))


def _extents(plan: LoadPlan, window_of: I64, block_bytes: I64, file_bytes: I64) -> tuple[I64, I64, I64]:
    """Find the byte ranges (extents) to read. Return the window, the first byte and the end of each."""
    owner, low, high = _touched(plan)
    file = plan.file[owner]
    block = np.maximum(block_bytes[file], 1)
    # From here on a range consists of whole blocks if the blocks of its file are verified.
    ends = np.minimum(-(-high // block) * block, file_bytes[file])
    # near: the largest gap over which a range is read together with the one before it.
    columns = window_of[owner], low // block * block, ends, np.where(block_bytes[file] > 0, 0, NEAR_BYTES)
    order = np.lexsort((columns[1], columns[0]))
    window, low, high, near = (column[order] for column in columns)
    begins = is_new(window)
    # reach[i]: largest end of the window's ranges up to i; fresh[i]: range i begins too far behind reach[i - 1].
    reach = running_max(high, begins)
    fresh = begins.copy()
    fresh[1:] |= low[1:] > reach[:-1] + near[1:]
    # first: the first range of each extent; end: the one behind its last.
    first, end = group_bounds(fresh)
    return window[first], low[first], reach[end - 1]


def _touched(plan: LoadPlan) -> tuple[I64, I64, I64]:
    """List the byte ranges of its file that each item touches. Parts of an item that lie near each other are one range.

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


def _landing(spans: Runs, plain: Mask, new: Mask) -> Mask:
    """Return a mask of the items that are read straight into their destination.

    `plain` marks items whose bytes are in order in both places, `new` the first item of each file and group.
    """
    # Bytes that two items want are read once, into the window's buffer, and copied to both, so neither item lands.
    ends = running_max(spans.src + spans.size, new)
    clash = ~new[1:] & (spans.src[1:] < ends[:-1])
    good: Mask = plain & (spans.size >= LAND_BYTES)
    good[1:] &= ~clash
    good[:-1] &= ~clash
    return good
