"""A tensor of any number of dims as a table: its first dims are the rows, the others the columns.

1. The edges of all boxes divide each side of the table into cells. The dims are split into rows and columns where that gives the
   fewest cells.
2. A side with more cells than can be told apart is divided evenly instead.
3. Each cell shows the part whose box contains its middle element. So time and size are bounded for any number of elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

from ..core.catalog.specs import Ints
from ..core.geometry.runs import I64

MAX_CUTS = 512
"""The most cells along each side of a tensor's table."""


@dataclass(frozen=True, slots=True)
class CellTable:
    """A table of a tensor's elements.

    Attributes
    ----------
    rows, columns : (R + 1,), (C + 1,)
        The first element of each cell along the side, and the number of elements on that side at the end.
    row_dims
        The number of dims that are rows.
    parts : (R, C)
        The part that each cell shows, -1 if it shows none.
    """

    rows: I64
    columns: I64
    row_dims: int
    parts: I64

    def boxes(self) -> tuple[I64, I64]:
        """Merge cells that show the same part into rectangles.

        Returns
        -------
        boxes : (N, 4)
            ``x, y, width, height`` in elements.
        part : (N,)
            The part that each rectangle shows.
        """
        found = np.array(list(_rectangles(self.parts)), np.int64).reshape(-1, 5)
        top, bottom, left, right, part = found.T
        x, y = self.columns[left], self.rows[top]
        return np.stack([x, y, self.columns[right] - x, self.rows[bottom] - y], axis=1), part


def lay_out(shape: Ints, offsets: I64, lengths: I64, part: I64) -> CellTable:
    """Lay out boxes of a tensor as a table.

    Parameters
    ----------
    offsets, lengths : (B, D)
    part : (B,)
        The part that each box belongs to.
    """
    if not prod(shape):
        return CellTable(np.array([0, 1]), np.array([0, 1]), 0, np.full((1, 1), -1))
    # cuts[d]: the coordinates on dim d where any box begins or ends.
    cuts = [
        np.unique(np.concatenate([[0, size], offsets[:, dim], offsets[:, dim] + lengths[:, dim]]))
        for dim, size in enumerate(shape)
    ]
    # sides: for each way to split the dims, the edges of the cells of both sides.
    splits = range(1, len(shape)) if len(shape) > 1 else (0,)
    sides = [(_divided(shape[:k], cuts[:k]), _divided(shape[k:], cuts[k:]), k) for k in splits]
    rows, columns, k = min(sides, key=lambda of: len(of[0]) * len(of[1]))
    # points[d]: the coordinate on dim d of the middle of each cell, along the side that dim d is on.
    points = [*_middles(rows, shape[:k]), *_middles(columns, shape[k:])]
    parts = np.full((len(rows) - 1, len(columns) - 1), -1)
    for begin, size, number in zip(offsets, lengths, part.tolist(), strict=True):
        inside = [(at >= b) & (at < b + n) for at, b, n in zip(points, begin, size, strict=True)]
        # A side without dims has one cell.
        down, across = (np.flatnonzero(np.all(of, axis=0)) if of else np.array([0]) for of in (inside[:k], inside[k:]))
        if len(down) and len(across):
            parts[np.ix_(down, across)] = number
    return CellTable(rows, columns, k, parts)


def _divided(sizes: Ints, cuts: Sequence[I64]) -> I64:
    """Cut one side of a table into cells: return the first element of each cell, and the number of elements at the end."""
    whole = prod(sizes)
    cut = [dim for dim, at in enumerate(cuts) if len(at) > 2]
    if not cut:
        return np.array([0, whole])
    inner = cut[-1]  # dims inside this one are whole; each index of the dims outside has the same cuts of it
    outer, unit = prod(sizes[:inner]), prod(sizes[inner + 1 :])
    if outer * (len(cuts[inner]) - 1) > MAX_CUTS:
        return np.unique([i * whole // MAX_CUTS for i in range(MAX_CUTS + 1)])
    begins = (np.arange(outer)[:, None] * sizes[inner] + cuts[inner][:-1]) * unit
    return np.append(begins.ravel(), whole)


def _middles(edges: I64, sizes: Ints) -> list[I64]:
    """Return the coordinates, in the dims of one side, of the middle of each cell: an array for each dim."""
    at, out = (edges[:-1] + edges[1:]) // 2, []
    for size in reversed(sizes):
        at, coordinate = np.divmod(at, size)
        out.append(coordinate)
    return out[::-1]


def _rectangles(parts: I64) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield rectangles of equal numbers in a table, as (top, bottom, left, right, number); negative numbers are left out.

    The runs of each row are joined with the same runs of the row above.
    """
    # begun: the runs of the row above, with the row in which each began.
    begun: dict[tuple[int, int, int], int] = {}
    for row, shown in enumerate(parts):
        ends = [0, *(np.flatnonzero(np.diff(shown)) + 1).tolist(), len(shown)]
        runs = [(a, b, int(shown[a])) for a, b in pairwise(ends) if shown[a] >= 0]
        going_on = {run: begun.get(run, row) for run in runs}
        yield from ((top, row, *run) for run, top in begun.items() if run not in going_on)
        begun = going_on
    yield from ((top, len(parts), *run) for run, top in begun.items())
