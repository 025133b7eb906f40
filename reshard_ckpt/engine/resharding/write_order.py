"""The order in which new files are written: tensor by tensor, many files side by side, so that their source is read once.

New ranks that hold different columns of one tensor draw on the same rows of the same files: read for each of them alone, these
rows would be read as often as there are such ranks. So a group of such files is written at once.

1. Ranks are in one group if they differ only on axes that cut an inner dim of some tensor.
2. A group's write items are taken tensor by tensor, in the order that all its files have; those of one tensor that share rows and
   do not fit a window are cut into as many slices for each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from ...core.catalog.specs import Ints, Mesh
from ...core.planning.target_placement import TargetPlacement
from ..loading.stream import MAX_RUNS, Run

MAX_FILES = 64
"""Files written at once."""


@dataclass(frozen=True, slots=True)
class Item:
    """One write item: its place in the order of all files (element size, then tensor), the run, and bytes of an element."""

    key: tuple[int, int]
    run: Run
    item_bytes: int


@dataclass(frozen=True, slots=True)
class Slice:
    """The next bytes of one file of those that are written at once."""

    output: int
    run: Run


def shared_axes(mesh: Mesh, shapes: Sequence[Ints], placed: Sequence[TargetPlacement]) -> frozenset[int]:
    """The axes whose ranks hold different columns of some tensor: what they cut is no outermost dim."""
    found: set[int] = set()
    for shape, p in zip(shapes, placed, strict=True):
        outer = next((dim for dim, size in enumerate(shape) if size > 1), 0)
        found.update(i for i, axis in enumerate(p.axes) if axis.kind == "shard" and (axis.dim or 0) > outer and mesh.sizes[i] > 1)
    return frozenset(found)


def group_ranks(mesh: Mesh, shared: frozenset[int]) -> list[list[int]]:
    """The ranks of the mesh in groups whose files are written at once."""
    groups: dict[Ints, list[int]] = {}
    for rank in range(mesh.size):
        key = tuple(c for i, c in enumerate(mesh.coordinates(rank)) if i not in shared)
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def divide(groups: Sequence[Sequence[int]], num_bytes: Sequence[int], num: int) -> list[list[list[int]]]:
    """The groups over `num` processes, in order, so that each writes about as much; a group may be cut.

    >>> divide([[0, 1], [2, 3]], [5, 5, 5, 5], 4)
    [[[0]], [[1]], [[2]], [[3]]]
    >>> divide([[0, 1], [2, 3]], [5, 5, 5, 5], 2)
    [[[0, 1]], [[2, 3]]]
    """
    ranks = [rank for group in groups for rank in group]
    middles = np.cumsum([num_bytes[r] for r in ranks]) - np.array([num_bytes[r] for r in ranks]) / 2
    total = max(sum(num_bytes), 1)
    owner = dict(zip(ranks, np.minimum(middles * num // total, num - 1).astype(int).tolist(), strict=True))
    out: list[list[list[int]]] = [[] for _ in range(num)]
    for group in groups:
        for process in range(num):
            mine = [rank for rank in group if owner[rank] == process]
            out[process] += [mine[i : i + MAX_FILES] for i in range(0, len(mine), MAX_FILES)]
    return out


def windows(outputs: Sequence[Sequence[Item]], window_bytes: int) -> Iterator[list[Slice]]:
    """The items of all files, in windows; each file's own stay in order."""
    window: list[Slice] = []
    room = window_bytes
    for batch in _batches(outputs):
        size = sum(item.run.count * item.item_bytes for _, items in batch for item in items)
        count = sum(len(items) for _, items in batch)
        if window and (size > room or len(window) + count > MAX_RUNS):
            yield window
            window, room = [], window_bytes
        if size <= window_bytes:
            window += [Slice(output, item.run) for output, items in batch for item in items if item.run.count]
            room -= size
            continue
        num = -(-size // window_bytes)
        for n in range(num):
            yield [Slice(output, run) for output, items in batch for run in _slice(items, n, num)]
    if window:
        yield window


Batch = list[tuple[int, list[Item]]]
"""Files, as indices, and their items of one tensor."""


def _batches(outputs: Sequence[Sequence[Item]]) -> Iterator[Batch]:
    """Group what is taken at once: of a tensor, the items of files that share rows; others go one by one."""
    by_key: dict[tuple[int, int], dict[int, list[Item]]] = {}
    for output, items in enumerate(outputs):
        for item in items:
            by_key.setdefault(item.key, {}).setdefault(output, []).append(item)
    for key in sorted(by_key):
        batch: Batch = []
        reach = 0
        for low, high, output in sorted((*_rows(items), output) for output, items in by_key[key].items()):
            if batch and low >= reach:
                yield batch
                batch = []
            batch.append((output, by_key[key][output]))
            reach = max(reach, high)
        yield batch


def _rows(items: Sequence[Item]) -> tuple[int, int]:
    """The range along the first dim that the items lie in; a last row that is not whole does not count."""
    lows, highs = [], []
    for run in (item.run for item in items):
        inner = max(prod(run.lengths[1:]), 1)
        first = run.offsets[0] if run.offsets else 0
        lows.append(first + run.start // inner)
        highs.append(first + (run.start + run.count) // inner)
    return min(lows), max(highs)


def _slice(items: Sequence[Item], n: int, num: int) -> Iterator[Run]:
    """The n-th of so many slices of the items, end to end."""
    total = sum(item.run.count for item in items)
    low, high = total * n // num, total * (n + 1) // num
    position = 0
    for item in items:
        run = item.run
        begin, end = max(low - position, 0), min(high - position, run.count)
        if begin < end:
            yield replace(run, start=run.start + begin, count=end - begin)
        position += run.count
