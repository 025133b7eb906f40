"""Whether runs tile their tensors, against counting how often each element is held."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.geometry import tiling
from reshard_ckpt.core.geometry.columns import group_ids
from reshard_ckpt.core.geometry.tiling import find_faults, find_gap, find_overlap
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


def test_a_grid_with_one_box_moved_is_found() -> None:
    offsets = np.array([(i * 4, j * 4) for i in range(16) for j in range(16)])
    lengths = np.full_like(offsets, 4)
    assert find_overlap(offsets, lengths) is None
    offsets[100] += (0, 1)
    pair = find_overlap(offsets, lengths)
    assert pair is not None
    assert 100 in pair
    low, high = find_gap(np.array([64, 64]), np.delete(offsets, 100, 0), np.delete(lengths, 100, 0))
    assert (low, high) == ((24, 16), (28, 20))
