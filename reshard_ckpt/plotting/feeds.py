"""The parts of one tensor on the ranks of another mesh, as `reshard` lays it out, and the saved ranks that feed each part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..core.catalog.model import Catalog
from ..core.catalog.specs import Ints, Mesh, PieceColumns
from ..core.geometry.runs import I64, decompose, pad_left, strides_of
from ..core.planning.load_plan import plan_load
from ..core.planning.target_pieces import target_rows
from ..core.planning.target_placement import TargetPlacement, TargetTopology, place

Run: TypeAlias = tuple[Ints, Ints, int, int]
"""A run of a box: the box's offsets and lengths, then the run's first element and number of elements."""


@dataclass(frozen=True, slots=True)
class WantedPart:
    """A part of a tensor on another mesh: its runs, and the ranks that hold just these runs."""

    ranks: Ints
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Fed:
    """Boxes that a reshard moves: box i of a tensor goes from saved rank ``saved[i]`` to `WantedPart` number ``wanted[i]``."""

    offsets: I64
    lengths: I64
    saved: I64
    wanted: I64


def wanted_on(catalog: Catalog, name: str, mesh: Mesh, groups: Mapping[str, Sequence[str]]) -> list[WantedPart]:
    """List the parts of a tensor on another mesh, each with the ranks that hold it, in order of rank.

    Parameters
    ----------
    groups
        The name of each optimizer, mapped to the FQNs of its parameters in the optimizer's order.

    Raises
    ------
    UsageError
        The catalog does not tell how to lay the tensors out on this mesh.
    """
    placed = place(catalog, catalog.names, TargetTopology(mesh, groups=groups))
    # Tensors of one vector are cut together, so where this tensor is cut depends on all of them.
    names = [name, *(other for other in catalog.names if other != name and _is_cut_with(placed[name], placed, other))]
    shapes = [catalog.shape(catalog.index(n)) for n in names]
    held, boxes = target_rows(shapes, [placed[n] for n in names], names, mesh, {})
    runs: dict[int, list[Run]] = {}
    for rank, _, box, start, count in held.take(held.tensor == 0).rows():
        runs.setdefault(rank, []).append((*boxes[box], start, count))
    # alike: the ranks that hold the same runs.
    alike: dict[tuple[Run, ...], list[int]] = {}
    for rank, held_by_it in runs.items():
        alike.setdefault(tuple(held_by_it), []).append(rank)
    return [WantedPart(tuple(ranks), parts) for parts, ranks in alike.items()]


def _is_cut_with(of: TargetPlacement, placed: Mapping[str, TargetPlacement], other: str) -> bool:
    """Tell whether the cuts of the tensor placed as `of` depend on the tensor named `other`; `placed` has all placements by name.

    They do if the tensor follows `other`, or if both lie in one flat vector.
    """
    leader = placed[of.follows] if of.follows is not None else of
    vector, its = leader.vector, placed[other].vector
    return other == of.follows or (vector is not None and its is not None and its[0] == vector[0])


def boxes_of(runs: Sequence[Run], ndim: int) -> tuple[I64, I64, I64]:
    """Divide runs into boxes.

    Returns
    -------
    offsets, lengths : (B, D)
        The boxes.
    of : (B,)
        The index of the run that each box is a part of.
    """
    offsets, lengths, start, count = _columns(runs, ndim)
    if ndim == 0:
        return offsets, lengths, np.arange(len(runs))
    cut = decompose(lengths, start, count)
    return offsets[cut.parent] + cut.offsets, cut.lengths, cut.parent


def _columns(runs: Sequence[Run], ndim: int) -> tuple[I64, I64, I64, I64]:
    """Convert runs to columns: offsets and lengths of their boxes, each (N, D), and start and count, each (N,)."""
    offsets, lengths = (np.array([run[i] for run in runs], np.int64).reshape(len(runs), ndim) for i in (0, 1))
    start, count = (np.array([run[i] for run in runs], np.int64) for i in (2, 3))
    return offsets, lengths, start, count


def feeds(catalog: Catalog, tensor: int, wanted: Sequence[WantedPart]) -> Fed:
    """Plan a load of all wanted parts of a tensor; return the boxes that go from each saved rank to each part."""
    shape = catalog.shape(tensor)
    # room, strides (1, D): one more than the shape of the tensor in each dim, and the strides of that; a scalar counts as a
    # vector of one element. The additional elements keep the plan from joining dims of an overlap to one.
    room = np.array([shape or (1,)], np.int64) + 1
    ndim, strides = room.shape[1], strides_of(room)
    runs = [(offsets or (0,), lengths or (1,), start, count) for of in wanted for offsets, lengths, start, count in of.runs]
    offsets, lengths, start, count = _columns(runs, ndim)
    pieces = PieceColumns(
        tensor=np.repeat(np.arange(len(wanted)), [len(of.runs) for of in wanted]),
        offsets=offsets,
        lengths=lengths,
        start=start,
        count=count,
        # Each piece is placed in memory as if that were a tensor of shape `room`, so an item's place in memory is its place in
        # the tensor.
        base=(offsets * strides).sum(axis=1),
        strides=np.repeat(strides, len(runs), axis=0),
    )
    plan = plan_load(catalog, np.full(len(wanted), tensor), pieces, window_bytes=1 << 62)
    rank_of = np.array([file.rank for file in catalog.files] or [0], np.int64)
    width = max(plan.lengths.shape[1], ndim)
    # An overlap's place in the destination is that of its first element in the tensor, so its digits are the coordinates.
    return Fed(
        offsets=(plan.dst[:, None] // strides % room)[:, : len(shape)],
        lengths=pad_left(plan.lengths, width, 1)[:, width - len(shape) :],
        saved=rank_of[plan.file],
        wanted=plan.dest,
    )
