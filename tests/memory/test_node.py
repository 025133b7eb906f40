"""A tmpfs that something else has filled: nothing that a job begins with needs its memory."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest

from reshard_ckpt.checkpoint import Manager, Memory
from reshard_ckpt.memory import generations, node
from reshard_ckpt.memory.generations import find_generations
from reshard_ckpt.memory.node import node_id, run_folder, run_path, runs, user_folder
from tests.memory.test_manager import assert_is_stored, killed, loaded, state
from tests.reliability.faults import FaultyOs, fails

SAID = "this save goes to the store, not to memory"
CALLS = ("mkdir", "symlink", "open")


@pytest.fixture
def memory(shm: Path) -> Memory:
    return Memory(copies=0, folder=str(shm))


@pytest.mark.parametrize("call", CALLS)
def test_a_run_begins_where_there_is_no_memory_and_uses_it_once_there_is(tmp_path: Path, memory: Memory, call: str):
    """A tmpfs whose memory or inodes are all taken; where its folders cannot be made, each save tries again."""
    with mock.patch.object(node, "os", FaultyOs(call, None, fails(errno.ENOSPC))):
        manager = Manager(tmp_path, memory=memory, persist_every=1000)
        assert manager.load_latest(state(0)) is None
        with pytest.warns(UserWarning, match=f"{SAID}.*{os.strerror(errno.ENOSPC)}"):
            manager.async_save(1, state(1)).result()
        assert_is_stored(tmp_path, 1)
        assert loaded(manager) == (1, "store")
    manager.async_save(2, state(2)).result()
    assert loaded(manager) == (2, "memory")
    assert manager.memory_skipped == 1
    killed(manager)


@pytest.mark.parametrize("call", CALLS)
def test_what_is_in_memory_is_loaded_where_nothing_more_can_be_written_there(tmp_path: Path, memory: Memory, call: str):
    manager = Manager(tmp_path, memory=memory, persist_every=1000)
    manager.save(1, state(1))
    for step in (2, 3):
        manager.async_save(step, state(step)).result()
    killed(manager)
    refuses = FaultyOs(call, None, fails(errno.ENOSPC))
    with mock.patch.object(node, "os", refuses), mock.patch.object(generations, "write_atomically", refuses.open):
        manager = Manager(tmp_path, memory=memory, persist_every=1000)
        assert loaded(manager) == (3, "memory")
        assert refuses.calls > 0
        killed(manager)


def test_a_node_that_cannot_note_what_is_loaded_says_so_and_does_it_the_next_time(tmp_path: Path, memory: Memory):
    manager = Manager(tmp_path, memory=memory, persist_every=1000)
    manager.async_save(1, state(1)).result()
    folder = run_path(memory.folder, str(tmp_path))
    (generation,) = find_generations(folder)
    (folder / generation.name).unlink()  # as on a node that was away when it was saved
    adopt = manager._memory._tier.adopt  # type: ignore[union-attr]
    full = mock.patch.object(node, "os", FaultyOs("replace", None, fails(errno.ENOSPC)))
    with full, pytest.warns(UserWarning, match="is not noted in this node's memory: .*No space left"):
        adopt(generation)
    assert find_generations(folder) == []
    adopt(generation)
    assert find_generations(folder) == [generation]
    killed(manager)


def test_every_run_of_a_folder_is_listed(tmp_path: Path, shm: Path):
    assert [*runs(str(shm))] == []
    roots = [str(tmp_path / name) for name in "abcd"]
    for root in roots:
        run_folder(str(shm), root)
    assert sorted(found.root for found in runs(str(shm))) == roots


def test_the_id_of_a_node_lasts_as_long_as_its_memory(shm: Path):
    with mock.patch.object(node, "os", FaultyOs("symlink", None, fails(errno.ENOSPC))):
        stand_in = node_id(str(shm))
        assert node_id(str(shm)) == stand_in
    first = node_id(str(shm))
    assert first == node_id(str(shm)) != stand_in
    shutil.rmtree(shm)
    assert node_id(str(shm)) not in (first, stand_in)
    (path := user_folder(str(shm)) / "node").unlink()
    path.write_text(first)  # as an earlier version did
    assert node_id(str(shm)) == first
