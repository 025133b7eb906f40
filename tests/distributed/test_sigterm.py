"""SIGTERM while a save waits for a rank that does not come: within the grace it is given up, and all are told."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.checkpoint import Manager
from reshard_ckpt.errors import PeerError
from reshard_ckpt.storage.local import LocalWriter
from tests.distributed.outcomes import Outcome, outcome
from tests.launch import on_ranks


@pytest.mark.parametrize("in_background", [True, False])
@on_ranks(2)
def test_what_waits_for_a_rank_that_does_not_come_is_given_up_in_time(tmp_path: Path, in_background: bool):
    """Rank 1 hangs while it writes, until rank 0, which got the signal, has given up; then both save once more."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    called: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    finish = LocalWriter.finish

    def hang(self: LocalWriter) -> None:
        if rank == 1:
            store.get("given up")
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

    with Manager(tmp_path, finish_on_sigterm=0.3 if rank == 0 else True) as manager:
        told = pytest.raises(PeerError, match="given up, as this process was told to end")
        with mock.patch.object(LocalWriter, "finish", hang):
            with told as raised:
                save()
            if rank == 0:
                store.set("given up", "")
        dist.barrier()
        assert outcome(lambda: manager.save(2, state(2))) == Outcome()
        assert manager.steps() == [2]
    assert raised.value.ranks == (0,)
    assert str(raised.value).startswith("rank 0: ") == (rank == 1)
    assert called == ([signal.SIGTERM] if rank == 0 else [])
    assert torch.equal(checkpoint.read(tmp_path / "step_2")["w"], torch.arange(8.0) + 200)
