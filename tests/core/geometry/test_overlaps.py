"""Cutting overlapping runs, against sets of elements."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.geometry.tiling import cut_overlaps

runs = st.lists(
    st.tuples(
        st.integers(0, 2), st.integers(0, 1), st.integers(0, 12), st.integers(1, 8), st.sampled_from([True, True, True, False])
    ),
    max_size=12,
)


@given(runs)
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
