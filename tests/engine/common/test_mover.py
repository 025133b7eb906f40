"""Tests: the parts of an exchange, round by round."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from reshard_ckpt.engine.common.mover import Boxes, Memories, Mover, Transfers

PARTS, RANKS, ROUNDS = 60, 4, 3


def test_an_exchange_of_many_rounds_and_ranks_needs_memory_for_its_parts_alone() -> None:
    rounds, ranks = 4096, 16384
    number = np.arange(rounds)
    transfers = Transfers(round=number, owner=np.zeros(rounds, np.int64), taker=1 + number, num_bytes=number * 8 + 8)
    tracemalloc.start()
    mover = Mover(0, ranks, rounds, transfers, [])
    sizes = [mover.sizes(each) for each in (0, 7, rounds - 1)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20
    for each, (sent, received) in zip((0, 7, rounds - 1), sizes, strict=True):
        assert {peer: num for peer, num in enumerate(sent) if num} == {1 + each: each * 8 + 8}
        assert not any(received)


@pytest.mark.parametrize("seed", range(5))
def test_each_part_comes_to_its_place_in_whatever_order_parts_are_listed(seed: int) -> None:
    """Boxes of 1 to 4 rows of a matrix lie elsewhere on their owner and on their taker; a rank may take a part from itself."""
    random = np.random.default_rng(seed)
    owner, taker, number = (random.integers(0, most, PARTS) for most in (RANKS, RANKS, ROUNDS))
    num_rows = random.integers(1, 5, PARTS)
    transfers = Transfers(round=number, owner=owner, taker=taker, num_bytes=num_rows * 3 * 4)
    lengths, strides = np.stack([num_rows, np.full(PARTS, 3)], axis=1), np.full((PARTS, 2), (5, 1))
    # first[i], into[i]: the first element of part i on its owner, and on its taker; both tensors have 4 rows of 5 for each part
    first, into = np.arange(PARTS) * 20, random.permutation(PARTS) * 20
    source = [torch.arange(PARTS * 20.0) + 10_000 * rank for rank in range(RANKS)]
    target = [torch.zeros(PARTS * 20) for _ in range(RANKS)]
    movers = [Mover(rank, RANKS, ROUNDS, transfers, [torch.float32] * PARTS) for rank in range(RANKS)]
    for rank, mover in enumerate(movers):
        sent = Boxes.of(np.where(owner == rank, 0, -1), first, lengths, strides)
        taken = Boxes.of(np.where(taker == rank, 0, -1), into, lengths, strides)
        mover.bind(Memories([source[rank]]), sent, Memories([target[rank]]), taken)
    for each in range(ROUNDS):
        messages = [[torch.zeros(size, dtype=torch.uint8) for size in mover.sizes(each)[0]] for mover in movers]
        for mover, out in zip(movers, messages, strict=True):
            mover.pack(each, out, [0] * RANKS)
        for rank, mover in enumerate(movers):
            came = [out[rank] for out in messages]
            assert [len(data) for data in came] == mover.sizes(each)[1]
            mover.unpack(each, came, [0] * RANKS)
    wanted = [torch.zeros(PARTS * 20) for _ in range(RANKS)]
    for i in range(PARTS):
        box, place = (slice(start, start + 5 * num_rows[i]) for start in (first[i], into[i]))
        rows = source[owner[i]][box].view(-1, 5)[:, :3]
        wanted[taker[i]][place].view(-1, 5)[:, :3] = rows
    assert all(torch.equal(found, right) for found, right in zip(target, wanted, strict=True))
