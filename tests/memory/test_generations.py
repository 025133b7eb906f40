"""The generations of a node: their order, and one whose file is damaged."""

from __future__ import annotations

import os
import resource
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import Manager, Memory
from reshard_ckpt.errors import CheckpointError, CheckpointNotFound, CorruptError, StorageError
from reshard_ckpt.memory import node
from reshard_ckpt.memory import run as run_module
from reshard_ckpt.memory.generations import find_generations
from reshard_ckpt.memory.node import run_path
from reshard_ckpt.memory.offline import persist_held
from reshard_ckpt.memory.run import MemoryRun
from reshard_ckpt.memory.tier import MemoryTarget, Tier
from reshard_ckpt.storage.local import LocalStorage
from tests.cli.running import run
from tests.memory.test_manager import assert_is, flip, killed, loaded, slot_of, state

NAMED = "ignore:passed over, as it cannot be loaded"


@pytest.fixture
def memory(shm: Path) -> Memory:
    return Memory(copies=0, folder=str(shm))


def test_a_save_of_a_step_again_replaces_the_one_in_memory(tmp_path: Path, memory: Memory):
    with Manager(tmp_path, memory=memory, persist_every=1000) as manager:
        for step, number in ((1, 11), (2, 22), (2, 2)):
            manager.async_save(step, state(number)).result()
        assert [held.step for held in find_generations(run_path(memory.folder, str(tmp_path)))] == [1, 2]
        assert loaded(manager) == (2, "memory")
        killed(manager)


def test_of_two_saves_of_a_step_the_later_one_is_loaded(tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch):
    """The first is on its way to the store when the second is committed, so both are in memory; their ids are no order."""
    go, both, whole, finish, wait_for = (
        threading.Event(),
        threading.Event(),
        run_module.persist,
        MemoryTarget.finish,
        MemoryRun.wait_for,
    )

    def slow(*args: Any, **options: Any) -> None:
        go.wait()
        whole(*args, **options)

    def finish_late(*args: Any) -> Any:
        both.wait()
        return finish(*args)

    def begun(self: MemoryRun, step: int) -> None:
        wait_for(self, step)
        (both if begins.pop() else threading.Event()).set()

    begins = [True, False]
    monkeypatch.setattr(run_module, "persist", slow)
    monkeypatch.setattr(MemoryTarget, "finish", finish_late)
    monkeypatch.setattr(MemoryRun, "wait_for", begun)
    ids = iter(["20260101T000000Z-ffffffff", "20260101T000000Z-00000000"])
    monkeypatch.setattr("reshard_ckpt.engine.saving.agreement.new_save_id", lambda: next(ids))
    with Manager(tmp_path, memory=memory, persist_every=5) as manager:
        handles = [manager.async_save(5, state(number)) for number in (55, 5)]
        assert [handle.result() is not None for handle in handles] == [True, True]
        assert len(find_generations(run_path(memory.folder, str(tmp_path)))) == 2
        go.set()
        assert handles[0].persisted()
        assert loaded(manager) == (5, "memory")  # whose values prove that it is the later one
        manager._memory.wait()  # type: ignore[union-attr]
        into = state(0)
        manager.load(5, into)
        assert_is(into, 5)
        killed(manager)


def test_a_save_counts_in_memory_though_the_one_that_it_was_newer_than_is_gone_from_the_store(tmp_path: Path, memory: Memory):
    with Manager(tmp_path, memory=memory, persist_every=1000) as manager:
        manager.save(5, state(51))
        manager.async_save(5, state(5)).result()
        killed(manager)
    shutil.rmtree(tmp_path / "step_5")
    with Manager(tmp_path, memory=memory, persist_every=1000) as manager:
        assert loaded(manager) == (5, "memory")


def test_a_newer_save_of_a_step_that_the_store_has_goes_to_the_store_too(tmp_path: Path, shm: Path):
    """Else the older one would be loaded, as that step, once memory has forgotten the newer one."""
    memory = Memory(copies=0, folder=str(shm), generations=1)
    with Manager(tmp_path, memory=memory, persist_every=1000) as manager:
        manager.save(5, state(51))
        assert manager.async_save(5, state(5)).persisted()
        assert not manager.async_save(6, state(6)).persisted()
        into = state(0)
        manager.load(5, into)
        assert_is(into, 5)


@pytest.mark.parametrize("how", ["save", "no room"])
def test_a_save_of_the_same_step_in_the_store_is_newer_though_the_job_died_before_memory_forgot_the_older_one(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch, how: str
):
    """A later one in memory is newer again, also where the store has got the one before it meanwhile."""
    manager = Manager(tmp_path, memory=memory, persist_every=1000)
    manager.async_save(5, state(51)).result()
    with monkeypatch.context() as dying:
        dying.setattr(MemoryRun, "forget", lambda *_: False)
        dying.setattr(Tier, "_forget_older", lambda *_: None)
        if how == "save":
            manager.save(5, state(5), metadata="newer")
        else:
            dying.setattr(Tier, "target", lambda *_: None)
            manager.async_save(5, state(5), metadata="newer").result()
    killed(manager)
    assert len(find_generations(run_path(memory.folder, str(tmp_path)))) == 1
    with pytest.raises(CheckpointNotFound, match="the store has a newer save of that step"):
        persist_held(str(tmp_path), memory.folder)
    with Manager(tmp_path, memory=memory, persist_every=1000) as manager:
        assert manager.metadata(5) == "newer"
        assert loaded(manager) == (5, "store")
        into = state(0)
        manager.load(5, into)
        assert_is(into, 5)
    checkpoint.load(tmp_path / "step_5", into := state(0))
    assert_is(into, 5)
    manager = Manager(tmp_path, memory=memory, persist_every=1000)
    manager.async_save(5, state(5)).result()
    killed(manager)
    with Manager(tmp_path, memory=memory) as manager:
        assert loaded(manager) == (5, "memory")


def test_the_store_is_asked_for_the_step_that_a_caller_describes_and_for_no_other(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
):
    asked: list[int] = []
    monkeypatch.setattr(MemoryRun, "_stored_id", lambda _, step: asked.append(step) or "")
    with Manager(tmp_path, memory=replace(memory, generations=3), persist_every=1000) as manager:
        for step in (1, 2, 3):
            manager.async_save(step, state(step), metadata=f"step {step}").result()
        asked.clear()
        assert manager.metadata(2) == "step 2"
        assert asked == [2]


def test_the_next_job_frees_the_memory_of_a_generation_file_whose_writer_was_killed(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
):
    """The writer was killed before the rename, so its temporary file has the memory that was reserved for the generation file."""

    def is_killed(*_: Any) -> None:
        raise RuntimeError("killed")

    folder = run_path(memory.folder, str(tmp_path))
    manager = Manager(tmp_path, memory=memory, persist_every=1000)
    with monkeypatch.context() as dying:
        dying.setattr(node, "os", SimpleNamespace(**{**vars(os), "replace": is_killed}))
        with pytest.raises(CheckpointError, match="killed"):
            manager.async_save(1, state(1)).result()
    killed(manager)
    assert len([*folder.glob(".*.tmp")]) == 1
    with Manager(tmp_path, memory=memory):
        assert [*folder.glob(".*.tmp")] == []


def three_steps(root: Path, memory: Memory) -> dict[int, str]:
    """Save step 1 to the store, and steps 2 and 3 to memory; their ids."""
    ids = {}
    manager = Manager(root, memory=memory, persist_every=1000)
    manager.save(1, state(1))
    for step in (2, 3):
        handle = manager.async_save(step, state(step))
        handle.result()
        ids[step] = handle.running.save_id
    killed(manager)
    return ids


@pytest.mark.parametrize("where", ["catalog", "header", "image"])
def test_what_is_damaged_in_memory_is_always_named(tmp_path: Path, memory: Memory, shm: Path, where: str):
    """Whether an older one of memory is loaded instead, or the store's, and by every kind of load."""
    root = tmp_path / "run"
    ids = three_steps(root, memory)

    def damage(step: int) -> None:
        if where == "catalog":
            (path,) = run_path(str(shm), str(root)).glob(f"*{ids[step]}.gen")
        else:
            path = slot_of(shm, root, ids[step])
        flip(path, {"catalog": 300, "header": 40, "image": 65536 + 2_000_000}[where])

    def passed_over(tier: str) -> list[int]:
        manager = Manager(root, memory=memory, persist_every=1000)
        into = state(0)
        with pytest.warns(UserWarning, match="passed over") as caught:
            found = manager.load_latest(into)
        killed(manager)
        assert found.tier == tier
        assert_is(into, found.step)
        said = [str(one.message) for one in caught if "passed over, as it cannot be loaded: " in str(one.message)]
        assert [line.removeprefix("passed over, as it cannot be loaded: ") for line in said] == [*found.passed_over]
        return [int(line.split()[1]) for line in found.passed_over]

    damage(3)
    assert passed_over("memory") == [3]
    damage(2)
    manager = Manager(root, memory=memory, persist_every=1000)
    for load in (lambda: manager.load(2, state(0)), lambda: manager.read(2)):
        with pytest.warns(UserWarning, match="passed over, as it cannot be loaded: step 2 in memory"):
            load()
    killed(manager)
    shutil.rmtree(root / "step_2")  # where the first load had sent it
    assert passed_over("store") == [3, 2]


@pytest.mark.filterwarnings(NAMED)
def test_a_run_whose_only_checkpoint_is_damaged_in_memory_does_not_begin_from_nothing(tmp_path: Path, memory: Memory, shm: Path):
    manager = Manager(tmp_path, memory=memory, persist_every=1000)
    handle = manager.async_save(1, state(1))
    handle.result()
    flip(slot_of(shm, tmp_path, handle.running.save_id), 40)
    with pytest.raises(CorruptError, match="no checkpoint can be loaded:\nstep 1 in memory: 1 of 1 files are damaged"):
        manager.load_latest(state(0))
    killed(manager)


def test_the_command_names_what_it_passes_over(tmp_path: Path, memory: Memory, shm: Path):
    root = tmp_path / "run"
    ids = three_steps(root, memory)
    (path,) = run_path(str(shm), str(root)).glob(f"*{ids[3]}.gen")
    flip(path, 300)
    (held,) = run("memory", "list", root, "--folder", shm, "--json").json
    assert [(one["step"], one["saved_s"] is None) for one in held["steps"]] == [(2, False), (3, True)]
    done = run("memory", "persist", root, "--folder", shm)
    assert done.code == 0
    assert "passed over: step 3 in memory: its catalog is damaged on this node" in done.err
    assert run("memory", "persist", root, "--folder", shm, "--step", "3").code == 1


def test_the_listing_marks_what_the_run_went_back_from(tmp_path: Path, memory: Memory, shm: Path):
    root, aside = tmp_path / "run", tmp_path / "aside"
    ids = three_steps(root, memory)
    (path,) = run_path(str(shm), str(root)).glob(f"*{ids[3]}.gen")
    shutil.copy(path, aside)
    manager = Manager(root, memory=memory, persist_every=1000)
    manager.load(2, state(0))
    manager.async_save(4, state(4)).result()
    killed(manager)
    shutil.copy(aside, path)  # as on a node that was away
    (held,) = run("memory", "list", root, "--folder", shm, "--json").json
    assert [(one["step"], one["superseded"]) for one in held["steps"]] == [(2, False), (3, True), (4, False)]
    assert "3 (superseded)" in run("memory", "list", root, "--folder", shm).out
    shutil.rmtree(root)  # nothing says any more what counts
    (held,) = run("memory", "list", root, "--folder", shm, "--json").json
    assert not any(one["superseded"] for one in held["steps"])


@pytest.mark.filterwarnings("ignore:this node's memory holds 1 checkpoints of another run")
def test_two_runs_of_one_root_are_told_apart_and_have_an_age(tmp_path: Path, memory: Memory, shm: Path):
    root, ids = tmp_path / "run", []
    for _ in range(2):
        manager = Manager(root, memory=memory)
        manager.async_save(1, state(1)).result()
        killed(manager)
        (held,) = run("memory", "list", root, "--folder", shm, "--json").json
        ids = [one["run"] for one in held["steps"]]
        shutil.rmtree(root)
    assert len(set(ids)) == len(ids) == 2
    shown = run("memory", "list", root, "--folder", shm).out
    assert all(one[:8] in shown for one in ids)
    assert " ms" in shown or " s" in shown


def test_a_clean_close_drops_the_memory_where_that_is_wanted(tmp_path: Path, shm: Path):
    memory = Memory(copies=0, folder=str(shm), drop_on_clean_exit=True)
    folder = run_path(str(shm), str(tmp_path))
    manager = Manager(tmp_path, memory=memory, persist_every=1000)
    manager.async_save(1, state(1)).result()
    killed(manager)
    assert list(folder.glob("*.slot"))  # a job that fails needs it
    with Manager(tmp_path, memory=memory, persist_every=1000) as manager:
        assert loaded(manager) == (1, "memory")
        manager.async_save(2, state(2)).result()
    assert not folder.exists()
    with Manager(tmp_path, memory=memory, persist_every=1000) as manager:
        assert loaded(manager) == (2, "store")
        with pytest.raises(CheckpointNotFound):
            manager.load(1_000, state(0))


def test_a_clean_close_stores_a_generation_that_is_older_than_a_copy_in_the_store(tmp_path: Path, shm: Path):
    memory = Memory(copies=0, folder=str(shm), drop_on_clean_exit=True)
    manager = Manager(tmp_path, memory=memory, persist_every=1000)
    manager.save(3, state(3))
    manager.async_save(5, state(5)).result()
    killed(manager)
    shutil.copytree(tmp_path / "step_3", tmp_path / "step_60")
    with Manager(tmp_path, memory=memory, persist_every=1000) as manager:
        assert manager.latest() == 5
    with Manager(tmp_path, memory=memory) as manager, pytest.warns(UserWarning, match="saved as step_3"):
        assert loaded(manager) == (5, "store")


def test_a_copy_onto_the_step_of_a_generation_does_not_hide_the_generation(tmp_path: Path, shm: Path):
    memory = Memory(copies=0, folder=str(shm))
    manager = Manager(tmp_path, memory=memory, persist_every=1000)
    manager.save(3, state(3))
    manager.async_save(6, state(6)).result()
    shutil.copytree(tmp_path / "step_3", tmp_path / "step_6")
    assert set(manager.read(6)) == {"w", "extra.step", "extra.long"}
    assert loaded(manager) == (6, "memory")
    killed(manager)
    with Manager(tmp_path, memory=memory, persist_every=1000) as manager:
        assert loaded(manager) == (6, "memory")
    with Manager(tmp_path) as manager:
        assert loaded(manager) == (6, "store")


def test_persist_writes_a_generation_over_a_copy_of_another_step(tmp_path: Path, shm: Path):
    manager = Manager(tmp_path, memory=Memory(copies=0, folder=str(shm)), persist_every=1000)
    manager.save(3, state(3))
    manager.async_save(6, state(6)).result()
    killed(manager)
    shutil.copytree(tmp_path / "step_3", tmp_path / "step_6")
    assert persist_held(str(tmp_path), folder=str(shm)).step == 6
    with Manager(tmp_path) as manager:
        assert loaded(manager) == (6, "store")


def test_a_step_folder_that_vanishes_while_it_is_persisted_gets_no_catalog(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
):
    root, real = tmp_path / "run", LocalStorage.publish
    manager = Manager(root, memory=Memory(copies=0, folder=str(shm)), persist_every=1000)
    manager.async_save(6, state(6)).result()
    killed(manager)

    def vanish(self: LocalStorage, *args: Any, **options: Any) -> Any:
        (root / "step_6").rename(tmp_path / "gone")
        return real(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "publish", vanish)
        with pytest.raises(StorageError, match="step_6: another job deleted files of this save"):
            persist_held(str(root), folder=str(shm))
    assert not (root / "step_6" / "catalog.msgpack").exists()
    assert persist_held(str(root), folder=str(shm)).is_published
    with Manager(root) as manager:
        assert loaded(manager) == (6, "store")


def test_a_store_that_refuses_keeps_the_memory(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(*_: Any, **options: Any) -> None:
        raise CorruptError("no")

    memory = Memory(copies=0, folder=str(shm), drop_on_clean_exit=True)
    manager = Manager(tmp_path, memory=memory, persist_every=1000)
    manager.async_save(1, state(1)).result()
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "persist", refused)
        with pytest.warns(UserWarning, match="not in the store"), pytest.raises(Exception, match="was not written to"):
            manager.close()
    with Manager(tmp_path, memory=memory) as manager:
        assert loaded(manager) == (1, "memory")


def test_what_is_loaded_unverified_is_not_read_twice_to_verify_it(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
):
    manager = Manager(tmp_path, memory=memory, persist_every=1000)
    for step in (1, 2):
        manager.async_save(step, state(step)).result()
    verified = []
    monkeypatch.setattr("reshard_ckpt.memory.restore.whole_files", lambda *args: verified.append(args))
    into = state(0)
    found = manager.load_latest(into, verify=False)
    assert (found.step, found.tier) == (2, "memory")
    assert_is(into, 2)
    manager.load(1, into, verify=False)
    assert_is(into, 1)
    assert not verified
    killed(manager)


def test_a_process_with_little_address_space_finds_its_generations(tmp_path: Path, memory: Memory):
    """As under ``ulimit -v``, or where the kernel grants no more than it has (``vm.overcommit_memory=2``)."""
    with Manager(tmp_path, memory=memory, persist_every=1000) as manager:
        manager.async_save(1, state(1)).result()
        killed(manager)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), before[1]))
    try:
        found = find_generations(run_path(memory.folder, str(tmp_path)))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert [held.step for held in found] == [1]
