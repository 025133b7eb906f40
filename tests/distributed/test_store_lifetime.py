"""A save in the background outlives the process group that it began in, also where rank 0's own process hosts the job's store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from reshard_ckpt import checkpoint
from tests.distributed.by_hand import run_by_hand

# Publishing waits until the job has no process group any more, so that no save is over before that by luck.
GATE = """
import threading
from reshard_ckpt.storage.local import LocalWriter
gone, finish = threading.Event(), LocalWriter.finish
def finish_late(self):
    gone.wait()
    finish(self)
LocalWriter.finish = finish_late
def state(add):
    return {"shared": torch.arange(1000) + add, f"own{rank}": torch.full((1000,), rank + add)}
"""

LEAVES = (
    GATE
    + """
init()
checkpoint.async_save(sys.argv[2], state(0))
dist.destroy_process_group()
gone.set()
"""
)

MAKES_ANEW = (
    GATE
    + """
def destroy(n):
    # Torch itself fails where a rank comes back before rank 0 has closed the old store, so both meet at a pipe in between.
    dist.destroy_process_group()
    open(f"{sys.argv[2]}/pipe{n}", "r" if rank else "w").close()
kept = []
for i in range(2):
    init()
    kept.append(checkpoint.async_save(f"{sys.argv[2]}/{2 * i}", state(2 * i)))
    destroy(2 * i)
    init()
    total = torch.full((3,), rank + 1)
    dist.all_reduce(total)
    assert total.tolist() == [size * (size + 1) // 2] * 3
    gone.set()
    kept.append(checkpoint.async_save(f"{sys.argv[2]}/{2 * i + 1}", state(2 * i + 1)))
    destroy(2 * i + 1)
for handle in kept:
    handle.result(600)
"""
)

FORKS = (
    GATE
    + """
from reshard_ckpt.errors import UsageError
init()
def in_child(task):
    child = os.fork()
    if not child:
        try:
            task()
        except UsageError as error:
            os._exit(7 if f"forked from rank {rank} of the job and cannot speak for it" in str(error) else 8)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
dist.barrier()
loads = lambda: checkpoint.load(sys.argv[2], state(0))
assert in_child(loads) == 7  # before this process has said anything itself
handle = checkpoint.async_save(sys.argv[2], state(0))
assert in_child(loads) == 7
assert in_child(lambda: checkpoint.save(sys.argv[2] + "-child", state(0))) == 7
loader = torch.utils.data.DataLoader(torch.arange(8), num_workers=2, multiprocessing_context="fork")
assert [int(item) for item in loader] == list(range(8))
gone.set()
handle.result()
assert in_child(lambda: checkpoint.read(sys.argv[2])) == 0
checkpoint.load(sys.argv[2], state(0))
dist.destroy_process_group()
"""
)


def check(path: Path, add: int, size: int) -> None:
    saved = checkpoint.read(path)
    assert torch.equal(saved["shared"], torch.arange(1000) + add)
    assert [saved[f"own{rank}"][7].item() for rank in range(size)] == [rank + add for rank in range(size)]
    assert checkpoint.verify(path).ok


@pytest.mark.parametrize(("init", "size"), [("tcp", 2), ("env", 3)])
def test_the_last_save_of_a_job_that_leaves_at_once_is_committed(tmp_path: Path, init: str, size: int) -> None:
    outcomes = run_by_hand(LEAVES, size, tmp_path, str(tmp_path / "ckpt"), init=init)
    assert [status for status, _ in outcomes] == [0] * size, outcomes
    check(tmp_path / "ckpt", 0, size)


@pytest.mark.parametrize("init", ["env", "tcp"])
def test_a_process_group_made_anew_loses_neither_the_save_under_way_nor_the_next(tmp_path: Path, init: str) -> None:
    for n in range(4):
        os.mkfifo(tmp_path / f"pipe{n}")
    outcomes = run_by_hand(MAKES_ANEW, 2, tmp_path, str(tmp_path), init=init)
    assert [status for status, _ in outcomes] == [0] * 2, outcomes
    for i in range(4):
        check(tmp_path / str(i), i, 2)


def test_forked_children_of_ranks_are_told_that_they_cannot_speak_for_them(tmp_path: Path) -> None:
    outcomes = run_by_hand(FORKS, 2, tmp_path, str(tmp_path / "ckpt"))
    assert [status for status, _ in outcomes] == [0] * 2, outcomes
    check(tmp_path / "ckpt", 0, 2)
