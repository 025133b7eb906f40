"""Writing plain and tagged values as files of ``torch.save``, without their classes; `objects` reads them.

The program that loads the file makes the objects. It gets back a ``Namespace`` where a dict is tagged as one, and members of
Megatron's enums.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
import torch

from ..core.report import type_in_words
from ..errors import UnsupportedError
from ..format.objects import Named
from .objects import NAMESPACE, NAMESPACE_TAG, may_be_called
from .pickle_writer import Built, FunctionCall, Global, Instance, Pairs, pickled
from .tensor_zip import tensor_parts
from .zip_records import write_records


def object_bytes(value: Any, name: str) -> bytes:
    """Encode a value as a file of ``torch.save``.

    Raises
    ------
    UnsupportedError
        It holds a value that is neither plain nor tagged.
    """
    parts = _Parts(name)
    described = pickled(parts.of(value))
    out = bytearray()
    storages = ((f"data/{key}", len(data), [data]) for key, data in enumerate(parts.storages))
    first = ("data.pkl", len(described), [described]), ("byteorder", 6, [b"little"])
    write_records(out.extend, [*first, *storages, ("version", 2, [b"3\n"])])
    return bytes(out)


class _Parts:
    """Converts values to parts of a pickle; `storages` collects the bytes of tensors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.storages: list[bytes] = []

    def of(self, value: Any) -> Any:
        match value:
            case None | bool():
                return value
            case Named():
                return self._named(value)
            case Enum():
                return self._named(Named(type(value).__module__, type(value).__qualname__, value.value))
            case np.generic():  # before numbers: numpy's float64 is a float
                return FunctionCall(_numpy("scalar"), (_dtype(value.dtype), _bytes(value.tobytes())))
            case int() | float() | str():
                return value
            case complex():
                return FunctionCall(Global("__builtin__", "complex"), (value.real, value.imag))
            case bytes():
                return _bytes(value)
            case torch.Size():
                return FunctionCall(Global("torch", "Size"), (tuple(value),))
            case list():
                return [self.of(item) for item in value]
            case tuple():
                return tuple(self.of(item) for item in value)
            case set() | frozenset():
                return FunctionCall(Global("__builtin__", type(value).__name__), ([self.of(item) for item in value],))
            case dict():
                return self._dict(value)
            case torch.Tensor():
                return self._tensor(value)
            case torch.dtype():
                return Global("torch", str(value).removeprefix("torch."))
            case torch.device():
                return FunctionCall(Global("torch", "device"), (value.type, *(() if value.index is None else (value.index,))))
            case np.ndarray():
                return _array(value)
            case np.dtype():
                return _dtype(value)
        raise UnsupportedError(
            f"{self.name}: {type_in_words(value)} has no place in a checkpoint of Megatron; leave it out with exclude=, or "
            "save a plain value"
        )

    def _dict(self, value: dict[Any, Any]) -> Any:
        if value.get(NAMESPACE_TAG) == ":".join(NAMESPACE):
            return Instance(Global(*NAMESPACE), {key: self.of(item) for key, item in value.items() if key != NAMESPACE_TAG})
        return Pairs([(self.of(key), self.of(item)) for key, item in value.items()])

    def _named(self, value: Named) -> Any:
        kind = Global(value.module, value.name)
        if value.plain is None:
            return kind
        if isinstance(value.plain, dict | tuple):
            return Instance(kind, self.of(value.plain))
        if not may_be_called(value.module):
            raise UnsupportedError(f"{self.name}: a value of {value.module}.{value.name} is none of Megatron's; leave it out")
        return FunctionCall(kind, (self.of(value.plain),))

    def _tensor(self, value: torch.Tensor) -> FunctionCall:
        flat = value.detach().cpu().contiguous().reshape(-1)
        self.storages.append(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        return tensor_parts(value.dtype, tuple(value.shape), str(len(self.storages) - 1))


def _bytes(value: bytes) -> FunctionCall:
    return FunctionCall(Global("_codecs", "encode"), (value.decode("latin1"), "latin1"))


def _numpy(name: str) -> Global:
    """Refer to a function by numpy 1's module; numpy 2 finds it under that name, too."""
    return Global("numpy.core.multiarray", name)


def _dtype(value: np.dtype[Any]) -> Built:
    order = value.str[0]
    # The state that numpy pickles: version 3, byte order, three fields of structured dtypes, item size and alignment (of strings
    # alone), flags. The arguments: the code without byte order, not aligned, copied.
    state = (3, order, None, None, None, *((-1, -1, 0) if value.kind not in "SU" else (value.itemsize, value.alignment, 8)))
    return Built(FunctionCall(Global("numpy", "dtype"), (value.str[1:], False, True)), state)


def _array(value: np.ndarray[Any, Any]) -> Built:
    # numpy makes an empty array, and then gives it its state: version, shape, dtype, whether in Fortran order, bytes.
    empty = FunctionCall(_numpy("_reconstruct"), (Global("numpy", "ndarray"), (0,), _bytes(b"b")))
    return Built(empty, (1, tuple(value.shape), _dtype(value.dtype), False, _bytes(np.ascontiguousarray(value).tobytes())))
