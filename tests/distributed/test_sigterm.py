"""SIGTERM while a save waits for a rank that does not come: within the grace it is given up, and all are told."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.checkpoint import Manager
from reshard_ckpt.storage.local import LocalWriter
from tests.distributed.outcomes import Outcome, outcome
from tests.launch import run_ranks


def job(root: str, in_background: bool) -> tuple[Outcome, Outcome, list[int], list[int]]:
    """Rank 1 hangs while it writes, until rank 0, which got the signal, has given up; then both save once more."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    called: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    finish = LocalWriter.finish

    def hang(self: LocalWriter) -> None:
        if rank == 1:
            store.get(f"given up {in_background}")
        elif not in_background:
            os.kill(os.getpid(), signal.SIGTERM)
        finish(self)

    def state(step: int) -> dict[str, LocalShard]:
        return {"w": LocalShard(torch.arange(4.0) + 4 * rank + 100 * step, (8,), (4 * rank,))}

    def save() -> None:
        if not in_background:
            manager.save(1, state(1))
            return
        handle = manager.async_save(1, state(1))
        if rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        handle.result()

    with Manager(root, finish_on_sigterm=0.3 if rank == 0 else True) as manager:
        with mock.patch.object(LocalWriter, "finish", hang):
            first = outcome(save)
            if rank == 0:
                store.set(f"given up {in_background}", "")
        dist.barrier()
        second = outcome(lambda: manager.save(2, state(2)))
        steps = manager.steps()
    return first, second, steps, called


def both(root: str) -> list[tuple[Outcome, Outcome, list[int], list[int]]]:
    return [job(f"{root}/{in_background}", in_background) for in_background in (True, False)]


def test_what_waits_for_a_rank_that_does_not_come_is_given_up_in_time(tmp_path: Path):
    for rank, cases in enumerate(run_ranks(both, 2, str(tmp_path))):
        for first, second, steps, called in cases:
            assert first.error == "PeerError"
            assert first.ranks == (0,)
            assert "given up, as this process was told to end" in first.message
            assert first.message.startswith("rank 0: ") == (rank == 1)
            assert second == Outcome()
            assert steps == [2]
            assert called == ([signal.SIGTERM] if rank == 0 else [])
    for in_background in (True, False):
        assert torch.equal(checkpoint.read(tmp_path / str(in_background) / "step_2")["w"], torch.arange(8.0) + 200)
