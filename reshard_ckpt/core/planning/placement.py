"""How is each tensor laid out on the mesh? What the state declares, and for other axes what the ranks' pieces show.

For an axis that nothing declares, compare ranks that differ in that coordinate alone (a *line*: those that agree on all other
axes with the lowest rank of the tensor's first run):

1. all hold the same pieces: replicated if every coordinate has them, resident on those that do otherwise;
2. they hold different runs of the same boxes: flat;
3. they hold different boxes: sharded along the first dim in which these differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..catalog.specs import AxisPlacement, Mesh
from ..geometry.ordering import is_new, lex_order
from ..geometry.runs import I64

Placement = tuple[AxisPlacement, ...]


@dataclass(frozen=True, slots=True)
class PieceTable:
    """What the ranks hold of all tensors: a row a piece, in order of tensor. `box` and `run` number distinct boxes and runs."""

    tensor: I64
    rank: I64
    box: I64
    run: I64


@dataclass(frozen=True, slots=True)
class _AxisColumns:
    """Of each tensor what the pieces show on one axis: whether ranks hold the same, whether they share boxes, the first dim that
    differs, and which coordinates have any."""

    same: NDArray[np.bool_]
    flat: NDArray[np.bool_]
    dim: I64
    present: NDArray[np.bool_]


def derive(mesh: Mesh, declared: Sequence[Placement], ndim: I64, holding: PieceTable, box_offsets: I64) -> list[Placement]:
    """The placement of each tensor on every axis of the mesh, in its order.

    Parameters
    ----------
    declared
        Of each tensor; wins over what its pieces show.
    ndim : (T,)
    box_offsets : (B, D)
        Of the boxes that `holding` numbers.
    """
    shown = [_spell(axis, _shown_on(mesh, i, len(declared), ndim, holding, box_offsets)) for i, axis in enumerate(mesh.axes)]
    derived = []
    for said, *found in zip(declared, *shown, strict=True):
        by_axis = {p.axis: p for p in said}
        derived.append(tuple(by_axis.get(p.axis, p) for p in found) if said else tuple(found))
    return derived


def _spell(axis: str, shown: _AxisColumns) -> list[AxisPlacement]:
    """The placement of each tensor; alike ones are made once."""
    kind = np.where(shown.same, np.where(shown.present.all(axis=1), 0, 1), np.where(shown.flat, 2, 3))
    made: dict[tuple[int, int, bytes], AxisPlacement] = {}
    out = []
    for which, dim, present in zip(kind.tolist(), shown.dim.tolist(), shown.present, strict=True):
        key = which, dim if which == 3 else 0, present.tobytes() if which == 1 else b""
        if key not in made:
            coords = tuple(np.flatnonzero(present).tolist()) if which == 1 else ()
            kinds = ("replicate", "resident", "flat", "shard")
            made[key] = AxisPlacement(axis, kinds[which], dim if which == 3 else None, coords)
        out.append(made[key])
    return out


def _shown_on(mesh: Mesh, axis: int, num_tensors: int, ndim: I64, holding: PieceTable, box_offsets: I64) -> _AxisColumns:
    size, stride = mesh.sizes[axis], int(np.prod(mesh.sizes[axis + 1 :], dtype=np.int64))
    coordinate = np.arange(mesh.size) // stride % size
    line_of = np.arange(mesh.size) - coordinate * stride
    present = np.zeros((num_tensors, size), bool)
    present[holding.tensor, coordinate[holding.rank]] = True
    first = np.searchsorted(holding.tensor, np.arange(num_tensors))
    own_line = np.full(num_tensors, -1, np.int64)
    some = np.flatnonzero(present.any(axis=1))
    own_line[some] = line_of[holding.rank[first[some]]]
    on_line = np.flatnonzero(line_of[holding.rank] == own_line[holding.tensor])
    tensor, run, box = holding.tensor[on_line], holding.run[on_line], holding.box[on_line]
    shift = box_offsets.shape[1] - ndim
    offsets = box_offsets[box]
    begins = np.flatnonzero(is_new(tensor))
    dim = np.zeros(num_tensors, np.int64)
    if len(begins):
        reference = offsets[np.repeat(begins, np.diff(np.append(begins, len(tensor))))]
        differs = np.logical_or.reduceat(offsets != reference, begins, axis=0)
        dim[tensor[begins]] = np.maximum(np.argmax(differs, axis=1) - shift[tensor[begins]], 0)
    num_runs = _count_distinct(tensor, run, num_tensors)
    same = _same_runs(tensor, run, coordinate[holding.rank[on_line]], num_runs, num_tensors)
    return _AxisColumns(same, _count_distinct(tensor, box, num_tensors) < num_runs, dim, present)


def _count_distinct(tensor: I64, number: I64, num_tensors: int) -> I64:
    """How many distinct numbers each tensor has."""
    order = lex_order(tensor, number) if len(tensor) else tensor
    return np.bincount(tensor[order][is_new(tensor[order], number[order])], minlength=num_tensors)


def _same_runs(tensor: I64, run: I64, coordinate: I64, num_runs: I64, num_tensors: int) -> NDArray[np.bool_]:
    """Whether every coordinate that has runs of a tensor has all of them: then, and only then, all have the same."""
    if not len(tensor):
        return np.ones(num_tensors, bool)
    order = lex_order(tensor, coordinate, run)
    tensor, coordinate, run = tensor[order], coordinate[order], run[order]
    pairs = np.bincount(tensor[is_new(tensor, coordinate, run)], minlength=num_tensors)
    coordinates = np.bincount(tensor[is_new(tensor, coordinate)], minlength=num_tensors)
    same: NDArray[np.bool_] = pairs == coordinates * num_runs
    return same


def agreed(declared: Sequence[Placement]) -> Placement:
    """What all ranks declare alike, axis by axis; an axis on which they differ counts as not declared."""
    first, *rest = list(dict.fromkeys(declared)) or [()]
    return tuple(p for p in first if all(p in other for other in rest))
