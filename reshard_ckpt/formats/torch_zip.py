"""Where the bytes of each tensor lie in a file that ``torch.save`` wrote.

Such a file is a zip of uncompressed records: a pickle that describes the tensors, and a record for each storage.

1. Read the place and the size of each record from the zip's directory (`read_records`).
2. Load the pickle with ``torch.load`` over a memory map, with tensors and plain values alone allowed (``weights_only``). So no
   storage is read, and each of them has an address in the map.
3. Find the address of the map by matching storages with records, and with it the place of every tensor (`MappedFile`). Each
   storage must be exactly one record.
"""

from __future__ import annotations

import mmap
import struct
import sys
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointError, CorruptError, UnsupportedError
from .hash_collisions import refuse_hash_collisions

ZIP_MAGIC = b"PK\x03\x04"
LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""How files begin that ``torch.save`` wrote before torch 1.6, or writes with ``_use_new_zipfile_serialization=False``."""

HEAD_BYTES = 16

_LOCAL_HEADER_BYTES = 30
_ENCRYPTED = 1

_BAD_ZIP = (ValueError, NotImplementedError, EOFError, OSError, RuntimeError, OverflowError)
"""What `zipfile` raises besides its own error: it seeks to where a damaged directory sends it."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record of the zip that holds a storage: its first byte in the file, and its number of bytes."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A file that is mapped into memory from address `base` on."""

    base: int
    size: int

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Return the byte of the file at which a tensor's memory begins; None where the memory is not of this file."""
        at = tensor.data_ptr() - self.base
        return at if 0 <= at < self.size else None


def load_archive(path: str, size: int) -> tuple[Any, MappedFile]:
    """Load a torch file, with tensors over a memory map of it.

    Raises
    ------
    CorruptError
        It is damaged.
    UnsupportedError
        It holds more than tensors and plain values, or is of another kind of torch's files.
    """
    records = read_records(path)
    storages: list[tuple[int, int]] = []

    def keep(storage: Any, location: str) -> Any:
        if storage.nbytes():
            storages.append((storage.data_ptr(), storage.nbytes()))
        return storage  # on the CPU, wherever it was when it was saved

    refuse_hash_collisions(path, path)
    try:
        loaded = torch.load(path, map_location=keep, mmap=True, weights_only=True)
    except Exception as error:  # what a damaged pickle raises may be anything
        raise _load_error(path, error) from error
    return loaded, MappedFile(_mapping_base(records, storages, path), size)


def _load_error(path: str, error: Exception) -> CheckpointError:
    """Make the error for a file that torch does not load."""
    try:
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:
        foreign = []
    if foreign:
        return UnsupportedError(
            f"{path}: holds {', '.join(foreign[:3])}{', …' if len(foreign) > 3 else ''}, not only tensors and plain values, and "
            "loading those could run any code; save it again without them, or allow them with "
            "torch.serialization.add_safe_globals if you trust the file"
        )
    return CorruptError(
        f"{path}: torch cannot load it ({str(error).splitlines()[0][:200] if str(error) else error!r}); use another copy"
    )


def read_records(path: str) -> list[Record]:
    """List the places of all storages, in order, from the zip's own directory."""
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            members = archive.infolist()
            _check_kind(archive, members, path)
            return sorted((_record(member, file, path) for member in members if _is_storage(member)), key=lambda r: r.offset)
    except (*_BAD_ZIP, zipfile.BadZipFile, zlib.error, struct.error) as error:
        raise CorruptError(f"{path}: is no whole zip, as torch.save writes it ({error}); use another copy") from error


def _is_storage(member: zipfile.ZipInfo) -> bool:
    folder, _, name = member.filename.rpartition("/")
    return (folder == "data" or folder.endswith("/data")) and bool(name) and member.file_size > 0


def _check_kind(archive: zipfile.ZipFile, members: Sequence[zipfile.ZipInfo], path: str) -> None:
    """Check that torch.save wrote the file, on a machine with the byte order of this one."""
    by_end = {member.filename.rpartition("/")[2]: member for member in members}
    if "constants.pkl" in by_end:
        raise UnsupportedError(
            f"{path}: is a TorchScript archive, which is code; save module.state_dict() of torch.jit.load(path)"
        )
    if "data.pkl" not in by_end:
        raise UnsupportedError(f"{path}: is a zip, but not one that torch.save wrote; pass a checkpoint")
    order = by_end.get("byteorder")
    if order is not None and order.file_size < 16 and archive.read(order) not in (b"", sys.byteorder.encode()):
        raise UnsupportedError(f"{path}: was written on a machine of another byte order; load and save it again with torch")


def _record(member: zipfile.ZipInfo, file: Any, path: str) -> Record:
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & _ENCRYPTED:
        raise UnsupportedError(f"{path}: its record {member.filename!r:.80} is compressed; load and save it again with torch")
    file.seek(member.header_offset)
    header = file.read(_LOCAL_HEADER_BYTES)
    if len(header) < _LOCAL_HEADER_BYTES or header[:4] != ZIP_MAGIC:
        raise CorruptError(f"{path}: its record {member.filename!r:.80} is not where the directory says; use another copy")
    # The name and the extra field may be longer here than in the directory: the padding that aligns the data is in the latter.
    name_bytes, extra_bytes = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    return Record(member.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes, member.file_size)


def _mapping_base(records: Sequence[Record], storages: Sequence[tuple[int, int]], path: str) -> int:
    """Find the address at which the file is mapped: the one for which every storage is one of the records."""
    found = sorted(set(storages))
    if not found:
        return 0
    known = {(record.offset, record.size) for record in records}
    first, first_size = found[0]
    # A file is mapped from the beginning of a page; as all storages are in the file, the first cannot be one of the last records.
    candidates = records[: len(records) - len(found) + 1]
    bases = {
        first - record.offset
        for record in candidates
        if record.size == first_size and (first - record.offset) % mmap.PAGESIZE == 0
    }
    consistent = [base for base in bases if all((at - base, size) in known for at, size in found)]
    if len(consistent) != 1:
        what = "are not its records" if not consistent else "may be several of its records"
        raise CorruptError(f"{path}: the storages that it describes {what}; load and save it again with torch")
    return consistent[0]


class MappedFiles:
    """Several mapped files; finds which of them a tensor lies in."""

    def __init__(self, mappings: Sequence[MappedFile]) -> None:
        self._order = sorted(range(len(mappings)), key=lambda i: mappings[i].base)
        self._bases = [mappings[i].base for i in self._order]
        self._mappings = mappings

    def find(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return the number of the file and the byte in it; None where the tensor lies in none of them."""
        at = bisect_right(self._bases, tensor.data_ptr()) - 1
        if at < 0:
            return None
        offset = self._mappings[self._order[at]].offset_of(tensor)
        return None if offset is None else (self._order[at], offset)
