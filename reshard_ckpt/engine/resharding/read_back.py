"""Reading back: read blocks from the store soon after they were written, and compare them with their digests.

Bytes that were written a moment ago are still in the processor's cache, so reading them costs little more than a copy. Some
stores show a file only after it is finished; its blocks are read then. A file system may answer from its own cache. So this
proves that the right bytes were handed over at the right offsets, not that the disk will return them years later.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...errors import CheckpointError, CorruptError
from ...format.files import BLOCK_BYTES, wrong_blocks
from ...storage.protocol import Storage

STEP_BYTES = 1 << 20
"""Number of bytes that are read back at once, a multiple of the block size."""


class WrittenBlocks(NamedTuple):
    """A range of a file to read back: bytes `low` to `high`. It begins and ends at a block, or at the end of the file.

    `digests` are the digests of the file's blocks from byte `hashed` on.
    """

    key: str
    digests: Sequence[int]
    low: int
    high: int
    hashed: int = 0


class ReadBack:
    """Reads written blocks back and compares them with their digests; any number of threads may call it at once."""

    def __init__(self, storage: Storage, *, enabled: bool) -> None:
        self._storage, self._enabled = storage, enabled
        self._local = threading.local()
        self._left: list[WrittenBlocks] = []

    def verify(self, parts: Iterable[WrittenBlocks]) -> None:
        """Read and verify some ranges now; keep a range for `verify_rest` if the store cannot read it yet.

        Raises
        ------
        CorruptError
            A block that was read back differs from its digest.
        """
        for part in parts if self._enabled else ():
            try:
                self._verify(part)
            except _Differs:  # also a CheckpointError, but damage is never put off
                raise
            except CheckpointError:  # a store need not show a file before it is finished
                self._left.append(part)

    def verify_rest(self) -> None:
        """Verify the ranges that could not be read in `verify`. Call it once all files are finished."""
        while self._left:
            self._verify(self._left.pop())

    def _verify(self, part: WrittenBlocks) -> None:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = memoryview(bytearray(STEP_BYTES))
        for low in range(part.low, part.high, STEP_BYTES):
            data = self._local.buffer[: min(STEP_BYTES, part.high - low)]
            self._storage.read_into(part.key, low, [data])
            for wrong in wrong_blocks([data], low - part.hashed, part.digests, BLOCK_BYTES):
                at = wrong + part.hashed
                raise _Differs(
                    f"{self._storage.url}: {part.key}: bytes {at}:{min(at + BLOCK_BYTES, part.high)} read back differ from "
                    "what was written; check the disk and the memory of this machine, then run again"
                )


class _Differs(CorruptError):
    """Raised when a block that was read back differs from its digest."""
