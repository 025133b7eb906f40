"""Writing what memory holds to the store while a job may come, on this node or another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import Manager, Memory
from reshard_ckpt.errors import UsageError
from reshard_ckpt.format.files import RUN_LOCK_KEY
from reshard_ckpt.memory import offline
from reshard_ckpt.memory.generations import find_generations
from reshard_ckpt.memory.node import run_path
from reshard_ckpt.memory.offline import persist_held
from reshard_ckpt.storage import open_storage
from tests.memory.test_manager import flip, killed, slot_of, state


def test_no_job_removes_what_is_being_written(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch):
    """A manager that is made meanwhile would take it for what a dead save has left, and the catalog would come without it."""
    manager = Manager(tmp_path, memory=Memory(copies=0, folder=str(shm)), persist_every=1000)
    manager.async_save(1, state(1)).result()
    killed(manager)
    whole, refused = offline.publish, []

    def publish(*args: Any) -> None:
        try:
            Manager(tmp_path).close()  # of a node that knows nothing of this one's memory
        except UsageError as error:
            refused.append(str(error))
        whole(*args)

    monkeypatch.setattr(offline, "publish", publish)
    with Manager(tmp_path), pytest.raises(UsageError, match="a job manages the checkpoints there; end it first"):
        persist_held(str(tmp_path), str(shm))
    (tmp_path / RUN_LOCK_KEY).write_text("process 1 on another node")  # as if the job had not been this process
    assert persist_held(str(tmp_path), str(shm)).is_published
    assert checkpoint.verify(tmp_path / "step_1").ok
    assert len(refused) == 1
    assert "reshard-ckpt memory persist writes some" in refused[0]
    Manager(tmp_path).close()


@pytest.mark.parametrize("which", ["file", "digests"])
def test_a_file_of_the_right_size_and_wrong_bytes_is_written_again(tmp_path: Path, shm: Path, which: str):
    """A power cut may leave such files of an attempt that was killed."""
    manager = Manager(tmp_path, memory=Memory(copies=0, folder=str(shm)), persist_every=1000)
    manager.async_save(1, state(1)).result()
    killed(manager)
    (generation,) = find_generations(run_path(str(shm), str(tmp_path)))
    (file,) = generation.decoded_catalog().files
    with open_storage(tmp_path / "step_1") as storage:
        offline._write_absent(run_path(str(shm), str(tmp_path)), generation, [file.key], storage, generation.decoded_catalog())
    flip(tmp_path / "step_1" / (file.key if which == "file" else file.digests_key), 30)
    assert persist_held(str(tmp_path), str(shm)).num_bytes == file.size
    assert checkpoint.verify(tmp_path / "step_1").ok


def test_a_file_of_another_node_with_wrong_digests_is_missing(tmp_path: Path, shm: Path):
    manager = Manager(tmp_path, memory=Memory(copies=0, folder=str(shm)), persist_every=1000)
    handle = manager.async_save(1, state(1))
    handle.result()
    killed(manager)
    folder = run_path(str(shm), str(tmp_path))
    (generation,) = find_generations(folder)
    (file,) = generation.decoded_catalog().files
    with open_storage(tmp_path / "step_1") as storage:
        offline._write_absent(folder, generation, [file.key], storage, generation.decoded_catalog())
    slot_of(shm, tmp_path, handle.running.save_id).unlink()  # as if another node had written the file
    flip(tmp_path / "step_1" / file.digests_key, 30)
    report = persist_held(str(tmp_path), str(shm))
    assert not report.is_published
    assert report.missing == tuple(generation.holders[file.key])
