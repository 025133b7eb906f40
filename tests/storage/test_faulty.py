"""The faulty storage is a storage, and fails where it is told to."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from reshard_ckpt.errors import StorageError
from reshard_ckpt.storage import MemoryStorage
from tests.storage.contract import StorageContract, put
from tests.storage.faulty import FailAt, FaultyStorage


@pytest.fixture
def memory() -> Iterator[MemoryStorage]:
    storage = MemoryStorage(uuid.uuid4().hex)
    yield storage
    storage.delete([key for key, _ in storage.list()])


@pytest.fixture
def storage(memory: MemoryStorage) -> FaultyStorage:
    return FaultyStorage(memory, lambda operation, key: None)


class TestFaultyStorage(StorageContract):
    pass


@pytest.mark.parametrize(("n", "operation"), [*enumerate(["create", "write", "finish", "sync", "publish", "delete"])])
def test_the_nth_operation_fails_and_no_half_file_stays(memory: MemoryStorage, n: int, operation: str):
    fail = FailAt(n, StorageError("disk full"))
    storage = FaultyStorage(memory, fail)

    def use() -> None:
        put(storage, "d/f")
        storage.sync(["d/f"])
        storage.publish("catalog", b"x")
        storage.delete(["d/f"])

    with pytest.raises(StorageError, match="disk full"):
        use()
    assert fail.seen[-1][0] == operation
    held = [key for key, _ in memory.list()]
    assert held == {0: [], 1: [], 2: [], 3: ["d/f"], 4: ["d/f"], 5: ["catalog", "d/f"]}[n]
