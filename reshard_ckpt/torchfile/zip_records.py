"""Reading and writing files of ``torch.save`` as zips: uncompressed records, one after the other.

1. *Reading*: the directory at the end of the file has the place of each record's header; the record's bytes follow the header.
   Checksums are not checked: torch does not check them, and does not always write them
   (``torch.serialization.set_crc32_options``).
2. *Writing*: front to back, as a stream. The sizes are known before; each checksum is written behind its record.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, cast

from ..errors import CorruptError, UnsupportedError
from ..storage.protocol import Storage

ZIP_MAGIC = b"PK\x03\x04"
LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of files that torch before 1.6 wrote, or a newer one with ``_use_new_zipfile_serialization=False``."""

HEAD_BYTES = 16
ALIGNMENT = 64
MAX_PICKLE_BYTES = 1 << 30
"""The most bytes of the pickle of one file: a thousand times the size that a large model needs."""

_LOCAL_HEADER_BYTES, _ZIP64_BYTES = 30, 20
_ENCRYPTED = 1

_BAD_ZIP = (
    zipfile.BadZipFile, zlib.error, struct.error, ValueError, NotImplementedError, EOFError, OSError, RuntimeError, OverflowError,
)  # fmt: skip
"""The errors that `zipfile` raises: others besides its own occur if a damaged directory makes it seek to a wrong place."""


NewRecord = tuple[str, int, Iterable[bytes | memoryview]]
"""The name of a record to write, its size in bytes, and its bytes in parts."""


class StoredFile(io.RawIOBase):
    """A file of any store, with the interface of a Python file that is open for reading."""

    def __init__(self, storage: Storage, key: str, size: int) -> None:
        self._storage, self._key, self._size, self._at = storage, key, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + (0, self._at, self._size)[whence]
        if at < 0:
            raise OSError(f"seeks to byte {at}")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        num = max(min(len(buffer), self._size - self._at), 0)
        self._storage.read_into(self._key, self._at, [memoryview(buffer)[:num]])
        self._at += num
        return num


class ZipRecords:
    """The records of a zip, by their names below the one folder that all of them are in.

    Raises
    ------
    CorruptError
        The file is not a whole zip.
    UnsupportedError
        It has the format before torch 1.6, holds code, or has a compressed record.
    """

    def __init__(self, file: BinaryIO | io.RawIOBase, name: str) -> None:
        self._file, self._name = file, name
        try:
            self.num_bytes = file.seek(0, io.SEEK_END)
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
        except _BAD_ZIP as error:
            file.seek(0)
            refuse_legacy(file.read(HEAD_BYTES) or b"", name)
            raise self._damaged(str(error)) from error
        if any(member.filename.endswith("/constants.pkl") for member in members):
            raise UnsupportedError(f"{name}: is a TorchScript archive, which is code; save module.state_dict() of torch.jit.load")
        packed = next((one for one in members if one.compress_type != zipfile.ZIP_STORED or one.flag_bits & _ENCRYPTED), None)
        if packed is not None:
            raise UnsupportedError(f"{name}: its {packed.filename!r:.80} is compressed; load and save it again with torch")
        inside = [member for member in members if "/" in member.filename]
        self._members = {member.filename.partition("/")[2]: member for member in inside}
        if len(self._members) < len(inside):  # which record torch would take is unknown
            raise self._damaged("several records have one name")
        self._begins: dict[str, int] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._members

    def size(self, key: str) -> int:
        """Return the number of bytes of a record."""
        return self._members[key].file_size

    def storages(self) -> list[str]:
        """List the records that hold storages."""
        return [key for key in self._members if key.startswith("data/") and key != "data/"]

    def begin(self, key: str) -> int:
        """Return the position of a record's bytes in the file: behind its header, whose length only the header itself tells."""
        if key not in self._begins:
            member = self._members[key]
            header = self._read(member.header_offset, _LOCAL_HEADER_BYTES)
            # Bytes 26 and 28 of a local header: the lengths of the name and of the extra field, which follow the header.
            name_bytes, extra_bytes = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
            begin = member.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
            if not header.startswith(ZIP_MAGIC) or begin + member.file_size > self.num_bytes:
                raise self._damaged(f"its record {member.filename!r:.80} is not where the directory says")
            self._begins[key] = begin
        return self._begins[key]

    def read(self, key: str) -> bytes:
        """Read all bytes of a record."""
        return self._read(self.begin(key), self.size(key))

    def read_pickle(self, byteorder: str = "little") -> bytes:
        """Read the pickle that describes the saved object.

        Raises
        ------
        UnsupportedError
            There is none, or the file was written on a machine of another byte order than `byteorder`.
        """
        if "data.pkl" not in self or self.size("data.pkl") > MAX_PICKLE_BYTES:
            raise UnsupportedError(f"{self._name}: is a zip, but not one that torch.save wrote; pass a checkpoint")
        if "byteorder" in self and self.size("byteorder") < 16 and self.read("byteorder") not in (b"", byteorder.encode()):
            raise UnsupportedError(
                f"{self._name}: was written on a machine of another byte order; load and save it again with torch there"
            )
        return self.read("data.pkl")

    def _read(self, at: int, size: int) -> bytes:
        try:
            self._file.seek(at)
            data = self._file.read(size) or b""
        except _BAD_ZIP as error:
            raise self._damaged(str(error)) from error
        if len(data) < size:
            raise self._damaged("it is cut")
        return data

    def _damaged(self, why: str) -> CorruptError:
        return CorruptError(f"{self._name}: is no whole zip, as torch.save writes it ({why:.200}); use another copy")


def refuse_legacy(head: bytes, name: str) -> None:
    """Refuse a file whose first bytes `head` are those of torch's old format."""
    if head.startswith(LEGACY_MAGIC):
        raise UnsupportedError(
            f"{name}: is of torch's old format, without places of its tensors; write it anew: torch.save(torch.load(path), path)"
        )


class _Output:
    """The output file for `zipfile`: it can be written to, but not seek, so `zipfile` puts checksums behind the records."""

    def __init__(self, write: Callable[[bytes | memoryview], object]) -> None:
        self._write, self._size = write, 0

    def write(self, data: bytes | memoryview) -> int:
        self._write(data)
        self._size += len(data)
        return len(data)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Do nothing, because nothing is buffered."""


def write_records(write: Callable[[bytes | memoryview], object], records: Iterable[NewRecord]) -> int:
    """Write a zip as ``torch.save`` does, by calls of `write`; return the number of bytes written."""
    out = _Output(write)
    with zipfile.ZipFile(cast(Any, out), "w", zipfile.ZIP_STORED) as archive:
        for name, size, parts in records:
            member = zipfile.ZipInfo(f"archive/{name}")
            member.file_size = size
            is_large = size > zipfile.ZIP64_LIMIT // 2
            # torch maps storages into memory, so their bytes must begin aligned. The extra field "FB" of the header pads them:
            # two bytes of name, two of length, then the padding. zipfile adds its own extra field if the record is large.
            head = out.tell() + _LOCAL_HEADER_BYTES + len(member.filename) + 4 + _ZIP64_BYTES * is_large
            padding = -head % ALIGNMENT
            member.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
            with archive.open(member, "w", force_zip64=is_large) as record:
                for part in parts:
                    record.write(part)
    return out.tell()
