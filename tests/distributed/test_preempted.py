"""`manager.preempted` on real ranks without any collective in their loops, and a real SIGTERM to one of them."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from reshard_ckpt.checkpoint import Manager
from reshard_ckpt.errors import UsageError
from tests.launch import on_ranks


@on_ranks(4)
def test_all_ranks_are_preempted_at_the_same_read(tmp_path: Path):
    """Read until told, rank r beginning 500 × r reads ahead; rank 2 gets the signal, when all have come that far."""
    rank = dist.get_rank()
    with Manager(tmp_path / "run") as manager:
        before = signal.getsignal(signal.SIGTERM)
        assert not any(manager.preempted for _ in range(1 + 500 * rank))
        steps = 2 + 500 * rank
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        while not manager.preempted:
            steps += 1
        assert manager.preempted
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    of_ranks = [0] * 4
    dist.all_gather_object(of_ranks, steps)
    assert of_ranks == [steps] * 4
    assert steps > 1501


@on_ranks(2)
def test_a_first_read_outside_the_main_thread_is_an_error_on_all_ranks(tmp_path: Path):
    """Rank 1 reads first in another thread, where no handler can be set; all are told."""
    with Manager(tmp_path / "run") as manager, ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="main thread"):
        _ = pool.submit(lambda: manager.preempted).result() if dist.get_rank() else manager.preempted


def test_alone_the_signal_is_seen_at_the_next_read_and_the_handler_of_before_comes_back(tmp_path: Path):
    called: list[int] = []
    own = signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    try:
        with Manager(tmp_path / "run", finish_on_sigterm=True) as manager:
            assert not manager.preempted
            os.kill(os.getpid(), signal.SIGTERM)
            assert manager.preempted
        with pytest.raises(UsageError, match="preempted: the manager of .* is closed"):
            _ = manager.preempted
        assert called == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert called == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, own)


def test_a_forked_child_ends_by_the_signal_as_it_did_before(tmp_path: Path):
    with Manager(tmp_path / "run") as manager:
        assert not manager.preempted
        read, write = os.pipe()
        child = os.fork()
        if not child:
            woken, wakes = os.pipe()
            os.set_blocking(wakes, False)
            signal.set_wakeup_fd(wakes)  # not signal.pause(): the signal may come just before it, and would not end it
            os.write(write, b"x")
            os.read(woken, 1)
            os._exit(0)
        assert os.read(read, 1) == b"x"
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not manager.preempted
