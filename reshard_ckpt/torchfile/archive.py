"""Reading files of ``torch.save`` from any store, even if they hold more than tensors and plain values; no code of them runs.

1. Find the records in the zip's directory (`zip_records`).
2. Read the pickle with stand-ins for classes. If files of many ranks have the same pickle, byte for byte, it is read once.
3. A tensor is a view of a record. `TorchFile.at` looks its place in the file up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..errors import CorruptError
from ..format.files import digest128
from ..storage.protocol import Storage
from .bounds import refuse_bombs
from .objects import Globals, PlainValues
from .pickle_reader import Opaque, StandInClass, StandInFunction, Table, read_pickle
from .tensors import ENCODED, SIZE, TENSOR_TABLE, PickledDTensor, PickledTensor, stored_at
from .zip_records import StoredFile, ZipRecords


def _rebuilt(make: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Return a tensor without the Python attributes that it was saved with.

    Those of a DTensor are kept in a `PickledDTensor`: they say which part of the global tensor this one is.
    """
    if make is _WRAPPER:
        # The state of a class with slots is a pair: its dict or None, and its slots.
        state = next((each for each in (state if isinstance(state, tuple) else (state,)) if isinstance(each, dict)), {})
        known = isinstance(kind, StandInClass) and type(arguments) is tuple and len(arguments) > 2
        return (
            PickledDTensor(SIZE.make(arguments[2]), state.get("_local_tensor"), state.get("_spec"))
            if known
            else Opaque(str(kind))
        )
    if isinstance(make, Opaque):
        return make
    if not isinstance(make, StandInFunction) or type(arguments) is not tuple:
        raise ValueError("a tensor of a kind that is unknown")
    return make.make(*arguments)


def _number(value: Any) -> int:
    if type(value) is not int:
        raise ValueError("a member of an enum that is no number")
    return value


def _set_of(kind: type[set[Any]] | type[frozenset[Any]]) -> StandInFunction:
    """Return a stand-in for the class `kind`. It makes a set of plain values, or an `Opaque` object if there are any others."""

    def make(items: Any = ()) -> Any:
        if type(items) not in (list, tuple) or len(items) > _MAX_SET:
            raise ValueError("a set of something else than a list")
        return kind(items) if all(type(item) in _HASHED for item in items) else Opaque(f"a {kind.__name__} of objects")

    return StandInFunction(kind.__name__, make)


_HASHED = (str, bytes, int, float, bool, type(None))
_MAX_SET = 1 << 20
"""The most elements of a set, whose hashing could be made slow."""

_BUILTINS = ("builtins", "__builtin__")


def _wrapper(*arguments: Any) -> Any:
    raise ValueError("a tensor that wraps others, without its attributes")


_WRAPPER = StandInFunction("_rebuild_wrapper_subclass", _wrapper)

TABLE: Table = {
    **TENSOR_TABLE,
    ("torch._utils", "_rebuild_wrapper_subclass"): _WRAPPER,
    ("torch.distributed.tensor", "DTensor"): StandInClass("DTensor"),
    ("torch.distributed._tensor.api", "DTensor"): StandInClass("DTensor"),
    ("torch", "Tensor"): StandInClass("torch.Tensor"),
    ("torch._tensor", "_rebuild_from_type_v2"): StandInFunction("_rebuild_from_type_v2", _rebuilt),
    ("_codecs", "encode"): ENCODED,
    **{(module, "bytes"): StandInFunction("bytes", lambda: b"") for module in _BUILTINS},
    **{(module, kind.__name__): _set_of(kind) for module in _BUILTINS for kind in (set, frozenset)},
}  # fmt: skip
"""The globals that any file may name. Values that need others become `Opaque`."""


class TorchFile:
    """One file; `content` is the saved object, with tensors as `PickledTensor`."""

    def __init__(self, key: str, stored: StoredFile, zipped: ZipRecords, content: Any, name: str) -> None:
        self.key, self.size, self.content = key, zipped.num_bytes, content
        self._stored, self._zipped, self._name = stored, zipped, name
        self._values = PlainValues(lambda key: zipped.read(f"data/{key}"), self.size, name)

    def at(self, tensor: PickledTensor) -> int:
        """Return the position of a tensor's first element in the file, in bytes.

        Raises
        ------
        CorruptError
            The tensor reaches beyond its record.
        """
        record = f"data/{tensor.storage.key}"
        if record not in self._zipped or not tensor.is_within(self._zipped.size(record)):
            raise CorruptError(
                f"{self._name} has a tensor of shape {tensor.shape} that reaches beyond its data; use another copy"
            )
        return self._zipped.begin(record) + tensor.offset * tensor.dtype.itemsize

    def elements(self, tensor: PickledTensor, first: int, count: int) -> torch.Tensor:
        """Read `count` elements of a row-major tensor, from element `first` on."""
        data = bytearray(count * tensor.dtype.itemsize)
        self._stored.seek(self.at(tensor) + first * tensor.dtype.itemsize)
        self._stored.readinto(data)
        return torch.frombuffer(data, dtype=tensor.dtype)

    def number(self, made: Any) -> Any:
        """Return the number in a tensor of one element; anything else as it is."""
        is_one = isinstance(made, PickledTensor) and prod(made.shape) == 1
        return self.elements(made, 0, 1).item() if is_one else made

    def plain(self, made: Any) -> Any:
        """Convert an object of the content to a plain or tagged value.

        Raises
        ------
        UnsupportedError
            It needs to call a class or function.
        CorruptError
            It is damaged, or too large.
        """
        return self._values.of(made)


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a module or a layer: its name, its view of a storage, and the file that holds it."""

    fqn: str
    view: PickledTensor
    file: TorchFile


class FileReader:
    """Opens files of one store, and reads equal pickles once.

    Parameters
    ----------
    classes
        Another library's classes that its files may name, by module and name. Instances are stand-ins, whose attributes
        `attributes_of` returns. A class that is mapped to False is an enum of numbers, whose members become numbers.
    any_class
        Files may name all classes, and `TorchFile.plain` converts their instances.
    """

    def __init__(
        self, storage: Storage, classes: Mapping[tuple[str, str], bool] | None = None, *, any_class: bool = False
    ) -> None:
        named = {
            key: StandInClass(key[1]) if has_attributes else StandInFunction(key[1], _number)
            for key, has_attributes in (classes or {}).items()
        }
        self._storage: Storage = storage
        self._table: Table = Globals(lenient=True) if any_class else {**TABLE, **named}
        self._known: dict[bytes, Any] = {}

    def open(self, key: str) -> TorchFile:
        """Open a file.

        Raises
        ------
        CorruptError
            It is missing, cut or damaged.
        UnsupportedError
            It has the format before torch 1.6, or was written on a machine of another byte order.
        """
        name, size = f"{self._storage.url}: {key}", self._storage.size(key)
        if size is None:
            raise CorruptError(f"{name} is missing; copy it, or use another checkpoint")
        stored = StoredFile(self._storage, key, size)
        zipped = ZipRecords(stored, name)
        data = zipped.read_pickle()
        digest = digest128(data)
        if digest not in self._known:
            content = read_pickle(data, self._table, name=name, persistent=stored_at, opaque=True)
            refuse_bombs(content, len(data), size, name)
            self._known[digest] = content
        return TorchFile(key, stored, zipped, self._known[digest], name)
