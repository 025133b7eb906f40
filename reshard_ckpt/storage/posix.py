"""Wrappers of system calls for files, and locks. They continue short reads and writes, cache descriptors, and explain errors.

Locks are advisory `flock` locks on files, which the system releases when their process dies. They also exclude a second lock that
this process takes by opening the file again. A forked child, such as a loader's worker, would share its parent's lock, and keep
it after the parent has died; so it closes its copies at once. Every lock of this package is one of these. Nothing else, such as a
mapping, may use the locked descriptor: that would keep it open in the child.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from weakref import WeakSet

from ..errors import StorageError
from .protocol import Lock

_MAX_BUFFERS = min(os.sysconf("SC_IOV_MAX"), 1024)
_READ_BYTES = 1 << 20
"""The number of bytes by which a file of unknown size is read, so that the memory for it grows with its size."""

_TRIES = 10
"""Number of attempts to read a file that other machines replace meanwhile."""

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_CANNOT = "this file system cannot do that: use another one, or the address of the store behind it, such as s3://bucket/prefix"
_NEXT_STEPS = {
    errno.ENOSPC: "free space there, or save to another path",
    errno.EDQUOT: "free space within your quota, or save to another path",
    errno.EACCES: "give this user the rights, or use another path",
    errno.EPERM: "give this user the rights, or use another path",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f), or use another file system",
    errno.EROFS: "mount it writable, or use another path",
    errno.EMFILE: "raise the limit of open files (ulimit -n); if gcsfuse says so of a folder to rename, use gs://bucket/prefix",
    errno.ENFILE: "raise the system's limit of open files",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.ELOOP: "a symbolic link stands in the way; writing follows none below the checkpoint's folder: remove it",
    errno.ENOTDIR: "a file or a symbolic link stands where a folder must be: remove it, or use another path",
    errno.EISDIR: "a folder stands where a file must be: remove it, or use another path",
    errno.EIO: "the device failed: look at the system's log, and use another disk",
    errno.ESTALE: "another machine deleted or replaced it, or the network file system was mounted anew: try again",
    errno.ENOSYS: _CANNOT,
    errno.ENOTSUP: _CANNOT,
}


class Explained:
    """Context manager that raises an `OSError` as a `StorageError` with the operation, the place, the reason and the next step.

    A class and not a generator: it is entered for every read and write, and a generator takes several times as long.
    """

    __slots__ = ("_action", "_path")

    def __init__(self, action: str, path: str) -> None:
        self._action, self._path = action, path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, OSError):
            step = _NEXT_STEPS.get(error.errno or 0, "look at the file system, then try again")
            raise StorageError(f"{self._path}: cannot {self._action}: {error.strerror or error}; {step}") from error


def sync_folder(folder: str | int) -> None:
    """Make the names in a folder durable (fsync). The folder is a path or a descriptor; a folder that is gone is passed over."""
    if isinstance(folder, str):
        try:
            fd = os.open(folder, FOLDER)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            sync_folder(fd)
        finally:
            os.close(fd)
        return
    try:
        os.fsync(folder)
    except OSError as error:
        # Some network and user-space file systems cannot sync folders; there is no more to do.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def write_all(fd: int, data: memoryview) -> None:
    """Write all of `data` to a descriptor, in as many calls as it takes: the system takes at most 2 GiB in one."""
    while len(data):
        written = os.write(fd, data)
        if written == 0:  # a write of 0 bytes: trying again might go on for ever
            raise OSError(errno.EIO, "the system wrote nothing and gave no reason")
        data = data[written:]


def free_bytes_at(path: str) -> int | None:
    """Return the free bytes of a file system for this user, or None if unknown; the folder at `path` need not exist yet."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    try:
        status = os.statvfs(path)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        return None
    if status.f_blocks == 0:  # some file systems in user space keep no count, and report this
        return None
    return status.f_frsize * (status.f_bfree if os.geteuid() == 0 else status.f_bavail)


def begin_write_out(fd: int, offset: int, num_bytes: int) -> None:
    """Let the kernel begin to write a range of a file to its disk, and do not wait for it.

    Linux does so on the advice that the range will not be needed; pages that are still being written stay in its cache.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # it is only advice: without it, the fsync has more to do
            os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def preadv_all(file: OpenFile, views: list[memoryview], offset: int) -> int:
    """Read a file from byte `offset` on into the views, in order. Return the number of bytes that the file lacks to fill them."""
    views = [view for view in views if len(view)]
    left = sum(map(len, views))
    while left:
        got = os.preadv(file.fd, views if len(views) <= _MAX_BUFFERS else views[:_MAX_BUFFERS], offset)
        left -= got
        if not left or not got:
            break
        offset += got
        while got >= len(views[0]):
            got -= len(views.pop(0))
        views[0] = views[0][got:]
    return left


def stamp_of(status: os.stat_result) -> object:
    """Return the time of change and the size of a file, which tell that the file was changed.

    The inode number is left out, because file systems over object stores make it up anew.
    """
    return status.st_mtime_ns, status.st_size


def broken_link(path: str, counts: Callable[[str], bool] = lambda name: True) -> str | None:
    """Describe, for a message, a symbolic link whose target is missing: the path itself, or a link in it whose name counts.

    Return None if there is none. Caches of downloads hold such links once their files were removed.
    """
    places = [path]
    with suppress(OSError):  # not a folder
        places += sorted(os.path.join(path, name) for name in os.listdir(path) if counts(name))
    link = next((place for place in places if os.path.islink(place) and not os.path.exists(place)), None)
    if link is None:
        return None
    return f"{link} is a link to {os.path.realpath(link)}, which is missing; download or copy it again, or remove the link"


def open_to_read(path: str) -> int:
    """Open a regular file to read, and return its descriptor. Anything else, such as a pipe, counts as missing.

    A folder raises `IsADirectoryError`.
    """
    # Without O_NONBLOCK, opening a pipe that somebody placed there would wait for its other end.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        kind = os.fstat(fd).st_mode
    except BaseException:
        os.close(fd)
        raise
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", path)
    raise FileNotFoundError(errno.ENOENT, "no regular file", path)


def read_at_most(path: str, limit: int) -> bytes:
    """Read a file, at most its first `limit` bytes. If the file is smaller, a large limit costs no memory.

    A network file system may take the file away (ESTALE) if another machine replaces it meanwhile; then the new one is read.
    """
    for tries_left in reversed(range(_TRIES)):
        fd, data = -1, bytearray()
        try:
            fd, left = open_to_read(path), limit
            while left and (chunk := os.read(fd, left if left < _READ_BYTES else _READ_BYTES)):
                data += chunk
                left -= len(chunk)
            break
        except OSError as error:
            if error.errno != errno.ESTALE or not tries_left:
                raise
        finally:
            if fd >= 0:
                with suppress(OSError):  # from a network file system; it was only read
                    os.close(fd)
    return bytes(data)


@contextmanager
def locked(folder: int, timeout_s: float) -> Iterator[None]:
    """Hold an exclusive lock on an open folder in a ``with`` block. On a file system without locks it excludes nobody."""
    fd, lock = os.open(".", FOLDER, dir_fd=folder), None
    where = f"/proc/self/fd/{folder}"
    with suppress(OSError, LocksUnsupported):
        name = os.readlink(where) if os.path.islink(where) else "the checkpoint's folder"
        lock = await_lock(fd, name, timeout_s=timeout_s)
    try:
        yield
    finally:
        if lock is not None:
            with suppress(OSError):
                lock.release()


class OpenFile:
    """An open file. It is closed once nothing refers to this object, so that no thread loses it while it reads."""

    __slots__ = ("fd", "stamp")

    def __init__(self, path: str) -> None:
        self.fd = -1
        self.fd = open_to_read(path)
        self.stamp = stamp_of(os.fstat(self.fd))

    def __del__(self) -> None:
        if self.fd >= 0:
            with suppress(OSError):  # from a network file system; it was only read
                os.close(self.fd)


_ALL_OPEN: WeakSet[OpenFiles] = WeakSet()


class OpenFiles:
    """A cache of open files: keeps the `max_files` files that were read last. A file being read stays open longer."""

    def __init__(self, max_files: int) -> None:
        self._max_files = max_files
        self._files: OrderedDict[str, OpenFile] = OrderedDict()
        self._first: dict[str, object] = {}
        self._lock = threading.Lock()
        _ALL_OPEN.add(self)

    def get(self, path: str) -> OpenFile:
        with self._lock:
            if (file := self._files.get(path)) is None:
                file = self._files[path] = OpenFile(path)
                self._first.setdefault(path, file.stamp)
            self._files.move_to_end(path)
            if len(self._files) > self._max_files:
                self._files.popitem(last=False)
            return file

    def first_stamp(self, path: str) -> object:
        """Return the `stamp_of` a file when it was first opened; None if it was not."""
        return self._first.get(path)

    def forget(self, path: str) -> None:
        with self._lock:
            self._files.pop(path, None)
            self._first.pop(path, None)

    def clear(self) -> None:
        with self._lock:
            self._files.clear()
            self._first.clear()

    def __len__(self) -> int:
        return len(self._files)


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.EBADF)
MOMENTS_S = 120.0
"""The longest time in seconds that `await_lock` waits. Its locks are held only for moments, but in these a process may allocate
gigabytes of memory, or publish on a slow disk."""

_LIVE_LOCKS: weakref.WeakSet[FileLock] = weakref.WeakSet()


class LocksUnsupported(StorageError):
    """Raised if the file system, or the store, does not support locks."""


class FileLock(Lock):
    """A lock on the open file of a path, held until `release`."""

    def __init__(self, fd: int, path: str) -> None:
        self.fd, self._path = fd, path
        _LIVE_LOCKS.add(self)

    def check(self) -> None:
        """Raise a `StorageError` if another file, or none, is at the path now: another process may have locked that."""
        with Explained("look at", self._path):
            try:
                if os.path.samestat(os.stat(self._path), os.fstat(self.fd)):
                    return
            except FileNotFoundError:
                pass
        raise StorageError(
            f"{self._path}: somebody has removed or replaced this file, or a folder above it, which this process had locked; "
            "another job may be there now, so nothing was deleted: end one of the two, and begin again"
        )

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        # First, and apart from the close: Ctrl-C just before a close would leave the file locked as long as this process lives.
        if self.fd >= 0:
            with suppress(OSError):
                fcntl.flock(self.fd, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Close the file. That releases the lock, unless another process has the file open too."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with suppress(OSError):  # from a network file system; nothing was written that counts
                os.close(fd)

    def note(self, text: bytes) -> None:
        """Replace the contents of the locked file by a text for anyone who finds it locked."""
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, text, 0)

    def __del__(self) -> None:
        self.release()


def lock_file(fd: int, path: str, *, shared: bool) -> FileLock | None:
    """Lock an open file and return the lock, which then owns the file. If another lock excludes this one, close it; return None.

    Raise `LocksUnsupported` if the file system knows no locks.
    """
    lock = FileLock(fd, path)  # first, so that a child that is forked from here on closes its copy
    if _takes(lock, path, shared):
        return lock
    lock.release()
    return None


def await_lock(fd: int, path: str, *, shared: bool = False, timeout_s: float) -> FileLock:
    """Lock an open file as `lock_file` does, and wait until no other lock excludes this one: for locks that are held for moments.

    Raise `StorageError` if another process has held the lock for all that time, so it must hang.

    Parameters
    ----------
    timeout_s
        Seconds to wait; never more than `MOMENTS_S`.
    """
    lock = FileLock(fd, path)
    try:
        # A blocking flock has no timeout: a process that is stopped while it holds the lock would stop all others.
        for _ in lock_attempts(path, timeout_s):
            if _takes(lock, path, shared):
                break
    except BaseException:
        lock.release()
        raise
    return lock


def lock_attempts(path: str, timeout_s: float) -> Iterator[None]:
    """Yield before each attempt to take a lock, and wait between attempts.

    Raise `StorageError` if `timeout_s` seconds have passed, or `MOMENTS_S` if that is less.
    """
    began, most_s = time.monotonic(), min(timeout_s, MOMENTS_S)
    while True:
        yield
        waited = time.monotonic() - began
        if waited >= most_s:
            raise StorageError(
                f"{path}: another process has had its lock for {most_s:g} s, not for a moment: it hangs, or was stopped; "
                "end it, and try again"
            )
        time.sleep(min(max(waited / 10, 0.0005), 0.05))


def _takes(lock: FileLock, path: str, shared: bool) -> bool:
    try:
        fcntl.flock(lock.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BaseException as error:
        code = error.errno if isinstance(error, OSError) else None
        if code == errno.EAGAIN or (code == errno.EACCES and _unlocks(lock.fd)):
            return False
        lock.release()
        if code in _NO_LOCKS:
            raise LocksUnsupported(f"{path}: cannot lock: {os.strerror(code)}; this file system has no locks") from error
        raise
    return True


def _unlocks(fd: int) -> bool:
    """Tell what EACCES of `flock` means: that somebody has the lock (SMB), if unlocking works; else that nobody may lock here."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError:
        return False
    return True


def _after_fork() -> None:
    """In a forked child, close its copies of locked files, and give caches new locks: the parent's threads may hold the old."""
    for lock in list(_LIVE_LOCKS):
        lock.close()
    for files in _ALL_OPEN:
        files._lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
