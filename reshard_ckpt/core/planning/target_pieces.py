"""The pieces that each rank of another topology holds, in the same columns as if that rank had described its own state.

1. The placements of a tensor give each rank some boxes of it, and a flat axis leaves a range of these boxes laid end to end
   (`local_region`).
2. Tensors of one *vector* are laid end to end before a flat axis cuts them, as optimizers with one flat buffer do.
3. The pieces of all ranks, in order of rank, are the input of the planner of saves (`save_plan`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import numpy as np

from ..catalog.placements import Box, LocalRegion, local_region
from ..catalog.specs import Ints, Mesh
from ..geometry.columns import ColumnTable
from ..geometry.runs import I64, pad_rows
from .local_metadata import JobMetadata, TensorColumns
from .target_placement import TargetPlacement

Row = tuple[int, int, int, int]
"""One piece that a rank holds: rank, index of the box, first element and number of elements."""


@dataclass(frozen=True, slots=True)
class TargetRows(ColumnTable):
    """The pieces of all ranks, as columns in order of rank: indices of tensor and box, and the box's run ``start, count``."""

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
    """List the pieces of all tensors that each rank of a mesh holds, and the distinct boxes that they refer to.

    Parameters
    ----------
    shapes, placed, names
        One entry for each tensor. `shapes` goes on with the shapes of the blobs (bytes of values).
    blobs
        For the index of each blob the ranks that hold it whole.
    """
    builder = _TargetRowsBuilder(shapes, placed, mesh)
    rows = {i: builder.rows(i) for i in range(len(placed))}
    index = {name: i for i, name in enumerate(names)}
    for i, of_one in enumerate(placed):
        if of_one.follows is not None:  # it lies only on the ranks that hold a part of the tensor that it follows
            rows[i] = rows[i][np.isin(rows[i][:, 0], rows[index[of_one.follows]][:, 0])]
    for i, holders in blobs.items():
        whole = builder.box(((0,), shapes[i]))
        rows[i] = _as_table((rank, whole, 0, prod(shapes[i])) for rank in holders)
    tensor = np.repeat(np.array([*rows], np.int64), [len(of_one) for of_one in rows.values()])
    rank, box, start, count = np.concatenate([*rows.values(), _as_table(())]).T
    # Sorted by rank, then by tensor.
    table = TargetRows(rank, tensor, box, start, count)
    return table.take(np.lexsort((tensor, rank))), list(builder.boxes)


class _TargetRowsBuilder:
    """Lists the pieces of tensors on all ranks of a mesh, and collects the distinct boxes."""

    def __init__(self, shapes: Sequence[Ints], placed: Sequence[TargetPlacement], mesh: Mesh) -> None:
        self.shapes, self.placed, self.mesh = shapes, placed, mesh
        self.coordinates = [mesh.coordinates(rank) for rank in range(mesh.size)]
        self.boxes: dict[Box, int] = {}
        self.alike: dict[tuple[Ints, TargetPlacement], I64] = {}
        self.vectors: dict[int, list[int]] = {}
        """The tensors of each vector, in its order."""
        in_vectors = [(placed.vector, i) for i, placed in enumerate(placed) if placed.vector is not None]
        for (number, _), i in sorted(in_vectors):
            self.vectors.setdefault(number, []).append(i)
        self.uncut: dict[tuple[int, Ints], tuple[list[LocalRegion | None], list[int]]] = {}
        """The key is a vector and a rank's coordinates, without the one on the flat axis. The value is the rank's part of each
        tensor before that axis cuts, and the beginning of each part in the vector; the last number is the end of the vector."""

    def box(self, box: Box) -> int:
        """Return the number of a box. A box seen for the first time gets the next number."""
        return self.boxes.setdefault(box, len(self.boxes))

    def rows(self, tensor: int) -> I64:
        """Return the pieces of a tensor on all ranks as (N, 4): rank, box, start and count.

        Tensors of one shape and placement share them.
        """
        placed = self.placed[tensor]
        key = (self.shapes[tensor], placed)
        if key not in self.alike:
            # Ranks that differ only on replicated axes hold the same pieces, which are computed once. Of a vector, another tensor
            # may be divided along these axes.
            dividing = [i for i, p in enumerate(placed.axes) if p.kind != "replicate" or placed.vector is not None]
            held: dict[Ints, list[tuple[int, int, int]]] = {}
            rows: list[Row] = []
            for rank, where in enumerate(self.coordinates):
                at = tuple(where[i] for i in dividing)
                if at not in held:
                    held[at] = self._held(tensor, where)
                rows += ((rank, *run) for run in held[at])
            self.alike[key] = _as_table(rows)
        return self.alike[key]

    def _held(self, tensor: int, where: Ints) -> list[tuple[int, int, int]]:
        """Return the runs of a tensor that the rank at coordinates `where` holds, each as box, start and count."""
        shape, region = self.shapes[tensor], self._region(tensor, where)
        if region is None:
            return []
        if 0 in shape:  # a rank that has an empty tensor holds one run of no elements
            return [(self.box(((0,) * len(shape), shape)), 0, 0)]
        return [(self.box(box), start, count) for box, start, count in region.runs()]

    def _region(self, tensor: int, where: Ints) -> LocalRegion | None:
        """Return the part of a tensor that the rank at coordinates `where` holds; None if it has not even an empty part."""
        placed, sizes = self.placed[tensor], self.mesh.sizes
        if placed.vector is None:
            return local_region(self.shapes[tensor], placed.axes, sizes, where)
        (number, position), axis = placed.vector, placed.flat_axis
        assert axis is not None
        at = number, where[:axis] + where[axis + 1 :]
        if at not in self.uncut:
            members = self.vectors[number]
            regions = [local_region(self.shapes[i], self.placed[i].without_flat().axes, sizes, where) for i in members]
            lengths = (0 if region is None else region.num_elements for region in regions)
            self.uncut[at] = regions, list(accumulate(lengths, initial=0))
        regions, begins = self.uncut[at]
        region, size = regions[position], begins[position + 1] - begins[position]
        # Ranks along the flat axis divide the vector evenly. step: elements of one rank; low: where they begin in the tensor.
        step = -(-begins[-1] // sizes[axis])
        low = step * where[axis] - begins[position]
        start, stop = max(low, 0), min(low + step, size)
        return None if region is None or (size and start >= stop) else replace(region, flat=(start, max(stop - start, 0)))


def _as_table(rows: Iterable[Row]) -> I64:
    return np.array(list(rows), np.int64).reshape(-1, 4)


def as_job_metadata(table: TensorColumns, held: TargetRows, boxes: Sequence[Box], num_ranks: int) -> JobMetadata:
    """Convert the pieces of all ranks to the input of the planner of saves; every rank has the same table of tensors."""
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
