"""A manager with a memory tier, in one process: what goes where, what is loaded from where, and what is refused."""

from __future__ import annotations

import os
import shutil
import stat
import threading
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import Manager, Memory
from reshard_ckpt.errors import CheckpointError, CheckpointNotFound, CorruptError, StorageError, UsageError
from reshard_ckpt.memory import background, node, offline, pool
from reshard_ckpt.memory import run as run_module
from reshard_ckpt.memory.generations import Generation, find_generations, keep_generation
from reshard_ckpt.memory.node import node_id, run_path, user_folder
from reshard_ckpt.memory.offline import drop_held, held_runs, persist_held
from reshard_ckpt.memory.persist import publish
from reshard_ckpt.memory.pool import SlotPool
from reshard_ckpt.memory.run import MemoryRun
from reshard_ckpt.storage import open_storage
from tests.cli.running import run
from tests.layouts import values_of

NUM_GENERATIONS = 1000 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 150
SLOT_BYTES = (8 << 20) + (64 << 10)
"""What `state` takes in memory."""


def state(number: int) -> dict[str, Any]:
    """Several blocks of a tensor, whose bytes depend on place and number, and plain values."""
    return {"w": values_of((700, 1024), "F32", number), "extra": {"step": number, "long": "x" * 9000}}


def loaded(manager: Manager) -> tuple[int, str]:
    """Load the newest checkpoint; its step and tier, once it is proved right."""
    into = state(0)
    found = manager.load_latest(into)
    assert_is(into, found.step)
    return found.step, found.tier


def twice(number: int) -> dict[str, Any]:
    """A state that takes twice the memory."""
    return {**state(number), "w2": state(number + 1)["w"], "w3": state(number + 2)["w"]}


def assert_is(into: dict[str, Any], number: int) -> None:
    wanted = state(number)
    assert into["w"].view(dtype=into["w"].dtype).numpy().tobytes() == wanted["w"].numpy().tobytes()
    assert into["extra"] == wanted["extra"]


def killed(manager: Manager) -> None:
    """Leave as a job that fails: nothing more goes to the store."""
    manager.__exit__(RuntimeError, RuntimeError(), None)


def slot_of(folder: Path, root: Path, save_id: str) -> Path:
    """The slot on this node that has the images of a save."""
    return next(p for p in run_path(str(folder), str(root)).glob("*.slot") if save_id.encode() in p.read_bytes()[:65536])


def flip(path: Path, offset: int) -> None:
    """Turn one bit over."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def of_users(caught: Iterable[warnings.WarningMessage]) -> list[str]:
    """The warnings that are for users; others may be of what tests before this one have left."""
    return [str(one.message) for one in caught if issubclass(one.category, UserWarning)]


@pytest.fixture
def memory(shm: Path) -> Memory:
    return Memory(copies=0, folder=str(shm))


@pytest.fixture
def usual_umask() -> Iterator[None]:
    """The umask that most users have."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """A warning that no test expects is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)  # of what tests before this one have left to the collector of garbage
        yield


def test_saves_go_to_memory_and_every_so_often_to_the_store(tmp_path: Path, memory: Memory):
    with Manager(tmp_path, memory=memory, persist_every=3) as manager:
        assert manager.load_latest(state(0)) is None
        for step in range(1, 6):
            handle = manager.async_save(step, state(step))
            assert handle.result().num_bytes > 700 * 4096
            assert (handle.copies, handle.persisted()) == (0, step == 3)
            assert (tmp_path / "step_3" / "catalog.msgpack").exists() == (step >= 3)
        assert manager.steps() == [3, 4, 5]
        assert loaded(manager) == (5, "memory")
    assert handle.persisted()  # by the clean close
    assert checkpoint.verify(tmp_path / "step_5").ok
    assert checkpoint.catalog(tmp_path / "step_5").folder == "step_5"
    assert not (tmp_path / "step_4").exists()
    assert_is_stored(tmp_path, 5)


@pytest.mark.parametrize("step", [np.int64(3), torch.tensor(3)])
def test_a_step_may_be_an_integer_of_another_package(tmp_path: Path, memory: Memory, step: Any):
    with Manager(tmp_path, memory=memory, keep_last=1) as manager:
        manager.async_save(step, {"w": torch.arange(5)}).result()
        state = {"w": torch.zeros(5, dtype=torch.int64)}
        manager.load(step, state)
        assert torch.equal(state["w"], torch.arange(5))
        manager.save(step + 1, state)
        assert manager.steps() == [3, 4]
        manager.delete(step)
        assert manager.steps() == [4]


def test_the_first_goes_to_the_store_one_interval_after_the_start(tmp_path: Path, memory: Memory):
    now = [100.0]
    rule = background.PersistRule("10min", clock=lambda: now[0])
    due = []
    for now[0] in (100, 699, 700, 701, 1299, 1300):
        due.append(rule.due(0))
    assert due == [False, False, True, False, False, True]
    with pytest.raises(UsageError, match="persist_every=0"):
        Manager(tmp_path, memory=memory, persist_every=0)
    with pytest.raises(UsageError, match="persist_every=10: .*pass memory=checkpoint.Memory"):
        Manager(tmp_path, persist_every=10)


def test_save_and_what_has_no_room_go_to_the_store_and_are_pruned(tmp_path: Path, memory: Memory):
    with Manager(tmp_path, memory=memory, persist_every=1000, keep_last=2, keep_best=1) as manager:
        manager.async_save(10, state(10), metric=9.0).result()
        manager.save(10, state(11), metric=1.0)  # newer than what memory has of this step
        into = state(0)
        found = manager.load_latest(into)
        assert (found.step, found.tier, into["extra"]["step"]) == (10, "store", 11)
        for step in (20, 30, 40):
            manager.save(step, state(step), metric=float(step == 20))
        assert manager.steps() == [20, 30, 40]  # the best, and the last two
        manager.async_save(50, state(50), metric=5.0).result()
        assert (manager.best(), manager.latest()) == (50, 50)
        manager.delete(50)
        assert manager.latest() == 40
        with pytest.raises(CheckpointNotFound):
            manager.delete(50)
        assert loaded(manager) == (40, "store")


def test_an_older_step_supersedes_newer_ones_also_on_a_node_that_was_away(tmp_path: Path, memory: Memory, shm: Path):
    root, away = tmp_path / "run", shm / "away"
    manager = Manager(root, memory=memory, persist_every=3)
    for step in (1, 2, 3, 4):
        manager.async_save(step, state(step)).persisted()
    killed(manager)
    here = run_path(str(shm), str(root))
    shutil.copytree(here, away)
    with Manager(root, memory=memory) as manager:
        into = state(0)
        manager.load(3, into)
        assert_is(into, 3)
        assert manager.steps() == [3, 4]
        manager.async_save(4, state(44)).result()
        assert manager.steps() == [3, 4]
        into = state(0)
        manager.load(4, into)
        assert_is(into, 44)
        manager.load(3, into)
        manager.async_save(5, state(55)).result()
        killed(manager)
    shutil.rmtree(here)
    shutil.copytree(away, here)  # it comes back with step 4
    manager = Manager(root, memory=memory)
    assert loaded(manager) == (3, "memory")
    killed(manager)


def test_in_the_store_too_what_is_beyond_the_step_that_was_loaded_no_longer_counts(tmp_path: Path, memory: Memory):
    with Manager(tmp_path, memory=memory) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
        assert (manager.steps(), manager.latest()) == ([1, 2, 3], 3)
        manager.load(1, state(0))
        assert manager.latest() == 3
        manager.async_save(2, state(22)).result()
        assert manager.steps() == [1, 2]
        into = state(0)
        found = manager.load_latest(into)
        assert (found.step, found.tier) == (2, "memory")
        assert_is(into, 22)


def test_what_a_kill_kept_from_the_store_is_written_by_the_next_start(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
):
    manager = Manager(tmp_path, memory=memory, persist_every=1)
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # before the save, whose thread warns when it comes to it
        patch.setattr("reshard_ckpt.memory.persist.publish", lambda *_, **__: 1 / 0)
        patch.setattr("reshard_ckpt.memory.persist.remove", lambda *_: None)  # who is killed removes nothing
        handle = manager.async_save(7, state(7))
        assert handle.result().num_bytes
        with pytest.raises(CheckpointError, match="in memory"):
            handle.persisted()
        killed(manager)
    assert any((tmp_path / "step_7").rglob("*.safetensors"))  # the files without the catalog
    manager = Manager(tmp_path, memory=memory, persist_every=1000)
    assert loaded(manager) == (7, "memory")
    killed(manager)  # it waits for what is on its way
    assert checkpoint.verify(tmp_path / "step_7").ok


@pytest.mark.parametrize("cut", ["*.safetensors", "*.digests"])
def test_a_file_that_a_kill_cut_is_written_anew_by_the_command(
    tmp_path: Path, memory: Memory, shm: Path, monkeypatch: pytest.MonkeyPatch, cut: str
):
    manager = Manager(tmp_path, memory=memory, persist_every=1)
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr("reshard_ckpt.memory.persist.publish", lambda *_, **__: 1 / 0)
        patch.setattr("reshard_ckpt.memory.persist.remove", lambda *_: None)  # who is killed removes nothing
        manager.async_save(7, state(7)).result()
        killed(manager)
    (path,) = (tmp_path / "step_7").rglob(cut)
    path.write_bytes(path.read_bytes()[:-8])
    assert run("memory", "persist", tmp_path, "--folder", shm).code == 0
    assert checkpoint.verify(tmp_path / "step_7").ok
    assert_is_stored(tmp_path, 7)


def test_a_damaged_checkpoint_in_the_store_is_replaced_from_memory(tmp_path: Path, memory: Memory):
    manager = Manager(tmp_path, memory=memory, persist_every=1)
    assert manager.async_save(7, state(7)).result()
    killed(manager)
    flip(tmp_path / "step_7" / "catalog.msgpack", 200)
    manager = Manager(tmp_path, memory=memory, persist_every=1000)
    assert loaded(manager) == (7, "memory")
    killed(manager)
    assert checkpoint.verify(tmp_path / "step_7").ok
    assert_is_stored(tmp_path, 7)


def test_a_run_that_begins_anew_does_not_load_what_another_with_its_root_left(tmp_path: Path, memory: Memory):
    root = tmp_path / "run"
    manager = Manager(root, memory=memory)
    manager.async_save(5, state(5)).result()
    killed(manager)
    shutil.rmtree(root)
    with pytest.warns(UserWarning, match="1 checkpoints of another run .* up to step 5, which are not loaded"):
        manager = Manager(root, memory=memory)
    assert manager.load_latest(state(0)) is None
    manager.async_save(1, state(1)).result()
    assert loaded(manager) == (1, "memory")
    killed(manager)


def test_memory_that_is_short_is_named_once_and_counted(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch):
    small = Memory(copies=0, folder=str(shm), max_bytes=10 << 20)
    with Manager(tmp_path / "a", memory=small, keep_last=1) as manager:
        with pytest.warns(UserWarning, match="not to memory.* Memory\\(max_bytes=10,485,760\\), and the newest") as warned:
            handles = [manager.async_save(step, state(step)) for step in (1, 2, 3)]
        assert [(handle.persisted(), handle.copies) for handle in handles] == [(True, 0)] * 3
        assert len(of_users(warned)) == 1
        assert manager.memory_skipped == 3
        assert loaded(manager) == (3, "store")
        assert manager.steps() == [3]  # pruned like any other save

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with Manager(tmp_path / "b", memory=Memory(copies=0, folder=str(shm))) as manager:
        with pytest.warns(UserWarning, match="No space left on device"):
            manager.async_save(1, state(1)).result()
        assert loaded(manager) == (1, "store")
    assert not list(run_path(str(shm), str(tmp_path / "b")).glob("*.slot"))


def test_a_tmpfs_that_fills_up_beside_the_slots_sends_saves_to_the_store(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
):
    """All slots are there; then somebody else takes all memory that is left, before a save or while it is staged."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    def write_into(fd: int, *_: Any, **__: Any) -> Any:
        assert os.fstat(fd).st_blocks * 512 >= 1 << 20  # memory that was reserved
        return fdopen(fd, *_, **__)

    fdopen, fallocate = os.fdopen, os.posix_fallocate
    with Manager(tmp_path, memory=Memory(copies=0, folder=str(shm)), persist_every=1000) as manager:
        for step in (1, 2, 3):
            manager.async_save(step, state(step)).result()
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.warns(UserWarning, match="to the store, not to memory.*catalog of a save: No space left"):
                manager.async_save(4, state(4)).result()
        assert loaded(manager) == (4, "store")
        with monkeypatch.context() as patch:
            patch.setattr(node.os, "fdopen", write_into)
            manager.async_save(5, state(5)).result()
        assert loaded(manager) == (5, "memory")
        assert manager.memory_skipped == 1
        assert fallocate is os.posix_fallocate
        killed(manager)


@pytest.mark.parametrize("found_by", ["the budget", "the file system"])
def test_fewer_generations_are_kept_where_memory_has_room_for_fewer(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch, found_by: str
):
    """Two slots of three are there: one generation, and one that is being filled."""
    two = 2 * SLOT_BYTES
    folder, budget = run_path(str(shm), str(tmp_path)), two if found_by == "the budget" else None
    if budget is None:
        monkeypatch.setattr(pool, "free_bytes", lambda _: two - sum(p.stat().st_size for p in folder.glob("*.slot")))
    memory = Memory(copies=0, folder=str(shm), max_bytes=budget)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Manager(tmp_path, memory=memory, persist_every=1000) as manager:
            for step in range(1, 6):
                manager.async_save(step, state(step)).result()
                assert len(list(folder.glob("*.slot"))) <= 2
            assert manager.steps() == [5]
            assert loaded(manager) == (5, "memory")
            assert manager.memory_skipped == 0
            for step in (6, 7):  # for one of twice the size there is room, but not beside the newest
                manager.async_save(step, twice(step)).result()
            assert manager.memory_skipped == 2
            assert manager.steps() == [5, 6, 7]
            killed(manager)
    messages = of_users(caught)
    assert len(messages) == 2, messages
    assert "so it keeps no more than 1" in messages[0]
    assert "goes to the store, not to memory" in messages[1]
    into = state(0)
    with Manager(tmp_path, memory=memory) as manager:
        manager.load(5, into)
        assert_is(into, 5)
        killed(manager)


def test_generations_that_grow_give_the_memory_of_older_ones_up(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch):
    folder = run_path(str(shm), str(tmp_path))
    monkeypatch.setattr(pool, "free_bytes", lambda _: 4 * SLOT_BYTES - sum(p.stat().st_size for p in folder.glob("*.slot")))
    with Manager(tmp_path, memory=Memory(copies=0, folder=str(shm)), persist_every=1000) as manager:
        for step in (1, 2, 3):
            manager.async_save(step, state(step)).result()
        manager.async_save(4, twice(4)).result()
        assert manager.steps() == [3, 4]
        with pytest.warns(UserWarning, match="keeps no more than 1"):
            manager.async_save(5, twice(5)).result()
        for step in (6, 7):
            manager.async_save(step, twice(step)).result()
            assert manager.steps() == [step]
        assert manager.memory_skipped == 0
        into = twice(0)
        found = manager.load_latest(into)
        assert (found.step, found.tier) == (7, "memory")
        wanted = twice(7)
        assert all(into[name].numpy().tobytes() == wanted[name].numpy().tobytes() for name in ("w", "w2", "w3"))
        killed(manager)


def test_saves_go_to_the_store_once_somebody_has_removed_the_memory(tmp_path: Path, shm: Path):
    """As systemd does at the end of a session. Where all slots are there already, nothing else would show it."""
    root, memory = tmp_path / "run", Memory(copies=0, folder=str(shm), generations=1)
    with Manager(root, memory=memory, persist_every=1000) as manager:
        for step in (1, 2):
            manager.async_save(step, state(step)).result()
        shutil.rmtree(run_path(str(shm), str(root)))
        with pytest.warns(UserWarning, match="goes to the store, not to memory.* somebody has removed it"):
            manager.async_save(3, state(3)).result()
        manager.async_save(4, state(4)).result()
        assert manager.steps() == [3, 4]
    assert_is_stored(root, 4)  # and closing looked for nothing that is gone
    root = tmp_path / "slots alone"
    with Manager(root, memory=memory, persist_every=1000) as manager:
        for step in (1, 2, 3):
            manager.async_save(step, state(step)).result()
            for slot in run_path(str(shm), str(root)).glob("*.slot") if step == 2 else ():
                slot.unlink()
        assert loaded(manager) == (3, "memory")
        killed(manager)
    with Manager(root, memory=memory) as manager:
        assert loaded(manager) == (3, "memory")


def test_the_budget_holds_over_restarts_and_changes_of_size(tmp_path: Path, shm: Path):
    most = 3 * SLOT_BYTES
    folder = run_path(str(shm), str(tmp_path))
    for attempt in range(4):
        manager = Manager(tmp_path, memory=Memory(copies=0, folder=str(shm), max_bytes=most), persist_every=1000)
        if attempt:
            assert loaded(manager) == (3 * attempt, "memory")
            manager._memory.wait()  # until what was loaded is in the store, too, it keeps its slot
        for step in range(3 * attempt + 1, 3 * attempt + 4):
            manager.async_save(step, state(step)).result()
            assert sum(path.stat().st_blocks * 512 for path in folder.glob("*.slot")) <= most
        assert manager.memory_skipped == 0
        killed(manager)
        assert len(list(folder.glob("*.slot"))) <= 3


def test_hundreds_of_generations_stay_within_the_budget_and_drop_leaves_nothing(tmp_path: Path, shm: Path):
    most, weights, root = 3 * SLOT_BYTES, torch.zeros(600_000, dtype=torch.int32), tmp_path / "run"
    folder = run_path(str(shm), str(root))
    with Manager(root, memory=Memory(copies=0, folder=str(shm), max_bytes=most), persist_every=100, keep_last=2) as manager:
        for step in range(1, NUM_GENERATIONS + 1):
            manager.async_save(step, {"w": weights.fill_(step)}).result()
            assert sum(path.stat().st_blocks * 512 for path in folder.glob("*.slot")) <= most
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
        assert len(maps) <= 3
        assert manager.memory_skipped == 0
        found = manager.load_latest({"w": weights.zero_()})
        assert (found.step, found.tier, int(weights.min())) == (NUM_GENERATIONS, "memory", NUM_GENERATIONS)
    assert sorted(path.suffix for path in folder.iterdir()) == ["", "", "", ".gen", ".gen", ".slot", ".slot", ".slot"]
    drop_held(str(root), str(shm))
    assert [path.name for path in user_folder(str(shm)).iterdir()] == ["node"]


def test_pinned_generations_are_not_refilled(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch):
    go = threading.Event()
    whole = run_module.persist

    def slow(*args: Any, **options: Any) -> None:
        go.wait()
        whole(*args, **options)

    monkeypatch.setattr(run_module, "persist", slow)
    memory = Memory(copies=0, folder=str(shm), generations=1)
    with Manager(tmp_path, memory=memory, persist_every=2) as manager:
        handles = [manager.async_save(step, state(step)) for step in (1, 2, 3)]
        handles[-1].result()
        with pytest.warns(UserWarning, match="still being written to the store"):
            manager.async_save(4, state(4)).result()
        go.set()
        assert handles[1].persisted()
    assert_is_stored(tmp_path, 2)
    assert_is_stored(tmp_path, 4)


def held_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have what goes to the store wait for an event, which also comes once somebody waits for it."""
    go, whole, wait = threading.Event(), run_module.persist, MemoryRun.wait

    def slow(*args: Any, **options: Any) -> None:
        go.wait()
        whole(*args, **options)

    def hurry(self: MemoryRun) -> None:
        go.set()
        wait(self)

    monkeypatch.setattr(run_module, "persist", slow)
    monkeypatch.setattr(MemoryRun, "wait", hurry)
    return go


def test_what_is_on_its_way_to_the_store_replaces_nothing_newer(tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch):
    with Manager(tmp_path, memory=memory, persist_every=1) as manager:
        held_up(monkeypatch)
        manager.async_save(5, state(5)).result()
        manager.save(5, state(55))
        into = state(0)
        manager.load(5, into)
        assert_is(into, 55)
    into = state(0)
    checkpoint.load(tmp_path / "step_5", into)
    assert_is(into, 55)


def test_what_is_on_its_way_to_the_store_is_superseded_too(tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch):
    manager = Manager(tmp_path, memory=memory, persist_every=1)
    manager.save(1, state(1))
    go = held_up(monkeypatch)
    handle = manager.async_save(2, state(2))
    handle.result()
    manager.load(1, state(0))
    manager.save(1, state(1))
    go.set()
    assert handle.persisted()
    killed(manager)
    manager = Manager(tmp_path, memory=memory)
    assert loaded(manager) == (1, "store")
    killed(manager)


def test_superseded_steps_do_not_push_out_those_that_count(tmp_path: Path, memory: Memory):
    with Manager(tmp_path, memory=memory, persist_every=1000, keep_last=2) as manager:
        for step in (10, 20):
            manager.save(step, state(step))
        manager.load(10, state(0))
        manager.save(11, state(11))
        assert manager.steps() == [10, 11]
        manager.save(12, state(12))
        assert manager.steps() == [11, 12]
    assert (tmp_path / "step_20").exists()  # nobody has saved it again


@pytest.mark.parametrize("how", ["deleted", "gone back from", "saved again"])
def test_what_no_longer_counts_takes_no_place_of_a_generation(tmp_path: Path, shm: Path, how: str):
    """An older generation kept its place in the list, and lost its slot to the next save."""
    memory = Memory(copies=0, generations=3, folder=str(shm))
    with Manager(tmp_path, memory=memory, persist_every=1000) as manager:
        for step in (1, 2, 3):
            manager.async_save(step, state(step)).result()
        if how == "deleted":
            manager.delete(2)
            manager.delete(3)
        elif how == "gone back from":
            manager.load(1, state(0))
        else:
            for _ in range(2):
                manager.async_save(3, state(3)).result()
        for step in (4, 5):
            manager.async_save(step, state(step)).result()
            assert {one: manager.read(one)["extra.step"] for one in manager.steps()} == {one: one for one in manager.steps()}
        assert manager.steps() == ([3, 4, 5] if how == "saved again" else [1, 4, 5])


def test_a_damaged_one_that_was_gone_back_from_does_not_hide_others_that_are(tmp_path: Path, memory: Memory):
    with Manager(tmp_path, memory=memory) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    flip(tmp_path / "step_2" / "catalog.msgpack", 200)
    with Manager(tmp_path, memory=memory) as manager:
        with pytest.warns(UserWarning, match="passed over.*step 2"):
            assert loaded(manager) == (1, "store")
        manager.save(3, state(3))
    flip(tmp_path / "step_3" / "catalog.msgpack", 200)
    with Manager(tmp_path, memory=memory) as manager:
        with pytest.warns(UserWarning, match="passed over"):
            found = manager.load_latest(state(0))
        assert found.step == 1
        assert [line[:7] for line in found.passed_over] == ["step 3:", "step 2:"]
        killed(manager)


def test_a_step_that_was_gone_back_from_counts_again_once_it_is_loaded(tmp_path: Path, memory: Memory):
    with Manager(tmp_path, memory=memory) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
        manager.load(1, state(0))
        manager.save(0, state(0))
        assert manager.steps() == [0, 1]
        manager.load(3, state(0))
        manager.save(0, state(0))
        assert (manager.steps(), manager.latest()) == ([0, 1, 3], 3)  # of the step between, nobody said so
        killed(manager)
    with Manager(tmp_path, memory=memory) as manager:
        assert loaded(manager) == (3, "store")


def test_closing_sends_what_was_loaded_from_memory_where_the_store_has_what_no_longer_counts(tmp_path: Path, memory: Memory):
    manager = Manager(tmp_path, memory=memory, persist_every=1000)
    manager.async_save(1, state(1)).result()
    manager.save(2, state(2))
    killed(manager)
    with Manager(tmp_path, memory=memory, persist_every=1000) as manager:
        manager.load(1, state(0))
        with pytest.raises(TypeError):  # this save fails, and so no newer one is there
            manager.save(1, state(1), nonsense=True)
    assert_is_stored(tmp_path, 1)


def test_closing_writes_nothing_older_than_what_is_in_the_store(tmp_path: Path, memory: Memory):
    with Manager(tmp_path, memory=memory, persist_every=1000) as manager:
        manager.async_save(1, state(1)).result()
        manager.save(2, state(2))
    assert not (tmp_path / "step_1").exists()


def test_a_store_that_cannot_delete_has_the_checkpoint_all_the_same(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
):
    def refused(*_: Any) -> None:
        raise StorageError("read-only")

    monkeypatch.setattr("reshard_ckpt.memory.persist.clean_up", refused)
    said = "stored, but what it replaced is not all deleted: read-only"
    with Manager(tmp_path, memory=memory, persist_every=1) as manager, pytest.warns(UserWarning, match=said):
        assert manager.async_save(1, state(1)).persisted()
    assert_is_stored(tmp_path, 1)


def test_what_another_run_left_goes_before_the_newest_of_this_one(tmp_path: Path):
    pool = SlotPool(Memory(), tmp_path, timeout_s=600)
    pool.run = "this"
    for run_id, attempt, step in (("this", 1, 1), ("this", 1, 2), ("other", 7, 9)):
        keep_generation(tmp_path, Generation(run_id, attempt, step, 1, f"{run_id}{step}", b"", {}))
    gone = []
    while pool._give_up_oldest():
        left = {one.save_id for one in find_generations(tmp_path)}
        gone += {"this1", "this2", "other9"} - left - set(gone)
    assert gone == ["other9", "this1"]


def assert_is_stored(root: Path, step: int) -> None:
    into = state(0)
    checkpoint.load(root / f"step_{step}", into)
    assert_is(into, step)


def test_what_is_refused(tmp_path: Path, memory: Memory):
    with Manager(tmp_path, memory=memory) as manager:
        with pytest.raises(UsageError, match="host_buffer_bytes=.*Memory\\(max_bytes"):
            manager.async_save(1, state(1), host_buffer_bytes=1 << 24)
        with pytest.raises(UsageError, match="sha256"):
            manager.async_save(1, state(1), sha256=True)
        with pytest.raises(TypeError):
            manager.async_save(1, state(1), nonsense=True)
        manager.async_save(1, state(1)).result()
    with pytest.raises(UsageError, match="read_only"):
        Manager(tmp_path, memory=memory, read_only=True)
    for wrong in ({"copies": -1}, {"generations": 0}, {"copies": True}, {"max_bytes": 0}):
        with pytest.raises(UsageError, match=f"{next(iter(wrong))}=.*: pass a whole number"):
            Memory(**wrong)


@pytest.mark.usefixtures("usual_umask")
def test_files_are_for_their_owner_alone_and_links_are_not_followed(tmp_path: Path, memory: Memory, shm: Path):
    root = tmp_path / "run"
    manager = Manager(root, memory=memory)
    manager.async_save(1, state(1)).result()
    killed(manager)
    top = user_folder(str(shm))
    for path in (top, *top.rglob("*")):
        wanted = 0o700 if path.is_dir() else 0o600
        assert path.is_symlink() or stat.S_IMODE(path.lstat().st_mode) == wanted, path
    top.chmod(0o755)
    with pytest.raises(StorageError, match="mode 0755"):
        Manager(root, memory=memory)
    top.chmod(0o700)
    folder, moved = run_path(str(shm), str(root)), tmp_path / "elsewhere"
    slot = next(folder.glob("*.slot"))
    shutil.move(slot, moved)
    slot.symlink_to(moved)
    manager = Manager(root, memory=memory)
    with (
        pytest.warns(UserWarning, match="step 1 in memory: 1 of 1 files are"),
        pytest.raises(CorruptError, match="no checkpoint can"),
    ):
        manager.load_latest(state(0))
    killed(manager)
    folder.rename(shm / "whole")
    folder.symlink_to(shm / "whole")
    with pytest.raises(StorageError, match="is a link"):
        Manager(root, memory=memory)
    top.rename(shm / "top")
    top.symlink_to(shm / "top")
    with pytest.raises(StorageError, match="must be a folder of this user"):
        Manager(root, memory=memory)


def test_a_file_that_another_node_has_written_meanwhile_is_not_touched(
    tmp_path: Path, memory: Memory, shm: Path, monkeypatch: pytest.MonkeyPatch
):
    """The other one may have published it by now; it does so here between the two looks of this one."""
    root = tmp_path / "run"
    manager = Manager(root, memory=memory, persist_every=1000)
    manager.async_save(1, state(1)).result()
    killed(manager)
    folder = run_path(str(shm), str(root))
    (generation,) = find_generations(folder)
    deleted: list[str] = []
    with open_storage(root / "step_1") as storage:
        assert offline._write_absent(folder, generation, [*generation.holders], storage, generation.decoded_catalog())
        publish(storage, generation)
        monkeypatch.setattr(storage, "delete", deleted.extend)
        monkeypatch.setattr(offline, "is_persisted", lambda *_: False)  # it looked too early
        monkeypatch.setattr(offline, "open_storage", lambda path: open_storage(path) if path == str(root) else storage)
        assert persist_held(str(root), str(shm)).num_bytes == 0
    assert not deleted
    assert_is_stored(root, 1)


def test_what_goes_while_it_is_listed_is_no_error(tmp_path: Path, memory: Memory, shm: Path, monkeypatch: pytest.MonkeyPatch):
    root = tmp_path / "run"
    manager = Manager(root, memory=memory, persist_every=1000)
    for step in (1, 2):
        manager.async_save(step, state(step)).result()
    whole = os.listdir

    def late(path: Any = ".") -> list[str]:
        names = whole(path)
        return [*names, "gone.gen"] if Path(path) == run_path(str(shm), str(root)) else names

    monkeypatch.setattr(node.os, "listdir", late)
    (held,) = held_runs(str(root), str(shm))
    assert held.num_bytes >= 2 * SLOT_BYTES
    killed(manager)
    monkeypatch.setattr(node.shutil, "rmtree", lambda path: os.rmdir(path))
    with pytest.raises(StorageError, match="cannot be dropped: .*not empty"):
        drop_held(str(root), str(shm))


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, memory: Memory, shm: Path):
    folder = user_folder(str(shm)) / run_path(str(shm), str(tmp_path)).name
    folder.touch()
    with pytest.raises(StorageError, match=f"{folder}: .*exists; list what is there"):
        Manager(tmp_path, memory=memory)
    folder.unlink()
    (folder / "alive").mkdir(parents=True, mode=0o700)
    with pytest.raises(StorageError, match=f"{folder}: .*directory; list what is there"):
        Manager(tmp_path, memory=memory)


def test_the_commands_list_persist_and_drop(tmp_path: Path, memory: Memory, shm: Path):
    root = tmp_path / "run"
    manager = Manager(root, memory=memory, persist_every=1000)
    for step in (1, 2, 3):
        manager.async_save(step, state(step)).result()
    refused = run("memory", "drop", root, "--folder", shm)
    assert (refused.code, "is alive" in refused.err) == (2, True)
    killed(manager)
    manager = Manager(root, memory=memory)  # it has saved nothing yet, and will load what is there
    refused = run("memory", "drop", root, "--folder", shm)
    assert (refused.code, "is alive" in refused.err) == (2, True)
    killed(manager)
    (held,) = run("memory", "list", "--folder", shm, "--json").json
    assert held["root"] == str(root)
    assert [(one["step"], one["files_here"], one["files"]) for one in held["steps"]] == [(2, 1, 1), (3, 1, 1)]
    assert "no checkpoint of a run is in" in run("memory", "list", "--folder", tmp_path / "none").out
    shown = run("memory", "list", root, "--folder", shm)
    assert "1 of 1" in shown.out
    done = run("memory", "persist", root, "--folder", shm)
    assert (done.code, "published" in done.out) == (0, True)
    assert_is_stored(root, 3)
    assert run("memory", "persist", root, "--folder", shm, "--step", "2").code == 0
    assert_is_stored(root, 2)
    assert run("memory", "persist", root, "--folder", shm, "--step", "9").code == 1
    for action in ("list", "drop"):  # `drop` took the other steps too
        refused = run("memory", action, root, "--folder", shm, "--step", "2")
        assert (refused.code, f"memory {action} --step 2: is for memory persist" in refused.err) == (2, True)
    assert run("memory", "drop", root, "--folder", shm).code == 0
    assert [path.name for path in user_folder(str(shm)).iterdir()] == ["node"]
    assert len(node_id(str(shm))) == 32
    assert run("memory", "persist", root, "--folder", shm).code == 1
    assert run("memory", "drop", "--folder", shm).code == 2
