"""Tests: the parts of an exchange, round by round."""

from __future__ import annotations

import tracemalloc

import numpy as np

from reshard_ckpt.engine.common.mover import Mover, Transfers


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
