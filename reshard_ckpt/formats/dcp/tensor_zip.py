"""Writing a tensor as ``torch.save`` does, but as a stream: a zip of stored members whose bytes need not be in memory.

All sizes are known beforehand. Only the checksums are not, and those stand behind the members. So one pass over a tensor is
enough.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from zlib import crc32

import torch

from ...core.catalog.specs import Ints, row_major_strides
from .heads import STORAGE_DTYPES
from .pickle_writer import FunctionCall, Global, PersistentId, pickled

ALIGNMENT = 64

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_DESCRIPTOR = struct.Struct("<4sIII")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_STREAMED = 1 << 3

_STORAGE_NAMES = {dtype: f"{name}Storage" for name, dtype in STORAGE_DTYPES.items()}


Write = Callable[[bytes | memoryview], None]


@dataclass(frozen=True, slots=True)
class _Member:
    name: bytes
    at: int
    size: int
    crc: int


def tensor_pickle(dtype: torch.dtype, shape: Ints) -> bytes:
    """Return the pickle of a contiguous tensor whose storage is member ``data/0``."""
    return pickled(tensor_parts(dtype, shape, "0"))


def tensor_parts(dtype: torch.dtype, shape: Ints, key: str) -> FunctionCall:
    """Describe a contiguous tensor whose storage is member ``data/<key>``, as a part of a pickle."""
    typed, count = _STORAGE_NAMES.get(dtype), prod(shape)
    kind = Global("torch.storage", "UntypedStorage") if typed is None else Global("torch", typed)
    storage = PersistentId(("storage", kind, key, "cpu", count * dtype.itemsize if typed is None else count))
    hooks = FunctionCall(Global("collections", "OrderedDict"), ())
    view = (storage, 0, shape, row_major_strides(shape), False, hooks)
    if typed is not None:
        return FunctionCall(Global("torch._utils", "_rebuild_tensor_v2"), view)
    name = Global("torch", str(dtype).removeprefix("torch."))
    return FunctionCall(Global("torch._utils", "_rebuild_tensor_v3"), (*view, name))


class Archive:
    """A zip, written front to back through `write`; `size` is the number of bytes written so far."""

    def __init__(self, write: Write) -> None:
        self._write_out = write
        self._members: list[_Member] = []
        self.size = 0

    def _write(self, data: bytes | memoryview) -> None:
        self._write_out(data)
        self.size += len(data)

    def add(self, name: str, size: int, parts: Iterable[bytes | memoryview]) -> None:
        """Add a member of `size` bytes, which come in parts."""
        encoded, at = f"archive/{name}".encode(), self.size
        # The bytes begin aligned, as torch maps them into memory; the room before them is an extra field.
        room = -(at + _LOCAL.size + len(encoded) + 4) % ALIGNMENT
        extra = struct.pack("<2sH", b"FB", room) + b"Z" * room
        self._write(_LOCAL.pack(b"PK\x03\x04", 0, _STREAMED, 0, 0, 0, 0, 0, 0, len(encoded), len(extra)) + encoded + extra)
        crc = 0
        begin = self.size
        for part in parts:
            crc = crc32(part, crc)
            self._write(part)
        assert self.size - begin == size
        self._write(_DESCRIPTOR.pack(b"PK\x07\x08", crc, size, size))
        self._members.append(_Member(encoded, at, size, crc))

    def finish(self) -> None:
        """Write the directory."""
        begin = self.size
        for m in self._members:
            head = (b"PK\x01\x02", 0, 0, _STREAMED, 0, 0, 0, m.crc, m.size, m.size, len(m.name), 0, 0, 0, 0, 0, m.at)
            self._write(_CENTRAL.pack(*head) + m.name)
        num = len(self._members)
        self._write(_END.pack(b"PK\x05\x06", 0, 0, num, num, self.size - begin, begin, 0))


def write_tensor(
    write: Callable[[bytes | memoryview], None], dtype: torch.dtype, shape: Ints, parts: Iterable[memoryview]
) -> int:
    """Write a tensor whose bytes come in parts, as ``torch.save`` would; return the number of bytes written."""
    described = tensor_pickle(dtype, shape)
    archive = Archive(write)
    archive.add("data.pkl", len(described), [described])
    archive.add("byteorder", 6, [b"little"])
    archive.add("data/0", prod(shape) * dtype.itemsize, parts)
    archive.add("version", 2, [b"3\n"])
    archive.finish()
    return archive.size
