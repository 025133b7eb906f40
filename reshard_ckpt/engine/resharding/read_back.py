"""Reading back: whether a file holds what was written to it. It is read through the store, just behind the writer.

What was written a moment ago is in the processor's cache, so this costs little more than a copy. What a store does not show
before a file is finished is read then. A file system may answer from its own cache: what is verified is that the right bytes were
handed over at the right places, not that the medium will return them years later.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...errors import CheckpointError, CorruptError
from ...format.checksums import BLOCK_BYTES, wrong_blocks
from ...storage.protocol import Storage

STEP_BYTES = 1 << 20
"""Bytes read back at once, a multiple of the block size."""


@dataclass(frozen=True, slots=True)
class WrittenBlocks:
    """Bytes `low` to `high` of a file, whole blocks but for its last, and the digests of all of its blocks."""

    key: str
    digests: Sequence[int]
    low: int
    high: int


class ReadBack:
    """Reads back what was written, in any number of threads."""

    def __init__(self, storage: Storage, *, enabled: bool) -> None:
        self._storage, self._enabled = storage, enabled
        self._local = threading.local()
        self._left: list[WrittenBlocks] = []

    def verify(self, parts: Iterable[WrittenBlocks]) -> None:
        """Verify these parts now, if the store shows them.

        Raises
        ------
        CorruptError
            Other bytes came back.
        """
        for part in parts if self._enabled else ():
            try:
                self._verify(part)
            except _Differs:
                raise
            except CheckpointError:  # a store need not show a file before it is finished
                self._left.append(part)

    def verify_rest(self) -> None:
        """Verify what could not be read before; all files are finished."""
        while self._left:
            self._verify(self._left.pop())

    def _verify(self, part: WrittenBlocks) -> None:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = memoryview(bytearray(STEP_BYTES))
        for low in range(part.low, part.high, STEP_BYTES):
            data = self._local.buffer[: min(STEP_BYTES, part.high - low)]
            self._storage.read_into(part.key, low, [data])
            for wrong in wrong_blocks([data], low, part.digests, BLOCK_BYTES):
                raise _Differs(
                    f"{self._storage.url}: {part.key}: bytes {wrong}:{min(wrong + BLOCK_BYTES, part.high)} read back differ from "
                    "what was written; check the disk and the memory of this machine, then run again"
                )


class _Differs(CorruptError):
    """Other bytes came back."""
