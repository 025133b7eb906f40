"""Advisory locks on files, which the system releases when the process that has them dies.

They are `flock` locks, so they also exclude other openings within this process. A forked child would share its parent's lock, and
keep it when the parent has died; so it closes its copies at once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from types import TracebackType

from ..errors import StorageError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.EBADF)
_LIVE_LOCKS: weakref.WeakSet[FileLock] = weakref.WeakSet()


class LocksUnsupported(StorageError):
    """The file system knows no locks."""


class FileLock:
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

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

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
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno in _NO_LOCKS:
            raise LocksUnsupported(f"{path}: cannot lock: {error.strerror}; this file system has no locks") from error
        raise
    return FileLock(fd)


def _drop_inherited() -> None:
    for lock in list(_LIVE_LOCKS):
        lock.release()


os.register_at_fork(after_in_child=_drop_inherited)
