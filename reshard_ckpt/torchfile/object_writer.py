"""Writing plain and tagged values, and tensors whose bytes are streamed, as files of ``torch.save``, without their classes.

`objects` reads them. The program that loads the file makes the objects. It gets back a ``Namespace`` where a dict is tagged as
one, and members of Megatron's enums.
"""

from __future__ import annotations

import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch

from ..core.catalog.specs import Ints, row_major_strides
from ..core.report import type_in_words
from ..errors import UnsupportedError
from ..format.objects import Named
from ..format.torch_values import SPARSE_PARTS, flat_copy
from .objects import NAMESPACE, NAMESPACE_TAG, may_be_called
from .pickle_writer import FunctionCall, Global, Instance, PersistentId, pickled
from .tensors import STORAGE_DTYPES
from .zip_records import ZipRecord, directory, lay_out_records, whole_record


def object_bytes(value: Any, name: str) -> bytes:
    """Encode a value as a file of ``torch.save``.

    Raises
    ------
    UnsupportedError
        It holds a value that is neither plain nor tagged.
    """
    records = laid_out(*described_object(value, name))
    whole = (whole_record(record, data) for record, data in records if isinstance(data, bytes))
    return b"".join(whole) + directory_of(records, ())


@dataclass(frozen=True, slots=True)
class StreamedTensor:
    """A contiguous tensor whose bytes the caller writes. Tensors with the same `index` share one storage."""

    index: int
    dtype: torch.dtype
    shape: Ints

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Records = Sequence[tuple[ZipRecord, bytes | StreamedTensor]]
"""The records of a file of ``torch.save`` in order. Each has its bytes, or the tensor whose bytes the caller writes."""


def laid_out(described: bytes, storages: Sequence[bytes | StreamedTensor]) -> Records:
    """Lay out a file of ``torch.save`` with this pickle and these storages: return its records in order."""
    contents: dict[str, bytes | StreamedTensor] = {"data.pkl": described, "byteorder": b"little"}
    contents |= {f"data/{number}": data for number, data in enumerate(storages)}
    contents["version"] = b"3\n"
    sizes = ((key, len(data) if isinstance(data, bytes) else data.num_bytes) for key, data in contents.items())
    return list(zip(lay_out_records(sizes), contents.values(), strict=True))


def directory_of(records: Records, crcs: Iterable[int]) -> bytes:
    """Return the last bytes of a file of ``torch.save``, given in order the CRC-32 of each tensor that the caller writes."""
    streamed = iter(crcs)
    all_crcs = [zlib.crc32(data) if isinstance(data, bytes) else next(streamed) for _, data in records]
    return directory([record for record, _ in records], all_crcs)


def described_object(value: Any, name: str) -> tuple[bytes, Sequence[bytes | StreamedTensor]]:
    """Return the pickle of a value, and the storages that it names by number; raise as `object_bytes` does."""
    parts = _Parts(name)
    return pickled(value, parts.reduced), parts.storages


class _Parts:
    """Replaces values by the instructions of a pickle that make them; collects storages (bytes, or tensors to be streamed)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.storages: list[bytes | StreamedTensor] = []
        self._keys: dict[int, int] = {}  # by index of a streamed tensor: the number of its storage

    def reduced(self, value: Any) -> Any:
        """Return the instruction, such as a `FunctionCall`, whose pickle makes a value. Plain data are returned as they are.

        The instruction may hold other values, such as arguments. The writer of the pickle calls this method again for each.
        """
        match value:
            case None | bool() | Global() | FunctionCall() | Instance() | PersistentId():
                return value
            case Named():
                return self._named(value)
            case Enum():
                return self._named(Named(type(value).__module__, type(value).__qualname__, value.value))
            case np.generic():  # before numbers: numpy's float64 is a float
                return FunctionCall(_numpy("scalar"), (value.dtype, value.tobytes()))
            case int() | float() | str():
                return value
            case complex():
                return FunctionCall(Global("__builtin__", "complex"), (value.real, value.imag))
            case bytes():
                return FunctionCall(Global("_codecs", "encode"), (value.decode("latin1"), "latin1"))
            case torch.Size():
                return FunctionCall(Global("torch", "Size"), (tuple(value),))
            case list() | tuple():
                return value
            case set() | frozenset():
                return FunctionCall(Global("__builtin__", type(value).__name__), (list(value),))
            case OrderedDict():
                return FunctionCall(Global("collections", "OrderedDict"), (), value.items())
            case defaultdict():
                factory = None if value.default_factory is None else Global("__builtin__", value.default_factory.__name__)
                return FunctionCall(Global("collections", "defaultdict"), (factory,), value.items())
            case Counter():
                return FunctionCall(Global("collections", "Counter"), (dict(value),))
            case dict():
                if value.get(NAMESPACE_TAG) != ":".join(NAMESPACE):
                    return value
                return Instance(Global(*NAMESPACE), {key: item for key, item in value.items() if key != NAMESPACE_TAG})
            case StreamedTensor(index, dtype, shape):
                key = self._keys.setdefault(index, len(self.storages))
                if key == len(self.storages):
                    self.storages.append(value)
                return tensor_parts(dtype, shape, str(key))
            case torch.nn.Parameter():
                arguments = value.detach(), value.requires_grad, _HOOKS
                return FunctionCall(Global("torch._utils", "_rebuild_parameter"), arguments)
            case torch.Tensor():
                return self._tensor(value)
            case torch.dtype():
                return Global("torch", str(value).removeprefix("torch."))
            case torch.device():
                return FunctionCall(Global("torch", "device"), (value.type, *(() if value.index is None else (value.index,))))
            case np.ndarray():
                # numpy makes an empty array, and then gives it its state: version, shape, dtype, whether in Fortran order, bytes.
                state = (1, tuple(value.shape), value.dtype, False, np.ascontiguousarray(value).tobytes())
                return FunctionCall(_numpy("_reconstruct"), (Global("numpy", "ndarray"), (0,), b"b"), state=state)
            case np.dtype():
                made_by: Any = value.__reduce__()  # numpy's own arguments and state: it crashes if it reads others
                return FunctionCall(Global("numpy", "dtype"), made_by[1], state=made_by[2])
        raise UnsupportedError(
            f"{self.name}: {type_in_words(value)} has no place in a checkpoint of Megatron; leave it out with exclude=, or "
            "save a plain value"
        )

    def _named(self, value: Named) -> Any:
        kind = Global(value.module, value.name)
        if value.plain is None:
            return kind
        if isinstance(value.plain, dict | tuple):
            return Instance(kind, value.plain)
        if not may_be_called(value.module):
            raise UnsupportedError(f"{self.name}: a value of {value.module}.{value.name} is none of Megatron's; leave it out")
        return FunctionCall(kind, (value.plain,))

    def _tensor(self, value: torch.Tensor) -> FunctionCall:
        if value.layout in SPARSE_PARTS:
            layout = FunctionCall(Global("torch.serialization", "_get_layout"), (str(value.layout),))
            held = [*(getattr(value, part)() for part in SPARSE_PARTS[value.layout]), value.shape]
            held += [value.is_coalesced()] if value.layout is torch.sparse_coo else []
            return FunctionCall(Global("torch._utils", "_rebuild_sparse_tensor"), (layout, tuple(held)))
        self.storages.append(flat_copy(value).view(torch.uint8).numpy().tobytes())
        return tensor_parts(value.dtype, tuple(value.shape), str(len(self.storages) - 1))


def _numpy(name: str) -> Global:
    """Return a reference to a function of numpy by the module that it has in numpy 1; numpy 2 finds it there too."""
    return Global("numpy.core.multiarray", name)


_HOOKS = FunctionCall(Global("collections", "OrderedDict"), ())
_STORAGE_NAMES = {dtype: f"{name}Storage" for name, dtype in STORAGE_DTYPES.items()}


def tensor_parts(dtype: torch.dtype, shape: Ints, key: str) -> FunctionCall:
    """Describe a contiguous tensor, whose storage is record ``data/<key>``, for the writer of a pickle."""
    typed, count = _STORAGE_NAMES.get(dtype), prod(shape)
    kind = Global("torch.storage", "UntypedStorage") if typed is None else Global("torch", typed)
    storage = PersistentId(("storage", kind, key, "cpu", count * dtype.itemsize if typed is None else count))
    view = (storage, 0, shape, row_major_strides(shape), False, _HOOKS)
    if typed is not None:
        return FunctionCall(Global("torch._utils", "_rebuild_tensor_v2"), view)
    name = Global("torch", str(dtype).removeprefix("torch."))
    return FunctionCall(Global("torch._utils", "_rebuild_tensor_v3"), (*view, name))


@lru_cache(maxsize=256)
def around_tensor(dtype: torch.dtype, shape: Ints) -> tuple[bytes, Callable[[int], bytes]]:
    """Return the bytes around a tensor's data in a file of ``torch.save`` that holds only this tensor.

    They are the bytes before the data, and a function from the CRC-32 of the data to the bytes behind.
    """
    records = laid_out(pickled(tensor_parts(dtype, shape, "0")), [StreamedTensor(0, dtype, shape)])
    (own,) = (record for record, data in records if not isinstance(data, bytes))
    *first, last = (whole_record(record, data) for record, data in records if isinstance(data, bytes))

    def behind(crc: int) -> bytes:
        return own.tail(crc) + last + directory_of(records, [crc])

    return b"".join(first) + own.head, behind
