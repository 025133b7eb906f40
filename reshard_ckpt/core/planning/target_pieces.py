"""What does each rank of another topology hold? Pieces for all ranks, as each would have captured them, in columns.

1. The axes that shard cut each dim in their order; the rest of each dim is ranges, and their products are boxes.
2. A flat axis cuts the row-major order of these boxes, end to end, into runs; of a vector, that of all its tensors together.
3. The ranks' pieces, in order of rank, are what the planner of saves takes (`core.save_plan`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from ..catalog.specs import Ints, Mesh
from ..geometry.chunks import Range, chunk, joined
from ..geometry.runs import I64, pad_rows
from .local_metadata import JobMetadata, TensorColumns
from .target_placement import TargetPlacement

Box = tuple[Ints, Ints]


@dataclass(frozen=True, slots=True)
class TargetRows:
    """Pieces of all ranks, in order of rank: the tensor (an index), and a run of a box (an index)."""

    rank: I64
    tensor: I64
    box: I64
    start: I64
    count: I64


def target_rows(
    shapes: Sequence[Ints],
    placed: Sequence[TargetPlacement],
    names: Sequence[str],
    mesh: Mesh,
    blobs: Mapping[int, Sequence[int]],
) -> tuple[TargetRows, list[Box]]:
    """The pieces that the ranks of a mesh hold of all tensors, and the distinct boxes.

    Parameters
    ----------
    shapes, placed, names
        Of the tensors; `shapes` goes on with those of the blobs.
    blobs
        By index, the ranks that hold each whole.
    """
    return _TargetRowsBuilder(shapes, placed, names, mesh).run(blobs)


class _TargetRowsBuilder:
    """One run of `target_rows`."""

    def __init__(self, shapes: Sequence[Ints], placed: Sequence[TargetPlacement], names: Sequence[str], mesh: Mesh) -> None:
        self.shapes, self.placed, self.mesh = shapes, placed, mesh
        self.index = {name: i for i, name in enumerate(names)}
        self.coordinates = [mesh.coordinates(rank) for rank in range(mesh.size)]
        self.boxes: dict[Box, int] = {}
        self.columns: list[I64] = []
        self.alike: dict[tuple[Ints, TargetPlacement], I64] = {}
        self.ranges: dict[tuple[object, ...], list[Range]] = {}

    def run(self, blobs: Mapping[int, Sequence[int]]) -> tuple[TargetRows, list[Box]]:
        vectors: dict[int, list[int]] = {}
        for i, placed in enumerate(self.placed):
            if placed.vector is not None:
                vectors.setdefault(placed.vector[0], []).append(i)
            elif placed.follows is None:
                self._add(i, self._rows_alone(i))
        held: dict[int, set[int]] = {}
        for members in vectors.values():
            members.sort(key=lambda i: self.placed[i].vector or (0, 0))
            for i, rows in self._rows_of_vector(members).items():
                held[i] = {row[0] for row in rows}
                self._add(i, np.array(rows, np.int64).reshape(-1, 4))
        for i, placed in enumerate(self.placed):
            if placed.follows is not None:
                leader = self.index[placed.follows]
                ranks = held[leader] if leader in held else set(self._rows_alone(leader)[:, 0].tolist())
                self._add(i, self._rows_following(i, ranks))
        for i, holders in blobs.items():
            whole = self._box(((0,), self.shapes[i]))
            self._add(i, np.array([(rank, whole, 0, prod(self.shapes[i])) for rank in holders], np.int64).reshape(-1, 4))
        table = np.concatenate(self.columns) if self.columns else np.zeros((0, 5), np.int64)
        table = table[np.lexsort((table[:, 0], table[:, 1]))]
        tensor, rank, box, start, count = (np.ascontiguousarray(column) for column in table.T)
        return TargetRows(rank, tensor, box, start, count), list(self.boxes)

    def _add(self, tensor: int, rows: I64) -> None:
        self.columns.append(np.column_stack([np.full(len(rows), tensor, np.int64), rows]))

    def _box(self, box: Box) -> int:
        return self.boxes.setdefault(box, len(self.boxes))

    def _rows_alone(self, tensor: int) -> I64:
        """Rank, box, start and count of a tensor that is cut on its own; worked out once for all that lie alike."""
        key = (self.shapes[tensor], self.placed[tensor])
        if key not in self.alike:
            rows = [row for rank in range(self.mesh.size) for row in self._rows_at(tensor, rank)]
            self.alike[key] = np.array(rows, np.int64).reshape(-1, 4)
        return self.alike[key]

    def _rows_following(self, tensor: int, ranks: set[int]) -> I64:
        rows = self._rows_alone(tensor)
        return rows[np.isin(rows[:, 0], sorted(ranks))]

    def _rows_at(self, tensor: int, rank: int) -> Iterator[tuple[int, int, int, int]]:
        if not self._is_resident(tensor, rank):
            return
        shape, placed = self.shapes[tensor], self.placed[tensor]
        if 0 in shape:  # whoever has an empty tensor stands for it with no elements
            yield rank, self._box(((0,) * len(shape), shape)), 0, 0
            return
        boxes, axis = self._local(tensor, rank), placed.flat_axis
        total = sum(prod(lengths) for _, lengths in boxes)
        low, high = 0, total
        if axis is not None:
            step = -(-total // self.mesh.sizes[axis])
            low, high = (min(step * (self.coordinates[rank][axis] + end), total) for end in (0, 1))
        yield from self._runs(rank, boxes, low, high)

    def _is_resident(self, tensor: int, rank: int) -> bool:
        where = self.coordinates[rank]
        return all(p.kind != "resident" or where[i] in p.coords for i, p in enumerate(self.placed[tensor].axes))

    def _local(self, tensor: int, rank: int) -> list[Box]:
        """The boxes that the axes which shard leave to a rank, none of them empty."""
        shape, placed = self.shapes[tensor], self.placed[tensor]
        by_dim: dict[int, list[int]] = {}
        for axis in placed.order:
            dim = placed.axes[axis].dim
            assert dim is not None
            by_dim.setdefault(dim, []).append(axis)
        sections = dict(placed.sections)
        ranges = [self._ranges(size, sections.get(d, (size,)), by_dim.get(d, ()), rank) for d, size in enumerate(shape)]
        return [(tuple(r[0] for r in chosen), tuple(r[1] for r in chosen)) for chosen in product(*ranges)]

    def _ranges(self, size: int, sections: Ints, axes: Sequence[int], rank: int) -> list[Range]:
        where = self.coordinates[rank]
        key = (sections, *((axis, where[axis]) for axis in axes))
        if key not in self.ranges:
            self.ranges[key] = self._cut(sections, axes, where)
        return self.ranges[key]

    def _cut(self, sections: Ints, axes: Sequence[int], where: Ints) -> list[Range]:
        """The first axis cuts each section, the others what it leaves."""
        ends = np.cumsum(sections).tolist()
        ranges: list[Range] = [(end - length, length) for end, length in zip(ends, sections, strict=True)]
        for i, axis in enumerate(axes):
            num, index = self.mesh.sizes[axis], where[axis]
            parts = [[r] for r in ranges] if i == 0 else [ranges]
            ranges = [r for part in parts for r in chunk(part, num, index)]
        return joined(ranges)

    def _runs(self, rank: int, boxes: Sequence[Box], low: int, high: int) -> Iterator[tuple[int, int, int, int]]:
        """Elements ``[low, high)`` of the boxes, end to end."""
        position = 0
        for box in boxes:
            size = prod(box[1])
            start, stop = max(low - position, 0), min(high - position, size)
            if start < stop:
                yield rank, self._box(box), start, stop - start
            position += size

    def _rows_of_vector(self, members: Sequence[int]) -> dict[int, list[tuple[int, int, int, int]]]:
        """The rows of tensors that are cut as one: what a rank's neighbours along the flat axis hold together is the vector."""
        out: dict[int, list[tuple[int, int, int, int]]] = {i: [] for i in members}
        for rank in range(self.mesh.size):
            local = [(i, self._local(i, rank)) for i in members if self._is_resident(i, rank) and 0 not in self.shapes[i]]
            if not local:
                continue
            axis = self.placed[members[0]].flat_axis
            assert axis is not None
            sizes = [sum(prod(lengths) for _, lengths in boxes) for _, boxes in local]
            step = -(-sum(sizes) // self.mesh.sizes[axis])
            low = step * self.coordinates[rank][axis]
            position = 0
            for (i, boxes), size in zip(local, sizes, strict=True):
                if position < low + step and low < position + size:
                    out[i] += self._runs(rank, boxes, low - position, low + step - position)
                position += size
        for i in members:
            if 0 in self.shapes[i]:
                out[i] = [row for rank in range(self.mesh.size) for row in self._rows_at(i, rank)]
        return out


def as_job_metadata(table: TensorColumns, held: TargetRows, boxes: Sequence[Box], num_ranks: int) -> JobMetadata:
    """The pieces of all ranks as their offers, which all know the same tensors."""
    width = table.shape.shape[1]
    begin = np.searchsorted(held.rank, np.arange(num_ranks))
    return JobMetadata(
        tables=(table,),
        table=np.zeros(num_ranks, np.int64),
        box_offsets=pad_rows([offsets for offsets, _ in boxes], width, 0),
        box_lengths=pad_rows([lengths for _, lengths in boxes], width, 1),
        rank=held.rank,
        local=np.arange(len(held.rank)) - begin[held.rank],
        tensor=held.tensor,
        box=held.box,
        start=held.start,
        count=held.count,
    )
