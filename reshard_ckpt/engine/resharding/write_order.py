"""The order in which new files are written: tensor by tensor, many files side by side, so that each source byte is read once.

New ranks that hold different columns of one tensor need the same rows of the same source files. Written one after the other, four
such ranks would read these rows four times. So their files are written side by side, as a group.

1. Two ranks are in one group if their mesh coordinates differ only on axes that cut an inner dim of some tensor.
2. A group's write items are taken tensor by tensor. All its files have the tensors in the same order, so bytes are only appended.
   Items of one tensor that share source rows go into one window. If they do not fit, each rank's items are cut into the same
   number of slices, and window n holds slice n of every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from ...core.catalog.specs import Ints, Mesh
from ...core.planning.target_placement import TargetPlacement
from ..common.sections import share
from ..loading.stream import MAX_RUNS, Run

MAX_FILES = 64
"""The largest number of files that are written side by side."""


class Item(NamedTuple):
    """A run of a saved tensor to write into a file. Items of all files sort by `key`: (-element size, tensor in the plan)."""

    key: tuple[int, int]
    run: Run
    item_bytes: int

    @property
    def num_bytes(self) -> int:
        """The size of the run in bytes, after conversion."""
        return self.run.count * self.item_bytes


Slice = tuple[int, Item]
"""A run to append to the files of one rank of a group: the index of the rank (output), and the run with its element size."""


def shared_axes(mesh: Mesh, shapes: Sequence[Ints], placed: Sequence[TargetPlacement]) -> frozenset[int]:
    """Return the mesh axes that cut an inner dim of some tensor: ranks along them hold different columns of the same rows.

    Parameters
    ----------
    shapes, placed
        The global shape and the new placement of each tensor.
    """
    found: set[int] = set()
    for shape, p in zip(shapes, placed, strict=True):
        # outer: the first dim of more than one element; a cut there gives whole rows to each rank
        outer = next((dim for dim, size in enumerate(shape) if size > 1), 0)
        found.update(i for i, axis in enumerate(p.axes) if axis.kind == "shard" and (axis.dim or 0) > outer and mesh.sizes[i] > 1)
    return frozenset(found)


def group_ranks(mesh: Mesh, shared: frozenset[int]) -> list[list[int]]:
    """Group the ranks of a mesh: the ranks of a group differ in their coordinates on the `shared` axes alone."""
    groups: dict[Ints, list[int]] = {}
    for rank in range(mesh.size):
        key = tuple(c for i, c in enumerate(mesh.coordinates(rank)) if i not in shared)
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def divide(groups: Sequence[Sequence[int]], num_bytes: Sequence[int], rank: int, num: int) -> list[list[int]]:
    """Divide groups of ranks over `num` processes so that each writes about as many bytes; return the groups of process `rank`.

    A group may be cut between processes, and into parts of at most `MAX_FILES` ranks.

    Parameters
    ----------
    num_bytes
        The bytes that each new rank writes, by rank.

    >>> [divide([[0, 1], [2, 3]], [5, 5, 5, 5], process, 4) for process in range(4)]
    [[[0]], [[1]], [[2]], [[3]]]
    >>> [divide([[0, 1], [2, 3]], [5, 5, 5, 5], process, 2) for process in range(2)]
    [[[0, 1]], [[2, 3]]]
    """
    ranks = [new for group in groups for new in group]
    own = {ranks[i] for i in share((num_bytes[new] for new in ranks), rank, num)}
    own_groups = [[new for new in group if new in own] for group in groups]
    return [group[i : i + MAX_FILES] for group in own_groups for i in range(0, len(group), MAX_FILES)]


def windows(outputs: Sequence[Sequence[Item]], window_bytes: int) -> Iterator[list[Slice]]:
    """Cut the write items of a group's files into windows of at most `window_bytes` and `MAX_RUNS`, and yield the windows.

    Each file's items stay in order.
    """
    window: list[Slice] = []
    room = window_bytes
    for batch in _batches(outputs):
        size = sum(item.num_bytes for _, items in batch for item in items)
        count = sum(len(items) for _, items in batch)
        if window and (size > room or len(window) + count > MAX_RUNS):
            yield window
            window, room = [], window_bytes
        if size <= window_bytes:
            window += [(output, item) for output, items in batch for item in items if item.run.count]
            room -= size
            continue
        num = -(-size // window_bytes)  # a batch larger than a window: cut each file's items into `num` slices
        for n in range(num):
            yield [(output, item) for output, items in batch for item in _slice(items, n, num)]
    if window:
        yield window


@dataclass(frozen=True, slots=True)
class Span:
    """The windows of a group that one process writes: `count` windows from number `first` on; None means all that follow.

    In the files of the group's rank i, headers not counted, these windows fill bytes ``begin[i]`` to ``end[i]``.
    """

    first: int
    count: int | None
    begin: list[int]
    end: list[int]


def span_of(outputs: Sequence[Sequence[Item]], window_bytes: int, low: int, high: int) -> Span:
    """Return the windows that begin between bytes `low` and `high`, counted over the items of all windows."""
    at, first, count = 0, 0, 0
    begin = [0] * len(outputs)
    end = [0] * len(outputs)
    for window in windows(outputs, window_bytes):
        if at >= high:
            break
        is_before = at < low
        for output, item in window:
            end[output] += item.num_bytes
            at += item.num_bytes
        if is_before:
            first, begin = first + 1, list(end)
        else:
            count += 1
    return Span(first, count, begin, end)


Batch = list[tuple[int, list[Item]]]
"""The write items of one tensor that are handled together: for each rank of the group (output), its index and its items."""


def _batches(outputs: Sequence[Sequence[Item]]) -> Iterator[Batch]:
    """Yield the write items of a group in batches that should be written together.

    A batch holds the items of one tensor in files whose source rows overlap. A file that shares no rows with others is a batch of
    its own.
    """
    by_key: dict[tuple[int, int], dict[int, list[Item]]] = {}
    for output, items in enumerate(outputs):
        for item in items:
            by_key.setdefault(item.key, {}).setdefault(output, []).append(item)
    for key in sorted(by_key):
        batch: Batch = []
        reach = 0  # the end of the rows that the batch covers so far
        for low, high, output in sorted((*_rows(items), output) for output, items in by_key[key].items()):
            if batch and low >= reach:
                yield batch
                batch = []
            batch.append((output, by_key[key][output]))
            reach = max(reach, high)
        yield batch


def _rows(items: Sequence[Item]) -> tuple[int, int]:
    """Return the first row, and the end of the rows, that some items need along the tensor's first dim.

    A last row that is only partly covered does not count.
    """
    lows, highs = [], []
    for run in (item.run for item in items):
        inner = max(prod(run.lengths[1:]), 1)
        first = run.offsets[0] if run.offsets else 0
        lows.append(first + run.start // inner)
        highs.append(first + (run.start + run.count) // inner)
    return min(lows), max(highs)


def _slice(items: Sequence[Item], n: int, num: int) -> Iterator[Item]:
    """Cut items, laid end to end, into `num` slices of about equal size, and yield the parts of items in slice `n`."""
    total = sum(item.run.count for item in items)
    low, high = total * n // num, total * (n + 1) // num
    position = 0
    for item in items:
        run = item.run
        begin, end = max(low - position, 0), min(high - position, run.count)
        if begin < end:
            yield item._replace(run=replace(run, start=run.start + begin, count=end - begin))
        position += run.count
