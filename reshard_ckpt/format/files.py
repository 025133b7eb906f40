"""The names (keys) of all files of a checkpoint, and the encoding of two of them: block checksums and the manifest.

Keys are relative to the checkpoint; ``docs/format.md`` is the specification.

Block checksums verify any bytes of a shard file without reading all of it:

1. Cut the file into blocks of `block_bytes` from byte 0 on; the last one may be shorter. Each block has an XXH3-64.
2. The digests file, beside the shard file, has a header with the sizes of file and block, and then the digests of all blocks.
3. The catalog, which has checksums of its own, keeps one XXH3-128 of the digests file.

A reader of a few bytes needs only the blocks that hold them: it hashes each, and compares with `Digests.values` (`wrong_blocks`).
XXH3 finds damage; it does not keep out somebody who forges both the data and the catalog.

The *manifest* has the SHA-256 of all files, in the form of ``sha256sum -c``: each line has 64 hexadecimal digits, two spaces, and
the path of a file below the checkpoint's folder. To find forgery, sign this one small text with a tool of your own; check the
signature first, and then the files.
"""

from __future__ import annotations

import re
import secrets
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..errors import CorruptError

if TYPE_CHECKING:
    from typing_extensions import Buffer  # from Python 3.12 on, it is in collections.abc

CATALOG_KEY = "catalog.msgpack"
"""The key of the catalog."""
RUN_LOCK_KEY = ".reshard_ckpt.lock"
"""The key of the lock in the root of a run; the job that manages the run holds it."""

CONVERT_LOCK = "convert.lock"
"""Name of the lock in an object store that a conversion holds as a lease; it stays if the conversion was killed."""

RESHARD_LOCK = "reshard.lock"
"""Name of the lock of an offline reshard, in the folder of the files that it writes."""

SAVE_TIME = "%Y%m%dT%H%M%SZ"
"""The format, for ``strftime``, of the time in the id of a save, UTC. Sorted as texts, such times are in order."""

SAVE_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{8}(?:[0-9a-f]{24})?")
"""Matches the id of a save: a time, and 8 random digits, or 32 digits that an offline reshard computes from its request."""

EXPORT = "safetensors"
"""The name of the folder, below a checkpoint, that holds its export for Hugging Face's libraries."""


def export_note_key(save_id: str) -> str:
    """Return the key of the note in an export that says which save it was made from."""
    return f"{EXPORT}/{save_id}.exported"


def exported_saves(keys: Iterable[str]) -> set[str]:
    """Return the ids of the saves that an export was made from, found in the keys of its files.

    >>> exported_saves(["safetensors/model.safetensors", "safetensors/20260101T000000Z-0123abcd.exported"])
    {'20260101T000000Z-0123abcd'}
    """
    return {found[1] for key in keys if (found := _EXPORT_NOTE.fullmatch(key))}


_EXPORT_NOTE = re.compile(rf"{EXPORT}/({SAVE_ID.pattern})\.exported")


def timeline_key(save_id: str) -> str:
    """Return the key of the file with the timeline of a save."""
    return f"{save_id}/timeline.msgpack"


def new_save_id() -> str:
    """Make the id of a new attempt to save: the time, for people, and random digits, so that it is unique."""
    return f"{time.strftime(SAVE_TIME, time.gmtime())}-{secrets.token_hex(4)}"


def file_key(save_id: str, rank: int, part: int, *, is_packed: bool = False) -> str:
    """Return the key of a rank's shard file. A file with packed rows is not a safetensors file.

    >>> file_key("s1", 3, 0), file_key("s1", 3, 0, is_packed=True)
    ('s1/rank00003-0.safetensors', 's1/rank00003-0.packed')
    """
    return f"{save_id}/rank{rank:05d}-{part}.{'packed' if is_packed else 'safetensors'}"


def digests_key(key: str) -> str:
    """Return the key of the digests file of a shard file."""
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
    """Encode a manifest, sorted by path, given the SHA-256 of each file by path."""
    return "".join(f"{digests[key].hex()}  {key}\n" for key in sorted(digests)).encode()


def decode_manifest(data: bytes, *, where: str) -> dict[str, bytes]:
    """Decode a manifest, and return the SHA-256 of each file by path.

    Raise `CorruptError` if it is not text, a line has another form, or a path is listed twice.
    """
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError:
        raise CorruptError(f"{where}: is not text, so not a manifest; use another checkpoint") from None
    digests: dict[str, bytes] = {}
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None or match[2] in digests:
            what = "lists a file twice" if match else "is not '<SHA-256>  <path>'"
            raise CorruptError(f"{where}: line {number} {what}: {line[:200]!r}; use another checkpoint")
        digests[match[2]] = bytes.fromhex(match[1])
    return digests


BLOCK_BYTES = 128 * 1024
"""Size of a block. It is small, so that a slice of a row is verified with few other bytes, and large enough that the digests are
1/16,384 of the data."""

ALLOWED_BLOCK_BYTES = (64 * 1024, 128 * 1024, 256 * 1024)
"""The block sizes that a reader accepts; a hostile file could ask for blocks of one byte, or of the whole file."""

_MAGIC = b"RSHDIGST"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQ")


class Digests(NamedTuple):
    """The XXH3-64 of each block of one shard file, in order."""

    block_bytes: int
    values: NDArray[np.uint64]


def num_blocks(file_size: int, block_bytes: int) -> int:
    """Compute how many blocks a file has.

    >>> num_blocks(131073, 131072)
    2
    """
    return -(-file_size // block_bytes)


def digests_file_bytes(file_size: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Compute the size of the digests file of a shard file of `file_size` bytes."""
    return _HEADER.size + 8 * num_blocks(file_size, block_bytes)


def digest128(data: Buffer) -> bytes:
    """Compute the XXH3-128 of `data`, 16 bytes in its canonical (big-endian) form.

    >>> digest128(b"").hex()
    '99aa06d3014798d86001c324468d497f'
    """
    return xxhash.xxh3_128_digest(data)


class BlockHasher:
    """Computes the digests of a shard file while it is written, in writes of any size.

    >>> hasher = BlockHasher()
    >>> hasher.update(b"x" * 200_000)
    >>> len(decode_digests(hasher.finish(), 200_000).values)
    2
    """

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._digests: list[int] = []
        self._open = xxhash.xxh3_64()
        self._open_bytes = 0

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the file that were hashed so far."""
        return len(self._digests) * self._block_bytes + self._open_bytes

    @property
    def values(self) -> Sequence[int]:
        """The digests of the blocks that are full so far."""
        return self._digests

    def update(self, data: Buffer) -> None:
        """Hash the next bytes of the file, given as any contiguous buffer."""
        view = memoryview(data)
        if view.nbytes == 0:  # the cast below refuses a shape with a zero
            return
        view = view.cast("B")
        taken = 0
        if self._open_bytes:  # a block is begun; it stays open only if it takes all of the view
            head = view[: self._block_bytes - self._open_bytes]
            taken = head.nbytes
            self._open.update(head)
            self._open_bytes += taken
            if self._open_bytes == self._block_bytes:
                self.close()
        whole = view.nbytes - (view.nbytes - taken) % self._block_bytes
        self._digests += [
            xxhash.xxh3_64_intdigest(view[at : at + self._block_bytes]) for at in range(taken, whole, self._block_bytes)
        ]
        if whole < view.nbytes:
            self._open.update(view[whole:])
            self._open_bytes += view.nbytes - whole

    def close(self) -> list[int]:
        """Return the digests of all blocks. A block that is not full ends with the bytes hashed so far."""
        if self._open_bytes:
            self._digests.append(self._open.intdigest())
            self._open.reset()
            self._open_bytes = 0
        return self._digests

    def finish(self) -> bytes:
        """End the last block, and return the encoded digests file of all bytes hashed so far."""
        size = self.num_bytes
        return encode_digests(self.close(), self._block_bytes, size)


def wrong_blocks(parts: Sequence[Buffer], low: int, values: Sequence[int] | NDArray[np.uint64], block_bytes: int) -> list[int]:
    """Hash blocks of a file, and return the byte offsets of those whose digest differs from the one in `values`.

    Parameters
    ----------
    values
        The expected digests of all blocks of the file.
    parts
        Bytes of the file from offset `low` on, end to end: whole blocks, except for the last block of the file.

    >>> hasher = BlockHasher(65536)
    >>> hasher.update(bytes(200_000))
    >>> wrong_blocks([bytes(65536), b"x" * 3392], 131072, hasher.close(), 65536)
    [196608]
    """
    first = low // block_bytes
    found = _digests(parts, block_bytes)
    wanted = values[first : first + len(found)]
    if isinstance(wanted, np.ndarray):
        wanted = wanted.tolist()
    if found == wanted:
        return []
    return [low + i * block_bytes for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]


def _digests(parts: Sequence[Buffer], block_bytes: int) -> list[int]:
    if len(parts) == 1:  # one buffer: nearly always
        view = memoryview(parts[0]).cast("B")
        return [xxhash.xxh3_64_intdigest(view[at : at + block_bytes]) for at in range(0, len(view), block_bytes)]
    hasher = BlockHasher(block_bytes)
    for part in parts:
        hasher.update(part)
    return hasher.close()


def encode_digests(values: Iterable[int] | NDArray[np.uint64], block_bytes: int, file_size: int) -> bytes:
    """Encode a digests file: a header, then the digest of each block as a little-endian uint64."""
    column = values if isinstance(values, np.ndarray) else np.fromiter(values, np.uint64)
    return _HEADER.pack(_MAGIC, _VERSION, block_bytes, file_size) + column.astype("<u8").tobytes()


def decode_digests(data: bytes | memoryview, file_size: int, *, name: str = "digests file") -> Digests:
    """Read a digests file.

    Raise `CorruptError` if the digests file is damaged, or of a newer version, or belongs to a file of another size.

    Parameters
    ----------
    data
        The whole digests file. The caller compares it with its digest in the catalog.
    file_size
        The size of the shard file, which the header must have.
    name
        Its name in messages.
    """
    if len(data) < _HEADER.size:
        raise CorruptError(f"{name}: {len(data)} bytes, less than a header of {_HEADER.size}; use another checkpoint")
    magic, version, block_bytes, size = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise CorruptError(f"{name}: begins with {magic!r}, not with {_MAGIC!r}: no digests file; use another checkpoint")
    if version != _VERSION:
        raise CorruptError(
            f"{name}: version {version}, written by a newer version than this, which reads {_VERSION}; upgrade reshard_ckpt"
        )
    if block_bytes not in ALLOWED_BLOCK_BYTES:
        raise CorruptError(f"{name}: blocks of {block_bytes} bytes, not one of {ALLOWED_BLOCK_BYTES}; use another checkpoint")
    if size != file_size:
        raise CorruptError(f"{name}: describes a file of {size} bytes, but it has {file_size}; use another checkpoint")
    if len(data) != digests_file_bytes(size, block_bytes):
        wanted = digests_file_bytes(size, block_bytes)
        raise CorruptError(f"{name}: {len(data)} bytes, but {size} bytes of data need {wanted}; use another checkpoint")
    return Digests(block_bytes, np.frombuffer(data, "<u8", offset=_HEADER.size).astype(np.uint64, copy=False))
