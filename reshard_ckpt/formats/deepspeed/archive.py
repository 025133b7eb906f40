"""Files of ``torch.save`` with more in them than tensors and plain values, read from any store; nothing in them is executed.

1. Find the members from the zip's directory at the end of the file.
2. Read the pickle with stand-ins. Files of many ranks have the same pickle, byte for byte: it is read once.
3. A tensor is a view of a member, whose place in the file is looked up when it is asked for.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from ...core.catalog.specs import is_row_major
from ...errors import CorruptError, UnsupportedError
from ...format.checksums import digest128
from ...storage.protocol import Storage
from ..dcp.heads import TENSOR_TABLE, TensorView, stored_at
from ..dcp.pickle_reader import Opaque, StandInClass, StandInFunction, Table, read_pickle
from ..torch_zip import HEAD_BYTES, LEGACY_MAGIC

MAX_PICKLE_BYTES = 1 << 30
"""Of the description of one file: a thousand times what a large model needs."""

_TAIL_BYTES = 64 << 10
_END, _END64, _LOCATOR64 = struct.Struct("<4s4H2IH"), struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
_ENTRY, _LOCAL = struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s5H3I2H")
_FULL = 0xFFFFFFFF


def _rebuilt(make: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Make a tensor with attributes of its own, which nobody needs."""
    if not isinstance(make, StandInFunction) or type(arguments) is not tuple:
        raise ValueError("a tensor of a kind that is unknown")
    return make.make(*arguments)


def _encoded(text: str, encoding: str) -> bytes:
    """Make what a protocol without bytes spells as text."""
    if encoding != "latin1":
        raise ValueError("bytes that are spelled as something else than latin1")
    return text.encode("latin1")


def _number(value: Any) -> int:
    if type(value) is not int:
        raise ValueError("a member of an enum that is no number")
    return value


def _set_of(kind: type[set[Any]] | type[frozenset[Any]]) -> StandInFunction:
    """Make what makes a set of plain values; of anything else, what nobody may look into."""

    def make(items: Any = ()) -> Any:
        if type(items) not in (list, tuple) or len(items) > _MAX_SET:
            raise ValueError("a set of something else than a list")
        return kind(items) if all(type(item) in _HASHED for item in items) else Opaque(f"a {kind.__name__} of objects")

    return StandInFunction(kind.__name__, make)


_HASHED = (str, bytes, int, float, bool, type(None))
_MAX_SET = 1 << 20
_LOSS_SCALER = "deepspeed.runtime.fp16.loss_scaler"
_BUILTINS = ("builtins", "__builtin__")

TABLE: Table = {
    **TENSOR_TABLE,
    ("torch", "Tensor"): StandInClass("torch.Tensor"),
    ("torch._tensor", "_rebuild_from_type_v2"): StandInFunction("_rebuild_from_type_v2", _rebuilt),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): StandInFunction("ZeroStageEnum", _number),
    (_LOSS_SCALER, "LossScaler"): StandInClass("LossScaler"),
    (_LOSS_SCALER, "DynamicLossScaler"): StandInClass("DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"): StandInClass("fragment_address"),
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"): StandInClass("SubparamShape"),
    ("_codecs", "encode"): StandInFunction("bytes", _encoded),
    **{(module, "bytes"): StandInFunction("bytes", lambda: b"") for module in _BUILTINS},
    **{(module, kind.__name__): _set_of(kind) for module in _BUILTINS for kind in (set, frozenset)},
}  # fmt: skip
"""What DeepSpeed's own parts of its files need. A user's values that need more are `Opaque`."""


class TorchFile:
    """One file: `content` is what was saved, with tensors as `TensorView`."""

    def __init__(self, storage: Storage, key: str, size: int, content: Any, members: Mapping[str, tuple[int, int]]) -> None:
        self.key, self.size, self.content = key, size, content
        self._storage, self._members = storage, members
        self._begins: dict[str, int] = {}

    def at(self, tensor: TensorView) -> int:
        """Return the byte of the file at which a tensor's first element lies.

        Raises
        ------
        CorruptError
            The tensor reaches beyond its member.
        """
        last = tensor.offset + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
        is_negative = tensor.offset < 0 or min(tensor.strides, default=0) < 0 or min(tensor.shape, default=1) < 1
        member = self._members.get(f"data/{tensor.storage.key}")
        if member is None or is_negative or (last + 1) * tensor.dtype.itemsize > member[1]:
            raise CorruptError(
                f"{self._storage.url}: {self.key} has a tensor of shape {tensor.shape} that reaches beyond its data; use "
                "another copy"
            )
        return self._begin(tensor.storage.key, *member) + tensor.offset * tensor.dtype.itemsize

    def stored(self, key: str) -> bytes:
        """Read all bytes of a storage."""
        header, size = self._members[f"data/{key}"]
        return _read(self._storage, self.key, self._begin(key, header, size), size)

    def _begin(self, key: str, header: int, size: int) -> int:
        if key not in self._begins:
            self._begins[key] = _begin(self._storage, self.key, self.size, header, size)
        return self._begins[key]


class FileReader:
    """Opens files of one store, and reads equal pickles once; `table` has the globals that they may name."""

    def __init__(self, storage: Storage, table: Table = TABLE) -> None:
        self._storage, self._table = storage, table
        self._known: dict[bytes, Any] = {}

    def open(self, key: str) -> TorchFile:
        """Open a file.

        Raises
        ------
        CorruptError
            It is missing, cut or damaged.
        UnsupportedError
            It is of the format before torch 1.6, or of a machine of another byte order.
        """
        storage, size = self._storage, self._storage.size(key)
        if size is None:
            raise CorruptError(f"{storage.url}: {key} is missing; copy it, or use another checkpoint")
        members = _members(storage, key, size)
        order = members.get("byteorder")
        if order is not None and order[1] < 16 and _read_member(storage, key, size, order) not in (b"", b"little"):
            raise UnsupportedError(f"{storage.url}: {key} was written on a machine of another byte order; save it again there")
        described = members.get("data.pkl")
        if described is None or described[1] > MAX_PICKLE_BYTES:
            raise CorruptError(f"{storage.url}: {key} is a zip, but not one that torch.save wrote; use another copy")
        data = _read_member(storage, key, size, described)
        digest = digest128(data)
        if digest not in self._known:
            name = f"{storage.url}: {key}"
            self._known[digest] = read_pickle(data, self._table, name=name, persistent=stored_at, opaque=True)
        return TorchFile(storage, key, size, self._known[digest], members)


def is_contiguous(tensor: TensorView) -> bool:
    """Tell whether the elements of a tensor lie in row-major order, without gaps."""
    return is_row_major(tensor.shape, tensor.strides)


def _read(storage: Storage, key: str, offset: int, size: int) -> bytes:
    data = bytearray(size)
    storage.read_into(key, offset, [memoryview(data)])
    return bytes(data)


def _damaged(storage: Storage, key: str, why: str) -> CorruptError:
    return CorruptError(f"{storage.url}: {key} is no whole zip, as torch.save writes it ({why}); use another copy")


def _members(storage: Storage, key: str, size: int) -> dict[str, tuple[int, int]]:
    """Read the directory: the place of the local header and the size of each member, by its name below the root folder."""
    tail = _read(storage, key, max(size - _TAIL_BYTES, 0), min(size, _TAIL_BYTES))
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) < at + _END.size:
        if _read(storage, key, 0, min(size, HEAD_BYTES)).startswith(LEGACY_MAGIC):
            raise UnsupportedError(
                f"{storage.url}: {key} is of torch's old format, without places of its tensors; write it anew with torch"
            )
        raise _damaged(storage, key, "its end is missing")
    *_, num, length, begin, _ = _END.unpack_from(tail, at)
    if at >= _LOCATOR64.size and tail[at - _LOCATOR64.size :].startswith(b"PK\x06\x07"):
        place = _LOCATOR64.unpack_from(tail, at - _LOCATOR64.size)[2]
        if place > size - _END64.size:
            raise _damaged(storage, key, "its directory is not where it should be")
        *_, num, length, begin = _END64.unpack(_read(storage, key, place, _END64.size))
    if begin + length > size or num * _ENTRY.size > length:
        raise _damaged(storage, key, "its directory is not where it should be")
    return _entries(storage, key, _read(storage, key, begin, length), num)


def _entries(storage: Storage, key: str, directory: bytes, num: int) -> dict[str, tuple[int, int]]:
    members: dict[str, tuple[int, int]] = {}
    at = 0
    for _ in range(num):
        if len(directory) < at + _ENTRY.size:
            raise _damaged(storage, key, "its directory is cut")
        magic, _, _, flags, method, *_, packed, size, name_bytes, extra_bytes, note_bytes, _, _, _, header = _ENTRY.unpack_from(
            directory, at
        )
        if magic != b"PK\x01\x02" or method or flags & 1 or packed != size:
            raise _damaged(storage, key, "a member is compressed, or its directory is damaged")
        name_end = at + _ENTRY.size + name_bytes
        name = directory[at + _ENTRY.size : name_end].decode(errors="replace")
        if _FULL in (size, header):
            size, header = _large(directory[name_end : name_end + extra_bytes], size, packed, header)
        members[name.partition("/")[2]] = header, size
        at = name_end + extra_bytes + note_bytes
    return members


def _large(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int]:
    """Take a size and a place that need 64 bits from the extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            numbers = list(struct.unpack_from(f"<{length // 8}Q", extra, at + 4)) if at + 4 + length <= len(extra) else []
            # In this order, and only those that do not fit into 32 bits.
            wide = [numbers.pop(0) if value == _FULL and numbers else value for value in (size, packed, header)]
            return wide[0], wide[2]
        at += 4 + length
    return size, header


def _begin(storage: Storage, key: str, file_size: int, header: int, size: int) -> int:
    """Find where the bytes of a member begin: behind its local header, whose length the directory does not tell."""
    if header + _LOCAL.size > file_size:
        raise _damaged(storage, key, "a member lies beyond its end")
    magic, *_, name_bytes, extra_bytes = _LOCAL.unpack(_read(storage, key, header, _LOCAL.size))
    begin = int(header + _LOCAL.size + name_bytes + extra_bytes)
    if magic != b"PK\x03\x04" or begin + size > file_size:
        raise _damaged(storage, key, "a member is not where the directory says")
    return begin


def _read_member(storage: Storage, key: str, file_size: int, member: tuple[int, int]) -> bytes:
    return _read(storage, key, _begin(storage, key, file_size, *member), member[1])
