"""Files on tmpfs in large pages: reserve the memory of a file, and map it where the kernel can map a large page at once."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

from ..engine.common.host_memory import ALIGN_BYTES

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_MAP_FIXED, _MADV_COLLAPSE = 0x10, 25  # of Linux; Python 3.11 does not name them


def reserve_file(fd: int, num_bytes: int) -> None:
    """Allocate the memory of a file on tmpfs for its first `num_bytes` bytes.

    It is in large pages if the kernel has `MADV_COLLAPSE` (Linux 6.1): these are mapped 512 times as fast. The mount needs no
    option `huge=`. Raise `OSError` if there is too little memory. The file may then have a part of it.
    """
    room = os.fstatvfs(fd)
    if room.f_blocks and room.f_bavail * room.f_frsize + os.fstat(fd).st_blocks * 512 < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # before other files of the mount find it full
    large = num_bytes // ALIGN_BYTES * ALIGN_BYTES
    for at in range(0, large, ALIGN_BYTES):
        os.posix_fallocate(fd, at, 1)  # the kernel collapses only ranges that have a page
    if large and hasattr(mmap, "MADV_HUGEPAGE"):
        with memoryview(map_file(fd, large)) as view:
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(large), _MADV_COLLAPSE)  # some kernels and mounts refuse it
    os.posix_fallocate(fd, 0, num_bytes)


def map_file(fd: int, num_bytes: int, *, is_private: bool = False, kind: type[mmap.mmap] = mmap.mmap) -> memoryview:
    """Map a file into memory, and return its bytes as a writable view of a mapping of class `kind`.

    The view begins at a multiple of a large page. So the kernel maps the large pages of the file as such, with one fault for each
    and not one for each 64 KiB. `mmap.mmap` cannot choose an address: it maps more memory, which nobody touches, and the file is
    mapped over a part of that. Both are unmapped together, with the last view. Raise `OSError` if the file cannot be mapped.

    Parameters
    ----------
    is_private
        Keep changes of the view out of the file.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return memoryview(kind(fd, num_bytes, access=mmap.ACCESS_COPY if is_private else mmap.ACCESS_WRITE))
    space = kind(-1, num_bytes + ALIGN_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(space))
    address = -(-begin // ALIGN_BYTES) * ALIGN_BYTES
    flags = (mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED) | _MAP_FIXED
    if _LIBC.mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return memoryview(space)[address - begin : address - begin + num_bytes]
