"""What every `Comm` must do, at any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from reshard_ckpt.comm import Comm

# Around the sizes from which a message has a key of its own, and several.
SIZES = [0, 1, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, (2 << 20) - 1, 2 << 20, (2 << 20) + 1, (9 << 20) + 3]

Run = Callable[[Callable[[Comm], Any]], list[Any]]


def message(rank: int, num_bytes: int) -> bytes:
    """Bytes that are no two ranks' and no two places' own."""
    return (bytes(range(rank, rank + 61)) * (num_bytes // 61 + 1))[:num_bytes]


class CommContract:
    """Subclasses give a fixture `run`, which returns what a function of the comm returns on each rank."""

    @pytest.mark.parametrize("num_bytes", SIZES)
    def test_gather_gives_all_messages_to_rank_0(self, run: Run, num_bytes: int):
        first, *others = run(lambda comm: comm.gather(message(comm.rank, num_bytes)))
        assert first == [message(rank, num_bytes) for rank in range(len(others) + 1)]
        assert others == [None] * len(others)

    @pytest.mark.parametrize("num_bytes", SIZES)
    def test_broadcast_gives_rank_0s_message_to_all(self, run: Run, num_bytes: int):
        got = run(lambda comm: comm.broadcast(message(7, num_bytes) if comm.rank == 0 else None))
        assert got == [message(7, num_bytes)] * len(got)

    @pytest.mark.parametrize("num_bytes", SIZES)
    def test_scatter_gives_each_rank_its_message(self, run: Run, num_bytes: int):
        got = run(lambda comm: comm.scatter([message(r, num_bytes) for r in range(comm.size)] if comm.rank == 0 else None))
        assert got == [message(rank, num_bytes) for rank in range(len(got))]

    def test_the_first_rank_of_a_machine_gives_its_message_to_the_others(self, run: Run):
        def body(comm: Comm) -> Any:
            near = comm.neighbours()
            messages = [b"%d-%d" % (near[0], i) for i in range(3)]
            return near, messages, [comm.broadcast_near(text if comm.rank == near[0] else None) for text in messages]

        for rank, (near, sent, got) in enumerate(run(body)):
            assert rank in near
            assert got == sent

    def test_messages_of_very_different_sizes(self, run: Run):
        def sizes(comm: Comm) -> list[int]:
            return [SIZES[rank % len(SIZES)] for rank in range(comm.size)]

        gathered = run(lambda comm: (comm.gather(message(comm.rank, sizes(comm)[comm.rank])), sizes(comm)))
        messages, lengths = gathered[0]
        assert messages == [message(rank, n) for rank, n in enumerate(lengths)]

    def test_calls_in_a_row_do_not_mix(self, run: Run):
        def body(comm: Comm) -> list[Any]:
            out: list[Any] = []
            for i in range(5):
                out.append(comm.broadcast(b"b%d" % i if comm.rank == 0 else None))
                out.append(comm.gather(b"g%d-%d" % (i, comm.rank)))
                out.append(comm.scatter([b"s%d-%d" % (i, r) for r in range(comm.size)] if comm.rank == 0 else None))
                out.append(comm.broadcast(b"again%d" % i if comm.rank == 0 else None))
            return out

        outcomes = run(body)
        for rank, got in enumerate(outcomes):
            expected: list[Any] = []
            for i in range(5):
                gathered = [b"g%d-%d" % (i, r) for r in range(len(outcomes))] if rank == 0 else None
                expected += [b"b%d" % i, gathered, b"s%d-%d" % (i, rank), b"again%d" % i]
            assert got == expected

    def test_what_is_sent_may_change_afterwards(self, run: Run):
        def body(comm: Comm) -> Any:
            buffer = bytearray(b"before")
            got = comm.gather(buffer), comm.broadcast(buffer), comm.scatter([buffer] * comm.size)
            buffer[:] = b"after!"
            return got

        first, *others = run(body)
        assert first == ([b"before"] * (len(others) + 1), b"before", b"before")
        assert others == [(None, b"before", b"before")] * len(others)
