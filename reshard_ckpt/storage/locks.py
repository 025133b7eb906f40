"""Advisory locks on files, which the system releases when their process dies.

They are `flock` locks, so they also exclude other openings within this process. A forked child, such as a loader's worker, would
share its parent's lock, and keep it after the parent has died; so it closes its copies at once. Every lock of this package is one
of these. Nothing else, such as a mapping, may use the locked descriptor: that would keep it open in the child.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
import weakref

from ..errors import StorageError
from .protocol import Lock

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.EBADF)
MOMENTS_S = 120.0
"""The longest wait of `await_lock`. Its locks are held only for moments, but in these a process may allocate gigabytes of
memory, or publish on a slow disk."""

_LIVE_LOCKS: weakref.WeakSet[FileLock] = weakref.WeakSet()


class LocksUnsupported(StorageError):
    """The file system does not support locks."""


class FileLock(Lock):
    """A lock on an open file, held until `release`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _LIVE_LOCKS.add(self)

    @property
    def fd(self) -> int:
        """The descriptor of the locked file."""
        return self._fd

    def release(self) -> None:
        """Release the lock; once released, this does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def note(self, text: bytes) -> None:
        """Replace the contents of the locked file by a note for whoever finds it locked."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text, 0)

    def __del__(self) -> None:
        self.release()


def lock_file(fd: int, path: str, *, shared: bool) -> FileLock | None:
    """Lock an open file, and let the lock own it; if another lock excludes this one, close the file and return None.

    Raises
    ------
    LocksUnsupported
        The file system knows no locks.
    """
    lock = FileLock(fd)  # first, so that a child that is forked from here on closes its copy
    if _takes(lock, path, shared):
        return lock
    lock.release()
    return None


def await_lock(fd: int, path: str, *, shared: bool = False, timeout_s: float) -> FileLock:
    """Lock an open file as `lock_file` does, and wait until no other lock excludes this one: for locks that are held for moments.

    Parameters
    ----------
    timeout_s
        Seconds to wait; never more than `MOMENTS_S`.

    Raises
    ------
    StorageError
        Another process has held the lock for all that time, so it must hang.
    """
    lock, began, most_s = FileLock(fd), time.monotonic(), min(timeout_s, MOMENTS_S)
    try:
        # A blocking flock has no timeout: a process that is stopped while it holds the lock would stop all others.
        while not _takes(lock, path, shared):
            waited = time.monotonic() - began
            if waited >= most_s:
                raise StorageError(
                    f"{path}: another process has had its lock for {most_s:g} s, not for a moment: it hangs, or was stopped; "
                    "end it, and try again"
                )
            time.sleep(min(max(waited / 10, 0.0005), 0.05))
    except BaseException:
        lock.release()
        raise
    return lock


def _takes(lock: FileLock, path: str, shared: bool) -> bool:
    try:
        fcntl.flock(lock.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except BaseException as error:
        lock.release()
        if isinstance(error, OSError) and error.errno in _NO_LOCKS:
            raise LocksUnsupported(f"{path}: cannot lock: {error.strerror}; this file system has no locks") from error
        raise
    return True


def _drop_inherited() -> None:
    for lock in list(_LIVE_LOCKS):
        lock.release()


os.register_at_fork(after_in_child=_drop_inherited)
