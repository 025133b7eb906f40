"""Advisory locks on files, which the system releases when the process that has them dies.

They are `flock` locks, so they also exclude other openings within this process. A forked child, such as a loader's worker, would
share its parent's lock, and keep it when the parent has died; so it closes its copies at once. Every lock of this package is one
of these, and nothing else, such as a mapping, may have the locked descriptor, which would keep it open in the child.
"""

from __future__ import annotations

import errno
import fcntl
import os
import weakref

from ..errors import StorageError
from .protocol import Lock

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.EBADF)
_LIVE_LOCKS: weakref.WeakSet[FileLock] = weakref.WeakSet()


class LocksUnsupported(StorageError):
    """The file system knows no locks."""


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
    """Lock an open file, which the lock then owns; None, and the file closed, where somebody else's lock excludes this one.

    Raises
    ------
    LocksUnsupported
        The file system knows no locks.
    """
    try:
        return _locked(fd, path, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return None


def await_lock(fd: int, path: str, *, shared: bool = False) -> FileLock:
    """Lock an open file as `lock_file` does, once nobody else's lock excludes this one: for locks that are held for moments."""
    return _locked(fd, path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def _locked(fd: int, path: str, flags: int) -> FileLock:
    lock = FileLock(fd)  # from here on a child that is forked meanwhile closes its copy
    try:
        fcntl.flock(fd, flags)
    except BaseException as error:
        lock.release()
        if isinstance(error, OSError) and error.errno in _NO_LOCKS:
            raise LocksUnsupported(f"{path}: cannot lock: {error.strerror}; this file system has no locks") from error
        raise
    return lock


def _drop_inherited() -> None:
    for lock in list(_LIVE_LOCKS):
        lock.release()


os.register_at_fork(after_in_child=_drop_inherited)
