"""Columns of numbers, texts and dtypes as bytes: small, and quick and safe to read.

1. *Integers* are not negative; they are stored little-endian at the narrowest width of 1, 2, 4 or 8 bytes that holds the largest.
   A column whose entries are all alike stores one.
2. *Texts* are one run of bytes, and a column of their lengths. If all are alike, one is stored.
3. A *table* is a msgpack map of columns. A reader ignores columns that it does not know.
4. A *dtype* is a code of the safetensors format; `TORCH_NAMES` has torch's name for each.

Entries have fixed places, so a reader may take a few rows of a column without the rest. A count is compared with the number of
bytes before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from ..core.catalog.specs import CODES
from ..core.geometry.runs import I64
from ..core.report import MAX_NAME_BYTES
from ..errors import CorruptError, UnsupportedError

if TYPE_CHECKING:
    import torch

MAX_CELLS = 1 << 28
"""The most entries of a table's matrix (a column for each dim), to bound the memory of readers: as int64 they take 2 GiB."""

MAX_COLUMNS = 32
"""The most columns of a matrix, and so the most dims of a tensor; a matrix of very many rows may have half as many."""

MAX_MEMBERS = 256
"""The most entries of a msgpack map or list other than a column."""

_WIDTHS = {"u1": 1, "u2": 2, "u4": 4, "u8": 8}


def pack_ints(values: I64 | NDArray[np.uint8] | Sequence[int]) -> list[Any]:
    """Encode a column of integers from 0 to 2⁶³ - 1, ready for msgpack.

    >>> pack_ints([7, 7, 7])
    ['u1', 3, b'\\x07']
    >>> pack_ints([1, 258])
    ['u2', 2, b'\\x01\\x00\\x02\\x01']
    """
    column = np.asarray(values, np.int64)
    if not len(column):
        return ["u1", 0, b""]
    low, high = int(column.min()), int(column.max())
    code = next(code for code, width in _WIDTHS.items() if high < 1 << 8 * width)
    stored = column[:1] if low == high else column
    return [code, len(column), stored.astype("<" + code).tobytes()]


def pack_matrix(values: I64) -> list[Any]:
    """Encode a matrix of integers (rows, D) as D columns, leftmost first."""
    return [pack_ints(column) for column in values.T]


def pack_bytes(values: Sequence[bytes]) -> list[Any]:
    """Encode a column of byte strings.

    >>> pack_bytes([b"ab", b"", b"c"])
    [3, ['u1', 3, b'\\x02\\x00\\x01'], b'abc']
    """
    stored = values[:1] if len(set(values)) == 1 else values
    return [len(values), pack_ints([len(value) for value in stored]), b"".join(stored)]


def pack_texts(values: Sequence[str]) -> list[Any]:
    """Encode a column of texts, in UTF-8."""
    return pack_bytes([value.encode() for value in values])


def pack_table(fields: Mapping[str, Any]) -> bytes:
    """Encode a table's columns as the body of its section."""
    packed: bytes = msgpack.packb(dict(fields))
    return packed


def unpack_map(data: bytes | memoryview, name: str) -> dict[str, Any]:
    """Decode a msgpack map with text keys. No array or map in it may be large, so that a header cannot claim much memory."""
    try:
        node = msgpack.unpackb(data, max_array_len=MAX_MEMBERS, max_map_len=MAX_MEMBERS, max_ext_len=0)
    except (ValueError, TypeError, MemoryError, RecursionError, msgpack.UnpackException) as error:
        raise CorruptError(f"{name}: not msgpack of this format ({error}); use another checkpoint") from error
    if type(node) is not dict or any(type(key) is not str for key in node):
        raise CorruptError(f"{name}: a msgpack {type(node).__name__} where a map belongs; use another checkpoint")
    return node


@dataclass(frozen=True, slots=True)
class Table:
    """One section of a catalog, read field by field.

    No column may have more than `max_count` entries.
    """

    name: str
    fields: dict[str, Any]
    max_count: int

    def corrupt(self, field: str, why: str) -> CorruptError:
        return CorruptError(f"catalog: {self.name}.{field} {why}; use another checkpoint")

    def field(self, field: str, kind: type) -> Any:
        """Return a field that is not a column. Its type must be exactly `kind`."""
        value = self.fields.get(field)
        if type(value) is not kind:
            raise self.corrupt(field, f"is {'missing' if field not in self.fields else 'not a ' + kind.__name__}")
        return value

    def ints(self, field: str, count: int | None = None) -> I64:
        """Decode a column of integers; it must have `count` entries, if given."""
        return self._ints(field, self.field(field, list), count)

    def column(self, form: str, field: str, count: int) -> list[Any]:
        """Decode a column in the form `form`: "ints", "texts" or "bytes"."""
        if form == "ints":
            numbers: list[int] = self.ints(field, count).tolist()
            return numbers
        return self.texts(field, count) if form == "texts" else self.byte_strings(field, count)

    def matrix(self, field: str, count: int) -> I64:
        """Decode a matrix of integers of shape (count, D)."""
        columns = self.field(field, list)
        if len(columns) > MAX_COLUMNS:
            raise self.corrupt(field, f"has {len(columns)} dims, over the {MAX_COLUMNS} that are read")
        most = min(MAX_CELLS, max(16 * self.max_count, 1 << 16))
        if count * len(columns) > most:
            raise self.corrupt(field, f"has {count} × {len(columns)} entries, over the {most} that are read")
        out = np.empty((count, len(columns)), np.int64)
        for i, column in enumerate(columns):
            out[:, i] = self._ints(field, column, count)
        return out

    def byte_strings(self, field: str, count: int | None = None) -> list[bytes]:
        """Decode a column of byte strings; it must have `count` entries, if given."""
        count, starts, data = self._pieces(field, self.field(field, list), count)
        strings = [data[begin:end] for begin, end in pairwise(starts)]
        return strings if len(strings) == count else strings * count

    def texts(self, field: str, count: int | None = None) -> list[str]:
        """Decode a column of texts, each of at most `MAX_NAME_BYTES` of UTF-8."""
        count, starts, data = self._pieces(field, self.field(field, list), count, longest=MAX_NAME_BYTES)
        try:
            text = data.decode()
            spans = pairwise(starts)
            texts = [text[a:b] for a, b in spans] if text.isascii() else [data[a:b].decode() for a, b in spans]
        except UnicodeDecodeError as error:
            raise self.corrupt(field, f"is not UTF-8 ({error.reason} at byte {error.start})") from error
        return texts if len(texts) == count else texts * count

    def _ints(self, field: str, node: Any, count: int | None) -> I64:
        if type(node) is not list or [type(part) for part in node] != [str, int, bytes] or node[0] not in _WIDTHS:
            raise self.corrupt(field, "is not a column of integers")
        code, stored_count, data = node
        self._check_count(field, stored_count, count)
        if not stored_count and not data:
            return np.empty(0, np.int64)
        if len(data) not in (_WIDTHS[code], stored_count * _WIDTHS[code]) or not stored_count:
            raise self.corrupt(field, f"has {len(data)} bytes for {stored_count} entries of {code}")
        stored = np.frombuffer(data, "<" + code)
        if code == "u8" and stored.max() >= 2**63:
            raise self.corrupt(field, f"holds {stored.max()}, over 2⁶³ - 1")
        values = stored.astype(np.int64)
        return values if len(values) == stored_count else np.full(stored_count, values[0])

    def _pieces(self, field: str, node: Any, count: int | None, longest: int = 2**62) -> tuple[int, list[int], bytes]:
        """Decode a column of strings without cutting it: return their number, the offsets of the stored strings, and all bytes.

        The last offset is the end. If all strings are alike, only one is stored.
        """
        if type(node) is not list or [type(part) for part in node] != [int, list, bytes]:
            raise self.corrupt(field, "is not a column of strings")
        self._check_count(field, node[0], count)
        lengths = self._ints(field, node[1], None)
        high = int(lengths.max()) if len(lengths) else 0
        if high > longest:
            raise self.corrupt(field, f"holds a text of {high} bytes, over the {longest} that are read")
        if len(lengths) not in (1, node[0]) or high > len(node[2]):
            raise self.corrupt(field, f"has {len(lengths)} lengths for {node[0]} strings in {len(node[2])} bytes")
        starts = [0, *np.cumsum(lengths).tolist()]
        if starts[-1] != len(node[2]):
            raise self.corrupt(field, f"has lengths of {starts[-1]} bytes together, but {len(node[2])} bytes")
        return node[0], starts, node[2]

    def _check_count(self, field: str, stored: int, wanted: int | None) -> None:
        if not 0 <= stored <= self.max_count or (wanted is not None and stored != wanted):
            raise self.corrupt(field, f"has {stored} entries, not {f'at most {self.max_count}' if wanted is None else wanted}")


TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
"""Torch's name of each dtype code of `core.catalog.specs`."""

_CODES = {f"torch.{name}": code for code, name in TORCH_NAMES.items()}
assert set(TORCH_NAMES) == set(CODES)

_ADVICE = {
    "torch.complex128": "save torch.view_as_real(tensor), which is float64",
    "torch.complex32": "save torch.view_as_real(tensor), which is float16",
}


def dtype_code(dtype: torch.dtype, name: str) -> str:
    """Return the format's code of a torch dtype; `name` is the tensor's name in the message.

    >>> import torch
    >>> dtype_code(torch.bfloat16, "model.w")
    'BF16'

    Raise `UnsupportedError` if the format has no such element type.
    """
    code = _CODES.get(str(dtype))
    if code is None:
        advice = _ADVICE.get(str(dtype), "save tensor.view(torch.uint8) and view it back after loading, or convert it")
        raise UnsupportedError(f"{name}: dtype {dtype} cannot be stored; {advice}")
    return code
