"""How does a tensor of any number of dims lie on paper? As a table: its first dims are the rows, the others the columns.

1. The dims are split where the fewest boxes fall apart into several rectangles; most do not.
2. A run of a box is cut into boxes first (`core.geometry.decompose`).
3. Where there are more rectangles than anybody can tell apart, what each point of a grid shows is drawn in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import numpy as np

from ...core.catalog.specs import Ints
from ...core.geometry.runs import I64
from ...errors import UnsupportedError

MAX_RECTANGLES = 4000
"""More are drawn as a grid."""

MAX_CUT = 400_000
"""More are not drawn at all."""

GRID = (160, 240)


@dataclass(frozen=True, slots=True)
class Cells:
    """A rectangle of the table, and the number of the part that it shows."""

    row: int
    column: int
    rows: int
    columns: int
    part: int


@dataclass(frozen=True, slots=True)
class Flat:
    """A tensor as a table: its size, how many dims are rows, and its rectangles."""

    rows: int
    columns: int
    row_dims: int
    cells: tuple[Cells, ...]
    is_grid: bool


def flatten(shape: Ints, offsets: I64, lengths: I64, part: I64) -> Flat:
    """Lay boxes of a tensor out on its table.

    Parameters
    ----------
    offsets, lengths : (B, D)
    part : (B,)
        The number of the part that each box belongs to.
    """
    num, where, sizes = len(shape), offsets.tolist(), lengths.tolist()
    splits = range(1, num) if num > 1 else range(1)
    counts = [sum(_count(size, shape, k) for size in sizes) for k in splits]
    best = int(np.argmin(counts))
    if counts[best] > MAX_CUT:
        raise UnsupportedError(
            f"a tensor of shape {shape} in {counts[best]:,} rectangles cannot be drawn; inspect lists its shards"
        )
    k = splits[best]
    rows, columns = prod(shape[:k]), prod(shape[k:])
    cells = [
        Cells(r, c, h, w, number)
        for at, size, number in zip(where, sizes, part.tolist(), strict=True)
        for (r, h), (c, w) in product(_intervals(at[:k], size[:k], shape[:k]), _intervals(at[k:], size[k:], shape[k:]))
    ]
    if len(cells) <= MAX_RECTANGLES:
        return Flat(rows, columns, k, tuple(cells), False)
    return Flat(rows, columns, k, tuple(_on_grid(cells, rows, columns)), True)


def _ranged(lengths: Sequence[int], shape: Sequence[int]) -> int:
    """The innermost dim of which a box may hold a part, if all dims inside it are whole."""
    dim = len(lengths) - 1
    while dim > 0 and lengths[dim] == shape[dim]:
        dim -= 1
    return dim


def _count(lengths: Sequence[int], shape: Sequence[int], k: int) -> int:
    groups = (lengths[:k], shape[:k]), (lengths[k:], shape[k:])
    return prod(prod(of[: _ranged(of, whole)]) for of, whole in groups if of)


def _intervals(offsets: Sequence[int], lengths: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Begin and length of the runs that a box is in the row-major order of some dims."""
    if not shape:
        yield 0, 1
        return
    dim = _ranged(lengths, shape)
    unit = prod(shape[dim + 1 :])
    for outer in product(*(range(o, o + n) for o, n in zip(offsets[:dim], lengths[:dim], strict=True))):
        base = 0
        for index, size in zip(outer, shape[:dim], strict=True):
            base = base * size + index
        yield (base * shape[dim] + offsets[dim]) * unit, lengths[dim] * unit


def _on_grid(cells: Sequence[Cells], rows: int, columns: int) -> Iterator[Cells]:
    """The part at each point of a grid, alike neighbours of a row as one; in units of the table, rounded to the grid."""
    down, across = min(rows, GRID[0]), min(columns, GRID[1])
    shown = np.full((down, across), -1, np.int64)
    for c in cells:
        r0, r1 = _points(c.row, c.rows, rows, down)
        c0, c1 = _points(c.column, c.columns, columns, across)
        shown[r0:r1, c0:c1] = c.part
    for row in range(down):
        ends = [0, *(np.flatnonzero(np.diff(shown[row])) + 1).tolist(), across]
        for a, b in pairwise(ends):
            if shown[row, a] >= 0:
                top, left = row * rows // down, a * columns // across
                bottom, right = (row + 1) * rows // down, b * columns // across
                yield Cells(top, left, bottom - top, right - left, int(shown[row, a]))


def _points(begin: int, length: int, size: int, points: int) -> tuple[int, int]:
    """The grid points ``i`` of which the middle, ``(2 i + 1) size / (2 points)``, is in an interval."""
    first, last = (max(-(-(2 * points * at - size) // (2 * size)), 0) for at in (begin, begin + length))
    return first, last
