"""The manifest of a checkpoint: the SHA-256 of its files, in the form of ``sha256sum -c``.

Each line has 64 hexadecimal digits, two spaces, and the path of a file below the checkpoint's folder. Block checksums find
accidents. To find forgery too, sign this one small text with a tool of your own; check the signature first, and then the files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import CorruptError

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
