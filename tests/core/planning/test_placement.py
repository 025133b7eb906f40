"""Placements derived for all tensors at once, against sets of what each coordinate of an axis holds."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.catalog.specs import AxisPlacement, Mesh
from reshard_ckpt.core.geometry.columns import lex_order
from reshard_ckpt.core.planning.placement import PieceTable, Placement, derive
from tests.tries import examples

OFFSETS = np.array([(a, b) for a in range(2) for b in range(2)], np.int64)
RUNS_PER_BOX = 2

Row = tuple[int, int]
"""A rank and a run; run r is of box r // RUNS_PER_BOX."""


def naive(mesh: Mesh, axis: int, declared: Placement, rows: list[Row], ndim: int) -> AxisPlacement:
    """What one axis does to one tensor; rows come in order of run and rank."""
    for said in declared:
        if said.axis == mesh.axes[axis]:
            return said

    def others(rank: int) -> tuple[int, ...]:
        at = mesh.coordinates(rank)
        return at[:axis] + at[axis + 1 :]

    held = {mesh.coordinates(rank)[axis] for rank, _ in rows}
    line = [(rank, run) for rank, run in rows if others(rank) == others(rows[0][0])]
    runs: dict[int, set[int]] = {}
    for rank, run in line:
        runs.setdefault(mesh.coordinates(rank)[axis], set()).add(run)
    name = mesh.axes[axis]
    if len({frozenset(r) for r in runs.values()}) <= 1:
        if len(held) == mesh.sizes[axis]:
            return AxisPlacement(name, "replicate")
        return AxisPlacement(name, "resident", coords=tuple(sorted(held)))
    boxes = {run // RUNS_PER_BOX for _, run in line}
    if len(boxes) < len({run for _, run in line}):
        return AxisPlacement(name, "flat")
    dims = []
    for dim in range(2):
        offsets = {frozenset(int(OFFSETS[run // RUNS_PER_BOX][dim]) for run in held_there) for held_there in runs.values()}
        dims += [dim] if len(offsets) > 1 else []
    return AxisPlacement(name, "shard", dim=max((dims or [0])[0] - (2 - ndim), 0))


meshes = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(lambda sizes: Mesh(tuple("abc"[: len(sizes)]), tuple(sizes)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Mesh, list[tuple[Placement, int, list[Row]]]]:
    mesh = draw(meshes)
    tensors = []
    for _ in range(draw(st.integers(1, 4))):
        ndim = draw(st.integers(1, 2))
        declared = draw(st.sampled_from([(), (AxisPlacement("a", "shard", dim=ndim - 1),), (AxisPlacement("b", "replicate"),)]))
        if draw(st.booleans()):
            # Something like a real layout: what a rank holds follows from its coordinates.
            weights = draw(st.lists(st.integers(0, 3), min_size=len(mesh.axes), max_size=len(mesh.axes)))
            ranks = [r for r in range(mesh.size) if draw(st.integers(0, 5))] or [0]
            rows = {(r, sum(w * c for w, c in zip(weights, mesh.coordinates(r), strict=True)) % 8) for r in ranks}
        else:
            row = st.tuples(st.integers(0, mesh.size - 1), st.integers(0, 7))
            rows = draw(st.sets(row, min_size=1, max_size=12))
        tensors.append((declared, ndim, sorted(rows, key=lambda row: (row[1], row[0]))))
    return mesh, tensors


@given(cases())
@examples(600)
def test_placements_are_what_sets_of_runs_show(case: tuple[Mesh, list[tuple[Placement, int, list[Row]]]]) -> None:
    mesh, tensors = case
    rows = [(t, run, rank) for t, (_, _, held) in enumerate(tensors) for rank, run in held]
    tensor, run, rank = np.array(rows, np.int64).T
    assert lex_order(tensor, run, rank).tolist() == list(range(len(rows)))
    # Runs are numbered over all tensors, boxes are shared by them.
    holding = PieceTable(tensor, rank, run // RUNS_PER_BOX, run + 8 * tensor)
    ndim = np.array([n for _, n, _ in tensors], np.int64)
    shape = np.full((len(tensors), 2), 2, np.int64)
    declared = [said for said, _, _ in tensors]
    table = derive(mesh, declared, shape, ndim, holding, OFFSETS, np.ones_like(OFFSETS))
    found = [table.placements[i] for i in table.of_tensor.tolist()]
    for (said, n, held), placement in zip(tensors, found, strict=True):
        plain = tuple(replace(p, turn=None, sections=()) for p in placement)
        assert plain == tuple(naive(mesh, axis, said, held, n) for axis in range(len(mesh.axes)))


@pytest.mark.parametrize(
    ("sizes", "sections"),
    [
        ({"tp": 2}, (8, 4, 4)),
        ({"dp": 4, "tp": 2}, (8, 4, 4)),  # dp cuts what tp holds of the first section, so ranges of one coordinate touch
        ({"tp": 4, "dp": 2}, (24, 8, 8, 8)),
    ],
)
def test_sections_that_tp_cuts_one_by_one_are_found(sizes: dict[str, int], sections: tuple[int, ...]) -> None:
    """As in a fused QKV weight; data-parallel ranks, if any, cut the local tensor once more."""
    mesh = Mesh(tuple(sizes), tuple(sizes.values()))
    held: list[tuple[int, int, int]] = []  # a rank, and the begin and end of a range of rows that it holds
    for rank in range(mesh.size):
        at = dict(zip(sizes, mesh.coordinates(rank), strict=True))
        rows: list[int] = []
        for end, size in zip(accumulate(sections), sections, strict=True):
            num = size // sizes["tp"]
            rows += range(end - size + num * at["tp"], end - size + num * (at["tp"] + 1))
        num = len(rows) // sizes.get("dp", 1)
        rows = rows[num * at.get("dp", 0) :][:num]
        begins = [row for row in rows if row - 1 not in rows]
        held += [(rank, begin, next(end for end in count(begin) if end not in rows)) for begin in begins]
    ranges = sorted({(begin, end) for _, begin, end in held})
    box, rank = np.array(sorted((ranges.index((begin, end)), rank) for rank, begin, end in held), np.int64).T
    low, high = np.array(ranges, np.int64).T
    holding = PieceTable(np.zeros_like(box), rank, box, box)
    one, shape = np.ones(1, np.int64), np.array([[sum(sections)]], np.int64)
    table = derive(mesh, [()], shape, one, holding, low[:, None], (high - low)[:, None])
    turns: dict[str, Any] = {"tp": {"turn": 0, "sections": sections}, "dp": {"turn": 1}}
    assert table.placements[table.of_tensor[0]] == tuple(AxisPlacement(axis, "shard", 0, **turns[axis]) for axis in sizes)
