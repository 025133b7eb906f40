"""Element types and their sizes in bytes, under the names of the safetensors format."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ITEM_BYTES: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

CODES: tuple[str, ...] = tuple(sorted(ITEM_BYTES))


def item_bytes_of(dtype: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the bytes of one element for each dtype code, an index into `CODES`."""
    return np.array([ITEM_BYTES[code] for code in CODES], np.int64)[dtype]
