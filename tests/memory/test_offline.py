"""Writing what memory holds to the store while a job may come, on this node or another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import Manager, Memory
from reshard_ckpt.errors import UsageError
from reshard_ckpt.memory import offline
from reshard_ckpt.memory.offline import persist_held
from tests.memory.test_manager import killed, state


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
    assert persist_held(str(tmp_path), str(shm)).is_published
    assert checkpoint.verify(tmp_path / "step_1").ok
    assert len(refused) == 1
    assert "reshard-ckpt memory persist writes some" in refused[0]
    Manager(tmp_path).close()
