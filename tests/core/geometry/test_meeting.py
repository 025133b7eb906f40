"""Pairs of boxes that share an element, by comparing all of them and by a sweep."""

from __future__ import annotations

from itertools import product
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.geometry import tiling
from reshard_ckpt.core.geometry.tiling import TensorBoxes, meet

FAR = 1 << 61


@given(st.data())
def test_meet_finds_just_the_pairs_that_share_an_element(data: st.DataObject):
    offset = st.sampled_from([0, 1, 2, 3, FAR, FAR + 1])

    def boxes() -> TensorBoxes:
        rows = data.draw(st.lists(st.tuples(st.integers(0, 3), *[offset] * 3, *[st.integers(0, 3)] * 3), max_size=12))
        table = np.array(rows, np.int64).reshape(-1, 7)
        return TensorBoxes(table[:, 0], table[:, 1:4], table[:, 4:])

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
    touching = tiling._touching
    with patch.object(tiling, "_touching", lambda *args: compared.append(args[4] - args[3]) or touching(*args)):
        left, right = meet(grid(32), grid(64))
    assert len(left) == len(right) == 64 * 64  # each fine box lies in one coarse box
    assert compared[0].sum() <= 32 * 32 * 2 * 64  # of 32 * 32 * 64 * 64 pairs
