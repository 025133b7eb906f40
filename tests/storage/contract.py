"""What every storage must do: the contract of `reshard_ckpt.storage.protocol`, which each implementation inherits."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from reshard_ckpt.errors import CorruptError, StorageError
from reshard_ckpt.storage import ABSENT, Document, LocalStorage, MissingKey, PublishConflict, Storage
from reshard_ckpt.storage.protocol import copy_file, read_parts

HOSTILE_KEYS = [
    "", "/", "/etc/passwd", "..", "../x", "a/../b", "a/..", ".", "a/./b", "./a", "a//b", "a/", "a\0b", "a\\b", "..\\x", "\ud800",
]  # fmt: skip

DATA = bytes(range(256)) * 40


def put(storage: Storage, key: str, data: bytes = b"x") -> None:
    with storage.create(key) as writer:
        writer.write(data)


def read_range(storage: Storage, key: str, offset: int, *sizes: int) -> list[bytes]:
    buffers = [bytearray(size) for size in sizes]
    storage.read_into(key, offset, [memoryview(buffer) for buffer in buffers])
    return [bytes(buffer) for buffer in buffers]


class StorageContract:
    """Subclasses give a fixture `storage`: an empty one."""

    many = 150
    """Files that many threads read: more than a store keeps open."""

    # --- folders ---

    def test_folders_are_those_right_below(self, storage: Storage):
        for key in ("top", "a/1", "a/b/2", "c/d/3"):
            put(storage, key)
        assert storage.folders() == ("a", "c")
        assert storage.folders("a") == ("b",)
        assert storage.folders("a/b") == storage.folders("none") == ()

    # --- writing ---

    def test_what_is_written_is_read(self, storage: Storage):
        with storage.create("save/rank0") as writer:
            writer.write(b"bytes,")
            writer.write(bytearray(b"bytearray,"))
            writer.write(memoryview(b"-view,-")[1:-1])
            writer.write(b"")
        assert storage.read("save/rank0", 1000) == b"bytes,bytearray,view,"

    @pytest.mark.parametrize("shape", [(6,), (2, 3), (), (0,), (0, 3)])
    def test_write_takes_buffers_of_any_item_size_and_shape(self, storage: Storage, shape: tuple[int, ...]):
        array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
        with storage.create("f") as writer:
            writer.write(memoryview(array))
        assert storage.read("f", 1000) == array.tobytes()

    def test_abort_removes_the_file(self, storage: Storage):
        writer = storage.create("d/f")
        writer.write(b"half")
        writer.abort()
        assert storage.list() == []
        put(storage, "d/f", b"again")
        assert storage.read("d/f", 10) == b"again"

    def test_leaving_the_block_by_an_exception_removes_the_file(self, storage: Storage):
        def write_half() -> None:
            with storage.create("d/f") as writer:
                writer.write(b"half")
                raise KeyError

        with pytest.raises(KeyError):
            write_half()
        assert storage.list() == []

    def test_finish_twice_and_abort_after_finish_do_nothing(self, storage: Storage):
        with storage.create("f") as writer:
            writer.write(b"data")
            writer.finish()
            writer.finish()
            writer.abort()
        assert storage.read("f", 10) == b"data"

    def test_finish_after_abort_does_nothing(self, storage: Storage):
        writer = storage.create("f")
        writer.abort()
        writer.finish()
        assert storage.size("f") is None

    @pytest.mark.parametrize("end", ["finish", "abort"])
    def test_write_after_the_end_is_a_programming_error(self, storage: Storage, end: str):
        writer = storage.create("f")
        getattr(writer, end)()
        with pytest.raises(ValueError, match="after it was closed"):
            writer.write(b"x")

    def test_sync_takes_the_keys_of_files_not_a_folder(self, storage: Storage):
        put(storage, "a/b/f")
        put(storage, "g")
        for keys in (["a/b/f"], ["g"], ["a/b/f", "g"], []):
            storage.sync(keys)
        with pytest.raises(TypeError, match="'a/b': pass the keys of the files"):
            storage.sync("a/b")

    def test_sync_of_what_is_not_there_does_nothing(self, storage: Storage):
        storage.sync(["nobody"])
        storage.sync(["nobody/is/here"])
        assert storage.list() == []

    # --- reading ---

    @pytest.mark.parametrize(
        ("offset", "sizes"),
        [(0, (256,)), (0, (len(DATA),)), (17, (1, 2, 3)), (len(DATA) - 1, (1,)), (5, (0, 4, 0, 0, 4, 0)), (0, ()), (7, (0,)),
         (3, (1,) * 5000), (len(DATA), (0,))],
    )  # fmt: skip
    def test_read_into_fills_each_buffer_in_turn(self, storage: Storage, offset: int, sizes: tuple[int, ...]):
        put(storage, "f", DATA)
        expected, position = [], offset
        for size in sizes:
            expected.append(DATA[position : position + size])
            position += size
        assert read_range(storage, "f", offset, *sizes) == expected

    def test_read_into_fills_memory_of_any_item_size_in_place(self, storage: Storage):
        source = np.arange(24, dtype=np.float64)
        put(storage, "f", b"head" + source.tobytes())
        target = np.zeros((4, 6))
        storage.read_into("f", 4, [memoryview(target)])
        assert (target.ravel() == source).all()

    @pytest.mark.parametrize(("offset", "sizes", "got"), [(0, (4, 7), 10), (8, (2, 2), 2), (10, (1,), 0), (99, (1, 1), 0)])
    def test_read_into_names_what_a_truncated_file_lacks(self, storage: Storage, offset: int, sizes: tuple[int, ...], got: int):
        put(storage, "save/f", bytes(10))
        message = rf"save/f: wanted {sum(sizes)} bytes from byte {offset} on, but the file ends after {got} of them"
        with pytest.raises(CorruptError, match=message):
            read_range(storage, "save/f", offset, *sizes)

    def test_reading_what_is_not_there_is_a_missing_key(self, storage: Storage):
        put(storage, "d/f")
        for key in ("g", "d/g", "e/f", "d", "d/f/g"):
            with pytest.raises(MissingKey, match=f"{key}: no such file"):
                storage.read(key, 10)
            with pytest.raises(MissingKey, match=f"{key}: no such file"):
                read_range(storage, key, 0, 1)
            with pytest.raises(MissingKey, match=f"{key}: no such file"):
                list(read_parts(storage, key, 0, 4))
            assert storage.size(key) is None

    def test_read_takes_a_file_of_exactly_the_limit_and_none_larger(self, storage: Storage):
        put(storage, "f", bytes(100))
        assert storage.read("f", 100) == bytes(100)
        with pytest.raises(CorruptError, match="f: larger than 99 bytes"):
            storage.read("f", 99)

    def test_a_file_is_read_in_parts_and_copied_over_one_that_is_there(self, storage: Storage, tmp_path: Path):
        put(storage, "f", DATA)
        parts = [(at, bytes(part)) for at, part in read_parts(storage, "f", len(DATA), 3000)]
        assert parts == [(at, DATA[at : at + 3000]) for at in range(0, len(DATA), 3000)]
        with LocalStorage(tmp_path / "source") as source:
            put(source, "f", b"new")
            copy_file(source, "f", storage)
        assert storage.read("f", 10) == b"new"

    def test_read_of_an_empty_file(self, storage: Storage):
        put(storage, "f", b"")
        assert storage.read("f", 0) == b""
        assert storage.size("f") == 0

    def test_many_threads_read_many_files(self, storage: Storage):
        files = {f"d/{i}": bytes([i]) * (i + 1) for i in range(self.many)}
        for key, data in files.items():
            put(storage, key, data)

        def check(key: str) -> bool:
            return read_range(storage, key, 0, len(files[key])) == [files[key]]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(check, list(files) * 4))

    def test_many_files_and_ranges_are_read_by_one_call(self, storage: Storage):
        for i in range(40):
            put(storage, f"d/{i}", bytes([i]) * i)
        keys = ["d/39", "missing/f", "d/1", "d/0"]
        assert storage.stat(keys) == [39, None, 1, 0]
        assert [found and found.data for found in storage.read_many(keys, 39)] == [bytes([39]) * 39, None, b"\1", b""]
        with pytest.raises(CorruptError, match="d/39: larger than 38 bytes"):
            storage.read_many(keys, 38)
        buffers = [bytearray(i) for i in range(40)]
        storage.read_ranges([(f"d/{i}", 0, [memoryview(buffer)]) for i, buffer in enumerate(buffers)])
        assert buffers == [bytearray([i]) * i for i in range(40)]
        with pytest.raises(CorruptError, match="d/7: wanted 2 bytes from byte 6 on, but the file ends after 1"):
            storage.read_ranges([("d/8", 0, [memoryview(bytearray(8))]), ("d/7", 6, [memoryview(bytearray(2))])])
        with pytest.raises(MissingKey, match="missing/f: no such file"):
            storage.read_ranges([("missing/f", 0, [memoryview(bytearray(2))])])

    def test_create_replaces_a_file_if_asked(self, storage: Storage):
        put(storage, "d/f", b"of a killed process")
        with storage.create("d/f", 3, replace=True) as writer:
            writer.write(b"new")
        assert storage.read("d/f", 10) == b"new"

    # --- leases ---

    def test_a_lease_excludes_others_and_leaves_a_note(self, storage: Storage):
        with storage.lease("run.lock", b"process 1") as lease:
            assert storage.lease("run.lock", b"process 2") is None
            lease.check()
            assert b"process 1" in storage.read("run.lock", 1000)
        lease.release()
        with storage.lease("run.lock", b"process 3"):
            assert b"process 3" in storage.read("run.lock", 1000)

    def test_a_lease_of_one_job_leaves_no_file(self, storage: Storage):
        with storage.lease("a/job.lock", b"process 1", once=True) as lease:
            assert storage.lease("a/job.lock", b"process 2", once=True) is None
            lease.check()
        assert storage.size("a/job.lock") is None
        storage.publish("a/job.lock", b"")  # of a killed process
        with storage.lease("a/job.lock", b"process 2", once=True) as lease:
            assert lease is not None
        lease.release()
        assert storage.list() == []

    # --- listing and deleting ---

    def test_list_is_recursive_sorted_and_by_folder(self, storage: Storage):
        for key in ("b", "a/2", "a/1", "a/c/3", "ab/4"):
            put(storage, key, key.encode())
        sizes = {"a/1": 3, "a/2": 3, "a/c/3": 5, "ab/4": 4, "b": 1}
        assert storage.list() == list(sizes.items())
        assert [key for key, _ in storage.list("a")] == ["a/1", "a/2", "a/c/3"]
        assert [key for key, _ in storage.list("a/c")] == ["a/c/3"]
        assert storage.list("nobody") == []
        assert storage.list("b") == []

    def test_list_of_an_empty_storage(self, storage: Storage):
        assert storage.list() == []

    def test_delete_removes_files_and_the_folders_left_empty(self, storage: Storage):
        for key in ("top", "a/1", "a/2", "b/c/d/3"):
            put(storage, key)
        storage.delete(["a/1", "b/c/d/3", "never/there", "nor this"])
        assert [key for key, _ in storage.list()] == ["a/2", "top"]
        put(storage, "b", b"a file now, so the folder is gone")

    def test_delete_of_everything_keeps_the_storage_usable(self, storage: Storage):
        put(storage, "a/f")
        storage.delete(key for key, _ in storage.list())
        assert storage.list() == []
        put(storage, "a/f", b"again")
        assert storage.read("a/f", 10) == b"again"

    def test_deleted_and_written_again_reads_the_new_bytes(self, storage: Storage):
        put(storage, "f", b"old!")
        assert read_range(storage, "f", 0, 4) == [b"old!"]
        storage.delete(["f"])
        put(storage, "f", b"new!")
        assert read_range(storage, "f", 0, 4) == [b"new!"]

    @pytest.mark.parametrize("how", ["delete", "create", "publish"])
    def test_a_file_that_the_store_has_replaced_was_first_read_after_that(self, storage: Storage, how: str):
        put(storage, "f", b"old")
        assert read_range(storage, "f", 0, 3) == [b"old"]
        if how == "publish":
            storage.publish("f", b"newer")
        else:
            if how == "delete":
                storage.delete(["f"])
            with storage.create("f", replace=how == "create") as writer:
                writer.write(b"newer")
        assert read_range(storage, "f", 0, 5) == [b"newer"]
        assert storage.first_stamp("f") == storage.stamp("f")

    # --- publishing ---

    def test_publish_puts_and_replaces(self, storage: Storage):
        for data in (b"one", b"two, longer", b"3"):
            storage.publish("d/catalog", data)
            assert storage.read("d/catalog", 100) == data
            assert read_range(storage, "d/catalog", 0, len(data)) == [data]
        assert storage.list() == [("d/catalog", 1)]

    def test_publish_compares_with_what_is_there(self, storage: Storage):
        first = storage.publish("catalog", b"1", expected=ABSENT)
        second = storage.publish("catalog", b"2", expected=first)
        for wrong in (first, ABSENT):
            with pytest.raises(PublishConflict, match=r"catalog: .* during this save"):
                storage.publish("catalog", b"3", expected=wrong)
        assert storage.read_many(["catalog"], 10) == [Document(b"2", second)]

    def test_publish_that_expects_what_is_not_there_leaves_nothing(self, storage: Storage):
        version = storage.publish("e/catalog", b"1")
        storage.delete(["e/catalog"])
        with pytest.raises(PublishConflict, match="disappeared"):
            storage.publish("e/catalog", b"2", expected=version)
        assert storage.list() == []
        put(storage, "d")

    def test_publish_with_expected_loses_no_update(self, storage: Storage):
        storage.publish("n", b"0")

        def add_ten(_: int) -> None:
            for _ in range(10):
                while True:
                    [old] = storage.read_many(["n"], 100)
                    assert old is not None
                    try:
                        storage.publish("n", str(int(old.data) + 1).encode(), expected=old.version)
                        break
                    except PublishConflict:
                        continue

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(add_ten, range(4)))
        assert storage.read("n", 100) == b"40"

    def test_a_reader_sees_the_old_document_or_the_new_one(self, storage: Storage):
        documents = [bytes([i]) * (1000 * (1 + i % 3)) for i in range(60)]
        storage.publish("catalog", documents[0])
        seen: set[bytes] = set()
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                seen.add(storage.read("catalog", 10_000))

        reader = threading.Thread(target=read)
        reader.start()
        for document in documents:
            storage.publish("catalog", document)
        done.set()
        reader.join()
        assert seen <= set(documents)

    # --- the rest ---

    @pytest.mark.parametrize("key", HOSTILE_KEYS, ids=ascii)
    def test_hostile_keys_are_refused_by_every_method(self, storage: Storage, key: str):
        calls = [
            lambda: storage.create(key),
            lambda: storage.read(key, 10),
            lambda: storage.read_into(key, 0, [memoryview(bytearray(1))]),
            lambda: storage.read_many([key], 10),
            lambda: storage.read_ranges([(key, 0, [memoryview(bytearray(1))])]),
            lambda: storage.stat([key]),
            lambda: storage.size(key),
            lambda: storage.publish(key, b"x"),
            lambda: storage.delete([key]),
            lambda: storage.sync([key]),
        ]
        if key:  # "" is the root
            calls.append(lambda: storage.list(key))
        for call in calls:
            with pytest.raises(CorruptError, match="is not the key"):
                call()
        assert storage.list() == []

    @pytest.mark.parametrize("key", ["…/ß ü", "with space", "a:b*?<>|", "%2e%2e", "...", "-rf", "日本", "a" * 255])
    def test_odd_but_harmless_keys_work(self, storage: Storage, key: str):
        put(storage, key, b"data")
        assert storage.list() == [(key, 4)]
        storage.delete([key])

    def test_a_closed_storage_opens_again(self, storage: Storage):
        put(storage, "f", b"data")
        with storage:
            assert read_range(storage, "f", 0, 4) == [b"data"]
        assert read_range(storage, "f", 0, 4) == [b"data"]


class ExclusiveCreateContract:
    """For stores whose hints say `shows_unfinished`: a file is there as soon as it is begun, and no other call begins it."""

    def test_created_file_exists_at_once(self, storage: Storage):
        writer = storage.create("f")
        assert storage.size("f") == 0
        writer.finish()

    def test_create_refuses_an_existing_file_and_leaves_it(self, storage: Storage):
        put(storage, "f", b"first")
        with pytest.raises(StorageError, match=r"f: already exists"):
            storage.create("f")
        assert storage.read("f", 10) == b"first"

    def test_create_refuses_a_file_that_is_being_written(self, storage: Storage):
        with storage.create("f"), pytest.raises(StorageError, match="already exists"):
            storage.create("f")

    def test_of_many_that_create_one_key_one_succeeds(self, storage: Storage):
        barrier = threading.Barrier(8)

        def create(i: int) -> bool:
            barrier.wait()
            try:
                put(storage, "d/f", str(i).encode())
            except StorageError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(create, range(8)))
        assert sum(won) == 1
        assert storage.read("d/f", 10) == str(won.index(True)).encode()

    def test_a_name_is_a_file_or_a_folder_never_both(self, storage: Storage):
        put(storage, "d/f")
        for key in ("d", "d/f/g"):
            with pytest.raises(StorageError):
                storage.create(key)
            with pytest.raises(StorageError):
                storage.publish(key, b"x")
            with pytest.raises(StorageError):
                storage.delete([key])
        assert storage.list() == [("d/f", 1)]


class LocksContract:
    """For stores whose hints say `has_locks`."""

    @pytest.mark.parametrize(("first", "second", "both"), [(0, 0, False), (0, 1, False), (1, 0, False), (1, 1, True)])
    def test_locks_exclude_each_other_unless_both_are_shared(self, storage: Storage, first: int, second: int, both: bool):
        put(storage, "f")
        held = storage.lock("f", shared=bool(first))
        assert held is not None
        other = storage.lock("f", shared=bool(second))
        assert (other is not None) == both
        held.release()
        held.release()
        for lock in (other, storage.lock("f", shared=True)):
            if lock is not None:
                lock.release()
        with storage.lock("f") as alone:
            assert alone is not None
            assert storage.lock("f", shared=True) is None

    def test_a_lock_is_made_where_asked_and_carries_a_note(self, storage: Storage):
        with pytest.raises(MissingKey):
            storage.lock("locks/f")
        with storage.lock("locks/f", make=True) as lock:
            lock.note(b"a long note")
            lock.note(b"mine")
            assert storage.read("locks/f", 100) == b"mine"

    def test_the_file_of_one_job_is_deleted_while_it_is_locked(self, storage: Storage, monkeypatch: pytest.MonkeyPatch):
        lease, delete = storage.lease("f", b"process 1", once=True), storage.delete

        def locked(keys: list[str]) -> None:
            assert storage.lock("f") is None
            delete(keys)

        monkeypatch.setattr(storage, "delete", locked)
        lease.release()
        assert storage.size("f") is None

    def test_locked_files_can_be_deleted(self, storage: Storage):
        put(storage, "f")
        with storage.lock("f"):
            storage.delete(["f"])
        with pytest.raises(MissingKey):
            storage.lock("f")
