"""Tensors as the pickles of ``torch.save`` describe them: views of storages, as plain data instead of torch's own objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.catalog.specs import Ints, is_row_major, row_major_strides
from ..errors import UnsupportedError
from .pickle_reader import MAX_ARGUMENTS, StandInClass, StandInFunction


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """The storage that a persistent id names: record ``data/<key>`` of the zip. `dtype` is None if the id does not tell it."""

    dtype: torch.dtype | None
    key: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor as the pickle describes it: a view of a storage; `offset` and `strides` count elements."""

    storage: SavedStorage
    dtype: torch.dtype
    offset: int
    shape: Ints
    strides: Ints

    @property
    def is_row_major(self) -> bool:
        """Whether the tensor's elements lie in its storage in row-major order, without gaps."""
        return is_row_major(self.shape, self.strides)

    def reshaped(self, shape: Ints) -> PickledTensor:
        """Return a view of the same elements in another shape; the tensor must be row-major."""
        return replace(self, shape=shape, strides=row_major_strides(shape))

    def is_within(self, num_bytes: int) -> bool:
        """Tell whether a tensor has elements, and all of them lie in the first `num_bytes` bytes of its storage."""
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        is_negative = self.offset < 0 or min(self.strides, default=0) < 0
        return not is_negative and min(self.shape, default=1) > 0 and (last + 1) * self.dtype.itemsize <= num_bytes


@dataclass(frozen=True, slots=True)
class PickledDTensor:
    """A DTensor as the pickle describes it: the global shape, the local tensor, and the stand-in of its spec."""

    shape: Ints
    local: Any
    spec: Any


def _size(values: Any = ()) -> Ints:
    if not isinstance(values, tuple | list) or len(values) > MAX_ARGUMENTS:
        raise ValueError("a torch.Size of something else than a few numbers")
    for value in values:  # a loop, because it is faster than `all`, and runs many times for each chunk
        if type(value) is not int:
            raise ValueError("a size that is not a whole number")
    return tuple(values)


def _empty_dict(*arguments: Any) -> dict[str, Any]:
    if arguments:
        raise ValueError("an OrderedDict with arguments")
    return {}


DTYPES: dict[tuple[str, str], torch.dtype] = {
    ("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
SIZE = StandInFunction("torch.Size", _size)
ORDERED_DICT = StandInFunction("collections.OrderedDict", _empty_dict)


@dataclass(frozen=True, slots=True)
class _StorageType:
    dtype: torch.dtype | None


def _tensor_v2(storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, metadata: Any = None) -> PickledTensor:
    shape, strides = SIZE.make(size), SIZE.make(stride)
    if not isinstance(storage, SavedStorage) or type(offset) is not int or len(shape) != len(strides):
        raise ValueError("a tensor without a storage, an offset and strides")
    if metadata:
        raise UnsupportedError("is saved as a lazily conjugated or negated view; save tensor.resolve_conj().resolve_neg()")
    if not isinstance(storage.dtype, torch.dtype):
        raise ValueError("a tensor without a dtype")
    return PickledTensor(storage, storage.dtype, offset, shape, strides)


def _tensor_v3(storage: Any, *view: Any) -> PickledTensor:
    """Make the stand-in of a tensor of an untyped storage; its dtype is among the arguments, before the metadata."""
    offset, size, stride, grad, hooks, dtype, *metadata = view
    return _tensor_v2(replace(storage, dtype=dtype), offset, size, stride, grad, hooks, *metadata)


def _encoded(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes in an encoding that pickles do not use")
    return text.encode("latin1")


ENCODED = StandInFunction("bytes", _encoded)
"""The stand-in of a function that makes bytes of text: pickle protocols before 3 have no operation for bytes."""


def stored_at(identity: Any) -> SavedStorage:
    match identity:
        case ("storage", _StorageType(dtype), str(key), str(), int(count)):
            return SavedStorage(dtype, key, count if dtype is None else count * dtype.itemsize)
    raise ValueError("a persistent id that names no storage")


STORAGE_DTYPES = {
    "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool,
    "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
}  # fmt: skip

TENSOR_TABLE: Mapping[tuple[str, str], Any] = {
    **DTYPES,
    **{("torch", f"{name}Storage"): _StorageType(dtype) for name, dtype in STORAGE_DTYPES.items()},
    ("torch", "UntypedStorage"): _StorageType(None),
    ("torch.storage", "UntypedStorage"): _StorageType(None),
    ("torch", "Size"): SIZE,
    ("torch._utils", "_rebuild_tensor_v2"): StandInFunction("_rebuild_tensor_v2", _tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3"): StandInFunction("_rebuild_tensor_v3", _tensor_v3),
    ("torch._utils", "_rebuild_parameter"): StandInFunction("_rebuild_parameter", lambda data, grad, hooks: data),
    ("collections", "OrderedDict"): ORDERED_DICT,
    ("torch.nn.parameter", "Parameter"): StandInClass("Parameter"),
}
