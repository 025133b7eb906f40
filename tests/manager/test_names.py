"""A run whose step folders have names of their own: every reader finds them, beside the names that the run had before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import Manager, Memory
from reshard_ckpt.checkpoint.listing import list_run
from reshard_ckpt.engine.common.step_folders import STEP_NAMES
from reshard_ckpt.errors import CheckpointNotFound, CorruptError, UsageError
from tests.cli.running import run
from tests.launch import on_ranks
from tests.manager.test_foreign import foreign
from tests.manager.test_manager import empty, state
from tests.reliability.faults import faulty

NAMES = {"step-{}": "step-20", "iter_{:07d}": "iter_0000020", "{}.ckpt": "20.ckpt"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", ["folder", "memory"])
def test_all_readers_know_the_name(name: str, where: str, tmp_path: Path, request: pytest.FixtureRequest):
    root = str(tmp_path) if where == "folder" else f"memory://{request.node.name}"
    with Manager(root, name=name, keep_last=2, keep_best=1) as manager:
        manager.save(5, state(5), metric=9.0)
        for step in (10, 15, 20):
            manager.async_save(step, state(step), metric=1.0)
        manager.load_latest(empty())  # waits for the pruning too
        assert (manager.steps(), manager.best(), manager.latest()) == ([5, 15, 20], 5, 20)
        assert manager.path(20) == f"{root}/{NAMES[name]}"
    assert [line.path for line in list_run(root)] == [f"{root}/{name.format(step)}" for step in (5, 15, 20)]
    with pytest.raises(CheckpointNotFound, match=f"load the newest as .*{NAMES[name]}'"):
        checkpoint.catalog(root)
    with Manager(root, read_only=True) as reader:  # knows the name from the root
        assert reader.load_latest(empty()).step == 20
    with Manager(root, name=name, keep_last=2, keep_best=1) as manager:
        manager.load(15, empty())
        manager.save(16, state(16))
        assert manager.steps() == [5, 15, 16]
        manager.delete(5)
        assert manager.steps() == [15, 16]
        with pytest.raises(CheckpointNotFound, match=name.format(16)):
            manager.load(7, empty())


def test_a_run_that_changes_its_name_goes_on(tmp_path: Path):
    foreign(tmp_path, "dcp", 10)
    with Manager(tmp_path) as manager:
        manager.save(20, state(20))
    with Manager(tmp_path, name="step-{}", keep_last=3) as manager:
        assert manager.steps() == [10, 20]
        assert manager.load_latest(empty()).step == 20
        manager.save(20, state(21))  # beside step_20
        manager.save(30, state(30))
        assert manager.path(20) == str(tmp_path / "step-20")
        into = empty()
        manager.load(20, into)
        assert torch.equal(into["w"], state(21)["w"])
    with Manager(tmp_path, name="iter_{}", keep_last=2) as manager:
        assert manager.steps() == [10, 20, 30]
        manager.save(40, state(40))
        assert manager.steps() == [10, 30, 40]
    lines = run("inspect", str(tmp_path)).out
    assert all(name in lines for name in ("step_10", "step-30", "iter_40"))
    with Manager(tmp_path) as manager:
        manager.save(50, state(50))
        assert manager.path(50) == str(tmp_path / "step_50")
        assert manager.steps() == [10, 30, 40, 50]


def test_a_folder_of_the_former_name_keeps_what_it_refers_to(tmp_path: Path):
    with Manager(tmp_path, incremental=True) as manager:
        manager.save(10, state(10))
        manager.save(20, state(10))
    assert any(file.checkpoint for file in checkpoint.catalog(tmp_path / "step_20").files)
    with Manager(tmp_path, name="step-{}", keep_last=2) as manager:
        manager.save(20, state(21))  # beside step_20, which no longer counts but can be loaded by its path
        manager.save(30, state(30))
        assert manager.steps() == [20, 30]
    assert torch.equal(checkpoint.read(tmp_path / "step_20")["w"], state(10)["w"])


def test_the_root_is_not_listed_anew_for_each_step(tmp_path: Path):
    with Manager(tmp_path, name="iter_{:07d}") as manager:
        for step in range(8):
            manager.save(step, state(step), metric=float(step))
    with Manager(tmp_path, name="iter_{:07d}") as manager:
        with faulty("scandir", None, lambda real, args, options: real(*args, **options)) as listings:
            assert manager.best() == 7  # reads the catalog of each step
        assert listings.calls < 4


def test_leftovers_go_from_folders_of_any_known_name(tmp_path: Path):
    Manager(tmp_path, name="step-{}").close()
    dead = [
        tmp_path / folder / "20250101T000000Z-0a1b2c3d" / "rank00000-0.safetensors" for folder in ("step-1", "step_2", "step+3")
    ]
    for path in dead:
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
    Manager(tmp_path, name="s{}").close()
    assert [path.exists() for path in dead] == [False, False, True]


@pytest.mark.parametrize("name", ["step", "a/{}", "{}{}", ".{}", "v2{}", "{}0", "{:x}", "{step}", 3])
def test_a_name_has_one_place_for_the_step(name: object, tmp_path: Path):
    with pytest.raises(UsageError, match="name=.*step-{}"):
        Manager(tmp_path, name=name)  # type: ignore[arg-type]


def test_a_damaged_note_of_the_names_is_said(tmp_path: Path):
    with Manager(tmp_path, name="step-{}") as manager:
        manager.save(1, state(1))
    (tmp_path / STEP_NAMES.key).write_bytes(b"x")
    with pytest.raises(CorruptError, match="name= of the run"):
        Manager(tmp_path, name="step-{}")
    assert "name= of the run" in (list_run(tmp_path)[-1].problem or "")


def test_saves_in_memory_go_to_folders_of_the_name(tmp_path: Path, shm: Path):
    memory = Memory(copies=0, folder=str(shm))
    with Manager(tmp_path, name="step-{}", memory=memory, persist_every=2) as manager:
        stored = [step for step in (1, 2, 3) if manager.async_save(step, state(step)).persisted()]
    assert stored == [2]
    assert {path.name for path in tmp_path.glob("step*")} == {"step-2", "step-3"}


@on_ranks(2)
def test_ranks_agree_on_the_name(tmp_path: Path):
    with Manager(tmp_path, name="step-{}", keep_last=1) as manager:
        for step in (1, 2):
            manager.async_save(step, state(step))
        assert (manager.load_latest(empty()).step, manager.steps()) == (2, [2])
        assert manager.path(2) == str(tmp_path / "step-2")
