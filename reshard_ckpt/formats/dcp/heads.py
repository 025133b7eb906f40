"""How a tensor lies in its chunk of a DCP file, read from the first bytes of the chunk alone.

A chunk is what ``torch.save`` made of its tensor: a zip whose members are stored uncompressed, one after the other. First comes a
pickle that describes how the tensor lies in its storage, then a few small members, then the storage. So the head is enough:

1. Walk over the members, from one local header to the next, up to the storage. Sizes are not in the headers, as the writer did
   not know them yet, but in a descriptor behind each member.
2. Read the pickle with stand-ins: dtype, size, strides, offset in the storage.
3. Chunks of equal shape and dtype have the same head, byte for byte, which is recognized and not parsed again.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod

import torch

from ...core.catalog.specs import Ints, is_row_major, row_major_strides
from ...core.words import a
from ...errors import CorruptError, UnsupportedError
from ...torchfile.pickle_reader import read_pickle
from ...torchfile.tensors import TENSOR_TABLE, PickledTensor, stored_at

HEAD_BYTES = 1 << 10
"""What is read of each chunk at first; the storage of a tensor begins before this."""

LONG_HEAD_BYTES = 64 << 10
"""What is read where that was not enough."""

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_DESCRIPTOR = struct.Struct("<4sIII")
_STREAMED, _ENCRYPTED, _STORED = 1 << 3, 1, 0


class HeadTooShort(Exception):
    """The storage begins after the bytes that were given."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How a tensor lies in its chunk: `at` is the byte of its first element, `end` of its storage; `strides` count elements."""

    dtype: torch.dtype
    shape: Ints
    strides: Ints
    at: int
    end: int

    @property
    def is_row_major(self) -> bool:
        """Whether its bytes are those of a row-major tensor."""
        return is_row_major(self.shape, self.strides)


def raw_layout(dtype: torch.dtype, shape: Ints, at: int = 0) -> TensorLayout:
    """The layout of a row-major tensor that has no head of its own."""
    return TensorLayout(dtype, shape, row_major_strides(shape), at, at + prod(shape) * dtype.itemsize)


class HeadParser:
    """Parses the heads of chunks, and caches those that it has seen."""

    def __init__(self) -> None:
        self._known: dict[int, dict[bytes, TensorLayout]] = {}
        self._alone: dict[bytes, TensorLayout] = {}

    def parse(self, data: memoryview, *, name: str) -> TensorLayout:
        """Parse the head of a chunk, of whose bytes `data` are the first.

        Raises
        ------
        HeadTooShort
            More of them are needed.
        CorruptError, UnsupportedError
            It is no tensor that ``torch.save`` made, or not a plain one.
        """
        for end, heads in self._known.items():
            head = heads.get(bytes(data[:end]))
            if head is not None:
                return head
        begin, head = _parse(bytes(data), name)
        self._known.setdefault(begin, {})[bytes(data[:begin])] = head
        return head

    def parse_alone(self, pickled: bytes, *, name: str) -> TensorLayout:
        """Parse the pickle of a tensor whose storage begins with the chunk."""
        if pickled not in self._alone:
            self._alone[pickled] = _head(_read_view(pickled, name), 0, name)
        return self._alone[pickled]


def _parse(data: bytes, name: str) -> tuple[int, TensorLayout]:
    """Return where the storage begins, and how the tensor lies in the chunk."""
    view: PickledTensor | None = None
    order = b"little"
    at = 0
    while True:
        member, begin, size = _member(data, at, name)
        if "/data/" in member:
            break
        body = _body(data, begin, size, name)
        if member.endswith("/data.pkl"):
            view = _read_view(body, name)
        elif member.endswith("/byteorder"):
            order = body
        at = begin + len(body) + (_DESCRIPTOR.size if size is None else 0)
    if view is None or not member.endswith(f"/data/{view.storage.key}"):
        raise CorruptError(f"{name}: its bytes are no tensor that torch.save made; use another checkpoint")
    if order != b"little" and view.dtype.itemsize > 1:
        raise UnsupportedError(f"{name}: was saved on a big-endian machine; load it with torch there, and save it again")
    return begin, _head(view, begin, name)


def _member(data: bytes, at: int, name: str) -> tuple[str, int, int | None]:
    """Return a member's name, where its bytes begin, and its size if the header has it."""
    if len(data) < at + _LOCAL.size:
        raise HeadTooShort
    magic, _, flags, method, _, _, _, _, size, name_length, extra_length = _LOCAL.unpack_from(data, at)
    begin = at + _LOCAL.size + name_length + extra_length
    if magic != b"PK\x03\x04" or flags & _ENCRYPTED or method != _STORED:
        raise CorruptError(f"{name}: byte {at} of its chunk begins no zip member as torch.save writes it; use another checkpoint")
    if len(data) < begin:
        raise HeadTooShort
    member = data[at + _LOCAL.size : at + _LOCAL.size + name_length].decode(errors="replace")
    return member, begin, None if flags & _STREAMED else size


def _body(data: bytes, begin: int, size: int | None, name: str) -> bytes:
    """Return the bytes of a small member; without a size, up to the descriptor that counts just these bytes."""
    if size is None:
        end = data.find(b"PK\x07\x08", begin)
        while end >= 0 and len(data) >= end + _DESCRIPTOR.size:
            if _DESCRIPTOR.unpack_from(data, end)[3] == end - begin:
                return data[begin:end]
            end = data.find(b"PK\x07\x08", end + 1)
        raise HeadTooShort
    if len(data) < begin + size:
        raise HeadTooShort
    return data[begin : begin + size]


def _read_view(pickled: bytes, name: str) -> PickledTensor:
    view = read_pickle(pickled, TENSOR_TABLE, name=name, persistent=stored_at)
    if not isinstance(view, PickledTensor):
        raise UnsupportedError(f"{name}: is saved as {a(type(view).__name__)} and not as a plain tensor; load it with torch")
    return view


def _head(view: PickledTensor, begin: int, name: str) -> TensorLayout:
    if not view.is_within(view.storage.num_bytes):
        raise CorruptError(f"{name}: its tensor of shape {view.shape} reaches beyond its storage; use another checkpoint")
    at, end = begin + view.offset * view.dtype.itemsize, begin + view.storage.num_bytes
    return TensorLayout(view.dtype, view.shape, view.strides, at, end)
