"""A check that a file from an earlier, killed attempt is whole, so that the next attempt keeps it.

The digests of a file are kept once it is durable. They show that the file still holds what was written then. That this is also
what is to be written now follows from the name of the folder, which is derived from the source and the options.
"""

from __future__ import annotations

from ...format.checksums import Digests, wrong_blocks
from ...storage.protocol import Storage, read_range

_STEP_BLOCKS = 32
"""Blocks that are read and hashed at once."""


def is_finished(storage: Storage, key: str, num_bytes: int, header: bytes, digests: Digests) -> bool:
    """Return whether a file of this size begins with `header` and every block of it has its recorded digest.

    Raises
    ------
    MissingKey
        There is no such file.
    """
    if read_range(storage, key, 0, len(header)) != header:
        return False
    step_bytes = digests.block_bytes * _STEP_BLOCKS
    buffer = memoryview(bytearray(min(step_bytes, num_bytes)))
    for low in range(0, num_bytes, step_bytes):
        data = buffer[: num_bytes - low]
        storage.read_into(key, low, [data])
        if wrong_blocks([data], low, digests.values, digests.block_bytes):
            return False
    return True
