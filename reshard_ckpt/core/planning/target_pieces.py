"""The pieces that each rank of another topology holds, as that rank would have captured them, in columns.

1. The placements of a tensor give each rank some boxes of it, and a flat axis leaves a range of these boxes laid end to end
   (`local_region`).
2. Tensors of one vector are laid end to end before a flat axis cuts them.
3. The pieces of all ranks, in order of rank, are the input of the planner of saves (`save_plan`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from ..catalog.placements import Box, local_region
from ..catalog.specs import Ints, Mesh
from ..geometry.columns import ColumnTable
from ..geometry.runs import I64, Range, pad_rows
from .local_metadata import JobMetadata, TensorColumns
from .target_placement import TargetPlacement

Row = tuple[int, int, int, int]
"""Rank, box, start and count."""


@dataclass(frozen=True, slots=True)
class TargetRows(ColumnTable):
    """The pieces of all ranks, in order of rank: the index of the tensor, and the run ``start, count`` of the box with index
    ``box``.
    """

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
    """List the pieces that the ranks of a mesh hold of all tensors, and the distinct boxes.

    Parameters
    ----------
    shapes, placed, names
        One entry for each tensor; `shapes` continues with the shapes of the blobs.
    blobs
        For the index of each blob the ranks that hold it whole.
    """
    return _TargetRowsBuilder(shapes, placed, names, mesh).run(blobs)


class _TargetRowsBuilder:
    """One call of `target_rows`: the boxes and rows found so far."""

    def __init__(self, shapes: Sequence[Ints], placed: Sequence[TargetPlacement], names: Sequence[str], mesh: Mesh) -> None:
        self.shapes, self.placed, self.mesh = shapes, placed, mesh
        self.index = {name: i for i, name in enumerate(names)}
        self.coordinates = [mesh.coordinates(rank) for rank in range(mesh.size)]
        self.boxes: dict[Box, int] = {}
        self.columns: list[I64] = []
        self.alike: dict[tuple[Ints, TargetPlacement], I64] = {}

    def run(self, blobs: Mapping[int, Sequence[int]]) -> tuple[TargetRows, list[Box]]:
        # Tensors on their own come first, then vectors, then tensors that follow others, whose ranks are known by then.
        vectors: dict[int, list[int]] = {}
        for i, placed in enumerate(self.placed):
            if placed.vector is not None:
                vectors.setdefault(placed.vector[0], []).append(i)
            elif placed.follows is None:
                self._add(i, self._rows_alone(i))
        # held[i]: the ranks that hold a part of tensor i of a vector.
        held: dict[int, set[int]] = {}
        for members in vectors.values():
            members.sort(key=lambda i: self.placed[i].vector or (0, 0))
            for i, rows in self._rows_of_vector(members).items():
                held[i] = {row[0] for row in rows}
                self._add(i, _as_table(rows))
        for i, placed in enumerate(self.placed):
            if placed.follows is not None:
                leader = self.index[placed.follows]
                ranks = held[leader] if leader in held else set(self._rows_alone(leader)[:, 0].tolist())
                rows_alone = self._rows_alone(i)
                self._add(i, rows_alone[np.isin(rows_alone[:, 0], sorted(ranks))])
        for i, holders in blobs.items():
            whole = self._box(((0,), self.shapes[i]))
            self._add(i, _as_table((rank, whole, 0, prod(self.shapes[i])) for rank in holders))
        table = np.concatenate(self.columns) if self.columns else np.zeros((0, 5), np.int64)
        # Sorted by rank, then by tensor.
        table = table[np.lexsort((table[:, 0], table[:, 1]))]
        tensor, rank, box, start, count = (np.ascontiguousarray(column) for column in table.T)
        return TargetRows(rank, tensor, box, start, count), list(self.boxes)

    def _add(self, tensor: int, rows: I64) -> None:
        self.columns.append(np.column_stack([np.full(len(rows), tensor, np.int64), rows]))

    def _box(self, box: Box) -> int:
        """Return the number of a box, a new one if it is new."""
        return self.boxes.setdefault(box, len(self.boxes))

    def _rows_alone(self, tensor: int) -> I64:
        """Return rank, box, start and count of the pieces of a tensor that is cut on its own; alike tensors share them."""
        key = (self.shapes[tensor], self.placed[tensor])
        if key not in self.alike:
            # Ranks that differ only on replicated axes hold the same pieces, which are computed once.
            dividing = [i for i, p in enumerate(self.placed[tensor].axes) if p.kind != "replicate"]
            held: dict[Ints, list[tuple[int, int, int]]] = {}
            rows: list[Row] = []
            for rank, where in enumerate(self.coordinates):
                at = tuple(where[i] for i in dividing)
                if at not in held:
                    held[at] = self._held(tensor, self.placed[tensor], where)
                rows += ((rank, *run) for run in held[at])
            self.alike[key] = _as_table(rows)
        return self.alike[key]

    def _held(self, tensor: int, placed: TargetPlacement, where: Ints, flat: Range | None = None) -> list[tuple[int, int, int]]:
        """Return box, start and count of the runs that the rank at coordinates `where` holds of a tensor.

        `flat` is the range of the rank's elements that it keeps, if the tensor is part of a vector.
        """
        shape = self.shapes[tensor]
        region = local_region(shape, placed.axes, self.mesh.sizes, where)
        if region is None:
            return []
        if 0 in shape:  # a rank that has an empty tensor holds one run of no elements
            return [(self._box(((0,) * len(shape), shape)), 0, 0)]
        region = region if flat is None else replace(region, flat=flat)
        return [(self._box(box), start, count) for box, start, count in region.runs()]

    def _rows_of_vector(self, members: Sequence[int]) -> dict[int, list[Row]]:
        """Return the rows of the tensors of one vector, which ranks along the flat axis divide evenly."""
        out: dict[int, list[Row]] = {i: [] for i in members}
        axis = self.placed[members[0]].flat_axis
        assert axis is not None
        uncut = {i: self.placed[i].without_flat() for i in members}
        for rank, where in enumerate(self.coordinates):
            regions = {i: local_region(self.shapes[i], uncut[i].axes, self.mesh.sizes, where) for i in members}
            sizes = {i: region.num_elements for i, region in regions.items() if region is not None}
            # step: elements of the vector that one rank holds; low: where this rank's part begins in the vector.
            step = -(-sum(sizes.values()) // self.mesh.sizes[axis])
            low = step * where[axis]
            # position: where the tensor begins, relative to the rank's part.
            position = -low
            for i, size in sizes.items():
                start, stop = max(-position, 0), min(step - position, size)
                if start < stop or 0 in self.shapes[i]:
                    out[i] += ((rank, *run) for run in self._held(i, uncut[i], where, (start, max(stop - start, 0))))
                position += size
        return out


def _as_table(rows: Iterable[Row]) -> I64:
    return np.array(list(rows), np.int64).reshape(-1, 4)


def as_job_metadata(table: TensorColumns, held: TargetRows, boxes: Sequence[Box], num_ranks: int) -> JobMetadata:
    """Put the pieces of all ranks into the planner's columns; every rank has the same table of tensors."""
    width = table.shape.shape[1]
    # begin[r]: the first row of rank r, so that `local` counts each rank's rows from 0.
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
