"""The placement of each tensor on the mesh: what the state declares, and for other axes what the ranks' pieces show.

For an axis that nothing declares, compare ranks that differ in that coordinate alone (a *line*: those that agree on all other
axes with the lowest rank of the tensor's first run):

1. all hold the same pieces: replicated if every coordinate has them, resident on those that do otherwise;
2. they hold different runs of the same boxes: flat;
3. they hold different boxes: sharded along the first dim in which one coordinate has other ranges than another.

In which order axes cut a dim that several shard, and in which sections, follows from the pieces too (`axis_cuts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..catalog.specs import AxisPlacement, Mesh
from ..geometry.ordering import group_ids, is_new, lex_order
from ..geometry.runs import I64
from .axis_cuts import HeldBounds, Placement, PlacementTable, with_cuts


@dataclass(frozen=True, slots=True)
class PieceTable:
    """What the ranks hold of all tensors: a row a piece, in order of tensor. `box` and `run` number distinct boxes and runs."""

    tensor: I64
    rank: I64
    box: I64
    run: I64


@dataclass(frozen=True, slots=True)
class _AxisColumns:
    """What the pieces of each tensor show on one axis: whether ranks hold the same, whether they share boxes, the first dim in
    which coordinates differ, and which coordinates have any (T, size)."""

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
        Of each tensor; wins over what its pieces show.
    shape : (T, D), ndim : (T,)
    box_offsets, box_lengths : (B, D)
        Of the boxes that `holding` numbers.
    """
    # Few tensors differ in what is declared: all that declare alike share one tuple.
    declarations = {id(said): said for said in declared}
    number = dict(zip(declarations, range(len(declarations)), strict=True))
    said = np.array([number[id(one)] for one in declared], np.int64)
    shown = [_spell(axis, _shown_on(mesh, i, len(declared), ndim, holding, box_offsets)) for i, axis in enumerate(mesh.axes)]
    # (T, 1 + axes): numbers of what is declared and of what is shown on each axis; equal rows have equal placements.
    of_tensor, first = group_ids(np.stack([said, *(numbers for _, numbers in shown)], axis=1))
    placements = []
    for t in first.tolist():
        by_axis = {p.axis: p for p in declared[t]}
        found = (spelled[numbers[t]] for spelled, numbers in shown)
        placements.append(tuple(by_axis.get(p.axis, p) for p in found))
    held = HeldBounds(holding.tensor, holding.rank, holding.box, box_offsets, box_offsets + box_lengths)
    return with_cuts(mesh, PlacementTable(placements, of_tensor), shape, ndim, held)


def _spell(axis: str, shown: _AxisColumns) -> tuple[list[AxisPlacement], I64]:
    """Spell the distinct placements on an axis, and number that of each tensor."""
    kind = np.where(shown.same, np.where(shown.present.all(axis=1), 0, 1), np.where(shown.flat, 2, 3))
    # Only what a kind has to say counts: the dim of a shard, the coordinates of what is resident.
    columns = [kind, np.where(kind == 3, shown.dim, 0), *np.where(kind[:, None] == 1, shown.present, 0).T.astype(np.int64)]
    numbers, first = group_ids(np.stack(columns, axis=1))
    spelled = []
    for t in first.tolist():
        coords = tuple(np.flatnonzero(shown.present[t]).tolist()) if kind[t] == 1 else ()
        name = ("replicate", "resident", "flat", "shard")[int(kind[t])]
        spelled.append(AxisPlacement(axis, name, int(shown.dim[t]) if kind[t] == 3 else None, coords))
    return spelled, numbers


def _shown_on(mesh: Mesh, axis: int, num_tensors: int, ndim: I64, holding: PieceTable, box_offsets: I64) -> _AxisColumns:
    size, stride = mesh.sizes[axis], int(np.prod(mesh.sizes[axis + 1 :], dtype=np.int64))
    coordinate = np.arange(mesh.size) // stride % size
    # A line is named by its rank of coordinate 0: ranks that differ on this axis alone have the same name.
    line_of = np.arange(mesh.size) - coordinate * stride
    present = np.zeros((num_tensors, size), bool)
    present[holding.tensor, coordinate[holding.rank]] = True
    first = np.searchsorted(holding.tensor, np.arange(num_tensors))
    own_line = np.full(num_tensors, -1, np.int64)
    some = np.flatnonzero(present.any(axis=1))
    own_line[some] = line_of[holding.rank[first[some]]]
    on_line = np.flatnonzero(line_of[holding.rank] == own_line[holding.tensor])
    tensor, run, box = holding.tensor[on_line], holding.run[on_line], holding.box[on_line]
    where = coordinate[holding.rank[on_line]]
    same = _hold_alike(tensor, run, where, num_tensors)
    flat = _count_distinct(tensor, box, num_tensors) < _count_distinct(tensor, run, num_tensors)
    dim = np.zeros(num_tensors, np.int64)
    sharded = np.flatnonzero(~(same | flat)[tensor])
    tensor, offsets, where = tensor[sharded], box_offsets[box[sharded]], where[sharded]
    # From the inside out, so that the outermost dim that differs is what stays.
    for column in reversed(range(offsets.shape[1])):
        differs = ~_hold_alike(tensor, offsets[:, column], where, num_tensors)
        dim[differs] = np.maximum(column - (offsets.shape[1] - ndim[differs]), 0)
    return _AxisColumns(same, flat, dim, present)


def _count_distinct(tensor: I64, number: I64, num_tensors: int) -> I64:
    """How many distinct numbers each tensor has."""
    order = lex_order(tensor, number) if len(tensor) else tensor
    return np.bincount(tensor[order][is_new(tensor[order], number[order])], minlength=num_tensors)


def _hold_alike(tensor: I64, number: I64, coordinate: I64, num_tensors: int) -> NDArray[np.bool_]:
    """Whether all coordinates that have anything of a tensor have the same numbers of it: then each has all that there are."""
    if not len(tensor):
        return np.ones(num_tensors, bool)
    order = lex_order(tensor, coordinate, number)
    tensor, coordinate, number = tensor[order], coordinate[order], number[order]
    pairs = np.bincount(tensor[is_new(tensor, coordinate, number)], minlength=num_tensors)
    coordinates = np.bincount(tensor[is_new(tensor, coordinate)], minlength=num_tensors)
    alike: NDArray[np.bool_] = pairs == coordinates * _count_distinct(tensor, number, num_tensors)
    return alike


def agreed(declared: Sequence[Placement]) -> Placement:
    """What all ranks declare alike, axis by axis; an axis on which they differ counts as not declared."""
    first, *rest = list(dict.fromkeys(declared)) or [()]
    return tuple(p for p in first if all(p in other for other in rest))
