"""An atomic swap of two files or folders: at every moment, one of the two is under each path."""

from __future__ import annotations

import ctypes
import errno
import os

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)
"""The error codes of a kernel without this call, of a file system that cannot swap, and of a sandbox that forbids the call."""


def swap(first: str, second: str) -> bool:
    """Exchange two files or folders of one file system in one atomic step. Raise `OSError` if the swap is supported, and failed.

    Returns
    -------
    bool
        False if the system or the file system cannot swap. Linux can from 3.15 on, on its own file systems; NFS cannot.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    arguments = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE))
    if renameat2(*arguments) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT:
        return False
    raise OSError(code, os.strerror(code), first, None, second)
