"""Ranks of a real job that are killed, hang, or leave a save out: the others say which, in time, and no checkpoint is lost.

`tests/reliability/test_sick_ranks.py` has the many cases, on threads; here are processes, signals and the job's own store.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.errors import PeerError
from reshard_ckpt.storage.local import LocalWriter
from tests.deadlines import over_when_here_are_all_but
from tests.distributed.outcomes import Outcome, outcome
from tests.launch import RanksFailed, on_ranks, run_ranks

SIZE = 3


def state(number: int) -> dict[str, Any]:
    rank = dist.get_rank()
    return {"w": LocalShard(torch.full((2, 4), 10.0 * number + rank), (2 * SIZE, 4), (2 * rank, 0)), "step": number}


def is_held(path: Path, number: int) -> bool:
    found = checkpoint.read(path)
    want = torch.cat([torch.full((2, 4), 10.0 * number + rank) for rank in range(SIZE)])
    return found["step"] == number and torch.equal(found["w"], want)


@on_ranks(SIZE)
def test_a_rank_that_hangs_or_leaves_a_save_out_is_named_and_the_job_goes_on(tmp_path: Path):
    """Rank 1 stops while it writes, until the others have given up; then it leaves a save out, and joins the one after."""
    rank, path = dist.get_rank(), tmp_path / "ckpt"
    store = dist.distributed_c10d._get_default_store()
    checkpoint.save(path, state(1))
    write = LocalWriter.write

    def hang(self: LocalWriter, data: Any) -> None:
        store.set("hangs", "")
        store.get("given up")  # returns once it is set
        write(self, data)

    gives_up = over_when_here_are_all_but(1, once=lambda: store.check(["hangs"]))
    told = pytest.raises(PeerError, match="rank 1 did not arrive within")
    with mock.patch.object(LocalWriter, "write", hang) if rank == 1 else gives_up, told as hangs:
        checkpoint.save(path, state(2))
    assert hangs.value.ranks == (1,)
    if rank == 0:
        store.set("given up", "")
    dist.barrier()
    assert is_held(path, 1)
    assert len([p for p in path.iterdir() if p.is_dir()]) == 1  # every rank has taken its files back
    dist.barrier()
    if rank != 1:
        with over_when_here_are_all_but(1), pytest.raises(PeerError, match="rank 1 did not arrive within 600 s"):
            checkpoint.save(tmp_path / "left out", state(3))
    dist.barrier()
    assert outcome(lambda: checkpoint.save(tmp_path / "next", state(4))) == Outcome()
    assert outcome(lambda: checkpoint.save(path, state(5))) == Outcome()
    assert is_held(tmp_path / "next", 4)
    assert is_held(path, 5)
    dist.barrier()


def dying_job(folder: str, async_: bool) -> None:
    """Rank 2 is killed while it writes; what the others say is left in files, since the launcher ends the job."""
    rank, path = dist.get_rank(), Path(folder, "ckpt")
    checkpoint.save(path, state(1))
    write = LocalWriter.write

    def die(self: LocalWriter, data: Any) -> None:
        write(self, data)
        os.kill(os.getpid(), signal.SIGKILL)

    def save() -> None:
        if async_:
            checkpoint.async_save(path, state(2)).result()
        else:
            checkpoint.save(path, state(2))

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher would end the others at once
    with mock.patch.object(LocalWriter, "write", die if rank == 2 else write):
        said = outcome(save)
    Path(folder, f"said-{rank}").write_text(f"{said.error} {said.ranks} {said.message}")
    os._exit(0)  # without a farewell to the process group, in which rank 2 would be waited for


@pytest.mark.parametrize("async_", [False, True], ids=["sync", "async"])
def test_a_rank_that_is_killed_is_named_by_the_others(tmp_path: Path, async_: bool):
    with pytest.raises(RanksFailed):
        run_ranks(dying_job, SIZE, str(tmp_path), async_)
    said = {path.name: path.read_text() for path in tmp_path.glob("said-*")}
    assert set(said) == {"said-0", "said-1"}
    for text in said.values():
        assert text.startswith("PeerError (2,) ")
        assert "the process of rank 2 ended before this was done" in text  # not after timeout_s, which is ten minutes
    assert is_held(tmp_path / "ckpt", 1)
    # The living have taken their files back, and rank 0 those of the dead one.
    catalog = checkpoint.catalog(tmp_path / "ckpt")
    assert not [p for p in (tmp_path / "ckpt").glob("*/*") if p.parent.name != catalog.save_id]
    checkpoint.save(tmp_path / "ckpt", {"x": torch.ones(3)})
    assert len([p for p in (tmp_path / "ckpt").iterdir() if p.is_dir()]) == 1
