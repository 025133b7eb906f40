"""A forked child has none of its parent's threads: it hears so by name, or begins anew, and never waits for them."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.engine.common.host_memory import allocate
from reshard_ckpt.engine.saving import async_save
from reshard_ckpt.errors import UsageError
from reshard_ckpt.storage import memory, open_storage
from reshard_ckpt.storage.local import LocalStorage, LocalWriter

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # that threads are under way is the point


def in_child(task: Callable[[], object]) -> str:
    """What a forked child says of a task: its result, or its error; a child that hangs is killed by its alarm."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(600)
        try:
            said = str(task())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as answer:
        said = answer.read()
    _, status = os.waitpid(child, 0)
    return said if status == 0 else f"ended by {status}"


def state() -> dict[str, object]:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return {"model": model, "optimizer": optimizer}


@pytest.fixture
def under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[dict, checkpoint.SaveHandle]]:
    """A lazy save that has not copied yet what the optimizer owns; it goes on, and is committed, after the test."""
    copy, stage = threading.Event(), async_save.SaveThread._stage

    def held(self: async_save.SaveThread, fill: Callable[[], None]) -> BaseException | None:
        if threading.current_thread().name == "reshard-ckpt-stage":
            copy.wait()
        return stage(self, fill)

    monkeypatch.setattr(async_save.SaveThread, "_stage", held)
    of = state()
    checkpoint.save(tmp_path / "before", of)
    handle = checkpoint.async_save(tmp_path / "under_way", of, staging="lazy")
    yield of, handle
    copy.set()
    handle.result()
    assert checkpoint.verify(tmp_path / "under_way").ok


def test_a_child_forked_during_a_save_works_or_is_told(tmp_path: Path, under_way: tuple[dict, checkpoint.SaveHandle]) -> None:
    of, handle = under_way
    said = in_child(handle.result)
    assert said.startswith("UsageError: this process was forked while the save to")
    assert "ask there for its result" in said
    assert in_child(lambda: (handle.staged(), handle.done(), handle.failed())) == "(None, True, True)"
    assert in_child(of["optimizer"].step) == "None"
    assert in_child(lambda: checkpoint.load(tmp_path / "before", of)).startswith("LoadReport")
    assert in_child(lambda: checkpoint.save(tmp_path / "child", of)).startswith("SaveReport")
    assert checkpoint.verify(tmp_path / "child").ok
    assert in_child(lambda: checkpoint.async_save(tmp_path / "lazy", of, staging="eager").result()).startswith("SaveReport")
    assert checkpoint.verify(tmp_path / "lazy").ok
    called = in_child(lambda: handle.add_done_callback(lambda of: os.write(2, b"")) or "called")
    assert called == "called"
    assert not handle.done()


def test_a_child_forked_while_a_save_holds_every_lock_does_not_wait_for_them(
    tmp_path: Path, under_way: tuple[dict, checkpoint.SaveHandle]
) -> None:
    of, handle = under_way
    storage = LocalStorage(tmp_path)
    locks = [
        handle.running._lock,
        handle.running.staged._condition,
        handle.running.committed._condition,
        async_save.POOL._lock,
        storage._open_files._lock,
        memory._LOCK,
    ]

    def use() -> str:
        with pytest.raises(UsageError, match="was forked"):
            handle.result()
        handle.staged()
        storage.read_into("before/catalog.msgpack", 0, [memoryview(bytearray(4))])
        checkpoint.async_save("memory://child", of).result()
        with open_storage("memory://child") as kept:
            assert kept.list()
        return "fine"

    for lock in locks:
        lock.acquire()
    try:
        said = in_child(use)
    finally:
        for lock in locks:
            lock.release()
    assert said == "fine"


def test_a_child_that_is_terminated_does_not_wait_for_the_save_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As data loaders end their workers."""
    gate, finish = threading.Event(), LocalWriter.finish

    def late(self: LocalWriter) -> None:
        gate.wait()
        finish(self)

    with checkpoint.Manager(tmp_path, finish_on_sigterm=True) as manager:
        monkeypatch.setattr(LocalWriter, "finish", late)
        handle = manager.async_save(1, {"a": torch.arange(5)})
        said = in_child(lambda: os.kill(os.getpid(), signal.SIGTERM))
        gate.set()
        handle.result()
        assert manager.steps() == [1]
    assert said == f"ended by {int(signal.SIGTERM)}"


def test_a_fork_copies_no_staging_buffer() -> None:
    try:
        mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).madvise(18)  # MADV_WIPEONFORK
    except OSError:
        pytest.skip("this kernel wipes no memory at a fork")
    buffer = allocate(4 << 20, pinned=False).fill_(7)
    assert in_child(lambda: int(buffer.max())) == "0"
    assert buffer.min() == 7


def test_an_idle_fork_is_harmless(tmp_path: Path) -> None:
    of = state()
    handle = checkpoint.async_save(tmp_path, of, staging="lazy")
    handle.result()
    assert in_child(handle.result).startswith("SaveReport")
    assert in_child(lambda: handle.failed()) == "False"
    assert in_child(of["optimizer"].step) == "None"
    loader = torch.utils.data.DataLoader(torch.arange(8), num_workers=2, multiprocessing_context="fork")
    assert [int(item) for item in loader] == list(range(8))
    checkpoint.save(tmp_path, of)
    assert checkpoint.verify(tmp_path).ok


def test_a_child_forked_while_a_manager_saves_and_removes_is_told(tmp_path: Path) -> None:
    """It has none of the threads that would end the save or the removing, and the lock on the root is its parent's."""
    manager = checkpoint.Manager(tmp_path / "run", keep_last=1)
    manager.save(1, state())
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: manager.save(3, state()),
        "async_save": lambda: manager.async_save(3, state()),
        "load": lambda: manager.load(1, state()),
        "load_latest": lambda: manager.load_latest(state()),
        "delete": lambda: manager.delete(1),
        "preempted": lambda: manager.preempted,
    }
    with manager._stored.pruning:  # as the thread does that removes, which waits here after its commit
        handle = manager.async_save(2, state())
        handle.running.wait()
        for name, call in calls.items():
            assert in_child(call).startswith(f"UsageError: {name}: this process was forked from the one that manages"), name
        assert in_child(lambda: (manager.close(), manager.steps())) == "(None, [1, 2])"
        assert in_child(lambda: checkpoint.Manager(tmp_path / "run", read_only=True).load(1, state())).startswith("LoadReport")
    with pytest.raises(UsageError, match="which is this one"):
        checkpoint.Manager(tmp_path / "run")
    manager.close()
    assert manager.steps() == [2]


def test_a_child_collects_garbage_if_another_thread_has_paused_the_collector(tmp_path: Path):
    """As a worker of a data loader that is forked while a thread saves."""
    began, go_on = threading.Event(), threading.Event()

    class Slow:
        def state_dict(self) -> dict[str, int]:
            began.set()
            go_on.wait()
            return {"x": 1}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    saving = threading.Thread(target=checkpoint.save, args=(tmp_path / "saved", {"slow": Slow()}))
    saving.start()
    began.wait()
    try:
        assert not gc.isenabled()
        assert in_child(gc.isenabled) == "True"
    finally:
        go_on.set()
        saving.join()
    assert gc.isenabled()
