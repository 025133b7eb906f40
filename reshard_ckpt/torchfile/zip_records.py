"""Reading and writing files of ``torch.save`` as zips: uncompressed records, one after the other.

1. *Reading*: the directory at the end of the file has the place of each record's header; the record's bytes follow the header.
   Checksums are not checked: torch does not check them, and does not always write them
   (``torch.serialization.set_crc32_options``).
2. *Writing*: front to back, as a stream. The sizes are known before; each checksum is written behind its record.
"""

from __future__ import annotations

import errno
import io
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from ..errors import CorruptError, UnsupportedError
from ..storage.protocol import Storage

ZIP_MAGIC = b"PK\x03\x04"
LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of files that torch before 1.6 wrote, or a newer one with ``_use_new_zipfile_serialization=False``."""

HEAD_BYTES = 16
ALIGNMENT = 64
MAX_PICKLE_BYTES = 1 << 30
"""The largest pickle of one file in bytes: a thousand times the size that a large model needs."""

_LOCAL_HEADER_BYTES = 30
_ENCRYPTED, _SIZES_BEHIND = 1, 8
_UNIX = 3

_BAD_ZIP = (
    zipfile.BadZipFile, zlib.error, struct.error, ValueError, NotImplementedError, EOFError, OSError, RuntimeError, OverflowError,
)  # fmt: skip
"""The errors by which `zipfile` shows that a file is damaged; a damaged directory can also make it seek to a wrong place."""


def _raise_unless_damage(error: BaseException | None) -> None:
    """Raise an error of the system again, such as EIO of a disk, which does not say that the file is damaged.

    A seek to a wrong place fails by EINVAL, or by an error without a number.
    """
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
        raise error


class StoredFile(io.RawIOBase):
    """A file of a store that can be read like an opened Python file."""

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
        handled = sys.exc_info()[1]  # by the caller
        try:
            self.num_bytes = file.seek(0, io.SEEK_END)
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
        except _BAD_ZIP as error:
            _raise_unless_damage(error)
            if error.__context__ is not handled:  # `zipfile` turns errors of some reads into a `BadZipFile`
                _raise_unless_damage(error.__context__)
            file.seek(0)
            refuse_legacy(file.read(HEAD_BYTES) or b"", name)
            raise self._damaged(str(error)) from error
        if any(member.filename.endswith("/constants.pkl") for member in members):
            raise UnsupportedError(f"{name}: is a TorchScript archive, which is code; save module.state_dict() of torch.jit.load")
        packed = next((m for m in members if m.compress_type != zipfile.ZIP_STORED or m.flag_bits & _ENCRYPTED), None)
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
        """Return the number of bytes of the record `key`."""
        return self._members[key].file_size

    def crc(self, key: str) -> int:
        """Return the CRC-32 of a record, as the zip's directory has it; 0 if the writer computed none."""
        return self._members[key].CRC

    def storages(self) -> list[str]:
        """List the names of the records that hold storages of tensors."""
        return [key for key in self._members if key.startswith("data/") and key != "data/"]

    def begin(self, key: str) -> int:
        """Return the byte of the file at which the record `key` begins: behind its header, which alone tells its own length."""
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
        """Read all bytes of the record `key`."""
        return self._read(self.begin(key), self.size(key))

    def read_pickle(self, byteorder: str = "little") -> bytes:
        """Read the pickle that describes the saved object.

        Raise `UnsupportedError` if there is none, or the file was written on a machine of another byte order than `byteorder`.
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
            _raise_unless_damage(error)
            raise self._damaged(str(error)) from error
        if len(data) < size:
            raise self._damaged("it is cut")
        return data

    def _damaged(self, why: str) -> CorruptError:
        return CorruptError(f"{self._name}: is not a whole zip, as torch.save writes it ({why:.200}); use another copy")


def refuse_legacy(head: bytes, name: str) -> None:
    """Refuse a file whose first bytes `head` are those of torch's old format."""
    if head.startswith(LEGACY_MAGIC):
        raise UnsupportedError(
            f"{name}: is of torch's old format, without places of its tensors; write it anew: torch.save(torch.load(path), path)"
        )


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """A record of a zip that is written as a stream: its name, its size, and the byte at which its header begins.

    The sizes of a zip are known before its data, so several processes can write it.
    """

    name: str
    size: int
    at: int

    def info(self, crc: int = 0) -> zipfile.ZipInfo:
        """Return the record's entry in the zip's directory, given the CRC-32 of its data. The header is made from it, too."""
        found = zipfile.ZipInfo(f"archive/{self.name}")
        found.create_system, found.external_attr, found.flag_bits = _UNIX, 0o600 << 16, _SIZES_BEHIND
        found.file_size, found.compress_size, found.header_offset, found.CRC = self.size, self.size, self.at, crc
        # Pad the header so that the data begin aligned: torch maps storages into memory. The padding is an extra field "FB": two
        # bytes of name, two of length, then as many bytes as are needed.
        found.extra = b"FB\0\0"
        padding = -(self.at + len(found.FileHeader(self._is_large))) % ALIGNMENT
        found.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
        return found

    @property
    def head(self) -> bytes:
        """The bytes of the record's header. It has no checksum and sizes: they follow the data."""
        return self.info().FileHeader(self._is_large)

    def tail(self, crc: int) -> bytes:
        """Return the bytes behind the record's data: checksum and sizes, given the CRC-32 of the data."""
        return struct.pack("<4sLQQ" if self._is_large else "<4sLLL", b"PK\7\10", crc, self.size, self.size)

    @property
    def end(self) -> int:
        """The byte of the file at which the next record begins."""
        return self.at + len(self.head) + self.size + len(self.tail(0))

    @property
    def _is_large(self) -> bool:
        return self.size > zipfile.ZIP64_LIMIT // 2


def lay_out_records(sizes: Iterable[tuple[str, int]]) -> list[ZipRecord]:
    """Lay out zip records of these names and sizes one after the other."""
    records: list[ZipRecord] = []
    for name, size in sizes:
        records.append(ZipRecord(name, size, records[-1].end if records else 0))
    return records


def whole_record(record: ZipRecord, data: bytes) -> bytes:
    """Return a record of a zip as bytes: its header, its data, and the checksum behind them."""
    return b"".join((record.head, data, record.tail(zlib.crc32(data))))


def directory(records: Sequence[ZipRecord], crcs: Iterable[int]) -> bytes:
    """Return the last bytes of a zip: the directory of its records, with the CRC-32 of each."""
    end = _End(records[-1].end)
    with zipfile.ZipFile(end, "w") as archive:
        archive.filelist += (record.info(crc) for record, crc in zip(records, crcs, strict=True))
    return end.getvalue()


class _End(io.BytesIO):
    """A file for `zipfile` to write the end of a zip to; it begins at byte `begin` of the zip, and cannot seek, as a stream."""

    def __init__(self, begin: int) -> None:
        super().__init__()
        self._begin = begin

    def tell(self) -> int:
        return self._begin + super().tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        raise io.UnsupportedOperation("a stream")
