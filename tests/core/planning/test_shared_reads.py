"""Sharing reads: each window that several ranks want has one owner, whose bytes reach all others, and no round is too large."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.planning.shared_reads import Messages, Wants, divide_reads

WINDOW = 100

Window = tuple[int, int]


@st.composite
def wants_of_ranks(draw: st.DrawFn) -> list[Wants]:
    out = []
    for _ in range(draw(st.integers(1, 6))):
        windows = sorted(draw(st.sets(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=8)))
        rows = []
        for window in windows:
            read = draw(st.integers(1, WINDOW))
            rows.append((*window, read, draw(st.integers(1, read))))
        out.append(Wants(*np.array(rows, np.int64).reshape(-1, 4).T))
    return out


def taken(wants: Wants) -> dict[Window, int]:
    """The bytes that a rank takes of each window."""
    return dict(zip(zip(wants.file.tolist(), wants.window.tolist(), strict=True), wants.taken.tolist(), strict=True))


def rows_of(messages: Messages) -> list[tuple[Window, int, int, int, int]]:
    """The window, owner, taker, round and size of each message."""
    columns = (messages.file, messages.window, messages.owner, messages.taker, messages.round, messages.size)
    return [((file, window), *rest) for file, window, *rest in zip(*(column.tolist() for column in columns), strict=True)]


@given(wants_of_ranks(), st.integers(1, 300))
def test_each_shared_window_has_one_owner_and_reaches_whoever_wants_it(wants: list[Wants], round_bytes: int) -> None:
    rows = rows_of(divide_reads(wants, round_bytes))
    by_rank = [taken(one) for one in wants]
    count = Counter(window for one in by_rank for window in one)
    shared = sorted(window for window, num in count.items() if num > 1)
    assert [window for window, *_ in rows] == sorted(window for window, *_ in rows)
    owners: dict[Window, set[int]] = {}
    got: dict[Window, list[int]] = {}
    for window, owner, taker, _, size in rows:
        owners.setdefault(window, set()).add(owner)
        got.setdefault(window, []).append(taker)
        assert size == by_rank[taker][window]
    assert sorted(owners) == shared
    for window in shared:
        (owner,) = owners[window]
        # Nobody reads a window that he does not want, and each other rank that wants it gets one message.
        assert sorted([owner, *got[window]]) == [rank for rank, one in enumerate(by_rank) if window in one]


@given(wants_of_ranks(), st.integers(1, 300))
def test_no_round_holds_more_than_its_bytes_or_one_message(wants: list[Wants], round_bytes: int) -> None:
    messages = divide_reads(wants, round_bytes)
    sent: dict[tuple[int, int], list[int]] = {}
    received: dict[tuple[int, int], list[int]] = {}
    last = [0] * len(wants)
    for _, owner, taker, number, size in rows_of(messages):
        sent.setdefault((number, owner), []).append(size)
        received.setdefault((number, taker), []).append(size)
        assert number < messages.num_rounds
        for rank in (owner, taker):  # in order: what is read need not be kept for long
            assert number >= last[rank]
            last[rank] = number
    for sizes in (*sent.values(), *received.values()):
        assert len(sizes) == 1 or sum(sizes) <= round_bytes


def test_ranks_that_share_nothing_do_not_wait_for_each_other() -> None:
    def wants(file: int) -> Wants:
        size = np.full(10, WINDOW)
        return Wants(np.full(10, file), np.arange(10), size, size)

    pairs = divide_reads([wants(0), wants(0), wants(1), wants(1)], WINDOW)
    assert pairs.num_rounds == divide_reads([wants(0), wants(0)], WINDOW).num_rounds
    owners = Counter(owner for _, owner, *_ in rows_of(pairs))
    assert owners == {0: 5, 1: 5, 2: 5, 3: 5}
