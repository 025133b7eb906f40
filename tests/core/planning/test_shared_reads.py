"""Sharing reads: every byte that anyone wants is read by a rank that can, reaches all that want it, and no round is too large."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.planning.shared_reads import Wants, share

WINDOW = 100


@st.composite
def wants_of_ranks(draw: st.DrawFn) -> list[Wants]:
    out = []
    for _ in range(draw(st.integers(1, 6))):
        rows = []
        for file, window in draw(st.sets(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=8)):
            cuts = sorted(draw(st.sets(st.integers(0, WINDOW), min_size=2, max_size=6)))
            rows += [
                (file, window, window * WINDOW + a, window * WINDOW + b) for a, b in zip(cuts[::2], cuts[1::2], strict=False)
            ]
        out.append(wants_of_rows(sorted(rows)))
    return out


def wants_of_rows(rows: list[tuple[int, int, int, int]]) -> Wants:
    """All bytes of the ranges are wanted; the first range of a window tells how many."""
    total = Counter[tuple[int, int]]()
    for file, window, low, high in rows:
        total[file, window] += high - low
    sizes = [total.pop((file, window), 0) for file, window, _, _ in rows]
    return Wants(*np.array(rows, np.int64).reshape(-1, 4).T, np.array(sizes, np.int64))


def in_window(wants: Wants, file: int, window: int) -> set[tuple[int, int]]:
    return {(f, b) for f, b in bytes_of(wants) if (f, b // WINDOW) == (file, window)}


def bytes_of(wants: Wants) -> set[tuple[int, int]]:
    return {
        (f, b)
        for f, low, high in zip(wants.file.tolist(), wants.low.tolist(), wants.high.tolist(), strict=True)
        for b in range(low, high)
    }


@given(wants_of_ranks(), st.integers(1, 300))
def test_every_shared_byte_is_read_once_and_reaches_whoever_wants_it(wants: list[Wants], round_bytes: int) -> None:
    schedule = share(wants, round_bytes)
    wanted = [bytes_of(w) for w in wants]
    windows = Counter((f, w) for one in wants for f, w in set(zip(one.file.tolist(), one.window.tolist(), strict=True)))
    assert [(w.file, w.window) for w in schedule.windows] == sorted(key for key, count in windows.items() if count > 1)
    read: Counter[tuple[int, int]] = Counter()
    got: list[set[tuple[int, int]]] = [set() for _ in wants]
    for window in schedule.windows:
        mine = {(window.file, b) for low, high in window.extents for b in range(low, high)}
        read.update(mine)
        got[window.owner] |= mine & wanted[window.owner]
        assert mine & wanted[window.owner]  # nobody reads of a window what he does not want at all
        for message in window.messages:
            assert message.dest != window.owner
            sent = in_window(wants[message.dest], window.file, window.window)
            assert len(sent) == message.size
            assert sent <= mine
            assert not sent & got[message.dest]
            got[message.dest] |= sent
    assert set(read.values()) <= {1}
    shared = {(f, w) for (f, w), count in windows.items() if count > 1}
    for rank, all_bytes in enumerate(wanted):
        assert got[rank] == {(f, b) for f, b in all_bytes if (f, b // WINDOW) in shared}
    assert set(read) == set().union(*got)


@given(wants_of_ranks(), st.integers(1, 300))
def test_no_round_holds_more_than_its_bytes_or_one_message(wants: list[Wants], round_bytes: int) -> None:
    schedule = share(wants, round_bytes)
    sent: dict[tuple[int, int], list[int]] = {}
    received: dict[tuple[int, int], list[int]] = {}
    last = [0] * len(wants)
    for window in schedule.windows:
        for message in window.messages:
            size = message.size
            sent.setdefault((message.round, window.owner), []).append(size)
            received.setdefault((message.round, message.dest), []).append(size)
            assert message.round < schedule.num_rounds
            for rank in (window.owner, message.dest):  # in order: what is read need not be kept for long
                assert message.round >= last[rank]
                last[rank] = message.round
    for sizes in (*sent.values(), *received.values()):
        assert len(sizes) == 1 or sum(sizes) <= round_bytes


def test_ranks_that_share_nothing_do_not_wait_for_each_other() -> None:
    def wants(file: int) -> Wants:
        window = np.arange(10)
        return Wants(np.full(10, file), window, window * WINDOW, (window + 1) * WINDOW, np.full(10, WINDOW))

    pairs = share([wants(0), wants(0), wants(1), wants(1)], WINDOW)
    assert pairs.num_rounds == share([wants(0), wants(0)], WINDOW).num_rounds
    owners = Counter(window.owner for window in pairs.windows)
    assert owners == {0: 5, 1: 5, 2: 5, 3: 5}
