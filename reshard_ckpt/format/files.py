"""The keys of the files of a checkpoint, the ids and names in them, and the manifest.

Keys are relative to the checkpoint; ``docs/format.md`` is the specification.

The *manifest* has the SHA-256 of all files, in the form of ``sha256sum -c``. Each line has 64 hexadecimal digits, two spaces, and
the path of a file below the checkpoint's folder. Block checksums find accidents. To find forgery too, sign this one small text
with a tool of your own; check the signature first, and then the files.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping

from ..errors import CorruptError

CATALOG_KEY = "catalog.msgpack"
"""The key of the catalog."""
RUN_LOCK_KEY = ".reshard_ckpt.lock"
"""The key of the lock in the root of a run; the job that manages the run holds it."""

SAVE_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{8}(?:[0-9a-f]{24})?")
"""A time and digits: 8 random ones, or 32 that an offline reshard computes from its request."""


def timeline_key(save_id: str) -> str:
    """Return the key of the timeline of a save."""
    return f"{save_id}/timeline.msgpack"


def new_save_id() -> str:
    """Make the id of one attempt to save: the time, for people, and random digits, to be unique."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"


def file_key(save_id: str, rank: int, part: int) -> str:
    """Return the key of a rank's shard file.

    >>> file_key("s1", 3, 0)
    's1/rank00003-0.safetensors'
    """
    return f"{save_id}/rank{rank:05d}-{part}.safetensors"


def digests_key(key: str) -> str:
    """Return the key of the digests of a shard file."""
    return key.removesuffix(".safetensors") + ".digests"


def manifest_key(save_id: str) -> str:
    """Return the key of the manifest of a save. It lies beside the files of that save, so that it belongs to no other catalog.

    >>> manifest_key("20260102T030405Z-0123abcd")
    '20260102T030405Z-0123abcd/manifest.sha256'
    """
    return f"{save_id}/manifest.sha256"


MAX_MANIFEST_BYTES = 1 << 30
"""The largest manifest that is read: some ten million files."""

# A star before the path says "binary", which makes no difference.
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def encode_manifest(digests: Mapping[str, bytes]) -> bytes:
    """Encode a manifest, sorted by path."""
    return "".join(f"{digests[key].hex()}  {key}\n" for key in sorted(digests)).encode()


def decode_manifest(data: bytes, *, where: str) -> dict[str, bytes]:
    """Decode a manifest; return the digests by path.

    Raises
    ------
    CorruptError
        A line has another form, or a path is listed twice.
    """
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError:
        raise CorruptError(f"{where}: is no text, so no manifest; use another checkpoint") from None
    digests: dict[str, bytes] = {}
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None or match[2] in digests:
            what = "lists a file twice" if match else "is no '<SHA-256>  <path>'"
            raise CorruptError(f"{where}: line {number} {what}: {line[:200]!r}; use another checkpoint")
        digests[match[2]] = bytes.fromhex(match[1])
    return digests
