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
import mmap
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from ...comm.group import current_accelerator
from .tensor_bytes import on_device

_LIBC = ctypes.CDLL(None)
_MADV_WIPEONFORK = 18  # of Linux; Python 3.11 does not name it

ALIGN_BYTES = 2 << 20
"""Size in bytes of a large page of memory."""


def allocate(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Allocate a 1-D uint8 host tensor that begins at a page and is rounded up to whole large pages; pinned if asked for."""
    size = max(-(-num_bytes // ALIGN_BYTES), 1) * ALIGN_BYTES
    if hasattr(mmap, "MAP_PRIVATE"):
        mapping: Any = (PinnableMap if pinned else mmap.mmap)(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                mapping.madvise(mmap.MADV_HUGEPAGE)
            with suppress(OSError):
                mapping.madvise(_MADV_WIPEONFORK)
        if not pinned or pin(memoryview(mapping)):
            return torch.frombuffer(mapping, dtype=torch.uint8)
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned, device="cpu")


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
    accelerator, mapping = current_accelerator(), view.obj
    registrar = None if accelerator is None else REGISTRARS.get(accelerator.type)
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


def ask_for_large_pages(tensor: torch.Tensor) -> None:
    """Ask the kernel to back the memory of a contiguous host tensor by large pages, which helps only before the first write."""
    low = -(-tensor.data_ptr() // ALIGN_BYTES) * ALIGN_BYTES
    size = (tensor.data_ptr() + tensor.nbytes) // ALIGN_BYTES * ALIGN_BYTES - low
    if size <= 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    touched = ctypes.c_ubyte()
    middle = low + size // ALIGN_BYTES // 2 * ALIGN_BYTES  # one page stands for all of them
    if _LIBC.mincore(ctypes.c_void_p(middle), ctypes.c_size_t(1), ctypes.byref(touched)) == 0 and not touched.value & 1:
        _LIBC.madvise(ctypes.c_void_p(low), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)  # only advice: some kernels refuse it
