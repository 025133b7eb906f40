"""A run's root that is reached by another path: the memory of the node is the same run's."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from reshard_ckpt.checkpoint import Manager, Memory
from reshard_ckpt.memory.node import run_path, runs
from reshard_ckpt.memory.offline import drop_held, held_runs, persist_held
from tests.memory.test_manager import killed, loaded, state


@pytest.fixture
def memory(shm: Path) -> Memory:
    return Memory(copies=0, folder=str(shm))


def test_every_path_to_a_root_is_the_same_run(tmp_path: Path, memory: Memory, shm: Path, monkeypatch: pytest.MonkeyPatch):
    real, link = tmp_path / "disk" / "run", tmp_path / "link"
    real.mkdir(parents=True)
    link.symlink_to(real.parent)
    monkeypatch.chdir(real)
    paths = [str(real), f"{link}/run", f"{link}/run/../run/", ".", f"file://{link}/run"]
    for step, path in enumerate(paths, 1):
        manager = Manager(path, memory=memory, persist_every=1000)
        assert loaded(manager) == (step - 1, "memory") if step > 1 else manager.load_latest(state(0)) is None
        manager.async_save(step, state(step)).result()
        killed(manager)
    assert [run.root for run in runs(str(shm))] == [str(real)]
    assert {run_path(str(shm), path) for path in paths} == {run_path(str(shm), str(real))}
    for path in paths:
        assert held_runs(path, str(shm))[0].steps[-1].step == len(paths)
    assert persist_held(paths[1], str(shm)).is_published
    assert drop_held(paths[-1], str(shm)) > 0
    assert not list(runs(str(shm)))


def test_a_root_that_no_path_shows_to_be_the_same_is_named(tmp_path: Path, memory: Memory):
    """As a folder that is mounted twice, which cannot be told from a copy of it."""
    manager = Manager(tmp_path / "run", memory=memory, persist_every=1000)
    manager.save(1, state(1))
    manager.async_save(2, state(2)).result()
    killed(manager)
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    with pytest.warns(UserWarning, match=f"up to step 2, by the root {os.path.realpath(tmp_path)}/run; they are not loaded"):
        manager = Manager(tmp_path / "other", memory=memory, persist_every=1000)
    assert loaded(manager) == (1, "store")
    manager.async_save(3, state(3)).result()
    killed(manager)
    manager = Manager(tmp_path / "other", memory=memory)  # it has its own by now
    assert loaded(manager) == (3, "memory")
    manager.close()


def test_a_relative_folder_stays_where_it_was(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(shm.parent)
    manager = Manager(tmp_path, memory=Memory(copies=0, folder=shm.name), persist_every=1000)
    monkeypatch.chdir(tmp_path)
    manager.async_save(1, state(1)).result()
    assert manager.memory_skipped == 0
    killed(manager)
    manager = Manager(tmp_path, memory=Memory(copies=0, folder=str(shm)), persist_every=1000)
    assert loaded(manager) == (1, "memory")
    killed(manager)
