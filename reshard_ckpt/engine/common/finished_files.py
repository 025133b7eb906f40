"""A check that a file from an earlier, killed attempt is whole, so that the next attempt keeps it.

The digests of a file are kept once it is durable; they prove that its bytes have not changed since. The name of the folder is the
identity of the request (`identity.py`); it proves that the same bytes are wanted now.
"""

from __future__ import annotations

from ...errors import CorruptError
from ...format.checksums import BLOCK_BYTES, decode_digests, digests_file_bytes, wrong_blocks
from ...storage.protocol import MissingKey, Storage, read_parts, read_range

_STEP_BYTES = 32 * BLOCK_BYTES
"""Bytes that are read and hashed at once."""


def finished_digests(
    storage: Storage, key: str, num_bytes: int, header: bytes, digests_storage: Storage, digests_key: str
) -> bytes | None:
    """Return the bytes of the digests file if an earlier attempt finished the file `key`, else None.

    A file is finished if it has this size, begins with `header`, and each of its blocks has its recorded digest.
    """
    if storage.size(key) != num_bytes:
        return None
    try:
        data = digests_storage.read(digests_key, digests_file_bytes(num_bytes))
        digests = decode_digests(data, num_bytes, name=digests_key)
        if digests.block_bytes != BLOCK_BYTES or read_range(storage, key, 0, len(header)) != header:
            return None
        parts = read_parts(storage, key, num_bytes, _STEP_BYTES)
        return None if any(wrong_blocks([part], low, digests.values, BLOCK_BYTES) for low, part in parts) else data
    except (MissingKey, CorruptError):
        return None
