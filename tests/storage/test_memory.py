"""Memory storage: the contract, and what a process shares."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from reshard_ckpt.storage import MemoryStorage, PublishConflict, Version, memory, object_lease
from tests.storage.contract import ExclusiveCreateContract, LocksContract, StorageContract, put


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def storage(name: str) -> Iterator[MemoryStorage]:
    storage = MemoryStorage(name)
    yield storage
    storage.delete([key for key, _ in storage.list()])


class TestMemoryStorage(StorageContract, ExclusiveCreateContract, LocksContract):
    pass


def test_one_name_is_one_storage_in_the_whole_process(storage: MemoryStorage, name: str):
    put(storage, "f", b"shared")
    assert MemoryStorage(name).read("f", 10) == b"shared"
    assert MemoryStorage(name + "2").list() == []


def test_written_bytes_do_not_change_with_the_buffer(storage: MemoryStorage):
    source = bytearray(b"before")
    with storage.create("f") as writer:
        writer.write(source)
        source[:] = b"after!"
    storage.publish("g", source)
    source[:] = b"again!"
    assert storage.read("f", 10) == b"before"
    assert storage.read("g", 10) == b"after!"


def test_an_emptied_storage_takes_no_memory(storage: MemoryStorage, name: str):
    put(storage, "a/f")
    storage.delete(["a/f"])
    storage.create("f").abort()
    with pytest.raises(PublishConflict):
        storage.publish("f", b"x", expected=Version("other"))
    assert not any(path.startswith(name) for path in memory._FILES)


def test_a_storage_sees_what_is_below_its_name(storage: MemoryStorage, name: str):
    put(MemoryStorage(f"{name}/step_1"), "save/f", b"below")
    assert storage.folders() == ("step_1",)
    assert storage.read("step_1/save/f", 10) == b"below"
    assert storage.lock("step_1/save/f") is not None
    assert MemoryStorage(f"{name}/step_1").lock("save/f") is None


def test_a_folder_has_no_file_of_a_neighbour_whose_name_begins_alike(storage: MemoryStorage):
    for key in ("a-b/x", "a./x", "a/y/z", "a0/x", "a/x", "ab", "b", "a!"):
        put(storage, key, b"1")
    assert [key for key, _ in storage.list("a")] == ["a/x", "a/y/z"]
    storage.delete(["a/x", "a/y/z", "a/x", "b"])
    assert storage.list("a") == []
    put(storage, "a", b"a file now")
    assert [key for key, _ in storage.list()] == sorted(["a-b/x", "a./x", "a0/x", "ab", "a!", "a"])


@pytest.mark.parametrize(
    "data", [b"{}", b"[]", b'{"ttl_s": NaN, "process": []}', b'{"ttl_s": 1}', pytest.param(b"[" * 60_000, id="deep")]
)
def test_a_damaged_lease_counts_as_held_for_a_minute(storage: MemoryStorage, data: bytes, monkeypatch: pytest.MonkeyPatch):
    storage.publish("run.lock", data)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        storage.publish("run.lock", b"renewed by its holder")

    monkeypatch.setattr(object_lease, "_sleep", sleep)
    assert object_lease.take_lease(storage, "run.lock", b"process 1", 60.0, once=False) is None
    assert waited == [5.0]
    assert isinstance(object_lease.holder_text(data), str)
