"""Runs of boxes against lists of indices."""

from __future__ import annotations

from itertools import islice, product
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.geometry.runs import as_boxes, bounds, decompose, ranges

Run = tuple[tuple[int, ...], tuple[int, ...], int, int]


@st.composite
def runs(draw: st.DrawFn, width: int) -> Run:
    lengths = tuple(draw(st.lists(st.integers(0, 6), min_size=width, max_size=width)))
    offsets = tuple(draw(st.lists(st.integers(0, 5), min_size=width, max_size=width)))
    start = draw(st.integers(0, prod(lengths)))
    return offsets, lengths, start, draw(st.integers(0, prod(lengths) - start))


many = st.integers(1, 4).flatmap(lambda width: st.lists(runs(width), min_size=1, max_size=5))


def elements(run: Run) -> list[tuple[int, ...]]:
    """The coordinates of a run, in its order."""
    offsets, lengths, start, count = run
    return list(islice(product(*(range(o, o + n) for o, n in zip(offsets, lengths, strict=True))), start, start + count))


def columns(case: list[Run]) -> tuple[np.ndarray, ...]:
    return tuple(np.array(column, np.int64) for column in zip(*case, strict=True))


@given(many)
def test_decompose_gives_few_boxes_that_are_the_run_in_order(case: list[Run]) -> None:
    offsets, lengths, start, count = columns(case)
    boxes = decompose(lengths, start, count)
    assert list(boxes.parent) == sorted(boxes.parent)
    for i, run in enumerate(case):
        mine = np.flatnonzero(boxes.parent == i)
        assert len(mine) <= 2 * len(run[1]) - 1
        cut = [(*map(tuple, (boxes.offsets[b] + offsets[i], boxes.lengths[b])), 0, int(prod(boxes.lengths[b]))) for b in mine]
        assert [x for box in cut for x in elements(box)] == elements(run)


@given(many)
def test_as_boxes_finds_every_run_that_is_a_box_and_just_its_elements(case: list[Run]) -> None:
    case = [run for run in case if run[3]]
    for run in case:
        offsets, lengths, start, count = columns([run])
        is_box, low, size = as_boxes(lengths, start, count)
        held = elements(run)
        span = [max(c) - min(c) + 1 for c in zip(*held, strict=True)]
        assert is_box[0] == (prod(span) == len(held))
        if is_box[0]:
            assert elements((*map(tuple, (offsets[0] + low[0], size[0])), 0, len(held))) == held


@given(many)
def test_bounds_hold_the_run(case: list[Run]) -> None:
    low, high = bounds(*columns(case))
    for i, run in enumerate(case):
        for x in elements(run):
            assert all(a <= c < b for a, c, b in zip(low[i], x, high[i], strict=True))


@given(st.lists(st.integers(0, 5)))
def test_ranges_counts_each_owner_from_zero(lengths: list[int]) -> None:
    owner, step = ranges(np.array(lengths, np.int64))
    expected = [(i, k) for i, n in enumerate(lengths) for k in range(n)]
    assert list(zip(owner.tolist(), step.tolist(), strict=True)) == expected
