"""Writing a tensor as a file of ``torch.save``, from a stream of its bytes, so that they need not all be in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from math import prod

import torch

from ..core.catalog.specs import Ints, row_major_strides
from .pickle_writer import FunctionCall, Global, PersistentId, pickled
from .tensors import STORAGE_DTYPES
from .zip_records import NewRecord, write_records

_STORAGE_NAMES = {dtype: f"{name}Storage" for name, dtype in STORAGE_DTYPES.items()}


@lru_cache(maxsize=256)
def tensor_pickle(dtype: torch.dtype, shape: Ints) -> bytes:
    """Return the pickle of a contiguous tensor whose storage is record ``data/0``."""
    return pickled(tensor_parts(dtype, shape, "0"))


def tensor_parts(dtype: torch.dtype, shape: Ints, key: str) -> FunctionCall:
    """Describe a contiguous tensor whose storage is record ``data/<key>``, as a part of a pickle."""
    typed, count = _STORAGE_NAMES.get(dtype), prod(shape)
    kind = Global("torch.storage", "UntypedStorage") if typed is None else Global("torch", typed)
    storage = PersistentId(("storage", kind, key, "cpu", count * dtype.itemsize if typed is None else count))
    hooks = FunctionCall(Global("collections", "OrderedDict"), ())
    view = (storage, 0, shape, row_major_strides(shape), False, hooks)
    if typed is not None:
        return FunctionCall(Global("torch._utils", "_rebuild_tensor_v2"), view)
    name = Global("torch", str(dtype).removeprefix("torch."))
    return FunctionCall(Global("torch._utils", "_rebuild_tensor_v3"), (*view, name))


def write_tensor(
    write: Callable[[bytes | memoryview], None], dtype: torch.dtype, shape: Ints, parts: Iterable[memoryview]
) -> int:
    """Write a file as ``torch.save`` of one tensor does, with its bytes from `parts`; return the number of bytes written."""
    described = tensor_pickle(dtype, shape)
    records: list[NewRecord] = [
        ("data.pkl", len(described), [described]),
        ("byteorder", 6, [b"little"]),
        ("data/0", prod(shape) * dtype.itemsize, parts),
        ("version", 2, [b"3\n"]),
    ]
    return write_records(write, records)
