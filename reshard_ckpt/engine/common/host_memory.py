"""Host memory for staging: buffers that are allocated once and reused, in as few pages as can be.

Memory that was never touched costs several times a plain copy the first time, since the kernel makes each page on the first
touch; large pages (`MADV_HUGEPAGE`) make that cheaper, and reuse makes it happen once. For an accelerator the buffer is pinned
(`pinning.py`), so that the device copies into it at full speed.
"""

from __future__ import annotations

import threading

import torch

from .pinning import empty_pinned, map_private

ALIGN_BYTES = 2 << 20


def allocate(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Allocate a 1-D uint8 host tensor, page-aligned; rounded up to whole large pages."""
    size = max(-(-num_bytes // ALIGN_BYTES), 1) * ALIGN_BYTES
    if pinned:
        return empty_pinned(size)
    mapping = map_private(size)
    return torch.empty(size, dtype=torch.uint8, device="cpu") if mapping is None else torch.frombuffer(mapping, dtype=torch.uint8)


class Pool:
    """The staging buffers of this process that no save uses at the moment, pinned ones apart."""

    def __init__(self) -> None:
        self.forked()

    def take(self, num_bytes: int, *, pinned: bool) -> torch.Tensor:
        """Take a buffer of at least this size: the idle one if it is large enough, else a new one in its place."""
        with self._lock:
            idle = self._idle.pop(pinned, None)
        if idle is None or idle.numel() < num_bytes:
            del idle  # before the new one is allocated: never both
            idle = allocate(num_bytes, pinned=pinned)
        if pinned:
            self._pinned.add(idle.data_ptr())
        return idle

    def give_back(self, buffer: torch.Tensor) -> None:
        """Keep the buffer, of which a part may have been used, for the next save; of two, the larger."""
        buffer = buffer.as_strided((buffer.untyped_storage().nbytes(),), (1,), 0)
        with self._lock:
            pinned = buffer.data_ptr() in self._pinned
            self._pinned.discard(buffer.data_ptr())
            idle = self._idle.get(pinned)
            if idle is None or idle.numel() < buffer.numel():
                self._idle[pinned] = buffer

    def clear(self) -> None:
        """Free the idle buffers."""
        with self._lock:
            self._idle.clear()

    def forked(self) -> None:
        """Begin anew, also in a forked child: a thread that is gone may hold the lock."""
        self._lock = threading.Lock()
        self._idle: dict[bool, torch.Tensor] = {}
        # The addresses of pinned buffers that are in use.
        self._pinned: set[int] = set()


POOL = Pool()
"""One for the process: saves follow each other, and every one needs the same memory."""
