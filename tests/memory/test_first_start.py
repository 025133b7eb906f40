"""A run whose store refuses its lineage: memory keeps a copy, so that a restart finds the checkpoints in memory again."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from reshard_ckpt.checkpoint import Manager, Memory
from reshard_ckpt.engine.common.lineage import LINEAGE
from reshard_ckpt.errors import CheckpointNotFound
from reshard_ckpt.memory.offline import drop_held, persist_held
from reshard_ckpt.storage import open_storage
from tests.launch import ROOT
from tests.reliability.faults import fails, faulty
from tests.reliability.ranks import jobs
from tests.warm_python import warm_python

pytestmark = pytest.mark.filterwarnings("error", "ignore:from which step this job went on could not be written")


def job(root: Path, folder: Path, store: str, *actions: str) -> None:
    """Load the newest, if asked to, load and save steps, and be killed."""
    with faulty("write", None, fails(errno.ENOSPC)) if store == "full" else nullcontext():
        manager = Manager(root, memory=Memory(copies=0, folder=str(folder)), persist_every=1000)
        for action in actions:
            what, step = action.split("=")
            if what == "load":
                manager.load(int(step), {"w": torch.zeros(1000)})
            elif what == "save":
                manager.save(int(step), {"w": torch.full((1000,), float(step))})
            else:
                manager.async_save(int(step), {"w": torch.full((1000,), float(step))}).result()
        os.kill(os.getpid(), signal.SIGKILL)


def run_job(root: Path, folder: Path, store: str, *actions: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [warm_python(), "-m", "tests.memory.test_first_start", str(root), str(folder), store, *actions]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def newest(root: Path, folder: Path) -> tuple[int, str] | None:
    """What a restart of the job would load; it saves nothing."""
    manager = Manager(root, memory=Memory(copies=0, folder=str(folder)), persist_every=1000)
    into = {"w": torch.zeros(1000)}
    found = manager.load_latest(into)
    manager.__exit__(RuntimeError, RuntimeError(), None)
    assert found is None or into["w"].unique().tolist() == [found.step]
    return found and (found.step, found.tier)


def test_a_first_start_on_a_full_store_finds_its_checkpoints_after_a_crash(tmp_path: Path, shm: Path):
    root = tmp_path / "run"
    run_job(root, shm, "full", "memory=5")
    run_job(root, shm, "full", "load=5", "memory=6", "memory=7")
    run_job(root, shm, "full", "load=6", "memory=4")  # the next attempt, though no store knows of the one before
    assert newest(root, shm) == (4, "memory")
    run_job(root, shm, "free", "load=4", "memory=8")
    with open_storage(root) as storage:
        assert LINEAGE.read(storage).attempt == 4
    assert newest(root, shm) == (8, "memory")


def test_the_command_writes_the_newest_attempt_of_such_a_run(tmp_path: Path, shm: Path):
    root = tmp_path / "run"
    run_job(root, shm, "full", "memory=5", "memory=6")
    run_job(root, shm, "full", "load=5", "memory=4")
    with pytest.raises(CheckpointNotFound, match="no such checkpoint; the steps there: 5, 4"):
        persist_held(str(root), str(shm), step=6)
    assert persist_held(str(root), str(shm)).step == 4


def test_what_was_gone_back_from_on_a_full_store_does_not_count_after_a_crash(tmp_path: Path, shm: Path):
    root = tmp_path / "run"
    run_job(root, shm, "free", "save=1", "save=2", "save=3")
    run_job(root, shm, "full", "load=1", "memory=2")
    assert newest(root, shm) == (2, "memory")


def test_a_root_that_was_removed_begins_anew_also_if_its_next_job_saved_nothing(tmp_path: Path, shm: Path):
    root = tmp_path / "run"
    run_job(root, shm, "full", "memory=5")
    shutil.rmtree(root)
    for _ in range(2):
        with pytest.warns(UserWarning, match="1 checkpoints of another run .* which are not loaded"):
            assert newest(root, shm) is None


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_job_without_memory_that_comes_first_leaves_the_copy_unless_it_is_dropped(tmp_path: Path, shm: Path, is_dropped: bool):
    """As docs/memory.md says: nothing tells this root from that of a full store."""
    root = tmp_path / "run"
    run_job(root, shm, "full", "memory=5")
    shutil.rmtree(root)
    Manager(root).close()
    if is_dropped:
        assert drop_held(str(root), str(shm)) > 0
    assert newest(root, shm) == (None if is_dropped else (5, "memory"))


def test_each_node_keeps_a_copy_and_a_damaged_one_is_ignored(tmp_path: Path, shm: Path):
    with jobs() as make:
        job = make(2)

        def manager(rank: int) -> Manager:
            return Manager(tmp_path, memory=Memory(copies=0, folder=str(shm / f"node{rank}")), persist_every=1000)

        with faulty("write", None, fails(errno.ENOSPC)):
            managers = job.run(manager)
            job.run(lambda rank: managers[rank].async_save(5, {f"w{rank}": torch.ones(10)}).result())
            job.run(lambda rank: managers[rank].__exit__(RuntimeError, RuntimeError(), None))
        (copy,) = (shm / "node0").glob("*/*/lineage")
        copy.write_bytes(copy.read_bytes()[:-1])
        managers = job.run(manager)
        found = job.run(lambda rank: managers[rank].load_latest({f"w{rank}": torch.zeros(10)}))
        assert [(one.step, one.tier) for one in found] == [(5, "peer")] * 2
        job.run(lambda rank: managers[rank].__exit__(RuntimeError, RuntimeError(), None))


if __name__ == "__main__":
    job(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
