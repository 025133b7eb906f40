"""Reading ``integrity.json``: Megatron-Core lists the SHA-256 of every file of a checkpoint there, if a job asks for it."""

from __future__ import annotations

import json

from ...plugins import Storage
from ...plugins.errors import CorruptError, UnsupportedError

INTEGRITY_KEY = "integrity.json"
MAX_BYTES = 64 << 20


def read_integrity(storage: Storage) -> dict[str, bytes]:
    """Return the SHA-256 of each file by its key; an empty dict if Megatron wrote no list.

    Raises
    ------
    CorruptError
        The list is damaged.
    UnsupportedError
        The digests are not SHA-256.
    """
    if storage.size(INTEGRITY_KEY) is None:
        return {}
    where = f"{storage.url}: {INTEGRITY_KEY}"
    try:
        listed = json.loads(bytes(storage.read(INTEGRITY_KEY, limit=MAX_BYTES)))
        algorithm, files = listed["algorithm"], listed["files"]
        digests = {str(key): bytes.fromhex(digest) for key, digest in files.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{where}: is no list of digests ({error}); use another checkpoint") from None
    if algorithm != "sha256":
        raise UnsupportedError(f"{where}: has digests of {algorithm!r:.40}; only sha256 is known")
    return digests
