"""Writing a checkpoint from memory to the store: the store gets all of it, as it was saved, or no catalog."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reshard_ckpt.checkpoint import Manager, Memory, SaveHandle
from reshard_ckpt.errors import CheckpointError
from reshard_ckpt.manager.stored import StoredSteps
from reshard_ckpt.memory import persist as persist_module
from reshard_ckpt.memory import run as run_module
from reshard_ckpt.memory.offline import persist_held
from reshard_ckpt.memory.run import MemoryRun
from reshard_ckpt.memory.tier import MemoryTarget
from tests.memory.test_manager import assert_is_stored, flip, held_up, killed, loaded, slot_of, state

pytestmark = pytest.mark.filterwarnings("ignore:the save to .* is in memory, but not in the store")

IN_IMAGE = (64 << 10) + 2_000_000
"""A byte of a tensor, in the slot of `state`."""


def test_damage_in_memory_never_reaches_the_store(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch):
    persist = run_module.persist

    def damaged(comm: Any, images: Any, generation: Any, *args: Any, **options: Any) -> bool:
        flip(slot_of(shm, tmp_path, generation.save_id), IN_IMAGE)
        return persist(comm, images, generation, *args, **options)

    manager = Manager(tmp_path, memory=Memory(copies=0, folder=str(shm)), persist_every=1)
    with monkeypatch.context() as damaging:
        damaging.setattr(run_module, "persist", damaged)
        with pytest.raises(CheckpointError, match=r"rank00000-0.safetensors is damaged; this copy is not used"):
            manager.async_save(1, state(1)).persisted()
    assert not [*tmp_path.glob("step_1/*")]
    assert manager.async_save(2, state(2)).persisted()
    killed(manager)
    assert_is_stored(tmp_path, 2)


def test_the_command_writes_no_damaged_copy_to_the_store(tmp_path: Path, shm: Path):
    manager = Manager(tmp_path, memory=Memory(copies=0, folder=str(shm)), persist_every=1000)
    handle = manager.async_save(1, state(1))
    handle.result()
    killed(manager)
    slot = slot_of(shm, tmp_path, handle.running.save_id)
    flip(slot, IN_IMAGE)
    report = persist_held(str(tmp_path), str(shm))
    assert (report.is_published, len(report.missing), report.num_bytes) == (False, 1, 0)
    assert not [path for path in tmp_path.glob("step_1/**/*") if path.is_file()]
    flip(slot, IN_IMAGE)
    assert persist_held(str(tmp_path), str(shm)).is_published
    assert_is_stored(tmp_path, 1)


@pytest.mark.parametrize("name", ["rank00000-0.safetensors", "rank00000-0.digests"])
@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_file_that_is_not_whole_in_the_store_gets_no_catalog(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch, name: str, how: str
):
    write_files = persist_module.write_files

    def lost(*args: Any) -> int:
        num_bytes = write_files(*args)
        (path,) = tmp_path.glob(f"step_1/*/{name}")
        if how == "cut":
            os.truncate(path, path.stat().st_size - 1)
        else:
            path.unlink()
        return num_bytes

    manager = Manager(tmp_path, memory=Memory(copies=0, folder=str(shm)), persist_every=1)
    with monkeypatch.context() as losing:
        losing.setattr(persist_module, "write_files", lost)
        with pytest.raises(CheckpointError, match=f"1 files of the save are not seen, such as .*{name}; not published"):
            manager.async_save(1, state(1)).persisted()
    assert not [*tmp_path.glob("step_1/*")]
    killed(manager)


def test_what_the_store_has_is_not_written_again(tmp_path: Path, shm: Path):
    """A job that was killed while it did that would have destroyed a committed checkpoint."""
    memory = Memory(copies=0, folder=str(shm))

    def files() -> dict[Path, int]:
        return {path: path.stat().st_ino for path in tmp_path.glob("step_1/**/*")}

    with Manager(tmp_path, memory=memory, persist_every=1) as manager:
        assert manager.async_save(1, state(1)).persisted()
        before = files()
    with Manager(tmp_path, memory=memory, persist_every=1) as manager:
        assert loaded(manager) == (1, "memory")
    assert persist_held(str(tmp_path), str(shm)).num_bytes == 0
    assert files() == before


def test_the_files_that_it_replaces_stay_as_long_as_the_manager_says(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[float] = []
    monkeypatch.setattr(persist_module, "clean_up", lambda storage, catalog, folders, grace_s: seen.append(grace_s))
    with Manager(tmp_path, memory=Memory(copies=0, folder=str(shm)), persist_every=1, grace="7s") as manager:
        assert manager.async_save(1, state(1)).persisted()
    assert seen == [7.0]


def test_what_was_loaded_from_memory_stays_there_until_it_is_in_the_store(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
):
    memory = Memory(copies=0, folder=str(shm), generations=1)
    manager = Manager(tmp_path, memory=memory, persist_every=1000)
    manager.async_save(1, state(1)).result()
    killed(manager)
    go = held_up(monkeypatch)
    with Manager(tmp_path, memory=memory, persist_every=1000) as manager:
        assert loaded(manager) == (1, "memory")
        for step in (2, 3):
            manager.async_save(step, state(step)).result()
        go.set()
        manager._memory.wait()  # type: ignore[union-attr]
        assert_is_stored(tmp_path, 1)
    with Manager(tmp_path, read_only=True) as reader:
        assert reader.steps() == [1, 3]


def test_a_save_waits_for_its_step_behind_others_on_their_way_to_the_store(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
):
    memory = Memory(copies=0, folder=str(shm))
    with Manager(tmp_path, memory=memory, persist_every=1, keep_last=9, keep_every=1) as manager:
        held_up(monkeypatch)
        first, _ = [manager.async_save(step, state(step + 50)) for step in (1, 2)]
        manager.save(1, state(1))
        assert first.persisted()
        assert_is_stored(tmp_path, 1)
    assert_is_stored(tmp_path, 1)


@pytest.mark.parametrize("how", ["save", "delete"])
def test_closing_writes_no_save_that_was_replaced_or_deleted(tmp_path: Path, shm: Path, how: str):
    with Manager(tmp_path, memory=Memory(copies=0, folder=str(shm)), persist_every=1000) as manager:
        manager.async_save(5, state(51)).result()
        if how == "save":
            manager.save(5, state(5))
        else:
            manager.delete(5)
    with Manager(tmp_path, read_only=True) as reader:
        assert reader.steps() == ([5] if how == "save" else [])
    if how == "save":
        assert_is_stored(tmp_path, 5)


def test_saves_are_noted_in_their_order_though_the_thread_of_one_is_late(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else ranks write them to the store in different orders, and wait for each other; and a close writes an older one."""
    add, asked, second, is_over = SaveHandle.add_done_callback, [], threading.Event(), threading.Event()

    def late(self: SaveHandle, callback: Callable[[SaveHandle], object]) -> None:
        asked.append(self)
        is_first = self.running is asked[0].running

        def call(done: SaveHandle) -> None:
            if is_first:
                second.wait(60)
                is_over.wait(0.3)  # of the second one, unless that waits for this one
            else:
                second.set()
            callback(done)
            if not is_first:
                is_over.set()

        add(self, call)

    memory = Memory(copies=0, folder=str(shm), generations=1)
    with Manager(tmp_path, memory=memory, persist_every=1000) as manager, monkeypatch.context() as delaying:
        delaying.setattr(SaveHandle, "add_done_callback", late)
        manager.async_save(1, state(1))
        manager.async_save(2, state(2)).result()
        manager._wait()
    with Manager(tmp_path, read_only=True) as reader:
        assert reader.steps() == [2]
    assert_is_stored(tmp_path, 2)


def test_a_wait_for_the_store_has_its_time_limit_also_behind_another_save(tmp_path: Path, shm: Path):
    manager = Manager(tmp_path, memory=Memory(copies=0, folder=str(shm)), persist_every=1)
    first = threading.Event()
    manager._memory._noted = first  # type: ignore[union-attr]  # as if the save before were not noted yet
    handle = manager.async_save(1, state(1))
    handle.result()
    with pytest.raises(TimeoutError, match=r"step_1 still waits for the save before it after 0.1 s; it goes on"):
        handle.persisted(0.1)
    first.set()
    assert handle.persisted()
    killed(manager)
    assert_is_stored(tmp_path, 1)


def test_what_comes_to_the_store_while_a_run_goes_back_is_superseded(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch):
    """The store is listed before, and the save has ended on its way there when that is asked."""
    listed = StoredSteps.save_ids_beyond

    def list_and_store(self: StoredSteps, step: int) -> list[str]:
        found = listed(self, step)
        go.set()
        manager._memory.wait()  # type: ignore[union-attr]
        return found

    manager = Manager(tmp_path, memory=Memory(copies=0, folder=str(shm)), persist_every=1)
    manager.save(1, state(1))
    go = held_up(monkeypatch)
    handle = manager.async_save(3, state(3))
    handle.result()
    manager.load(1, state(0))
    monkeypatch.setattr(StoredSteps, "save_ids_beyond", list_and_store)
    manager.async_save(2, state(2)).result()
    assert handle.persisted()
    killed(manager)
    with Manager(tmp_path, read_only=True) as reader:
        assert 3 not in reader.steps()


@pytest.mark.parametrize("is_done", [False, True])
def test_a_save_goes_to_the_store_if_an_older_one_of_its_step_does(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch, is_done: bool
):
    """Also if the older one was not there yet when the newer one began."""
    memory, finish = Memory(copies=0, folder=str(shm), generations=1), MemoryTarget.finish

    def finish_after(self: MemoryTarget, *args: Any) -> Any:
        if is_done and manager._memory._writing is not None:  # type: ignore[union-attr]
            manager._memory.wait()  # type: ignore[union-attr]
        return finish(self, *args)

    with Manager(tmp_path, memory=memory, persist_every=5) as manager:
        held_up(monkeypatch)
        monkeypatch.setattr(MemoryTarget, "finish", finish_after)
        manager.async_save(5, state(55)).result()
        manager._wait()
        monkeypatch.setattr(MemoryRun, "wait_for", lambda *_: None)  # it looks too early
        handle = manager.async_save(5, state(5))
        manager._wait()
        manager._memory.wait()  # type: ignore[union-attr]
        assert handle.persisted()  # not by closing, which writes the newest save
    assert_is_stored(tmp_path, 5)
