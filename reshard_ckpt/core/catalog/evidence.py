"""What do the saved rows show that a placement does not say? The order in which axes cut one dim, and the sections of a dim.

A row tells the rank that wrote it, and so its coordinates; a hypothesis about how the tensor was cut holds if every row lies in
what it gives to its rank. Replicas that one rank wrote for another are in the same place on all axes that cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np

from ..geometry.chunks import Range, chunk, joined
from ..geometry.runs import I64, bounds
from .model import Catalog
from .specs import AxisPlacement, Ints


@dataclass(frozen=True, slots=True)
class Cuts:
    """How a tensor was cut: the axes that cut each dim, first to last, and the sections of dims that were cut in sections."""

    order: Mapping[int, tuple[str, ...]]
    sections: Mapping[int, Ints]


@dataclass(frozen=True, slots=True)
class _Seen:
    """Where the rows of a tensor lie: bounds (rows, dims), and the coordinates (rows, axes) of the ranks that wrote them."""

    low: I64
    high: I64
    coordinates: I64


class Evidence:
    """Looks into the rows of a catalog; tensors that lie alike are looked at once."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        mesh = catalog.mesh
        ranks = np.array([file.rank for file in catalog.files], np.int64)
        self._useful = mesh is not None and bool((ranks < mesh.size).all())
        sizes = mesh.sizes if mesh is not None else ()
        self._axes = dict(zip(mesh.axes if mesh is not None else (), range(len(sizes)), strict=True))
        self._sizes = dict(zip(self._axes, sizes, strict=True))
        columns = np.unravel_index(ranks, sizes) if self._useful and sizes else ()
        self._coordinates = np.stack(columns, axis=1) if len(columns) else np.zeros((len(ranks), 0), np.int64)
        self._known: dict[tuple[object, ...], Cuts] = {}

    def first_coordinate(self, tensor: int, axis: str) -> int:
        """The lowest coordinate on an axis that wrote any of a tensor; 0 where nothing is known."""
        rows = self._rows(tensor)
        if not self._useful or axis not in self._axes or rows.start == rows.stop:
            return 0
        return int(self._coordinates[self._catalog.rows.file[rows], self._axes[axis]].min())

    def cuts(self, tensor: int, placement: Sequence[AxisPlacement]) -> Cuts:
        """How the axes that shard a tensor cut it."""
        by_dim: dict[int, list[str]] = {}
        for p in placement:
            if p.kind == "shard" and p.dim is not None and p.axis in self._axes:
                by_dim.setdefault(p.dim, []).append(p.axis)
        if not self._useful or not any(self._sizes[axis] > 1 for axes in by_dim.values() for axis in axes):
            return Cuts({dim: tuple(reversed(axes)) for dim, axes in by_dim.items()}, {})
        rows = self._rows(tensor)
        columns = (self._catalog.rows.box, self._catalog.rows.start, self._catalog.rows.count)
        seen = self._coordinates[self._catalog.rows.file[rows]]
        key = (self._catalog.shape(tensor), tuple(placement), *(column[rows].tobytes() for column in columns), seen.tobytes())
        if key not in self._known:
            self._known[key] = self._look(tensor, by_dim, seen)
        return self._known[key]

    def _rows(self, tensor: int) -> slice:
        table = self._catalog.tensors_table
        source = self._catalog.source(tensor)
        return slice(int(table.row_start[source]), int(table.row_start[source + 1]))

    def _look(self, tensor: int, by_dim: Mapping[int, Sequence[str]], coordinates: I64) -> Cuts:
        rows, saved, shape = self._rows(tensor), self._catalog.rows, self._catalog.shape(tensor)
        box = saved.box[rows]
        low, high = bounds(
            self._catalog.boxes.offsets[box], self._catalog.boxes.lengths[box], saved.start[rows], saved.count[rows]
        )
        ndim, width = len(shape), low.shape[1]
        seen = _Seen(low[:, width - ndim :], high[:, width - ndim :], coordinates)
        order: dict[int, tuple[str, ...]] = {}
        sections: dict[int, Ints] = {}
        for dim, axes in by_dim.items():
            cutting = [axis for axis in axes if self._sizes[axis] > 1]
            order[dim] = next((o for o in _orders(axes) if self._fits(seen, dim, shape[dim], o)), tuple(reversed(axes)))
            if len(cutting) == 1 and not self._fits(seen, dim, shape[dim], cutting):
                found = self._sections(seen, dim, shape[dim], cutting[0])
                if found is not None:
                    sections[dim] = found
        return Cuts(order, sections)

    def _fits(self, seen: _Seen, dim: int, size: int, order: Sequence[str]) -> bool:
        columns = [self._axes[axis] for axis in order]
        for where in product(*(range(self._sizes[axis]) for axis in order)):
            mine = np.flatnonzero((seen.coordinates[:, columns] == where).all(axis=1))
            ranges: list[Range] = [(0, size)]
            for axis, index in zip(order, where, strict=True):
                ranges = chunk(ranges, self._sizes[axis], index)
            first, length = ranges[0] if ranges else (0, 0)
            if not ((seen.low[mine, dim] >= first) & (seen.high[mine, dim] <= first + length)).all():
                return False
        return True

    def _sections(self, seen: _Seen, dim: int, size: int, axis: str) -> Ints | None:
        """Sizes of the sections that explain why every coordinate holds several ranges; None where nothing does."""
        num = self._sizes[axis]
        held = []
        for index in range(num):
            mine = np.flatnonzero(seen.coordinates[:, self._axes[axis]] == index)
            pairs = sorted(set(zip(seen.low[mine, dim].tolist(), seen.high[mine, dim].tolist(), strict=True)))
            held.append(joined([(low, high - low) for low, high in pairs]))
        if len({len(ranges) for ranges in held}) != 1 or any(low >= size for ranges in held for low, _ in ranges):
            return None
        found: list[int] = []
        for parts in zip(*held, strict=True):
            first, last = parts[0][0], sum(parts[-1])
            whole: Range = (first, last - first)
            if first != sum(found) or any(chunk([whole], num, i) != [part] for i, part in enumerate(parts)):
                return None
            found.append(last - first)
        return tuple(found) if sum(found) == size else None


def _orders(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The orders in which axes may have cut; the likeliest first: inner ones, as FSDP2 over tensor parallelism does."""
    yield tuple(reversed(axes))
    yield from (order for order in permutations(axes) if order != tuple(reversed(axes)))
