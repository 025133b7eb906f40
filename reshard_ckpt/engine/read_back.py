"""Does a file hold what was written to it? It is read back through the store, block by block, behind the writer.

A thread of its own compares each block with the digest that was made of the bytes on their way out. Where the store does not
show a file before it is finished, all of it is read then. A file system may answer from its cache: what is proved is that the
right bytes were handed over at the right places, not that the medium will return them years later.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from ..errors import CheckpointError, CorruptError
from ..format.checksums import BLOCK_BYTES, block_digest
from ..storage.protocol import Storage

STEP_BYTES = 4 << 20
"""So often a file that is being written is read back."""

READ_BYTES = 512 << 10
"""Bytes read back and hashed at once: few enough to be in the processor's cache for the second of the two."""

MAX_WAITING = 16
"""Steps that may be waiting before the writer waits for them: what was just written is read back while it is in the cache."""


class ReadBack:
    """Reads files back in a thread; errors are raised by whoever calls next, and by leaving the ``with`` block."""

    def __init__(self, storage: Storage, *, enabled: bool = True) -> None:
        self._storage, self.enabled = storage, enabled
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="reshard-ckpt-read-back")
        self._room = threading.BoundedSemaphore(MAX_WAITING)
        self._waiting: list[Future[None]] = []
        self._buffer = bytearray(READ_BYTES)
        self._proved: dict[str, int] = {}

    def reach(self, key: str, digests: Sequence[int], size: int, *, finished: bool) -> None:
        """Prove the first `size` bytes of a file, as far as that has not been done; `digests` are those of its blocks."""
        if not self.enabled:
            return
        self._collect()
        self._room.acquire()
        self._waiting.append(self._pool.submit(self._prove, key, digests, size, finished))

    def _prove(self, key: str, digests: Sequence[int], size: int, finished: bool) -> None:
        try:
            low = self._proved.get(key, 0)
            while low < size:
                low = self._step(key, digests, low, size)
                self._proved[key] = low
        except _Differs:
            raise
        except CheckpointError:
            if finished:  # before that, a store need not show what was written
                raise
        finally:
            self._room.release()

    def _step(self, key: str, digests: Sequence[int], low: int, size: int) -> int:
        high = min(low + READ_BYTES, size)
        data = memoryview(self._buffer)[: high - low]
        self._storage.read_into(key, low, [data])
        for at in range(low, high, BLOCK_BYTES):
            block = data[at - low : at - low + BLOCK_BYTES]
            if block_digest(block) != digests[at // BLOCK_BYTES]:
                raise _Differs(
                    f"{self._storage.url}: {key}: bytes {at}:{at + len(block)} read back differ from what was written; check the "
                    "disk and the memory of this machine, then run again"
                )
        return high

    def _collect(self) -> None:
        """Raise what failed."""
        while self._waiting and self._waiting[0].done():
            self._waiting.pop(0).result()

    def __enter__(self) -> ReadBack:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            for future in self._waiting:
                future.result()


class _Differs(CorruptError):
    """Other bytes came back."""
