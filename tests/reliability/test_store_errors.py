"""A save that stops anywhere leaves the old checkpoint or the new one, and the next save works and cleans up.

In this process: between any two operations of a storage, and between any two system calls of a local one, also inside publishing.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import saving
from reshard_ckpt.errors import CheckpointError, StorageError
from reshard_ckpt.storage import Storage, open_storage
from tests.jobs import save_job
from tests.reliability.calls import Calls
from tests.reliability.states import NEW, OLD, assert_next_save_works, held, plain, tensors_of, values_of_rank
from tests.storage.faulty import FailAt, FaultyStorage, StopAt, Stopped

Save = Callable[[Storage, str], None]

pytestmark = pytest.mark.filterwarnings("ignore:saved, but what it replaced is not all deleted")


def of_ranks(ranks: int, last: int) -> Save:
    """A job whose ranks run in turn, `last` as the last of them: where it dies, the others have done their part."""

    def save(storage: Storage, path: str) -> None:
        order = [*(rank for rank in range(ranks) if rank != last), last]
        save_job(storage, [tensors_of(r, ranks, NEW) for r in range(ranks)], [values_of_rank(NEW)] * ranks, order=order)

    return save


def public(kind: str) -> Save:
    def save(storage: Storage, path: str) -> None:
        with mock.patch.object(saving, "open_storage", return_value=storage):
            if kind == "sync":
                checkpoint.save(path, plain(NEW))
                return
            try:
                checkpoint.async_save(path, plain(NEW), staging=kind).result()
            except CheckpointError as error:
                if isinstance(error.__cause__, Stopped):
                    raise Stopped from None
                raise

    return save


SAVES = {
    "sync": public("sync"),
    "eager": public("eager"),
    "lazy": public("lazy"),
    **{f"rank {rank} of 4": of_ranks(4, rank) for rank in (0, 3)},
}


@pytest.fixture(params=["first", "overwrite"])
def old(request: pytest.FixtureRequest) -> int | None:
    return OLD if request.param == "overwrite" else None


@pytest.fixture
def memory() -> Iterator[str]:
    url = f"memory://{uuid.uuid4().hex}"
    yield url
    with open_storage(url) as storage:
        storage.delete([key for key, _ in storage.list()])


def begin(path: str, old: int | None) -> None:
    with open_storage(path) as storage:
        storage.delete([key for key, _ in storage.list()])
    if old is not None:
        checkpoint.save(path, plain(old))


def first_point(kind: str, keys: list[str]) -> int:
    """Where the last rank begins: what the others do before, is tried with them as the last one."""
    return next(i for i, key in enumerate(keys) if "rank" not in kind or f"rank{int(kind.split()[1]):05d}" in key)


def stopped(save: Callable[[], None]) -> bool:
    try:
        save()
    except Stopped:
        return True
    return False


@pytest.mark.parametrize("kind", SAVES)
def test_stopped_between_any_two_operations_of_the_store(memory: str, old: int | None, kind: str):
    seen = []
    begin(memory, old)
    with open_storage(memory) as storage:
        SAVES[kind](FaultyStorage(storage, whole := StopAt(1000)), memory)
    for n in range(first_point(kind, [key for _, key in whole.seen]), 100):
        begin(memory, old)
        stop = StopAt(n)
        with open_storage(memory) as storage:
            is_stopped = stopped(lambda: SAVES[kind](FaultyStorage(storage, stop), memory))  # noqa: B023
        seen.append(held(memory))
        if not is_stopped:
            break
        checkpoint.save(memory, plain(3))
        assert held(memory) == 3
        with open_storage(memory) as storage:
            save_id = checkpoint.catalog(memory).save_id
            assert {key.split("/")[0] for key, _ in storage.list()} == {"catalog.msgpack", save_id}
    else:
        pytest.fail("the save has more operations than were tried")
    committed = seen.index(NEW)
    assert seen == [old] * committed + [NEW] * (len(seen) - committed)
    assert committed > 5


@pytest.mark.parametrize("kind", ["sync", "lazy", "rank 0 of 4", "rank 3 of 4"])
def test_stopped_after_any_system_call(tmp_path: Path, old: int | None, kind: str, monkeypatch: pytest.MonkeyPatch):
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # what it is good for, test_power_cut asks
    seen = []
    whole = Calls(str(tmp_path))
    with whole.watching(), open_storage(tmp_path / "whole") as storage:
        SAVES[kind](storage, str(tmp_path / "whole"))
    for n in range(first_point(kind, [call.path for call in whole.done]) + 1, 200):
        path = tmp_path / f"{n}"
        if old is not None:
            checkpoint.save(path, plain(old))
        calls = Calls(str(tmp_path), stop_after=n)
        with calls.watching(), open_storage(path) as storage:
            is_stopped = stopped(lambda: SAVES[kind](storage, str(path)))  # noqa: B023
        seen.append(held(path))
        if not is_stopped:
            break
        assert_next_save_works(path)
    else:
        pytest.fail("the save has more calls than were tried")
    monkeypatch.setattr(os, "fsync", real)
    committed = seen.index(NEW)
    assert seen == [old] * committed + [NEW] * (len(seen) - committed)
    assert committed > 9


@pytest.mark.parametrize("kind", ["sync", "eager", "rank 3 of 4"])
def test_an_error_of_any_operation_leaves_the_old_one_and_no_file_of_the_rank(memory: str, old: int | None, kind: str):
    for n in range(100):
        begin(memory, old)
        fail = FailAt(n, StorageError("disk full"))
        with open_storage(memory) as storage:
            message = ""
            try:
                SAVES[kind](FaultyStorage(storage, fail), memory)
            except CheckpointError as error:
                message = str(error)
            failed = bool(message)
            assert ("disk full" in message) == failed
            assert held(memory) == (old if failed else NEW)
            if failed and "rank" not in kind and fail.seen[-1][0] != "publish":
                kept = checkpoint.catalog(memory).save_id if old else None
                assert {key.split("/")[0] for key, _ in storage.list() if "/" in key} <= {kept}
        if len(fail.seen) <= n:
            break
    else:
        pytest.fail("the save has more operations than were tried")
