from __future__ import annotations

import os
import signal
from typing import Any

import msgpack
import pytest
import torch
import torch.distributed as dist

from reshard_ckpt.comm import shared_memory
from reshard_ckpt.comm.exchange import open_exchange
from tests.launch import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory without a name is Linux's")


def test_another_process_sees_what_is_written_and_writes_what_is_seen():
    segment = shared_memory.Segment(1000)
    child = os.fork()
    if not child:
        memory = shared_memory.open_segment(segment.address)
        if memory is not None and memory.numel() == 1000 and memory[999] == 0:
            memory[999] = 7
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert segment.data[999] == 7
    segment.close()


def changed(address: bytes, index: int, value: Any) -> bytes:
    parts = list(msgpack.unpackb(address))
    parts[index] = value
    return msgpack.packb(parts)


def test_memory_that_is_not_the_one_that_was_meant_is_not_opened():
    segment, other = shared_memory.Segment(64), shared_memory.Segment(64)
    _, _, size, _ = msgpack.unpackb(segment.address)
    assert shared_memory.open_segment(segment.address) is not None
    for index, value in ((0, 1 << 22), (1, 1 << 20), (1, msgpack.unpackb(other.address)[1]), (2, size + 1), (3, bytes(16))):
        assert shared_memory.open_segment(changed(segment.address, index, value)) is None, (index, value)
    with open(os.devnull) as another:
        assert shared_memory.open_segment(changed(segment.address, 1, another.fileno())) is None
    data = segment.data
    segment.close()
    assert shared_memory.open_segment(segment.address) is None
    data[:] = 3  # who has it keeps it
    other.close()


def share_job() -> list[tuple[bool, ...]]:
    """Rank 1 has no memory to share, and rank 2 may open nobody's."""
    rank = dist.get_rank()
    if rank == 2:
        shared_memory.open_segment = lambda address: None
    exchange = open_exchange(None, timeout_s=600)
    assert exchange is not None
    shared = shared_memory.share_memory(exchange, 0 if rank == 1 else 16 * (rank + 1))
    shared.own[:] = rank
    dist.barrier()
    for other, memory in enumerate(shared.read):
        assert memory is None or torch.equal(memory, torch.full((16 * (other + 1),), other, dtype=torch.uint8))
    dist.barrier()
    return [tuple(memory is not None for memory in shared.read), tuple(shared.readers), (shared.own.numel() > 0,)]


def test_ranks_agree_about_who_reads_whom():
    assert run_ranks(share_job, 3) == [
        [(False, False, True), (False, True, False), (True,)],
        [(True, False, True), (False, False, False), (False,)],
        [(False, False, False), (True, True, False), (True,)],
    ]
