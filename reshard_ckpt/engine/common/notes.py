"""Notes: small documents beside the checkpoints of a run, such as its lineage, verified and bounded in size.

A note is 8 bytes of magic, the XXH3-128 of the body, and the body: msgpack of the note's version and of its value. The digest is
checked before the body is decoded. A hostile file can hold only a value of plain types, which `Note.parse` checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgpack

from ...errors import CorruptError
from ...format.checksums import digest128
from ...storage import MissingKey, Storage

_MAGIC = b"RSHNOTE1"
_HEAD = len(_MAGIC) + 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Note(Generic[T]):
    """A kind of note.

    Attributes
    ----------
    key
        The key of its file, below the root of a run.
    version
        Version of the encoded value; a reader refuses any other.
    max_bytes
        Size of the largest file that is read.
    parse
        Makes the value from the plain types of msgpack. It may raise any error for a body that does not fit.
    cure
        For messages: the next step if the note is damaged, and its consequence.
    """

    key: str
    version: int
    max_bytes: int
    parse: Callable[[Any], T]
    cure: str

    def encoded(self, value: Any) -> bytes:
        """Encode a value of plain types."""
        body: bytes = msgpack.packb([self.version, value])
        return _MAGIC + digest128(body) + body

    def decoded(self, data: bytes, *, where: str) -> T:
        """Decode and verify a note.

        Raises
        ------
        CorruptError
            The note is damaged, or of another version. The message names the file and the next step.
        """
        try:
            if len(data) > self.max_bytes:
                raise ValueError(f"{len(data):,} bytes, above the limit of {self.max_bytes:,}")
            body = data[_HEAD:]
            if data[: len(_MAGIC)] != _MAGIC or digest128(body) != data[len(_MAGIC) : _HEAD]:
                raise ValueError("its checksum does not fit")
            version, value = msgpack.unpackb(body)
            if version != self.version:
                raise ValueError(f"version {version!r:.40}, and this release reads {self.version}")
            return self.parse(value)
        except Exception as error:  # `parse` may raise any error for a body that no writer has made
            raise CorruptError(f"{where}: this note cannot be read ({error!s:.200}); {self.cure}") from error

    def read(self, storage: Storage) -> T | None:
        """Read the note from the root of a run; None if the file does not exist.

        Raises
        ------
        CorruptError
            As for `decoded`.
        """
        where = f"{storage.url}/{self.key}"
        try:
            data = storage.read(self.key, self.max_bytes)
        except MissingKey:
            return None
        except CorruptError as error:
            raise CorruptError(f"{where}: this note cannot be read ({error}); {self.cure}") from error
        return self.decoded(data, where=where)

    def keep(self, storage: Storage, value: Any) -> None:
        """Publish the note atomically."""
        storage.publish(self.key, self.encoded(value))
