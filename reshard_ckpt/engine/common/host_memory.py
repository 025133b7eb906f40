"""Host memory for staging: buffers in large pages that are allocated once and reused.

The first write to new memory takes several times as long as a plain copy, because the kernel makes each page on its first touch.
Large pages (`MADV_HUGEPAGE`) make that cheaper, and reuse makes it happen once. For an accelerator the buffer is pinned
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
    """The idle staging buffers of this process: at most one pinned and one that is not."""

    def __init__(self) -> None:
        self.forked()

    def take(self, num_bytes: int, *, pinned: bool) -> torch.Tensor:
        """Take a buffer of at least this size: the idle one if it is large enough, else a new one."""
        with self._lock:
            idle = self._idle.pop(pinned, None)
        if idle is None or idle.numel() < num_bytes:
            del idle  # freed first, so that the two never exist together
            idle = allocate(num_bytes, pinned=pinned)
        if pinned:
            self._pinned.add(idle.data_ptr())
        return idle

    def give_back(self, buffer: torch.Tensor) -> None:
        """Keep the whole buffer of a view for the next save. Of two idle buffers, keep the larger."""
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
        """Empty the pool. In a forked child, a thread that exists only in the parent may hold the old lock."""
        self._lock = threading.Lock()
        self._idle: dict[bool, torch.Tensor] = {}
        # The addresses of pinned buffers that are in use.
        self._pinned: set[int] = set()


POOL = Pool()
"""The pool of this process: its saves run one after another, and each needs the same memory."""
