"""Parsing the head of a chunk of a DCP file: its first bytes tell the dtype, shape, strides and place of its tensor.

A chunk is a file of ``torch.save`` of one tensor: a zip of uncompressed members, one after the other. First comes a pickle that
describes the tensor's view of its storage, then a few small members, then the storage. So the head is enough:

1. Walk over the members, from one local header to the next, up to the storage. The writer did not know the members' sizes when it
   wrote the headers, so a size is in the descriptor behind each member.
2. Read the pickle with stand-ins: dtype, size, strides, offset in the storage.
3. Chunks of equal shape and dtype have the same head, byte for byte. A head that was seen before is not parsed again.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod

import torch

from ...core.catalog.specs import Ints, is_row_major, row_major_strides
from ...core.report import type_in_words
from ...errors import CorruptError, UnsupportedError
from ...torchfile.pickle_reader import read_pickle
from ...torchfile.tensors import TENSOR_TABLE, PickledTensor, stored_at

HEAD_BYTES = 1 << 10
"""The number of first bytes of a chunk to read; in most chunks, the storage begins within them."""

LONG_HEAD_BYTES = 64 << 10
"""The number of first bytes of a chunk to read if the storage does not begin within `HEAD_BYTES`."""

# A local header: signature, version, flags, method, time, date, CRC, compressed size, size, lengths of name and extra field.
# A descriptor: signature, CRC, compressed size, size. A flag says that a descriptor follows the bytes.
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_DESCRIPTOR = struct.Struct("<4sIII")
_STREAMED, _ENCRYPTED, _STORED = 1 << 3, 1, 0


class HeadTooShort(Exception):
    """Raised if the head of a chunk ends before the tensor's storage begins. The caller reads more and tries again."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The place of a tensor in its chunk: `at` is the byte of its first element, `end` the end of its storage.

    `strides` count elements.
    """

    dtype: torch.dtype
    shape: Ints
    strides: Ints
    at: int
    end: int

    @property
    def is_row_major(self) -> bool:
        """Whether the tensor's elements lie in its chunk in row-major order, without gaps."""
        return is_row_major(self.shape, self.strides)


def raw_layout(dtype: torch.dtype, shape: Ints, at: int = 0) -> TensorLayout:
    """Return the layout of a row-major tensor whose elements begin at byte `at` of its chunk, without a head."""
    return TensorLayout(dtype, shape, row_major_strides(shape), at, at + prod(shape) * dtype.itemsize)


class HeadParser:
    """Parses the heads of chunks of DCP files. The layouts are cached, so that of many equal heads one is parsed."""

    def __init__(self) -> None:
        self._known: dict[int, dict[bytes, TensorLayout]] = {}
        self._alone: dict[bytes, TensorLayout] = {}

    def parse(self, data: memoryview, *, name: str) -> TensorLayout:
        """Parse the head of a chunk; `data` are the first bytes of the chunk.

        Raise `HeadTooShort` if `data` end before the storage begins, and `CorruptError` or `UnsupportedError` if the chunk is not
        a tensor that ``torch.save`` wrote, or not a plain one.
        """
        for end, heads in self._known.items():
            head = heads.get(bytes(data[:end]))
            if head is not None:
                return head
        begin, head = _parse(bytes(data), name)
        self._known.setdefault(begin, {})[bytes(data[:begin])] = head
        return head

    def parse_alone(self, pickled: bytes, *, name: str) -> TensorLayout:
        """Parse a tensor's pickle from the metadata. The chunk in the file is then the bare storage, without a head."""
        if pickled not in self._alone:
            self._alone[pickled] = _head(_read_view(pickled, name), 0, name)
        return self._alone[pickled]


def _parse(data: bytes, name: str) -> tuple[int, TensorLayout]:
    """Parse the first bytes of a chunk, a tensor's file; return the byte at which its storage begins, and the tensor's layout."""
    view: PickledTensor | None = None
    order = b"little"
    at = 0
    # Walk from member to member until the storage begins.
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
        raise CorruptError(f"{name}: its bytes are not a tensor that torch.save made; use another checkpoint")
    if order != b"little" and view.dtype.itemsize > 1:
        raise UnsupportedError(f"{name}: was saved on a big-endian machine; load it with torch there, and save it again")
    return begin, _head(view, begin, name)


def _member(data: bytes, at: int, name: str) -> tuple[str, int, int | None]:
    """Parse the header of a zip member at byte `at`: return its name, where its bytes begin, and its size.

    The size is None if the header has none.
    """
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
    """Return the content of a small member of the zip, which begins at `begin`.

    If its header has no size, the content ends before the first descriptor that has just this size.
    """
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
        raise UnsupportedError(f"{name}: is saved as {type_in_words(view)} and not as a plain tensor; load it with torch")
    return view


def _head(view: PickledTensor, begin: int, name: str) -> TensorLayout:
    if not view.is_within(view.storage.num_bytes):
        raise CorruptError(f"{name}: its tensor of shape {view.shape} reaches beyond its storage; use another checkpoint")
    at, end = begin + view.offset * view.dtype.itemsize, begin + view.storage.num_bytes
    return TensorLayout(view.dtype, view.shape, view.strides, at, end)
