"""Packed rows: rows of floats in 8 or 4 bits an element. A row has a minimum, a scale, and an integer code for each element.

A file with packed rows *stands for* a plain shard file. The catalog, the planners and the digests count bytes of the plain file;
only the reader and the writer of the file know the packed bytes. Decoding gives the same bytes everywhere: a float32 product, a
float32 sum, and a cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .specs import ITEM_BYTES

BITS = (8, 4)
"""The allowed numbers of bits of an element in a packed row."""

PACKABLE = ("F32", "F16", "BF16")
"""The dtypes whose rows may be packed."""

_NUMPY = {"F32": "<f4", "F16": "<f2"}
"""The numpy dtype of each packable dtype; numpy has none for BF16."""

_HEAD = np.dtype([("low", "<f4"), ("scale", "<f4")])
"""The head of a packed row: its minimum and its scale, before the codes of its elements."""


class PackedRows(NamedTuple):
    """Some packed rows that follow each other in a file: `num` rows of `width` elements, stored in `bits` bits an element.

    In the plain file, which has these rows unpacked, they have the dtype `dtype` and begin at byte `begin`.
    """

    begin: int
    num: int
    width: int
    dtype: str
    bits: int

    @property
    def row_bytes(self) -> int:
        """Size in bytes of one row in the plain file."""
        return self.width * ITEM_BYTES[self.dtype]

    @property
    def packed_row_bytes(self) -> int:
        """Size in bytes of one row as stored, with its head."""
        return _HEAD.itemsize + -(-self.width * self.bits // 8)

    @property
    def end(self) -> int:
        """The byte of the plain file behind the last row."""
        return self.begin + self.num * self.row_bytes

    @property
    def saved_bytes(self) -> int:
        """The number of bytes by which packing these rows makes the file shorter."""
        return self.num * (self.row_bytes - self.packed_row_bytes)

    def is_sound(self) -> bool:
        """Tell whether the fields have values that a writer could have written; call it on fields read from a file."""
        is_packable = self.dtype in PACKABLE and self.bits in BITS
        return is_packable and self.begin >= 0 and self.num > 0 and self.width > 0 and self.packed_row_bytes < self.row_bytes


def packed_size(size: int, packed: Sequence[PackedRows]) -> int:
    """Return the stored size in bytes of a file with packed rows, from the `size` of the plain file."""
    return size - sum(rows.saved_bytes for rows in packed)


def pack(rows: PackedRows, plain: bytes | memoryview) -> tuple[bytes, bytes]:
    """Pack the plain bytes of whole rows, rounding each element to `bits` bits.

    Returns
    -------
    tuple
        The packed bytes, and the rounded plain bytes that `unpack` makes of them.
    """
    # values (N, width): the numbers of each row; low, scale (N,): its minimum, and the step between two codes.
    values = _to_float(rows.dtype, plain).reshape(-1, rows.width)
    # Plus 0, which makes 0.0 of -0.0: the minimum and the maximum of both depend on the processor and on the place in memory.
    zero, most = np.float32(0), np.float32(2**rows.bits - 1)
    low = values.min(axis=1) + zero
    scale = (values.max(axis=1) + zero - low) / most
    # A scale of 0: all elements of the row are equal, or differ by less than float32 can divide.
    divisor = np.where(scale > 0, scale, np.float32(1))
    codes = np.rint((values - low[:, None]) / divisor[:, None]).clip(0, most).astype(np.uint8)
    packed = np.zeros(len(values), _row(rows))
    packed["head"]["low"], packed["head"]["scale"], packed["codes"] = low, scale, _joined(codes, rows.bits)
    data = packed.tobytes()
    return data, unpack(rows, data)


def unpack(rows: PackedRows, packed: bytes | memoryview) -> bytes:
    """Decode packed rows to the bytes of plain rows. They must be whole rows."""
    table = np.frombuffer(packed, _row(rows))
    codes = table["codes"]
    if rows.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=2).reshape(len(table), -1)[:, : rows.width]
    with np.errstate(all="ignore"):  # of damaged bytes; the digests find them
        values = codes.astype(np.float32) * table["head"]["scale"][:, None]
        values += table["head"]["low"][:, None]
        return _from_float(rows.dtype, values)


def _row(rows: PackedRows) -> np.dtype[Any]:
    return np.dtype([("head", _HEAD), ("codes", "u1", (rows.packed_row_bytes - _HEAD.itemsize,))])


def _joined(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack codes (N, width) of 4 bits two to a byte, the first into the lower half; codes of 8 bits stay as they are."""
    if bits == 8:
        return codes
    even: NDArray[np.uint8] = codes[:, ::2].copy()
    odd = codes[:, 1::2]
    even[:, : odd.shape[1]] |= odd << 4
    return even


def _to_float(dtype: str, data: bytes | memoryview) -> NDArray[np.float32]:
    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, _NUMPY[dtype]).astype(np.float32)


def _from_float(dtype: str, values: NDArray[np.float32]) -> bytes:
    if dtype == "BF16":  # rounded to the nearest, ties to even
        whole = values.view(np.uint32)
        return ((whole + 0x7FFF + ((whole >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return values.astype(_NUMPY[dtype]).tobytes()
