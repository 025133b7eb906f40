"""Which files had an attempt finished that was killed? Those beside whose digests every block of them can be proved.

The digests of a file are noted once the file is durable, in a folder of their own. They prove that the file holds what was
written then; that it is what is to be written now, whoever passes the notes must know.
"""

from __future__ import annotations

from ..errors import CorruptError
from ..format.checksums import BlockHasher, Digests, decode_digests, digests_file_bytes, wrong_blocks
from ..storage import MissingKey, Storage

_STEP_BLOCKS = 32


def note_finished(notes: Storage, key: str, hasher: BlockHasher) -> None:
    """Keep the digests of a file that is durable."""
    notes.publish(_note(key), hasher.finish())


def is_finished(storage: Storage, notes: Storage, key: str, num_bytes: int, begin: bytes) -> bool:
    """Whether a file is there, whole: of this size, beginning so, every block as it was when its digests were noted."""
    if storage.size(key) != num_bytes:
        return False
    try:
        digests = decode_digests(notes.read(_note(key), digests_file_bytes(num_bytes)), num_bytes, name=_note(key))
        found = memoryview(bytearray(len(begin)))
        storage.read_into(key, 0, [found])
        return bytes(found) == begin and _agree(storage, key, num_bytes, digests)
    except (MissingKey, CorruptError):
        return False


def _note(key: str) -> str:
    return f"{key}.digests"


def _agree(storage: Storage, key: str, num_bytes: int, digests: Digests) -> bool:
    each = digests.block_bytes
    buffer = memoryview(bytearray(min(each * _STEP_BLOCKS, num_bytes)))
    for low in range(0, num_bytes, each * _STEP_BLOCKS):
        data = buffer[: num_bytes - low]
        storage.read_into(key, low, [data])
        if wrong_blocks([data], low, digests.values, each):
            return False
    return True
