"""The plan of an exchange: every wanted element comes once, from a holder; own ones do not travel, near ones not far."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.catalog.specs import CODES, ITEM_BYTES, Ints, Piece
from reshard_ckpt.core.geometry.runs import pad_rows
from reshard_ckpt.core.planning import exchange
from reshard_ckpt.core.planning.exchange import OWN, Parts, RankRuns, plan_exchange
from tests.layouts import Layout, addresses, layouts, shapes

F32, BF16 = CODES.index("F32"), CODES.index("BF16")


def rows_by_rank(kept: list[Layout]) -> list[list[tuple[int, Piece]]]:
    """The pieces of every rank, each with its tensor."""
    ranks = range(len(kept[0].pieces))
    return [[(t, piece) for t, layout in enumerate(kept) for piece in layout.pieces[rank]] for rank in ranks]


def runs_of(kept: list[Layout], dtype: int) -> RankRuns:
    """What all ranks hold of some tensors; equal elements in unequal runs, which a save would cut, are left out."""
    rows = [(rank, i, t, piece) for rank, pieces in enumerate(rows_by_rank(kept)) for i, (t, piece) in enumerate(pieces)]

    def column(values: list[int]) -> np.ndarray:
        return np.array(values, np.int64)

    return RankRuns(
        rank=column([r for r, _, _, _ in rows]),
        local=column([i for _, i, _, _ in rows]),
        tensor=column([t for _, _, t, _ in rows]),
        offsets=pad_rows([p.offsets for *_, p in rows], 4, 0),
        lengths=pad_rows([p.lengths for *_, p in rows], 4, 1),
        start=column([p.start for *_, p in rows]),
        count=column([p.count for *_, p in rows]),
        dtype=np.full(len(rows), dtype),
        device=np.zeros(len(rows), np.int64),
    )


def elements(offsets: list[int], lengths: list[int], ndim: int) -> set[Ints]:
    return set(product(*(range(o, o + n) for o, n in zip(offsets[4 - ndim :], lengths[4 - ndim :], strict=True))))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Layout], list[Layout]]:
    """A few tensors as some ranks hold them, and as they want them."""
    ranks = draw(st.integers(1, 6))
    tensors = draw(st.lists(shapes(), min_size=1, max_size=3))
    held = [draw(layouts(shape, ranks).filter(whole_runs)) for shape in tensors]
    return held, [draw(layouts(shape, ranks)) for shape in tensors]


def whole_runs(layout: Layout) -> bool:
    """Whether runs are equal or share nothing, as the planner of a save has cut them."""
    seen: dict[Ints, object] = {}
    for pieces in layout.pieces:
        for piece in pieces:
            key = (piece.offsets, piece.lengths, piece.start, piece.count)
            if any(seen.setdefault(x, key) != key for _, x in addresses(piece)):
                return False
    return True


def check(held: list[Layout], wanted: list[Layout], parts: Parts) -> list[set[tuple[int, Ints]]]:
    """Every wanted element once, from a rank that holds it; returns what each rank gets from others."""
    num = len(held[0].pieces)
    rows_of = [rows_by_rank(held), rows_by_rank(wanted)]
    got: list[Counter[tuple[int, int, Ints]]] = [Counter() for _ in range(num)]
    far: list[set[tuple[int, Ints]]] = [set() for _ in range(num)]
    columns = (parts.owner, parts.owner_row, parts.taker, parts.taker_row, parts.offsets, parts.lengths)
    for owner, owner_row, taker, taker_row, offsets, lengths in zip(*(c.tolist() for c in columns), strict=True):
        tensor, source = rows_of[0][owner][owner_row]
        same, target = rows_of[1][taker][taker_row]
        assert same == tensor
        inside = elements(offsets, lengths, len(held[tensor].shape))
        assert inside
        for piece in (source, target):
            assert inside <= {x for _, x in addresses(piece)}
        got[taker].update((taker_row, tensor, x) for x in inside)
        if owner != taker:
            far[taker] |= {(tensor, x) for x in inside}
    for rank in range(num):
        assert got[rank] == Counter((i, t, x) for i, (t, p) in enumerate(rows_of[1][rank]) for _, x in addresses(p))
        own = {(t, x) for t, piece in rows_of[0][rank] for _, x in addresses(piece)}
        assert not far[rank] & own, "what a rank holds does not travel to it"
    return far


@given(jobs(), st.data())
def test_every_wanted_element_comes_once_from_the_nearest_holder(job: tuple[list[Layout], list[Layout]], data: st.DataObject):
    held, wanted = job
    num = len(held[0].pieces)
    node = [data.draw(st.integers(0, 2)) for _ in range(num)]
    parts = plan_exchange(runs_of(held, F32), runs_of(wanted, F32), node, 1 << 20)
    check(held, wanted, parts)
    holders: dict[tuple[int, Ints], set[int]] = {}
    for t, layout in enumerate(held):
        for rank, pieces in enumerate(layout.pieces):
            for piece in pieces:
                for _, x in addresses(piece):
                    holders.setdefault((t, x), set()).add(rank)
    rows_of = rows_by_rank(held)
    columns = (parts.owner, parts.owner_row, parts.taker, parts.offsets, parts.lengths, parts.round)
    for owner, row, taker, offsets, lengths, number in zip(*(c.tolist() for c in columns), strict=True):
        tensor = rows_of[owner][row][0]
        x = next(iter(elements(offsets, lengths, len(held[tensor].shape))))
        near = {rank for rank in holders[tensor, x] if node[rank] == node[taker]}
        assert (number == OWN) == (owner == taker)
        assert not near or node[owner] == node[taker]


@given(jobs(), st.sampled_from([16, 64, 300]))
def test_rounds_are_bounded_and_parts_in_the_order_of_their_messages(job: tuple[list[Layout], list[Layout]], limit: int):
    held, wanted = job
    num = len(held[0].pieces)
    smallest, exchange.MIN_PART_BYTES = exchange.MIN_PART_BYTES, 4
    try:
        parts = plan_exchange(runs_of(held, F32), runs_of(wanted, BF16), range(num), limit)
    finally:
        exchange.MIN_PART_BYTES = smallest
    check(held, wanted, parts)
    assert set(parts.wire.tolist()) <= {BF16}, "what is wanted smaller travels smaller"
    most = max(limit // (2 * num), 4)
    far = parts.owner != parts.taker
    assert (parts.num_bytes[far] <= most).all()
    for rank in (parts.owner, parts.taker):
        sizes = Counter[tuple[int, int]]()
        for number, which, size in zip(*(c[far].tolist() for c in (parts.round, rank, parts.num_bytes)), strict=True):
            sizes[number, which] += size
        assert all(size <= limit + num * most for size in sizes.values())
    order = list(zip(parts.round.tolist(), parts.owner.tolist(), parts.taker.tolist(), strict=True))
    assert order == sorted(order)


def test_holders_of_the_same_share_the_sending():
    """Four ranks hold a tensor of 64 MB whole, and four others want it: each holder sends a quarter of all."""
    shape = (4096, 4096)
    whole = [np.array([[0, 0, 0, 0]] * 4), np.array([[1, 1, *shape]] * 4)]
    zero = np.zeros(4, np.int64)

    def runs(ranks: list[int]) -> RankRuns:
        return RankRuns(np.array(ranks), zero, zero, zero, zero + 4096 * 4096, zero + F32, zero, *whole)

    parts = plan_exchange(runs([0, 1, 2, 3]), runs([4, 5, 6, 7]), [0, 0, 1, 1, 2, 2, 3, 3], 32 << 20)
    sent = np.bincount(parts.owner, weights=parts.num_bytes)
    assert sent.sum() == parts.num_bytes[parts.owner != parts.taker].sum() == 4 * 4096 * 4096 * ITEM_BYTES["F32"]
    assert sent.max() <= 1.05 * sent.mean()
