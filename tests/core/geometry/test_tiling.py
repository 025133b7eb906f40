"""Runs that tile their tensors, held against counts of each element; pairs of boxes that meet; overlapping runs that are cut."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from math import prod
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.geometry import tiling
from reshard_ckpt.core.geometry.columns import group_ids
from reshard_ckpt.core.geometry.tiling import TensorBoxes, cut_overlaps, find_faults, find_gap, find_overlap, meet
from tests.core.geometry.test_runs import Run, elements
from tests.tries import examples


@st.composite
def tilings(draw: st.DrawFn, width: int) -> tuple[tuple[int, ...], list[Run]]:
    """A tensor cut into boxes and these into runs, and then perhaps spoiled."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=width, max_size=width)))
    boxes = [((0,) * width, shape)]
    for _ in range(draw(st.integers(0, 5))):
        offsets, lengths = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, width - 1))
        at = draw(st.integers(0, lengths[dim]))
        for begin, size in ((0, at), (at, lengths[dim] - at)):
            moved = tuple(o + begin * (d == dim) for d, o in enumerate(offsets))
            boxes.append((moved, tuple(size if d == dim else n for d, n in enumerate(lengths))))
    rows: list[Run] = []
    for offsets, lengths in boxes:
        cuts = sorted({0, prod(lengths), *draw(st.lists(st.integers(0, prod(lengths)), max_size=2))})
        rows += [(offsets, lengths, a, b - a) for a, b in pairwise(cuts)]
    rows = draw(st.permutations(rows))
    spoil = draw(st.sampled_from(["no", "no", "drop", "twice", "longer"]))
    if spoil == "drop" and rows:
        rows = rows[1:]
    elif spoil == "twice" and rows:
        rows = [rows[0], *rows]
    elif spoil == "longer" and rows and rows[0][2] > 0:
        offsets, lengths, start, count = rows[0]
        rows = [(offsets, lengths, start - 1, count + 1), *rows[1:]]
    return shape, list(rows)


many = st.integers(1, 3).flatmap(lambda width: st.lists(tilings(width), min_size=1, max_size=4))


@given(many, st.sampled_from([1, 3, tiling.MAX_PAIRS]))
@examples(500)
def test_find_faults_names_exactly_the_tensors_that_are_not_tiled(
    case: list[tuple[tuple[int, ...], list[Run]]], max_pairs: int
) -> None:
    rows = [(t, run) for t, (_, runs) in enumerate(case) for run in runs]
    held = [np.zeros(shape, int) for shape, _ in case]
    for t, run in rows:
        for x in elements(run):
            held[t][x] += 1
    width = len(case[0][0])
    wide = [np.array([run[i] for _, run in rows], np.int64).reshape(-1, width) for i in (0, 1)]
    flat = [np.array([run[i] for _, run in rows], np.int64) for i in (2, 3)]
    box, first = group_ids(np.hstack(wide))
    shapes = np.array([shape for shape, _ in case], np.int64)
    before, tiling.MAX_PAIRS = tiling.MAX_PAIRS, max_pairs
    try:
        tensor = np.array([t for t, _ in rows], np.int64)
        faults = list(find_faults(shapes, wide[0][first], wide[1][first], tensor, box, *flat))
    finally:
        tiling.MAX_PAIRS = before
    assert {fault.tensor for fault in faults} == {t for t, counts in enumerate(held) if (counts != 1).any()}
    for fault in faults:
        region = held[fault.tensor][tuple(slice(a, b) for a, b in zip(fault.low, fault.high, strict=True))]
        if fault.rows:
            assert len(set(fault.rows)) == 2
            assert {rows[r][0] for r in fault.rows} == {fault.tensor}
        else:
            assert region.size
            assert (region == 0).all()
            assert fault.missing == (held[fault.tensor] == 0).sum()


def test_of_all_sets_of_three_boxes_just_those_that_tile_a_small_tensor_have_no_fault() -> None:
    shape = (2, 3)
    spans = [[(a, b - a) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    every = [((a, b), (n, m)) for (a, n), (b, m) in product(*spans)]
    cases = [boxes for size in range(4) for boxes in combinations(every, size)]
    low, lengths = (np.array([box[i] for case in cases for box in case], np.int64) for i in (0, 1))
    tensor = np.repeat(np.arange(len(cases)), [len(case) for case in cases])
    tiled = []
    for case in cases:
        held = np.zeros(shape, int)
        for (a, b), (n, m) in case:
            held[a : a + n, b : b + m] += 1
        tiled.append((held == 1).all())
    for order in (np.arange(len(tensor)), np.arange(len(tensor))[::-1]):
        rows = tensor[order], np.arange(len(order)), np.zeros(len(order), np.int64), lengths[order].prod(axis=1)
        faults = find_faults(np.full((len(cases), 2), shape), low[order], lengths[order], *rows)
        assert {fault.tensor for fault in faults} == set(np.flatnonzero(~np.array(tiled)).tolist())
    assert sum(tiled) == 13


def test_a_grid_with_one_box_moved_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "MAX_PAIRS", 50)  # so that the pair is not in the first batch
    offsets = np.array([(i * 4, j * 4) for i in range(16) for j in range(16)])
    lengths = np.full_like(offsets, 4)
    assert find_overlap(offsets, lengths) is None
    offsets[100] += (0, 1)
    assert {*(find_overlap(offsets, lengths) or ())} == {100, 101}
    low, high = find_gap(np.array([64, 64]), np.delete(offsets, 100, 0), np.delete(lengths, 100, 0))
    assert (low, high) == ((24, 16), (28, 20))


FAR = 1 << 61


@given(st.data())
def test_meet_finds_just_the_pairs_that_share_an_element(data: st.DataObject):
    offset = st.sampled_from([0, 1, 2, FAR, FAR + 1])
    few = data.draw(st.integers(0, 9))  # some cases have many pairs in several batches

    def boxes() -> TensorBoxes:
        box = st.tuples(st.integers(0, 2), *[offset] * 2, *[st.integers(0, 3)] * 2)
        table = np.array(data.draw(st.lists(box, min_size=few, max_size=12)), np.int64).reshape(-1, 5)
        return TensorBoxes(table[:, 0], table[:, 1:3], table[:, 3:])

    one, other = boxes(), boxes()
    expected = set()
    for i, j in product(range(len(one.tensor)), range(len(other.tensor))):
        low = np.maximum(one.offsets[i], other.offsets[j])
        high = np.minimum(one.offsets[i] + one.lengths[i], other.offsets[j] + other.lengths[j])
        if one.tensor[i] == other.tensor[j] and (low < high).all():
            expected.add((i, j))
    with patch.multiple(tiling, CROWDED=data.draw(st.sampled_from([0, 0.5, 1, 8])), MAX_PAIRS=data.draw(st.integers(1, 40))):
        left, right = meet(one, other)
    pairs = list(zip(left.tolist(), right.tolist(), strict=True))
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == expected
    assert (np.diff(left) >= 0).all()


def test_an_empty_box_inside_of_another_is_in_no_pair():
    zero = np.zeros(1, np.int64)
    empty, whole = (TensorBoxes(zero, np.array([[at, 0]]), np.array([[length, 1]])) for at, length in ((1, 0), (0, 2)))
    for one, other in ((empty, whole), (whole, empty)):
        assert [len(pairs) for pairs in meet(one, other)] == [0, 0]


def test_a_fine_grid_is_not_compared_pair_by_pair():
    def grid(num: int) -> TensorBoxes:
        places = np.stack(np.meshgrid(range(num), range(num), indexing="ij"), axis=-1).reshape(-1, 2)
        return TensorBoxes(np.zeros(num * num, np.int64), places * (128 // num), np.full((num * num, 2), 128 // num))

    compared = []
    counted = tiling.ranges
    with patch.object(tiling, "ranges", lambda counts: compared.append(counts.sum()) or counted(counts)):
        left, right = meet(grid(32), grid(64))
    assert len(left) == len(right) == 64 * 64  # each fine box lies in one coarse box
    assert sum(compared) <= 32 * 32 * 2 * 64  # of 32 * 32 * 64 * 64 pairs


overlapping = st.lists(
    st.tuples(
        st.integers(0, 2), st.integers(0, 1), st.integers(0, 12), st.integers(1, 8), st.sampled_from([True, True, True, False])
    ),
    max_size=12,
)


@given(overlapping)
def test_cut_runs_keep_their_elements_and_overlap_only_where_they_are_equal(case: list[tuple[int, int, int, int, bool]]) -> None:
    case = sorted(case, key=lambda run: run[:3])
    columns = [np.array([run[i] for run in case], np.int64) for i in range(4)]
    cut = cut_overlaps(*columns, np.array([run[4] for run in case], bool))
    boxes = {run[:2] for run in case}
    held = {i: set(range(run[2], run[2] + run[3])) for i, run in enumerate(case)}

    def clashes(members: list[tuple[int, int]]) -> bool:
        return any(a != b and a[0] < b[0] + b[1] and b[0] < a[0] + a[1] for a in members for b in members)

    must = {
        box
        for box in boxes
        if clashes([run[2:4] for run in case if run[:2] == box]) and all(run[4] for run in case if run[:2] == box)
    }
    assert (cut is not None) == bool(must)
    if cut is None:
        return
    parts: dict[int, list[tuple[int, int]]] = {}
    for source, start, count in zip(cut.source.tolist(), cut.start.tolist(), cut.count.tolist(), strict=True):
        assert count > 0
        parts.setdefault(source, []).append((start, count))
    assert {i: {x for s, n in mine for x in range(s, s + n)} for i, mine in parts.items()} == held
    for i, mine in parts.items():
        assert sum(n for _, n in mine) == len(held[i])
        if case[i][:2] not in must:
            assert mine == [case[i][2:4]]
    for box in must:
        assert not clashes([part for i, mine in parts.items() if case[i][:2] == box for part in mine])
