"""Dividing replicas over ranks: everything exactly once, by ranks that hold it, and level where it can be."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.planning.balance import ReplicaGroup, assign, level_shares


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(0, 5000))
def test_level_brings_loads_as_level_as_can_be(loads: list[int], total: int) -> None:
    share = level_shares(np.array(loads), total)
    assert (share >= 0).all()
    assert share.sum() == total
    filled = np.array(loads) + share
    # Whoever got something ends no higher than anyone else, but for the odd byte.
    for got in filled[share > 0].tolist():
        assert got <= filled.min() + 1


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[ReplicaGroup], np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    ranks, items = draw(st.integers(1, 8)), draw(st.integers(1, 12))
    groups, rest = [], list(range(items))
    while rest:
        take = draw(st.integers(1, len(rest)))
        members = sorted(draw(st.sets(st.integers(0, ranks - 1), min_size=1)))
        solid = draw(st.integers(0, take))
        chosen, rest = np.array(rest[:take], np.int64), rest[take:]
        groups.append(ReplicaGroup(np.array(members), chosen[solid:], chosen[:solid]))
    number = st.integers(1, 5000)
    elements = np.array(draw(st.lists(number, min_size=items, max_size=items)))
    sizes = np.array(draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=items, max_size=items)))
    slices = np.array(draw(st.lists(st.sampled_from([1, 7, 64]), min_size=items, max_size=items)))
    loads = np.array(draw(st.lists(st.integers(0, 3000), min_size=ranks, max_size=ranks)))
    return groups, elements, sizes, slices, loads


@given(jobs())
def test_assign_gives_every_element_once_to_a_rank_that_holds_it(
    job: tuple[list[ReplicaGroup], np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> None:
    groups, elements, sizes, slices, loads = job
    before = loads.copy()
    parts = assign(groups, elements, sizes, slices, loads)
    holders = {int(i): set(g.ranks.tolist()) for g in groups for i in (*g.items, *g.solid)}
    solid = {int(i) for g in groups for i in g.solid}
    for i, count in enumerate(elements.tolist()):
        mine = np.flatnonzero(parts.item == i)
        mine = mine[np.argsort(parts.start[mine])]
        ends = parts.start[mine] + parts.count[mine]
        assert parts.start[mine[0]] == 0
        assert ends[-1] == count
        assert (parts.start[mine][1:] == ends[:-1]).all()
        assert set(parts.rank[mine].tolist()) <= holders[i]
        assert i not in solid or len(mine) == 1
    written = np.bincount(parts.rank, weights=parts.count * sizes[parts.item], minlength=len(loads))
    assert (before + written == loads).all()


def test_a_group_of_all_ranks_comes_out_level() -> None:
    loads = np.array([0, 500_000, 0, 100_000])
    elements = np.array([1_000_003, 70_000, 2_000_000])
    group = ReplicaGroup(np.arange(4), np.arange(3), np.zeros(0, np.int64))
    assign([group], elements, np.array([4, 2, 1]), np.array([64, 1, 1000]), loads)
    assert loads.max() / loads.mean() <= 1.03
