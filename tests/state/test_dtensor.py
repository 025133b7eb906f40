"""Cuts of one dim, against lists of indices that are cut the same way; real DTensors are in test_on_ranks.py."""

from __future__ import annotations

from itertools import product
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.catalog.placements import local_region
from reshard_ckpt.core.catalog.specs import AxisPlacement
from reshard_ckpt.state.dtensor import AxisCut, dim_cuts, shard_order


def chunk(indices: list[int], num: int, index: int) -> list[int]:
    parts = [part.tolist() for part in torch.tensor(indices, dtype=torch.int64).chunk(num)]
    return parts[index] if index < len(parts) else []


def spelled(ranges: list[tuple[int, int]]) -> list[int]:
    return [i for first, length in ranges for i in range(first, first + length)]


def local_ranges(size: int, cuts: list[AxisCut]) -> list[tuple[int, int]]:
    """The ranges of a dim that the axes which shard it leave to a rank, by what is recorded of them."""
    axes = [AxisPlacement("", "shard", 0, turn=turn, sections=sections) for turn, sections in dim_cuts(size, cuts)]
    region = local_region((size,), axes, tuple(cut.num for cut in cuts), tuple(cut.index for cut in cuts))
    return list(region.ranges[0])


@st.composite
def cut_orders(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    """A size, the sizes of some axes, and the order in which they cut."""
    sizes = draw(st.lists(st.integers(1, 5), max_size=3))
    return draw(st.integers(0, 60)), sizes, draw(st.permutations(range(len(sizes))))


def split_factors(sizes: list[int], order: list[int]) -> list[int]:
    """What torch writes for an order: for each axis the product of those that cut before it though they stand after it."""
    return [prod(sizes[other] for other in order[: order.index(axis)] if other > axis) for axis in range(len(sizes))]


@given(cut_orders())
def test_axes_cut_in_the_order_that_split_factors_tell(case):
    size, sizes, order = case
    factors = split_factors(sizes, order)
    everything = []
    for coordinate in product(*(range(n) for n in sizes)):
        expected = list(range(size))
        for axis in order:
            expected = chunk(expected, sizes[axis], coordinate[axis])
        cuts = [AxisCut(n, i, f) for n, i, f in zip(sizes, coordinate, factors, strict=True)]
        ranges = local_ranges(size, cuts)
        assert spelled(ranges) == expected
        assert len(ranges) <= 1, "a shard order always gives one box"
        everything += expected
    assert sorted(everything) == list(range(size))


@given(st.integers(0, 60), st.integers(1, 7), st.integers(2, 7))
def test_a_split_factor_that_no_axis_explains_is_strided_in_earnest(size, num, split_factor):
    everything = []
    for index in range(num):
        groups = [chunk(list(range(size)), split_factor, g) for g in range(split_factor)]
        expected = [i for g in groups for i in chunk(g, num, index)]
        cuts = [AxisCut(num, index, split_factor)]
        assert shard_order(cuts) is None
        assert spelled(local_ranges(size, cuts)) == expected
        everything += expected
    assert sorted(everything) == list(range(size))


def test_fsdp_over_tp_on_13_rows_gives_rank_4_row_6():
    assert [spelled(local_ranges(13, [AxisCut(3, dp, 2), AxisCut(2, tp)])) for dp in range(3) for tp in range(2)] == [
        [0, 1, 2],
        [7, 8],
        [3, 4, 5],
        [9, 10],
        [6],
        [11, 12],
    ]


def test_where_both_readings_of_a_strided_placement_differ_some_rank_sees_another_size():
    # The size check in dtensor_layout is what tells a shard order from a DTensor that was cut left to right under the same
    # placements, so it must never be blind on all ranks at once.
    for size, dp, tp in product(range(40), range(2, 6), range(2, 6)):
        ours, other = {}, {}
        for i, j in product(range(dp), range(tp)):
            ours[i, j] = spelled(local_ranges(size, [AxisCut(dp, i, tp), AxisCut(tp, j)]))
            strided = [x for g in range(tp) for x in chunk(chunk(list(range(size)), tp, g), dp, i)]
            other[i, j] = chunk(strided, tp, j)
        assert ours == other or any(len(ours[k]) != len(other[k]) for k in ours), (size, dp, tp)
