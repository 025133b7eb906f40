"""A store that refuses what comes from memory: nothing of it stays there, and the next one that is due goes there."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import Manager, Memory
from reshard_ckpt.errors import CheckpointError
from reshard_ckpt.format.files import CATALOG_KEY
from reshard_ckpt.storage import LocalStorage
from reshard_ckpt.storage.protocol import PublishUnknown
from tests.memory.test_manager import assert_is_stored, state
from tests.reliability.faults import fails, faulty
from tests.reliability.ranks import jobs
from tests.reliability.states import NEW, held
from tests.reliability.test_sick_ranks import state as state_of


@pytest.mark.filterwarnings("ignore:the save to .* is in memory, but not in the store", "ignore:stored, but what it replaced")
def test_what_the_store_refused_leaves_nothing_there(tmp_path: Path, shm: Path):
    with Manager(tmp_path, memory=Memory(copies=0, folder=str(shm)), persist_every=1) as manager:
        step = left = 0
        for name in ("write", "fsync", "replace"):
            number, happened = 0, True
            while happened:
                step, failed = step + 1, False
                path = tmp_path / f"step_{step}"
                with faulty(name, number, fails(errno.ENOSPC), thread="reshard-ckpt-persist") as fault:
                    try:
                        assert manager.async_save(step, state(step)).persisted()
                    except CheckpointError:
                        failed = True
                if not failed or [*path.glob("*")]:  # an error may come after the catalog is there
                    assert_is_stored(tmp_path, step)
                    assert checkpoint.verify(path).ok
                left += failed and not [*path.glob("*")]
                number, happened = number + 1, fault.happened
            assert not failed
        assert left >= 6


@pytest.mark.filterwarnings("ignore:the save to .* is in memory, but not in the store")
def test_what_the_other_ranks_have_written_goes_too(tmp_path: Path, shm: Path):
    memory = Memory(copies=0, folder=str(shm))
    with jobs() as make:
        job = make(4)
        managers = job.run(lambda rank: Manager(tmp_path, memory=memory, persist_every=1))

        def save(rank: int, step: int) -> bool:
            handle = managers[rank].async_save(step, state_of(rank, NEW))
            try:
                return handle.persisted()
            except CheckpointError:
                return False

        with faulty("write", 0, fails(errno.ENOSPC), thread="reshard-ckpt-persist") as fault:
            assert job.run(lambda rank: save(rank, 1)) == [False] * 4
        assert fault.happened
        assert not [*tmp_path.glob("step_1/*")]
        assert job.run(lambda rank: save(rank, 2)) == [True] * 4
        job.run(lambda rank: managers[rank].close())
    assert held(tmp_path / "step_2") == NEW


@pytest.mark.filterwarnings("ignore:the save to .* is in memory, but not in the store")
def test_a_catalog_that_may_still_come_to_the_store_keeps_its_files(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch):
    """A store of objects may carry a request out after the client gave up on it, and after the last look at the path."""
    publish, late = LocalStorage.publish, []

    def unknown(self: LocalStorage, key: str, data: bytes, **expected: Any) -> Any:
        if key != CATALOG_KEY or "step_1" not in self.url:
            return publish(self, key, data, **expected)
        late.append(lambda: publish(LocalStorage(tmp_path / "step_1"), key, data))
        raise PublishUnknown(f"{key}: no answer")

    with Manager(tmp_path, memory=Memory(copies=0, folder=str(shm)), persist_every=1) as manager:
        monkeypatch.setattr(LocalStorage, "publish", unknown)
        with pytest.raises(CheckpointError, match="catalog.msgpack: no answer"):
            manager.async_save(1, state(1)).persisted()
        monkeypatch.undo()
        late[0]()
        assert_is_stored(tmp_path, 1)
        assert checkpoint.verify(tmp_path / "step_1").ok
