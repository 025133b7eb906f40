"""A disk that is full, fails, or may not be written: one named error on every rank, the old checkpoint stays, training goes on.

System calls fail below the local storage, one at a time, each in turn; then a real file system is full, read-only, limited or
gone, as far as this machine lets a test have one.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import CheckpointError, CheckpointNotFound, StorageError
from reshard_ckpt.storage.local import LocalStorage
from tests.open_files import open_below
from tests.reliability.faults import CHANGING, LOOKING, fails, faulty
from tests.reliability.ranks import Job, jobs
from tests.reliability.states import NEW, OLD, assert_clean, assert_next_save_works, contents, held, plain
from tests.reliability.test_sick_ranks import SIZE, save, state

ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT, errno.EROFS, errno.EINTR, errno.ESTALE, errno.ENOMEM, errno.EMFILE)


def attempt(call: Callable[[], Any]) -> BaseException | None:
    """What a call raises; warnings are not what this is about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except BaseException as error:
            return error
    return None


def async_save(path: Path) -> None:
    checkpoint.async_save(path, plain(NEW)).result(600)


# --- each call in turn ---


@pytest.mark.parametrize(
    ("name", "call"),
    [
        *((name, lambda path: checkpoint.save(path, plain(NEW))) for name in (*CHANGING, *LOOKING)),
        *((name, async_save) for name in ("write", "fsync", "replace")),
    ],
)
def test_each_call_that_fails_is_one_named_error_and_no_harm(tmp_path: Path, name: str, call: Callable[[Path], None]):
    """Over the points of a whole save: old or new, never an error without a name, never a file that stays, never a descriptor."""
    path, failed, n = tmp_path / "ckpt", 0, 0
    left = assert_next_save_works(path, OLD)
    before = open_below(tmp_path)
    while True:
        number = ERRORS[n % len(ERRORS)]
        with faulty(name, n, fails(number)) as fault:
            error = attempt(lambda: call(path))
        if not fault.happened:
            break
        if error is not None:
            assert isinstance(error, StorageError), (name, n, repr(error))
            assert os.strerror(number) in str(error)
            assert str(path) in str(error)
            failed += 1
        found = OLD if contents(path) == left else held(path)
        assert found in ((OLD, NEW) if error else (NEW,))
        left = assert_next_save_works(path, OLD)
        assert open_below(tmp_path) == before, (name, n)
        n += 1 if name != "open" or n < 3 else 2  # many of those only look at folders
    assert error is None
    assert failed or name in ("unlink", "rmdir", "listdir", "fstat"), n  # what only cleans up does not fail a save


@pytest.mark.parametrize("name", ["open", "mkdir", "write", "fsync", "close", "replace"])
@pytest.mark.parametrize("sick", [0, 3])
def test_what_fails_on_one_rank_fails_the_save_on_all(job: Job, tmp_path: Path, name: str, sick: int):
    if name == "replace" and sick:
        pytest.skip("rank 0 alone replaces the catalog")
    path = tmp_path / "ckpt"
    assert job.run(save(path, OLD)) == [None] * SIZE
    for n in (0, 1, 2):
        number = ERRORS[n]
        with faulty(name, n, fails(number), thread=f"rank {sick}") as fault:
            outcomes = job.run(save(path, NEW))
        if not fault.happened:
            assert outcomes == [None] * SIZE
            assert job.run(save(path, OLD)) == [None] * SIZE
            continue
        if outcomes != [None] * SIZE:
            for rank, error in enumerate(outcomes):
                assert type(error) is StorageError, outcomes
                assert str(error).startswith("" if rank == sick else f"rank {sick}: ")
                assert os.strerror(number) in str(error)
        # Nothing is left of it, also before the next save, unless it was over: then it is the new one.
        assert held(path) in (OLD, NEW)
        assert_clean(path)
        assert job.run(save(path, OLD)) == [None] * SIZE
        assert held(path) == OLD


@pytest.mark.parametrize("name", ["open", "read", "preadv", "fstat"])
def test_what_fails_in_a_load_is_one_named_error_and_the_next_load_works(job: Job, tmp_path: Path, name: str):
    assert job.run(save(tmp_path, NEW)) == [None] * SIZE
    for n in range(3):
        with faulty(name, n, fails(errno.EIO), thread="rank 1" if name != "preadv" else "") as fault:
            outcomes = job.run(lambda rank: checkpoint.load(tmp_path, state(rank, OLD)))
        if fault.happened:
            assert {type(error) for error in outcomes} == {StorageError}, outcomes
            assert all(os.strerror(errno.EIO) in str(error) and str(tmp_path) in str(error) for error in outcomes)
    into = [state(rank, OLD) for rank in range(SIZE)]
    reports = job.run(lambda rank: checkpoint.load(tmp_path, into[rank]))
    assert not [report for report in reports if isinstance(report, BaseException)]
    for rank, got in enumerate(into):
        want = state(rank, NEW)
        for key in ("rows", "same"):
            one, other = (t["t"][key] for t in (got, want))
            one, other = (getattr(t, "tensor", t).view(torch.uint8) for t in (one, other))
            assert torch.equal(one, other)


# --- calls that do less than they were asked to ---


def short(generator: random.Random) -> Callable[..., Any]:
    """Reads and writes that stop somewhere, always after a byte at least."""

    def instead(real: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if real is os.write:
            fd, data = args
            return real(fd, data[: generator.randint(1, len(data))])
        if real is os.read:
            fd, size = args
            return real(fd, generator.randint(1, size))
        fd, views, offset = args
        first = views[0]
        return real(fd, [first[: generator.randint(1, len(first))]], offset)

    return instead


@pytest.mark.parametrize("name", ["write", "read", "preadv"])
@pytest.mark.parametrize("seed", range(5))
def test_short_reads_and_writes_are_gone_on_with(tmp_path: Path, name: str, seed: int):
    with faulty(name, None, short(random.Random(seed))) as fault:
        checkpoint.save(tmp_path, plain(NEW))
        assert held(tmp_path) == NEW
    assert fault.calls > 2
    assert held(tmp_path) == NEW


def test_a_system_that_writes_nothing_and_gives_no_reason_is_an_error_and_no_endless_loop(tmp_path: Path):
    checkpoint.save(tmp_path, plain(OLD))
    with faulty("write", 1, lambda real, args, options: 0):
        error = attempt(lambda: checkpoint.save(tmp_path, plain(NEW)))
    assert isinstance(error, StorageError)
    assert "wrote nothing" in str(error)
    assert held(tmp_path) == OLD


def test_signals_that_interrupt_calls_change_nothing(tmp_path: Path):
    """A handler of the job's own, say a timer of a profiler, runs thousands of times a second."""
    hits = 0

    def hit(*_: object) -> None:
        nonlocal hits
        hits += 1

    old = signal.signal(signal.SIGALRM, hit)
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    try:
        for number in (OLD, NEW):
            checkpoint.save(tmp_path, plain(number))
            assert held(tmp_path) == number
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert hits
    assert_clean(tmp_path)


# --- room ---


@pytest.mark.parametrize("again", [False, True], ids=["first save", "kept plan"])
def test_too_little_room_is_told_on_all_ranks_before_a_byte_is_written(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
):
    path = tmp_path / "ckpt"
    if again:
        assert job.run(save(path, OLD)) == [None] * SIZE
    created: list[str] = []
    create = LocalStorage.create
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 4321)
    monkeypatch.setattr(LocalStorage, "create", lambda self, key, **options: created.append(key) or create(self, key, **options))
    outcomes = job.run(save(path, NEW))
    # 8 × 5 and 3 × 3 floats, a list of 5,000 numbers, and the digests of what each rank writes.
    for error in outcomes:
        assert isinstance(error, StorageError)
        assert str(path) in str(error)
        assert "but 4,321 are free there; nothing was written" in str(error)
        assert "this save writes " in str(error)
        assert "bytes (4 ranks" in str(error)
    assert created == []
    monkeypatch.undo()
    assert path.exists() == again
    with jobs():
        assert job.run(save(path, NEW)) == [None] * SIZE
    assert held(path) == NEW


def test_what_a_save_needs_is_what_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One byte too little is refused; as much as the tensors and digests take is tried."""
    needed = 40 * 4 + 24 + 8
    state = {"w": torch.zeros(40)}
    for free, refused in ((needed - 1, True), (needed, False), (None, False)):
        monkeypatch.setattr(LocalStorage, "free_bytes", lambda self, free=free: free)
        error = attempt(lambda: checkpoint.save(tmp_path, state))
        assert (error is not None) == refused
        if refused:
            assert f"this save writes {needed:,} bytes" in str(error)


def test_free_space_is_that_of_the_nearest_folder_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    status = os.statvfs(tmp_path)
    free = LocalStorage(tmp_path / "not" / "yet" / "there").free_bytes()
    assert free is not None
    assert 0 < free <= status.f_frsize * status.f_blocks
    nothing_known = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    with faulty("statvfs", None, lambda real, args, options: nothing_known):
        assert LocalStorage(tmp_path).free_bytes() is None
        checkpoint.save(tmp_path, plain(NEW))
    with faulty("statvfs", None, fails(errno.ENOSYS)):  # some file systems in user space have no such call
        assert LocalStorage(tmp_path).free_bytes() is None


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """A small file system of its own, where this process may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_really_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with mounted(tmp_path / "small", "size=1m"):
        path = tmp_path / "small" / "ckpt"
        checkpoint.save(path, {**plain(OLD)})
        large = {"w": torch.arange(1 << 18, dtype=torch.int32)}
        with pytest.raises(StorageError, match=r"this save writes 1,048,\d+ bytes .* are free there; nothing was written"):
            checkpoint.save(path, large)
        # Somebody else takes the room while the save is under way: what the look at free space cannot know.
        monkeypatch.setattr("reshard_ckpt.checkpoint.saving.check_free_space", lambda *_: None)
        for call in (lambda: checkpoint.save(path, large), lambda: checkpoint.async_save(path, large).result(600)):
            with pytest.raises(StorageError, match=r"No space left on device; free space there, or save to another path"):
                call()
            assert held(path) == OLD
            assert_clean(path)
        assert_next_save_works(path)


def test_a_file_system_that_is_mounted_read_only(tmp_path: Path):
    with mounted(tmp_path / "ro", "size=1m"):
        path = tmp_path / "ro" / "ckpt"
        checkpoint.save(path, plain(OLD))
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "ro")], check=True)
        with pytest.raises(StorageError, match=r"Read-only file system; mount it writable, or use another path"):
            checkpoint.save(path, plain(NEW))
        assert held(path) == OLD
        subprocess.run(["mount", "-o", "remount,rw", str(tmp_path / "ro")], check=True)
        assert_next_save_works(path)


def test_a_limit_on_the_size_of_files(tmp_path: Path):
    checkpoint.save(tmp_path, plain(OLD))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        error = attempt(lambda: checkpoint.save(tmp_path, {"w": torch.zeros(20_000)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(error, StorageError)
    assert os.strerror(errno.EFBIG) in str(error)
    assert held(tmp_path) == OLD
    assert_clean(tmp_path)


# --- paths ---


def as_nobody(call: Callable[[], Any]) -> BaseException | str | None:
    """What a call says that is made by a user without rights: root's own calls ask no permission."""
    if os.geteuid():
        return attempt(call)
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a process with threads forks
        child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os.setuid(65534)
            os.write(writing, repr(attempt(call)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def test_a_folder_that_may_not_be_written(tmp_path: Path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    for above in (folder, *folder.parents):
        if above.stat().st_uid == os.geteuid() and above != Path("/"):
            with suppress(PermissionError):
                above.chmod(above.stat().st_mode | 0o055)
    folder.chmod(0o555)
    try:
        said = str(as_nobody(lambda: checkpoint.save(folder / "ckpt", plain(NEW))))
    finally:
        folder.chmod(0o755)
    assert "Permission denied; give this user the rights, or use another path" in said
    assert "theirs" in said
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("below", ["", "ckpt", "a/b/c"])
def test_a_path_that_is_a_file(job: Job, tmp_path: Path, below: str):
    (tmp_path / "file").write_text("mine")
    path = tmp_path / "file" / below
    for outcomes in (job.run(save(path, NEW)), job.run(lambda rank: checkpoint.load(path, state(rank, NEW)))):
        assert {type(error) for error in outcomes} <= {StorageError, CheckpointNotFound}, outcomes
        assert len({type(error) for error in outcomes}) == 1
        assert all(str(tmp_path / "file") in str(error) for error in outcomes)
    assert (tmp_path / "file").read_text() == "mine"
    assert isinstance(attempt(lambda: async_save(path)), StorageError)


def test_a_folder_where_the_catalog_must_be(job: Job, tmp_path: Path):
    (tmp_path / "catalog.msgpack").mkdir()
    outcomes = job.run(save(tmp_path, NEW))
    assert {type(error) for error in outcomes} == {StorageError}
    assert all("a folder stands where a file must be: remove it, or use another path" in str(error) for error in outcomes)
    assert [p.name for p in tmp_path.iterdir()] == ["catalog.msgpack"]
    (tmp_path / "catalog.msgpack").rmdir()
    assert job.run(save(tmp_path, NEW)) == [None] * SIZE


def test_a_path_that_is_too_long(tmp_path: Path):
    with pytest.raises(StorageError, match="File name too long; use a shorter path"):
        checkpoint.save(tmp_path / ("x" * 300), plain(NEW))


@pytest.mark.parametrize(
    ("where", "old"),
    [("create", OLD), ("sync", OLD), ("list", OLD), ("publish", OLD), ("sync", None), ("list", None), ("publish", None)],
)
def test_a_folder_that_vanishes_while_it_is_saved_to(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, old: int | None
):
    """Somebody deletes the whole folder. What was there is lost, but nothing that is not whole appears in its place."""
    path = tmp_path / "ckpt"
    assert old is None or job.run(save(path, old)) == [None] * SIZE
    real, once = getattr(LocalStorage, where), threading.Lock()

    def vanish(self: LocalStorage, *args: Any, **options: Any) -> Any:
        if once.acquire(blocking=False):
            path.rename(tmp_path / "gone")
        return real(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, where, vanish)
        outcomes = job.run(save(path, NEW))
    assert all(isinstance(error, CheckpointError) for error in outcomes), outcomes
    assert all(isinstance(error, StorageError) and str(path) in str(error) for error in outcomes)
    assert not (path / "catalog.msgpack").exists()
    assert job.run(save(path, NEW)) == [None] * SIZE
    assert held(path) == NEW
    assert_clean(path)
