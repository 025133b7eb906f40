"""The placement of each tensor on the mesh, from the ranks' pieces of it, on axes for which the state does not declare it.

For an axis that nothing declares, compare the ranks of one *line*: ranks that differ in the coordinate on that axis alone. The
line of a tensor is the one with the lowest rank of its first run.

1. If all ranks of the line hold the same pieces, the tensor is replicated if every coordinate of the axis has pieces of it, and
   otherwise resident on the coordinates that have.
2. If they hold different runs of the same boxes, it is flat.
3. If they hold different boxes, it is sharded along the first dim on which the ranges of two coordinates differ.

The order in which several axes cut one dim, and the sections that they cut, follow from the pieces too (`_with_cuts`). A
*hypothesis* is an order of the axes that cut a dim, and sections of the dim that the first axis cuts each on its own. It gives
each rank some ranges of the dim. It holds if every piece lies in one range of its rank. Because the pieces of all ranks cover the
tensor, it then gives each rank exactly the ranges that the rank holds. Hypotheses are tested once for all tensors that lie alike:

1. The order in which inner axes cut first, without sections. It fits FSDP2 over tensor parallelism, and any axis that cuts alone.
2. Every other order, and then every order with the sections that the pieces show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, permutations
from typing import NamedTuple

import numpy as np

from ..catalog.placements import cut_ranges
from ..catalog.specs import AxisPlacement, Ints, Mesh, Placement
from ..geometry.columns import group_ids, is_new, lex_order, rows_by_id
from ..geometry.runs import I64, Mask, Range


class PieceTable(NamedTuple):
    """The pieces of all ranks as columns, sorted by tensor; `box` and `run` are numbers of the distinct boxes and runs."""

    tensor: I64
    rank: I64
    box: I64
    run: I64


def derive(
    mesh: Mesh, declared: Sequence[Placement], shape: I64, ndim: I64, holding: PieceTable, box_offsets: I64, box_lengths: I64
) -> PlacementTable:
    """Find the placement of each tensor on every mesh axis, from the declared placements and the pieces that ranks hold.

    Parameters
    ----------
    declared
        The declared placement of each tensor, which wins over the one that its pieces show.
    shape : (T, D), ndim : (T,)
    box_offsets, box_lengths : (B, D)
        The boxes, to which the rows of `holding` refer by index.
    """
    # Few tensors declare different placements, and equal ones share one tuple, so they are numbered by identity.
    declarations = {id(placement): placement for placement in declared}
    number = dict(zip(declarations, range(len(declarations)), strict=True))
    declared_number = np.array([number[id(placement)] for placement in declared], np.int64)
    shown = [_shown_on(mesh, axis, len(declared), ndim, holding, box_offsets) for axis in range(len(mesh.axes))]
    # A row for each tensor: the numbers of its declared placement and of the one shown on each axis. Equal rows are equal
    # placements.
    of_tensor, first = group_ids(np.stack([declared_number, *(numbers for _, numbers in shown)], axis=1))
    placements = []
    # The declared placement of an axis wins over the placement that the pieces show.
    for t in first.tolist():
        by_axis = {p.axis: p for p in declared[t]}
        found = (spelled[numbers[t]] for spelled, numbers in shown)
        placements.append(tuple(by_axis.get(p.axis, p) for p in found))
    bounds = box_offsets, box_offsets + box_lengths
    return _with_cuts(mesh, PlacementTable(placements, of_tensor), shape, ndim, holding, bounds)


def _shown_on(
    mesh: Mesh, axis: int, num_tensors: int, ndim: I64, holding: PieceTable, box_offsets: I64
) -> tuple[list[AxisPlacement], I64]:
    """Find the placement of each tensor along one mesh axis, by comparing ranks that differ only in their coordinate on it.

    For each tensor one *line* of such ranks is compared: the line with the rank of the tensor's first piece. Return the distinct
    placements on the axis, and for each tensor the index of its placement in that list, (T,).
    """
    size, stride = mesh.sizes[axis], int(np.prod(mesh.sizes[axis + 1 :], dtype=np.int64))
    coordinate = np.arange(mesh.size) // stride % size
    # A line is named by its rank of coordinate 0: ranks that differ on this axis alone have the same name.
    line_of = np.arange(mesh.size) - coordinate * stride
    # present[t, c]: coordinate c holds pieces of tensor t.
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
    # same[t]: all ranks that hold pieces of tensor t hold the same ones; flat[t]: some box of it is cut into several runs.
    same = _hold_alike(tensor, run, where, num_tensors)
    flat = _count_distinct(tensor, box, num_tensors) < _count_distinct(tensor, run, num_tensors)
    # dim[t]: the first dim on which coordinates differ.
    dim = np.zeros(num_tensors, np.int64)
    sharded = np.flatnonzero(~(same | flat)[tensor])
    tensor, offsets, where = tensor[sharded], box_offsets[box[sharded]], where[sharded]
    # From the innermost dim outwards, so that the outermost dim that differs is the last one written.
    for column in reversed(range(offsets.shape[1])):
        differs = ~_hold_alike(tensor, offsets[:, column], where, num_tensors)
        dim[differs] = np.maximum(column - (offsets.shape[1] - ndim[differs]), 0)
    kinds = ("replicate", "resident", "flat", "shard")
    # kind[t]: the index of the tensor's kind in `kinds`.
    kind = np.where(same, np.where(present.all(axis=1), 0, 1), np.where(flat, 2, 3))
    # Only columns that the kind uses count, others are 0: the dim of a shard, the coordinates of a resident tensor.
    columns = [kind, np.where(kind == 3, dim, 0), *np.where(kind[:, None] == 1, present, 0).T.astype(np.int64)]
    numbers, first_of = group_ids(np.stack(columns, axis=1))
    spelled = []
    for t in first_of.tolist():
        coords = tuple(np.flatnonzero(present[t]).tolist()) if kind[t] == 1 else ()
        spelled.append(AxisPlacement(mesh.axes[axis], kinds[kind[t]], int(dim[t]) if kind[t] == 3 else None, coords))
    return spelled, numbers


def _count_distinct(tensor: I64, number: I64, num_tensors: int) -> I64:
    """Count the distinct values of `number` for each tensor, (T,)."""
    # order: the entries by tensor and number, so that equal ones are neighbours.
    order = lex_order(tensor, number) if len(tensor) else tensor
    return np.bincount(tensor[order][is_new(tensor[order], number[order])], minlength=num_tensors)


def _hold_alike(tensor: I64, number: I64, coordinate: I64, num_tensors: int) -> Mask:
    """Tell for each tensor whether all coordinates of an axis that hold a part of it hold the same parts, (T,).

    Entry i of the columns says that ``coordinate[i]`` holds the part ``number[i]`` (a run, or an offset) of ``tensor[i]``. All
    hold the same if there are as many distinct pairs of coordinate and number as coordinates times numbers.
    """
    if not len(tensor):
        return np.ones(num_tensors, bool)
    order = lex_order(tensor, coordinate, number)
    tensor, coordinate, number = tensor[order], coordinate[order], number[order]
    # pairs[t], coordinates[t]: how many distinct pairs, and how many distinct coordinates, tensor t has.
    pairs = np.bincount(tensor[is_new(tensor, coordinate, number)], minlength=num_tensors)
    coordinates = np.bincount(tensor[is_new(tensor, coordinate)], minlength=num_tensors)
    alike: Mask = pairs == coordinates * _count_distinct(tensor, number, num_tensors)
    return alike


def agreed_placement(declared: Sequence[Placement]) -> Placement:
    """Return the axes of a tensor's placement that all ranks declare alike; an axis on which they differ is left out."""
    first, *rest = list(dict.fromkeys(declared)) or [()]
    return tuple(p for p in first if all(p in other for other in rest))


Hypothesis = tuple[tuple[int, ...], Ints]
"""A guess of how a dim is cut: the axes that cut it, first to last, and the sections that the first axis cuts separately."""

OpenDims = tuple[tuple[int, tuple[str, ...]], ...]
"""Dims whose cutting order is not known, each with the names of the axes that cut it."""


class PlacementTable(NamedTuple):
    """The distinct placements, and the index of each tensor's placement among them, (T,)."""

    placements: Sequence[Placement]
    of_tensor: I64


def _with_cuts(
    mesh: Mesh, table: PlacementTable, shape: I64, ndim: I64, held: PieceTable, bounds: tuple[I64, I64]
) -> PlacementTable:
    """Return the table with `turn` (the order in which axes cut a dim) and sections filled in, as far as the pieces show them.

    Parameters
    ----------
    shape : (T, D), ndim : (T,)
    held
        The pieces of all ranks, in order of tensor.
    bounds : (B, D), (B, D)
        The lowest corner of each box that `held` numbers, and the one behind its highest; padded on the left.
    """
    low, high = bounds
    wanted = {i: dims for i, p in enumerate(table.placements) if (dims := _open_dims(p))}
    if not wanted:
        return table
    cutting = sorted({mesh.axes.index(name) for dims in wanted.values() for _, names in dims for name in names})
    coordinates = np.stack(np.unravel_index(np.arange(mesh.size), mesh.sizes), axis=1)
    # One row for each piece from here on, and only one for ranks that differ on axes that cut nothing. where[i]: the coordinates
    # of its rank on the axes that cut, as one number; begin[t]: the first row of tensor t.
    where = np.ravel_multi_index(tuple(coordinates[:, cutting].T), [mesh.sizes[axis] for axis in cutting])[held.rank]
    rows = np.flatnonzero(is_new(held.tensor, held.box, where))
    where, rank, box = where[rows], held.rank[rows], held.box[rows]
    begin = np.searchsorted(held.tensor[rows], np.arange(len(shape) + 1)).tolist()
    # number: the distinct placements of the result, numbered in order; of_tensor[t]: the number of tensor t's.
    number: dict[Placement, int] = {}
    of_tensor = np.array([number.setdefault(p, len(number)) for p in table.placements], np.int64)[table.of_tensor]
    searched: dict[object, dict[int, Hypothesis]] = {}
    known: dict[object, int] = {}
    asked = np.flatnonzero(np.isin(table.of_tensor, list(wanted)))
    for t, at in zip(asked.tolist(), table.of_tensor[asked].tolist(), strict=True):
        own, dims = slice(begin[t], begin[t + 1]), wanted[at]
        # Tensors with equal shapes and pieces, as in equal layers, share one answer.
        alike = dims, shape[t].tobytes(), where[own].tobytes(), box[own].tobytes()
        if (at, alike) not in known:
            if alike not in searched:
                pieces = coordinates[rank[own]], low[box[own]], high[box[own]]
                searched[alike] = _search(mesh, dims, shape[t], int(ndim[t]), *pieces)
            known[at, alike] = number.setdefault(_filled(mesh, table.placements[at], searched[alike]), len(number))
        of_tensor[t] = known[at, alike]
    return PlacementTable(list(number), of_tensor)


def _open_dims(placement: Placement) -> OpenDims:
    """List the dims of a placement whose cutting order is incomplete, each with all axes that shard it."""
    by_dim: dict[int, list[AxisPlacement]] = {}
    for p in placement:
        if p.kind == "shard" and p.dim is not None:
            by_dim.setdefault(p.dim, []).append(p)
    lacking = ((dim, axes) for dim, axes in by_dim.items() if len({p.turn for p in axes} - {None}) < len(axes))
    return tuple((dim, tuple(p.axis for p in axes)) for dim, axes in lacking)


def _filled(mesh: Mesh, placement: Placement, found: Mapping[int, Hypothesis]) -> Placement:
    """Return the placement with the cutting order and sections that were found for each dim."""

    def fill(p: AxisPlacement) -> AxisPlacement:
        if p.kind != "shard" or p.dim is None or p.dim not in found:
            return p
        order, sections = found[p.dim]
        turn = order.index(mesh.axes.index(p.axis))
        return replace(p, turn=turn, sections=sections if turn == 0 else ())

    return tuple(map(fill, placement))


def _search(mesh: Mesh, dims: OpenDims, shape: I64, ndim: int, where: I64, low: I64, high: I64) -> dict[int, Hypothesis]:
    """Find for each dim of one tensor the first hypothesis (order of axes, and sections) that fits the ranks' pieces.

    A dim is left out if no hypothesis fits.

    Parameters
    ----------
    where : (N, axes)
        The coordinates of each piece's rank.
    low, high : (N, D)
        The bounds of the pieces.
    """
    out: dict[int, Hypothesis] = {}
    for dim, names in dims:
        column = dim + len(shape) - ndim
        size, pieces = int(shape[column]), np.stack([low[:, column], high[:, column]], axis=1)
        found = next((h for h in _hypotheses(mesh, names, size, where, pieces) if _holds(mesh, h, size, where, pieces)), None)
        if found is not None:
            out[dim] = found
    return out


def _hypotheses(mesh: Mesh, names: Sequence[str], size: int, where: I64, pieces: I64) -> Iterator[Hypothesis]:
    """Yield the hypotheses for one dim: each order of axes without sections, inner axes first, then orders with sections."""
    orders = list(permutations(sorted((mesh.axes.index(name) for name in names), reverse=True)))
    yield from ((order, ()) for order in orders)
    for order in orders:
        # Coordinate 0 holds the first part of each section, so sections begin where the ranges of coordinate 0 begin.
        low, high = np.unique(pieces[where[:, order[0]] == 0], axis=0).T
        begins = low[low > np.append(-1, np.maximum.accumulate(high))[:-1]].tolist()
        if len(begins) > 1 and begins[0] == 0:
            yield order, tuple(end - begin for begin, end in pairwise([*begins, size]))


def _holds(mesh: Mesh, hypothesis: Hypothesis, size: int, where: I64, pieces: I64) -> bool:
    """Tell whether a hypothesis fits: every piece lies in one of the ranges that it gives to the piece's rank."""
    order, sections = hypothesis
    # Ranks with the same coordinates on the cutting axes have the same ranges: one group each.
    ids, first = group_ids(where[:, list(order)])
    # at: one piece of a group; of_group: all of its pieces
    for at, of_group in zip(first.tolist(), rows_by_id(ids, len(first)), strict=True):
        ranges: Sequence[Range] = [(0, size)]
        for turn, axis in enumerate(order):
            ranges = cut_ranges(ranges, sections if turn == 0 else (), mesh.sizes[axis], int(where[at, axis]))
        begin, end = (np.array(column, np.int64) for column in ([r[0] for r in ranges], [sum(r) for r in ranges]))
        # inside[i, r]: piece i lies in range r.
        inside = (pieces[of_group, :1] >= begin) & (pieces[of_group, 1:] <= end)
        if not inside.any(axis=1).all():
            return False
    return True
