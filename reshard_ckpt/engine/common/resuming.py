"""Continuing a killed reshard or conversion: the identity of a request, and a check that a file of an earlier attempt is whole.

The identity is a hash that is equal only for requests that write the same bytes; the folder of the result is named by it. So it
covers everything that decides their bytes: the catalogs of the sources, which hold the digests of all files, the plan, and the
options. Whole objects are passed, and each of their fields counts, so a field that is added to a plan or to the options later
counts too.

The digests of a file are kept once it is durable; they prove that its bytes have not changed since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import msgpack
import numpy as np

from ...core.catalog.model import Catalog
from ...errors import CorruptError
from ...format.files import BLOCK_BYTES, decode_digests, digest128, digests_file_bytes, wrong_blocks
from ...format.values import encode_value
from ...storage.protocol import MissingKey, Storage, read_parts, read_range


def has_checksums(catalog: Catalog) -> bool:
    """Whether a catalog identifies the bytes of its tensors: each of its files has digests."""
    return all(file.digests_key for file in catalog.files)


def identity(*parts: object) -> str:
    """Return 32 hexadecimal digits, which differ for any two different requests.

    Raise `TypeError` if a part has another type, such as a function: pass its decisions as values instead.

    Parameters
    ----------
    parts
        The sources' catalogs, the plan and the options: plain values, numpy arrays and scalars, and frozen dataclasses of them.
        The fields of a dataclass that its comparison leaves out are left out here.

    Examples
    --------
    >>> identity([1, "a"]) == identity((1, "a")), identity(1) == identity(1.0)
    (True, False)
    """
    return digest128(msgpack.packb(parts, default=_spelled, unicode_errors="surrogatepass")).hex()


def _spelled(value: Any) -> Any:
    """Convert an object that msgpack cannot pack into plain values, to be hashed. msgpack calls this for nested objects too."""
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value) if field.compare}
        if isinstance(value, Catalog):  # a user's values, of more types than msgpack has
            parts["metadata"] = encode_value(value.metadata, "metadata")
        return [type(value).__qualname__, parts]
    if isinstance(value, np.ndarray | np.generic):
        return [value.dtype.str, value.shape, digest128(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)]
    if isinstance(value, Enum):
        return [type(value).__qualname__, value.name]
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set):
        return sorted(value)
    if isinstance(value, Sequence):
        return list(value)
    if isinstance(value, int):  # beyond 64 bits
        return ["int", hex(value)]
    raise TypeError(f"{value!r:.100} is {type(value)}, which has no spelling; pass its decisions as plain values")


_STEP_BYTES = 32 * BLOCK_BYTES
"""Bytes that are read and hashed at once while a finished file is checked."""


def finished_digests(
    storage: Storage, key: str, num_bytes: int, header: bytes, digests_storage: Storage, digests_key: str
) -> bytes | None:
    """Check whether an earlier attempt has finished the file `key`. Return the bytes of its digests file if so, else None.

    A file of `num_bytes` bytes is finished if it begins with `header`, and each of its blocks has its recorded digest.
    """
    try:
        data = digests_storage.read(digests_key, digests_file_bytes(num_bytes))
        digests = decode_digests(data, num_bytes, name=digests_key)
        if digests.block_bytes != BLOCK_BYTES or read_range(storage, key, 0, len(header)) != header:
            return None
        parts = read_parts(storage, key, num_bytes, _STEP_BYTES)
        return None if any(wrong_blocks([part], low, digests.values, BLOCK_BYTES) for low, part in parts) else data
    except (MissingKey, CorruptError):
        return None
