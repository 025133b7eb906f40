"""Local storage: the contract, and what only a file system can do wrong."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from reshard_ckpt.errors import StorageError
from reshard_ckpt.storage import LocalStorage, LocksUnsupported, MissingKey
from reshard_ckpt.storage.posix import FileLock, OpenFiles, lock_file, locked
from tests.open_files import open_below
from tests.reliability.faults import fails, faulty
from tests.storage.contract import ExclusiveCreateContract, LocksContract, StorageContract, put, read_range


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "made" / "when needed"


@pytest.fixture
def storage(root: Path) -> Iterator[LocalStorage]:
    with LocalStorage(root) as storage:
        yield storage


class TestLocalStorage(StorageContract, ExclusiveCreateContract, LocksContract):
    pass


# --- links and strange files ---


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "precious").write_bytes(b"precious")
    return folder


def test_nothing_is_written_or_deleted_through_a_linked_folder(storage: LocalStorage, root: Path, outside: Path):
    root.mkdir(parents=True)
    (root / "save").symlink_to(outside)
    for act in (
        lambda: storage.create("save/f"),
        lambda: storage.create("save/deep/f"),
        lambda: storage.publish("save/precious", b"x"),
        lambda: storage.delete(["save/precious"]),
    ):
        with pytest.raises(StorageError, match="symbolic link"):
            act()
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {"precious": b"precious"}


def test_a_linked_file_is_replaced_or_deleted_itself_and_its_target_is_left(storage: LocalStorage, root: Path, outside: Path):
    root.mkdir(parents=True)
    for name in ("f", "g", "h"):
        (root / name).symlink_to(outside / "precious")
    with pytest.raises(StorageError, match="already exists"):
        storage.create("f")
    with pytest.raises(StorageError, match="symbolic link"):
        storage.lock("f", make=True)
    storage.publish("g", b"new")
    storage.delete(["h"])
    assert (outside / "precious").read_bytes() == b"precious"
    assert not (root / "g").is_symlink()
    assert not (root / "h").is_symlink()


def test_a_link_to_nowhere_is_not_written_through(storage: LocalStorage, root: Path, outside: Path):
    root.mkdir(parents=True)
    (root / "f").symlink_to(outside / "new")
    with pytest.raises(StorageError, match="already exists"):
        storage.create("f")
    assert not (outside / "new").exists()
    assert storage.list() == []


def test_reading_follows_links(storage: LocalStorage, root: Path, outside: Path):
    root.mkdir(parents=True)
    (root / "f").symlink_to(outside / "precious")
    assert storage.read("f", 10) == b"precious"
    assert read_range(storage, "f", 3, 5) == [b"cious"]
    assert storage.list() == [("f", 8)]


def test_listing_does_not_enter_linked_folders(storage: LocalStorage, root: Path):
    put(storage, "a/f")
    (root / "a" / "loop").symlink_to(root)
    assert storage.list() == [("a/f", 1)]
    assert storage.list("a/loop") == []
    assert (storage.folders("a"), storage.folders("a", linked=True)) == ((), ("loop",))


@pytest.mark.parametrize("is_there", [True, False])
def test_the_root_itself_may_be_a_link_also_to_a_folder_that_is_made_by_the_first_file(tmp_path: Path, is_there: bool):
    if is_there:
        (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    storage = LocalStorage(tmp_path / "link")
    put(storage, "d/f", b"data")
    storage.publish("catalog", b"x")
    assert (tmp_path / "real" / "d" / "f").read_bytes() == b"data"


def test_a_file_in_the_place_of_the_root_is_named(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    storage = LocalStorage(tmp_path / "file")
    with pytest.raises(StorageError, match=r"file/f: cannot create: Not a directory; a file or a symbolic link stands"):
        storage.create("f")
    assert storage.list() == []
    assert storage.size("f") is None


def test_a_relative_root_does_not_move_with_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    storage = LocalStorage("ckpt")
    monkeypatch.chdir("/")
    put(storage, "f")
    assert (tmp_path / "ckpt" / "f").exists()
    assert storage.url == str(tmp_path / "ckpt")


# --- the system refuses, or does less than asked ---


def fail(monkeypatch: pytest.MonkeyPatch, call: str, code: int, *, after: int = 0) -> None:
    """Let ``os.<call>`` fail from the call `after` on."""
    real, calls = getattr(os, call), iter(range(1_000_000))

    def failing(*args: object, **kwargs: object) -> object:
        if next(calls) >= after:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, failing)


@pytest.mark.parametrize(
    ("code", "step"),
    [(errno.ENOSPC, "free space"), (errno.EDQUOT, "quota"), (errno.EACCES, "rights"), (errno.EROFS, "writable"),
     (errno.EIO, "another disk"), (errno.EMFILE, "ulimit"), (errno.EBUSY, "try again"),
     (errno.ENOSYS, "s3://bucket/prefix"), (errno.ENOTSUP, "s3://bucket/prefix"), (errno.ESTALE, "another machine")],
)  # fmt: skip
def test_a_refusal_names_the_path_the_reason_and_the_next_step(
    storage: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch, code: int, step: str
):
    with storage.create("d/f") as writer:
        fail(monkeypatch, "write", code)
        with pytest.raises(StorageError) as caught:
            writer.write(b"data")
        monkeypatch.undo()
    message = str(caught.value)
    assert message.startswith(f"{root}/d/f: cannot write: {os.strerror(code)}; ")
    assert step in message


def test_short_writes_and_reads_are_continued(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch):
    write, preadv, read = os.write, os.preadv, os.read
    data = os.urandom(1000)
    monkeypatch.setattr(os, "write", lambda fd, view: write(fd, view[:7]))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:3]], at))
    monkeypatch.setattr(os, "read", lambda fd, size: read(fd, min(size, 5)))
    put(storage, "f", data)
    storage.publish("g", data)
    assert storage.read("f", 1000) == storage.read("g", 1000) == data
    assert read_range(storage, "f", 1, 10, 0, 2, 300) == [data[1:11], b"", data[11:13], data[13:313]]


@pytest.mark.parametrize("call", ["fsync", "close"])
def test_a_file_that_cannot_be_made_durable_is_an_error_and_removed(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, call: str
):
    put(storage, "before")

    def write() -> None:
        with storage.create("d/f") as writer:
            writer.write(b"data")
            fail(monkeypatch, call, errno.EIO)
            try:
                writer.finish()
            finally:
                monkeypatch.undo()

    with pytest.raises(StorageError, match="cannot write: Input/output error"):
        write()
    assert storage.list() == [("before", 1)]


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize("after", range(6))
def test_publish_that_fails_anywhere_leaves_one_whole_document(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, call: str, after: int
):
    storage.publish("catalog", b"old")
    fail(monkeypatch, call, errno.EIO, after=after)
    try:
        storage.publish("catalog", b"new")
        failed = False
    except StorageError:
        failed = True
    monkeypatch.undo()
    assert storage.read("catalog", 10) in ((b"old", b"new") if failed else (b"new",))
    assert storage.list() == [("catalog", 3)]  # and no temporary file


def test_a_folder_that_knows_no_fsync_is_accepted(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch):
    real = os.fsync

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    put(storage, "d/f")
    storage.sync(["d/f"])
    storage.publish("catalog", b"x")
    assert [key for key, _ in storage.list()] == ["catalog", "d/f"]


def test_create_survives_a_folder_removed_under_it(storage: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch):
    """Another rank that fails and cleans up removes the folder while it is empty."""
    real, raced = os.open, []

    def racing(path: str, flags: int, *args: object, **kwargs: object) -> int:
        if path == "f" and not raced:
            raced.append(path)
            os.rmdir(root / "save")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", racing)
    put(storage, "save/f", b"data")
    assert raced
    assert storage.read("save/f", 10) == b"data"


def test_delete_opens_each_folder_once_and_goes_on_after_an_error(
    storage: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch
):
    keys = [f"save/{i}" for i in range(9)]
    for key in keys:
        put(storage, key)
    opened, real, unlink = [], os.open, os.unlink

    def counting(path: str, *args: int, **kwargs: int) -> int:
        opened.append(path)
        return real(path, *args, **kwargs)

    def refuse(path: str, **kwargs: int) -> None:
        if path == "4":
            raise OSError(errno.EPERM, "Operation not permitted")
        unlink(path, **kwargs)

    monkeypatch.setattr(os, "open", counting)
    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(StorageError, match="4: cannot delete: Operation not permitted"):
        storage.delete(keys)
    assert opened.count("save") == 1
    assert [key for key, _ in storage.list()] == ["save/4"]


# --- durable: what is synced, and when ---


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, root: Path) -> list[str]:
    """The syncs and renames that happen, with paths from the root's parent on."""
    root.parent.mkdir()
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def named(fd: int) -> str:
        return os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), root.parent)

    def log_fsync(fd: int) -> None:
        steps.append(f"fsync {named(fd)}")
        fsync(fd)

    def log_replace(source: str, target: str, **kwargs: int) -> None:
        steps.append(f"rename to {target}")
        replace(source, target, **kwargs)

    monkeypatch.setattr(os, "fsync", log_fsync)
    monkeypatch.setattr(os, "replace", log_replace)
    return steps


def test_finish_syncs_the_file_and_sync_the_folders_above_it(
    storage: LocalStorage, root: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch
):
    """No more than these, and nothing is listed: the folder may hold the files of thousands of ranks."""
    put(storage, "a/b/f")
    put(storage, "a/b/c/g")
    assert steps == ["fsync ..", "fsync .", f"fsync {root.name}/a/b/f", f"fsync {root.name}/a/b/c/g"]
    steps.clear()
    for call in ("scandir", "listdir", "walk"):
        monkeypatch.delattr(os, call)
    storage.sync(["a/b/f"])
    assert steps == [f"fsync {root.name}{below}" for below in ("/a/b", "/a", "")]
    steps.clear()
    storage.sync(["a/b/f", "a/b/c/g", "h"])
    assert steps == [f"fsync {root.name}{below}" for below in ("/a/b/c", "/a/b", "/a", "")]


def test_publish_syncs_the_new_file_renames_it_and_syncs_the_folder(storage: LocalStorage, root: Path, steps: list[str]):
    storage.publish("d/catalog", b"x")
    above_root, made_root, new_file, rename, folder, above = steps
    assert (above_root, made_root) == ("fsync ..", "fsync .")
    assert new_file.startswith(f"fsync {root.name}/d/.catalog.")
    assert (rename, folder, above) == ("rename to catalog", f"fsync {root.name}/d", f"fsync {root.name}")


def test_a_deep_root_is_made_durably(tmp_path: Path, steps: list[str], root: Path):
    put(LocalStorage(root.parent / "x" / "y" / "z"), "f")
    assert steps == ["fsync ..", "fsync .", "fsync x", "fsync x/y", "fsync x/y/z/f"]


def test_a_root_that_another_process_made_is_made_durable_once_by_the_one_that_syncs(root: Path, steps: list[str]):
    """Its maker may have been killed before it synced the name; but of thousands of ranks only one should do that."""
    root.mkdir()
    storage = LocalStorage(root)
    put(storage, "f")
    assert steps == [f"fsync {root.name}/f"]
    storage.sync(["f"])
    storage.sync(["f"])
    assert steps[1:] == ["fsync .", f"fsync {root.name}", f"fsync {root.name}"]
    steps.clear()
    LocalStorage(root).publish("catalog", b"x")
    assert steps[0] == "fsync ."
    assert steps[2:] == ["rename to catalog", f"fsync {root.name}"]


def test_a_root_whose_folder_may_not_be_read_is_no_obstacle(root: Path, monkeypatch: pytest.MonkeyPatch):
    root.mkdir(parents=True)
    real = os.open

    def refuse(path: str, flags: int, *args: object, **kwargs: object) -> int:
        if path == str(root.parent):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    put(storage := LocalStorage(root), "f")
    storage.sync(["f"])


# --- what is left behind, and who may touch what ---


def test_publish_removes_what_killed_publishers_left_and_nothing_else(storage: LocalStorage, root: Path):
    storage.publish("d/catalog", b"old")
    strays = [f".catalog.{'0123456789abcdef' * 2}.tmp", f".catalog.{'f' * 32}.tmp"]
    others = [".catalog.tmp", f".catalog.{'f' * 31}.tmp", f".other.{'f' * 32}.tmp", f"catalog.{'f' * 32}.tmp", ".catalog.notes"]
    for name in (*strays, *others):
        (root / "d" / name).write_bytes(b"")
    storage.publish("d/catalog", b"new")
    assert sorted(os.listdir(root / "d")) == sorted([*others, "catalog"])


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0, 0o664, 0o775)])
def test_permissions_follow_the_umask_and_never_let_everybody_write(root: Path, umask: int, file: int, folder: int):
    before = os.umask(umask)
    try:
        storage = LocalStorage(root)
        put(storage, "d/f")
        storage.publish("e/catalog", b"x")
        with storage.lock("lock", make=True) as lock:
            assert lock is not None
    finally:
        os.umask(before)
    for path in [root, *root.rglob("*")]:
        assert path.stat().st_mode & 0o7777 == (folder if path.is_dir() else file), path


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)], ids=["pipe", "folder", "device"]
)
def test_what_is_no_regular_file_is_not_read_and_not_waited_for(storage: LocalStorage, root: Path, make):
    put(storage, "d/f")
    make(root / "d" / "odd")
    assert storage.size("d/odd") is None
    for read in (lambda: storage.read("d/odd", 10), lambda: read_range(storage, "d/odd", 0, 1)):
        with pytest.raises(MissingKey):
            read()
    assert storage.list() == [("d/f", 1)]


# --- open files ---


def test_a_process_that_gives_up_its_part_leaves_the_parts_of_others(storage: LocalStorage, root: Path):
    with storage.write_at("f", 4) as writer:
        writer.write(b"data")
    for offset in (0, 4):
        storage.write_at("f", offset).abort()
    assert (root / "f").read_bytes() == bytes(4) + b"data"


def test_a_lease_is_taken_on_a_full_disk(storage: LocalStorage):
    with faulty("pwrite", None, fails(errno.ENOSPC)), storage.lease("f", b"process 1") as lease:
        assert lease is not None


def test_open_files_are_bounded_and_closed(storage: LocalStorage, root: Path):
    for i in range(200):
        put(storage, f"d/{i}", bytes([i]))
    before = open_below(root)
    for i in range(200):
        assert read_range(storage, f"d/{i}", 0, 1) == [bytes([i])]
    assert len(open_below(root)) == len(before) + 64
    storage.close()
    assert open_below(root) == before


def test_a_file_read_often_is_opened_once(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch):
    put(storage, "f", b"data")
    opened, real = [], os.open
    monkeypatch.setattr(os, "open", lambda path, *args, **kwargs: opened.append(path) or real(path, *args, **kwargs))
    for _ in range(10):
        read_range(storage, "f", 0, 4)
    assert len(opened) == 1


def test_the_files_read_last_stay_open_and_a_file_opened_again_keeps_its_first_stamp(tmp_path: Path):
    a, b, c = (str(tmp_path / name) for name in "abc")
    for path in (a, b, c):
        Path(path).write_bytes(b"old")
    files = OpenFiles(2)
    opened, first = files.get(a), (files.get(b), files.first_stamp(b))[1]
    assert files.get(a) is opened
    files.get(c)  # closes b
    assert files.get(a) is opened
    Path(b).write_bytes(b"newer")
    assert files.get(b).stamp != first == files.first_stamp(b)


def test_files_are_not_closed_under_a_reading_thread(storage: LocalStorage):
    """Many more files than may stay open, and somebody who closes all of them all the time."""
    for i in range(100):
        put(storage, f"d/{i}", bytes([i]) * 100)

    def check(i: int) -> bool:
        if i % 7 == 0:
            storage.close()
        return read_range(storage, f"d/{i % 100}", i % 50, 50) == [bytes([i % 100]) * 50]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, range(3000)))


def test_nothing_stays_open_after_writing_publishing_and_failing(storage: LocalStorage, root: Path):
    put(storage, "a/b/f")
    before = open_below(root)
    storage.publish("catalog", b"x")
    storage.create("a/g").abort()
    for key in ("a", "a/b/f", "a/b/f/g"):
        with pytest.raises(StorageError):
            storage.create(key)
    storage.delete(["a/b/f", "catalog", "none"])
    storage.sync(["a/b/f"])
    assert open_below(root) == before


def test_a_forked_child_does_not_keep_its_parents_lock(tmp_path: Path):
    storage = LocalStorage(tmp_path)
    lock = storage.lock("f", make=True)
    assert lock is not None
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(go[0], 1)  # lives on, as a data loader's worker may
        os._exit(0)
    try:
        os.read(ready[0], 1)
        lock.release()
        again = storage.lock("f")
        again.release()
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)


def test_a_child_of_one_that_was_killed_while_it_published_holds_up_no_other(tmp_path: Path):
    held, ready = os.pipe(), os.pipe()
    publisher = os.fork()
    if publisher == 0:
        with locked(os.open(tmp_path, os.O_RDONLY), 600):
            if os.fork():
                os.kill(os.getpid(), signal.SIGKILL)
            os.close(held[1])
            os.write(ready[1], b"x")  # `fork` has returned, so the lock was let go
            os.read(held[0], 1)  # lives on
        os._exit(0)
    try:
        os.waitpid(publisher, 0)
        os.close(ready[1])
        assert os.read(ready[0], 1) == b"x"
        other = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
    finally:
        for fd in (*held, ready[0]):
            os.close(fd)


@pytest.mark.parametrize("once", [False, True])
def test_a_lock_whose_file_somebody_replaced_allows_no_deletion(tmp_path: Path, once: bool):
    storage = LocalStorage(str(tmp_path))
    with storage.lease("f", b"one", once=once) as lease:
        assert lease is not None
        lease.check()
        (tmp_path / "f").unlink()
        (tmp_path / "f").write_bytes(b"another")
        with pytest.raises(StorageError, match="removed or replaced this file"):
            lease.check()


def test_a_lock_dies_with_its_process(tmp_path: Path):
    storage = LocalStorage(tmp_path)
    ready = os.pipe()
    child = os.fork()
    if child == 0:
        lock = storage.lock("f", make=True)
        os.write(ready[1], b"x" if lock else b"-")
        signal.pause()
    assert os.read(ready[0], 1) == b"x"
    assert storage.lock("f") is None
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    lock = storage.lock("f")
    lock.release()


def test_a_file_replaced_while_it_was_being_locked_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    storage = LocalStorage(tmp_path)
    put(storage, "f")

    def slow_lock(fd: int, path: str, *, shared: bool) -> FileLock | None:
        (tmp_path / "f").unlink()
        put(storage, "f")
        return lock_file(fd, path, shared=shared)

    monkeypatch.setattr("reshard_ckpt.storage.local.lock_file", slow_lock)
    with pytest.raises(MissingKey):
        storage.lock("f", shared=True)


def test_a_lock_that_fails_is_not_held_by_its_error(tmp_path: Path):
    storage = LocalStorage(tmp_path)
    put(storage, "f")
    with faulty("stat", 0, fails(errno.EIO)), pytest.raises(StorageError, match="cannot lock: Input/output error") as raised:
        storage.lock("f")
    assert storage.lock("f") is not None, raised


def test_an_error_of_closing_a_file_that_was_only_read_or_locked_is_none(tmp_path: Path):
    """A network file system may report one; nothing was written."""
    storage = LocalStorage(tmp_path)
    put(storage, "a", b"data")
    with faulty("close", None, fails(errno.ESTALE)):
        lock = storage.lock("a", shared=True)
        assert lock is not None
        lock.release()
        assert read_range(storage, "a", 1, 2) == [b"at"]
        assert storage.read("a", 10) == b"data"
        storage.close()
    assert storage.lock("a") is not None


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(fd: int, flags: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(LocksUnsupported, match="no locks"):
        LocalStorage(tmp_path).lock("f", make=True)


@pytest.mark.parametrize("refused", [False, True], ids=["held", "refused"])
def test_eacces_means_that_another_has_the_lock_unless_unlocking_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
):
    """Linux's client of Windows shares answers EACCES for a held lock; a security module does where nothing may be locked."""

    def flock(fd: int, flags: int) -> None:
        if refused or flags != fcntl.LOCK_UN:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("fcntl.flock", flock)
    if refused:
        with pytest.raises(StorageError, match="cannot lock: Permission denied; give this user the rights"):
            LocalStorage(tmp_path).lock("f", make=True)
    else:
        assert LocalStorage(tmp_path).lock("f", make=True) is None


@pytest.mark.parametrize("call", ["fstat", "read"])
def test_a_document_that_another_machine_replaces_while_it_is_read_is_read_anew(storage: LocalStorage, call: str):
    """A network file system may not keep the old file for those who have it open."""
    storage.publish("catalog", b"old")

    def replaced(real: Callable[..., bytes], args: tuple[Any, ...], options: dict[str, Any]) -> bytes:
        LocalStorage(storage.url).publish("catalog", b"new")
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with faulty(call, 0, replaced):
        assert storage.read("catalog", 10) == b"new"
    with faulty(call, None, fails(errno.ESTALE)), pytest.raises(StorageError, match="Stale file handle"):
        storage.read("catalog", 10)


class Denied:
    """An entry of a folder whose file a network file system denies, from its cache of names."""

    def __init__(self, entry: os.DirEntry[str]) -> None:
        self.name, self.path, self.is_dir, self.is_file = entry.name, entry.path, entry.is_dir, entry.is_file

    def stat(self) -> os.stat_result:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)


def test_a_file_that_a_cache_denies_is_listed_and_a_link_to_nowhere_is_not(storage: LocalStorage, root: Path):
    put(storage, "a/f", b"data")
    (root / "a" / "link").symlink_to("nowhere")
    with faulty("scandir", None, lambda real, args, options: map(Denied, real(*args, **options))):
        assert storage.list() == [("a/f", 0)]
