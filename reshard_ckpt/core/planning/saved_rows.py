"""What the rows of a catalog show: which coordinates wrote a tensor, and how axes cut it where the placement does not say.

Version 1 of the format recorded neither the order in which axes cut a dim nor sections. There, rows stand for the pieces of all
ranks: a row tells the rank that wrote it, and replicas that one rank wrote for another lie in the same place.
"""

from __future__ import annotations

import numpy as np

from ..catalog.model import Catalog
from ..catalog.placements import KINDS
from ..geometry.runs import I64, bounds, pad_left
from .axis_cuts import HeldBounds, Placement, PlacementTable, open_dims, with_cuts


class SavedRows:
    """Looks into the rows of a catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._rank = np.array([file.rank for file in catalog.files], np.int64)
        self._known = catalog.mesh is not None and bool((self._rank < catalog.mesh.size).all())

    def first_coordinate(self, tensor: int, axis: str) -> int:
        """The lowest coordinate on an axis that wrote any of a tensor; 0 where nothing is known."""
        mesh, ranks = self._catalog.mesh, self._ranks(tensor)
        if mesh is None or not self._known or axis not in mesh.axes or not len(ranks):
            return 0
        return int(np.unravel_index(ranks, mesh.sizes)[mesh.axes.index(axis)].min())

    def placements(self) -> tuple[Placement, ...]:
        """The placement of each tensor, completed where the catalog records no turns."""
        table, boxes, rows, mesh = self._catalog.tensors_table, self._catalog.boxes, self._catalog.rows, self._catalog.mesh
        numbers = zip(table.placement.tolist(), table.ndim.tolist(), strict=True)
        said = [_understood(self._catalog.placements[i], ndim) if i >= 0 else () for i, ndim in numbers]
        if mesh is None or not self._known or not any(map(open_dims, self._catalog.placements)):
            return tuple(said)
        said = [tuple(p for p in placement if p.axis in mesh.axes) for placement in said]
        low, high = bounds(boxes.offsets[rows.box], boxes.lengths[rows.box], rows.start, rows.count)
        tensor = np.repeat(np.arange(len(table.names)), np.diff(table.row_start))
        width = max(low.shape[1], table.shape.shape[1])
        held = HeldBounds(
            tensor, self._rank[rows.file], np.arange(len(rows.box)), pad_left(low, width, 0), pad_left(high, width, 1)
        )
        number = {placement: i for i, placement in enumerate(dict.fromkeys(said))}
        numbered = PlacementTable(list(number), np.array([number[placement] for placement in said], np.int64))
        found = with_cuts(mesh, numbered, pad_left(table.shape, width, 1), table.ndim, held)
        # An alias has no rows of its own, and lies as its source does.
        return tuple(found.placements[found.of_tensor[self._catalog.source(t)]] for t in range(len(said)))

    def _ranks(self, tensor: int) -> I64:
        start, source = self._catalog.tensors_table.row_start, self._catalog.source(tensor)
        return self._rank[self._catalog.rows.file[start[source] : start[source + 1]]]


def _understood(placement: Placement, ndim: int) -> Placement:
    """What of a placement means anything here: a catalog may come from a newer version, or from anywhere."""
    known = (p for p in placement if p.kind in KINDS and (p.kind != "shard" or p.dim is not None))
    return tuple(p for p in known if p.dim is None or p.dim < ndim)
