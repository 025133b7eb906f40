"""Host memory for staging: buffers in large pages that are allocated once and reused, and pinned for an accelerator.

The first write to new memory takes several times as long as a plain copy, because the kernel makes each page on its first touch.
Large pages (`MADV_HUGEPAGE`) make that cheaper, and reuse makes it happen once.

A forked child (a data loader's worker) has zeros in place of these buffers (`MADV_WIPEONFORK`, Linux 4.14). Without that the
kernel copies them, a pinned buffer at the fork and any other at the parent's next writes, page by page. Copying into a buffer of
512 MiB took 0.6 s and more after a fork, and 0.06 s before it.

A device copies from and into pinned memory at full speed, while the host goes on. torch rounds its pinned memory up to a power of
two, and never returns it to the system. So this module registers a mapping of its own with the device, for devices in
`REGISTRARS`; for others it uses torch's pinned memory. A mapping is registered and unregistered on the device that was current in
the thread: with CUDA both calls make a context there.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from ...comm.group import current_accelerator
from .tensor_bytes import on_device

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_MAP_FIXED, _MADV_WIPEONFORK, _MADV_COLLAPSE = 0x10, 18, 25  # of Linux; Python 3.11 does not name them

ALIGN_BYTES = 2 << 20
"""Size in bytes of a large page of memory."""


def allocate(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Allocate a 1-D uint8 host tensor that begins at a page and is rounded up to whole large pages; pinned if asked for."""
    size = max(-(-num_bytes // ALIGN_BYTES), 1) * ALIGN_BYTES
    if not pinned:
        mapping = map_private(size)
    else:
        mapping = None if _registrar() is None else map_private(size, PinnableMap)
        if mapping is not None and not pin(memoryview(mapping)):
            mapping = None
    if mapping is None:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned, device="cpu")
    return torch.frombuffer(mapping, dtype=torch.uint8)


class Pool:
    """The idle staging buffers of this process: at most one in pinned memory, and one in ordinary memory."""

    def __init__(self) -> None:
        self.forked()

    def take(self, num_bytes: int, *, pinned: bool) -> torch.Tensor:
        """Take a staging buffer of at least `num_bytes`: the idle one if it is large enough, else a new one."""
        with self._lock:
            idle = self._idle.pop(pinned, None)
        if idle is None or idle.numel() < num_bytes:
            del idle  # freed first, so that the two never exist together
            idle = allocate(num_bytes, pinned=pinned)
        if pinned:
            self._pinned.add(idle.data_ptr())
        return idle

    def give_back(self, buffer: torch.Tensor) -> None:
        """Give a buffer back for the next save; a view stands for its whole buffer.

        If one is idle already, keep the larger of the two.
        """
        buffer = buffer.as_strided((buffer.untyped_storage().nbytes(),), (1,), 0)
        with self._lock:
            pinned = buffer.data_ptr() in self._pinned
            self._pinned.discard(buffer.data_ptr())
            idle = self._idle.get(pinned)
            if idle is None or idle.numel() < buffer.numel():
                self._idle[pinned] = buffer

    def clear(self) -> None:
        """Free the idle buffers of the pool."""
        with self._lock:
            self._idle.clear()

    def forked(self) -> None:
        """Empty the pool and make a new lock: in a forked child, a thread of the parent may hold the old one."""
        self._lock = threading.Lock()
        self._idle: dict[bool, torch.Tensor] = {}
        # The addresses of pinned buffers that are in use.
        self._pinned: set[int] = set()


POOL = Pool()
"""The buffer pool of this process. Saves run one after another, and each needs buffers of about the same size."""


class Registrar(NamedTuple):
    """The driver's functions to pin host memory for devices of one type.

    `register` pins memory, given its address and its size in bytes; `unregister` unpins the memory at an address. Both raise an
    error if the driver refuses.
    """

    register: Callable[[int, int], None]
    unregister: Callable[[int], None]


def _call_cuda(name: str, *args: int) -> None:
    code = int(getattr(torch.cuda.cudart(), name)(*args))  # type: ignore[no-untyped-call]
    if code:
        raise RuntimeError(f"CUDA error {code}")


_PORTABLE = 1  # for every device of the process

REGISTRARS = {
    "cuda": Registrar(
        lambda address, num_bytes: _call_cuda("cudaHostRegister", address, num_bytes, _PORTABLE),
        lambda address: _call_cuda("cudaHostUnregister", address),
    )
}
"""For each device type, such as ``"cuda"``, the functions that pin host memory for it."""


class PinnableMap(mmap.mmap):
    """A memory mapping that `pin` may register with a driver. It is unregistered before it is unmapped, after its last view."""

    registrar: Registrar | None = None
    address = 0
    device: torch.device | None = None

    def __del__(self) -> None:
        if self.registrar is not None:
            with suppress(Exception), on_device(self.device):  # the interpreter may be ending, and the driver's context be gone
                self.registrar.unregister(self.address)


def pin(view: memoryview) -> bool:
    """Pin the bytes of a view of a `PinnableMap`, so that the current device copies from and into them at full speed.

    Return False if `REGISTRARS` lacks the type of the device, or if the driver refuses.
    """
    registrar, mapping = _registrar(), view.obj
    assert isinstance(mapping, PinnableMap)
    if registrar is None or mapping.registrar is not None:
        return registrar is not None
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    try:
        registrar.register(address, len(view))
    except Exception:  # a limit of locked memory, or a driver that cannot
        return False
    mapping.registrar, mapping.address, mapping.device = registrar, address, torch.accelerator.current_stream().device
    return True


def _registrar() -> Registrar | None:
    accelerator = current_accelerator()
    return None if accelerator is None else REGISTRARS.get(accelerator.type)


def map_private(num_bytes: int, kind: Any = mmap.mmap) -> Any:
    """Map new memory that is private to this process, in large pages if the kernel has them.

    Its bytes are zeros in a forked child. Return None on a system without private mappings.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return None
    mapping = kind(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
        with suppress(OSError):
            mapping.madvise(_MADV_WIPEONFORK)
    return mapping


def ask_for_large_pages(tensor: torch.Tensor) -> None:
    """Ask the kernel to back the memory of a contiguous host tensor by large pages; this helps only never written memory."""
    low = -(-tensor.data_ptr() // ALIGN_BYTES) * ALIGN_BYTES
    size = (tensor.data_ptr() + tensor.nbytes) // ALIGN_BYTES * ALIGN_BYTES - low
    if size <= 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    touched = ctypes.c_ubyte()
    middle = low + size // ALIGN_BYTES // 2 * ALIGN_BYTES  # one page stands for all of them
    if _LIBC.mincore(ctypes.c_void_p(middle), ctypes.c_size_t(1), ctypes.byref(touched)) == 0 and not touched.value & 1:
        _LIBC.madvise(ctypes.c_void_p(low), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)  # only advice: some kernels refuse it


def reserve_file(fd: int, num_bytes: int) -> None:
    """Allocate the memory of a file on tmpfs for its first `num_bytes` bytes.

    It is in large pages if the kernel has `MADV_COLLAPSE` (Linux 6.1): these are mapped 512 times as fast. The mount needs no
    option `huge=`.

    Raises
    ------
    OSError
        There is too little memory. The file may then have a part of it.
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
    mapped over a part of that. Both are unmapped together, with the last view.

    Parameters
    ----------
    is_private
        Keep changes of the view out of the file.

    Raises
    ------
    OSError
        The file cannot be mapped.
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
