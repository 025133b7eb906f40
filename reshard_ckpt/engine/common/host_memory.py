"""Host memory for staging: buffers that are allocated once and reused, in as few pages as can be.

Memory that was never touched costs several times a plain copy the first time, since the kernel makes each page on the first
touch; large pages (`MADV_HUGEPAGE`) make that cheaper, and reuse makes it happen once. For CUDA the buffer is pinned, so that the
device copies into it at full speed.
"""

from __future__ import annotations

import mmap
import threading

import torch

ALIGN_BYTES = 2 << 20


def allocate(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Allocate a 1-D uint8 host tensor, page-aligned; rounded up to whole large pages."""
    size = max(-(-num_bytes // ALIGN_BYTES), 1) * ALIGN_BYTES
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    if not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Pool:
    """The staging buffers of this process that no save uses at the moment, pinned ones apart."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[bool, torch.Tensor] = {}

    def take(self, num_bytes: int, *, pinned: bool) -> torch.Tensor:
        """Take a buffer of at least this size: the idle one if it is large enough, else a new one in its place."""
        with self._lock:
            idle = self._idle.pop(pinned, None)
        if idle is not None and idle.numel() >= num_bytes:
            return idle
        del idle  # before the new one is allocated: never both
        return allocate(num_bytes, pinned=pinned)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Keep the buffer for the next save; of two, the larger."""
        with self._lock:
            pinned = buffer.is_pinned() if torch.cuda.is_available() else False
            idle = self._idle.get(pinned)
            if idle is None or idle.numel() < buffer.numel():
                self._idle[pinned] = buffer

    def clear(self) -> None:
        """Free the idle buffers."""
        with self._lock:
            self._idle.clear()

    def forked(self) -> None:
        """Begin anew in a forked child: a thread that is gone may hold the lock."""
        self._lock, self._idle = threading.Lock(), {}


POOL = Pool()
"""One for the process: saves follow each other, and every one needs the same memory."""
