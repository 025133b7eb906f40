"""How is each tensor laid out on the mesh? What the state declares, and for other axes what the ranks' pieces show.

For an axis that nothing declares, compare ranks that differ in that coordinate alone:

1. all hold the same pieces: replicated if every coordinate has them, resident on those that do otherwise;
2. they hold different runs of the same boxes: flat;
3. they hold different boxes: sharded along the first dim in which these differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .geometry import I64
from .state import AxisPlacement, Mesh

Placement = tuple[AxisPlacement, ...]


@dataclass(frozen=True, slots=True)
class Holding:
    """What the ranks hold of one tensor: a row a piece. `box` and `run` number distinct boxes and distinct runs."""

    rank: I64
    box: I64
    run: I64
    offsets: I64


def mesh_coordinates(mesh: Mesh) -> I64:
    """``(ranks, axes)`` coordinates of every rank."""
    return np.indices(mesh.sizes).reshape(len(mesh.sizes), -1).T if mesh.sizes else np.zeros((1, 0), np.int64)


def derive(mesh: Mesh, coordinates: I64, declared: Placement, holding: Holding, ndim: int) -> Placement:
    """The placement on every axis of the mesh, in its order."""
    by_axis = {p.axis: p for p in declared}
    return tuple(
        by_axis.get(axis) or _axis_placement(axis, i, mesh.sizes[i], coordinates[holding.rank], holding, ndim)
        for i, axis in enumerate(mesh.axes)
    )


def _axis_placement(axis: str, i: int, size: int, coordinates: I64, holding: Holding, ndim: int) -> AxisPlacement:
    held = np.unique(coordinates[:, i])
    everywhere = len(held) == size
    # Ranks that agree with the first one on all other axes; one such line shows what the axis does.
    others = np.delete(coordinates, i, axis=1)
    line = np.flatnonzero((others == others[:1]).all(axis=1)) if len(others) else np.zeros(0, np.int64)
    runs = {int(c): set(holding.run[line[coordinates[line, i] == c]].tolist()) for c in np.unique(coordinates[line, i])}
    if len(set(map(frozenset, runs.values()))) <= 1:
        return AxisPlacement(axis, "replicate") if everywhere else AxisPlacement(axis, "resident", coords=tuple(held.tolist()))
    if len(np.unique(holding.box[line])) < len(np.unique(holding.run[line])):
        return AxisPlacement(axis, "flat")
    differs = (holding.offsets[line] != holding.offsets[line][:1]).any(axis=0)
    dim = int(np.argmax(differs)) - (holding.offsets.shape[1] - ndim)
    return AxisPlacement(axis, "shard", dim=max(dim, 0))


def agreed(declared: Sequence[Placement]) -> Placement:
    """What all ranks declare alike, axis by axis; an axis on which they differ counts as not declared."""
    first, *rest = list(dict.fromkeys(declared)) or [()]
    return tuple(p for p in first if all(p in other for other in rest))
