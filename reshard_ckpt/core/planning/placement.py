"""The placement of each tensor on the mesh: as the state declares it, and on other axes as the ranks' pieces show it.

For an axis that nothing declares, compare the ranks of one *line*: ranks that differ in the coordinate on that axis alone. The
line of a tensor is the one with the lowest rank of its first run.

1. If all ranks of the line hold the same pieces, the tensor is replicated if every coordinate of the axis has pieces of it, and
   otherwise resident on the coordinates that have.
2. If they hold different runs of the same boxes, it is flat.
3. If they hold different boxes, it is sharded along the first dim on which the ranges of two coordinates differ.

The order in which several axes cut one dim, and the sections they cut, follow from the pieces too (`axis_cuts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..catalog.specs import AxisPlacement, Mesh
from ..geometry.columns import group_ids, is_new, lex_order
from ..geometry.runs import I64
from .axis_cuts import HeldBounds, Placement, PlacementTable, with_cuts


@dataclass(frozen=True, slots=True)
class PieceTable:
    """The pieces of all ranks, one in each row, in order of tensor; `box` and `run` number the distinct boxes and runs."""

    tensor: I64
    rank: I64
    box: I64
    run: I64


@dataclass(frozen=True, slots=True)
class _AxisColumns:
    """A comparison of the ranks of each tensor's line on one axis.

    ``same[t]``: all ranks that hold pieces of tensor t hold the same ones. ``flat[t]``: some boxes have several runs. ``dim[t]``:
    the first dim on which coordinates differ. ``present[t, c]``: coordinate c holds pieces of tensor t.
    """

    same: NDArray[np.bool_]
    flat: NDArray[np.bool_]
    dim: I64
    present: NDArray[np.bool_]


def derive(
    mesh: Mesh, declared: Sequence[Placement], shape: I64, ndim: I64, holding: PieceTable, box_offsets: I64, box_lengths: I64
) -> PlacementTable:
    """Find the placement of each tensor on every axis of the mesh, in the mesh's order.

    Parameters
    ----------
    declared
        The declared placement of each tensor, which wins over the one that its pieces show.
    shape : (T, D), ndim : (T,)
    box_offsets, box_lengths : (B, D)
        The boxes that `holding` numbers.
    """
    # Few tensors declare different placements, and equal ones share one tuple, so they are numbered by identity.
    declarations = {id(said): said for said in declared}
    number = dict(zip(declarations, range(len(declarations)), strict=True))
    said = np.array([number[id(one)] for one in declared], np.int64)
    shown = [_spell(axis, _shown_on(mesh, i, len(declared), ndim, holding, box_offsets)) for i, axis in enumerate(mesh.axes)]
    # A row for each tensor: the numbers of its declared placement and of the one shown on each axis. Equal rows are equal
    # placements.
    of_tensor, first = group_ids(np.stack([said, *(numbers for _, numbers in shown)], axis=1))
    placements = []
    # The declared placement of an axis wins over the one that the pieces show.
    for t in first.tolist():
        by_axis = {p.axis: p for p in declared[t]}
        found = (spelled[numbers[t]] for spelled, numbers in shown)
        placements.append(tuple(by_axis.get(p.axis, p) for p in found))
    held = HeldBounds(holding.tensor, holding.rank, holding.box, box_offsets, box_offsets + box_lengths)
    return with_cuts(mesh, PlacementTable(placements, of_tensor), shape, ndim, held)


def _spell(axis: str, shown: _AxisColumns) -> tuple[list[AxisPlacement], I64]:
    """Make the distinct placements on one axis, and number that of each tensor."""
    # kind[t]: 0 replicate, 1 resident, 2 flat, 3 shard.
    kind = np.where(shown.same, np.where(shown.present.all(axis=1), 0, 1), np.where(shown.flat, 2, 3))
    # Only columns that the kind uses count, others are 0: the dim of a shard, the coordinates of a resident tensor.
    columns = [kind, np.where(kind == 3, shown.dim, 0), *np.where(kind[:, None] == 1, shown.present, 0).T.astype(np.int64)]
    numbers, first = group_ids(np.stack(columns, axis=1))
    spelled = []
    for t in first.tolist():
        coords = tuple(np.flatnonzero(shown.present[t]).tolist()) if kind[t] == 1 else ()
        name = ("replicate", "resident", "flat", "shard")[int(kind[t])]
        spelled.append(AxisPlacement(axis, name, int(shown.dim[t]) if kind[t] == 3 else None, coords))
    return spelled, numbers


def _shown_on(mesh: Mesh, axis: int, num_tensors: int, ndim: I64, holding: PieceTable, box_offsets: I64) -> _AxisColumns:
    """Compare the ranks of each tensor's line on one axis."""
    size, stride = mesh.sizes[axis], int(np.prod(mesh.sizes[axis + 1 :], dtype=np.int64))
    coordinate = np.arange(mesh.size) // stride % size
    # A line is named by its rank of coordinate 0: ranks that differ on this axis alone have the same name.
    line_of = np.arange(mesh.size) - coordinate * stride
    present = np.zeros((num_tensors, size), bool)
    present[holding.tensor, coordinate[holding.rank]] = True
    # first[t]: the first piece of tensor t; own_line[t]: the line of the rank that holds it; on_line: the pieces on their line.
    first = np.searchsorted(holding.tensor, np.arange(num_tensors))
    own_line = np.full(num_tensors, -1, np.int64)
    some = np.flatnonzero(present.any(axis=1))
    own_line[some] = line_of[holding.rank[first[some]]]
    on_line = np.flatnonzero(line_of[holding.rank] == own_line[holding.tensor])
    # One entry for each piece on its tensor's line from here on; where[i]: the coordinate on this axis that holds it.
    tensor, run, box = holding.tensor[on_line], holding.run[on_line], holding.box[on_line]
    where = coordinate[holding.rank[on_line]]
    same = _hold_alike(tensor, run, where, num_tensors)
    # Fewer boxes than runs: some box is cut into several runs.
    flat = _count_distinct(tensor, box, num_tensors) < _count_distinct(tensor, run, num_tensors)
    dim = np.zeros(num_tensors, np.int64)
    sharded = np.flatnonzero(~(same | flat)[tensor])
    tensor, offsets, where = tensor[sharded], box_offsets[box[sharded]], where[sharded]
    # From the innermost dim outwards, so that the outermost dim that differs is the last one written.
    for column in reversed(range(offsets.shape[1])):
        differs = ~_hold_alike(tensor, offsets[:, column], where, num_tensors)
        dim[differs] = np.maximum(column - (offsets.shape[1] - ndim[differs]), 0)
    return _AxisColumns(same, flat, dim, present)


def _count_distinct(tensor: I64, number: I64, num_tensors: int) -> I64:
    """Count the distinct numbers of each tensor."""
    order = lex_order(tensor, number) if len(tensor) else tensor
    return np.bincount(tensor[order][is_new(tensor[order], number[order])], minlength=num_tensors)


def _hold_alike(tensor: I64, number: I64, coordinate: I64, num_tensors: int) -> NDArray[np.bool_]:
    """Tell for each tensor whether every coordinate of an axis that holds a part of it holds the same parts.

    Entry i of the columns says that ``coordinate[i]`` holds the part ``number[i]`` (a run, or an offset) of ``tensor[i]``. All
    hold the same if there are as many distinct pairs of coordinate and number as coordinates times numbers.
    """
    if not len(tensor):
        return np.ones(num_tensors, bool)
    order = lex_order(tensor, coordinate, number)
    tensor, coordinate, number = tensor[order], coordinate[order], number[order]
    pairs = np.bincount(tensor[is_new(tensor, coordinate, number)], minlength=num_tensors)
    coordinates = np.bincount(tensor[is_new(tensor, coordinate)], minlength=num_tensors)
    alike: NDArray[np.bool_] = pairs == coordinates * _count_distinct(tensor, number, num_tensors)
    return alike


def agreed(declared: Sequence[Placement]) -> Placement:
    """Return the placement that all ranks declare, axis by axis; an axis on which they differ counts as not declared."""
    first, *rest = list(dict.fromkeys(declared)) or [()]
    return tuple(p for p in first if all(p in other for other in rest))
