"""Reading files of ``torch.save`` from any store, even if they hold more than tensors and plain values; no code of them runs.

1. Find the records in the zip's directory (`zip_records`).
2. Read the pickle with stand-ins for classes. If files of many ranks have the same pickle, byte for byte, it is read once.
3. A tensor is a view of a record. `TorchFile.at` looks its place in the file up.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO, RawIOBase
from math import prod
from typing import Any

import torch

from ..errors import CorruptError, UnsupportedError
from ..format.files import digest128
from ..storage.protocol import Storage
from .bounds import refuse_bombs
from .objects import Globals, PlainValues
from .pickle_reader import PicklingError, read_pickle
from .tensors import PickledTensor, stored_at
from .zip_records import StoredFile, ZipRecords


class TorchFile:
    """A file of ``torch.save``, opened; `content` is the saved object, with a `PickledTensor` for each tensor.

    The file may hold objects of any class. They are stand-ins here, whose attributes `attributes_of` returns.

    Parameters
    ----------
    key, name
        The key of the file in its store, and its name in messages.
    file
        The open file.
    tagged
        As for `PlainValues`: the objects that `plain` converts.
    known
        The contents of other files by the digest of their pickles; equal pickles are read once.

    Raises
    ------
    CorruptError
        It is cut or damaged.
    UnsupportedError
        It has the format before torch 1.6, or was written on a machine of another byte order.
    """

    def __init__(
        self, key: str, file: BytesIO | RawIOBase, name: str, *, tagged: str | None, known: dict[bytes, Any] | None = None
    ) -> None:
        self._file, self._zipped = file, ZipRecords(file, name)
        self.key, self.size, self._name = key, self._zipped.num_bytes, name
        self._values = PlainValues(lambda key: self._zipped.read(f"data/{key}"), self.size, tagged)
        data = self._zipped.read_pickle()
        contents, digest = {} if known is None else known, digest128(data)
        if digest not in contents:
            content = read_pickle(data, Globals(), name=name, persistent=stored_at)
            refuse_bombs(content, len(data), self.size, name)
            contents[digest] = content
        self.content = contents[digest]

    def at(self, tensor: PickledTensor) -> int:
        """Return the byte of the file at which a tensor's first element lies.

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

    def crc(self, tensor: PickledTensor) -> int:
        """Return the CRC-32 of a tensor's storage, without reading it; 0 if the file has none."""
        record = f"data/{tensor.storage.key}"
        return self._zipped.crc(record) if record in self._zipped else 0

    def elements(self, tensor: PickledTensor, first: int, count: int) -> torch.Tensor:
        """Read `count` elements of a row-major tensor, from element number `first` on."""
        return torch.frombuffer(self.memory(tensor, first, count), dtype=tensor.dtype)

    def memory(self, tensor: PickledTensor, first: int, count: int) -> bytearray:
        """Read the bytes of `count` elements as they lie in memory, whatever the strides, from element `first` on."""
        data = bytearray(count * tensor.dtype.itemsize)
        self._file.seek(self.at(tensor) + first * tensor.dtype.itemsize)
        self._file.readinto(data)
        return data

    def number(self, made: Any) -> Any:
        """Return the number that a one-element tensor holds, read from the file; return anything else as it is."""
        is_one = isinstance(made, PickledTensor) and prod(made.shape) == 1
        return self.elements(made, 0, 1).item() if is_one else made

    def plain(self, made: Any) -> Any:
        """Convert an object in the file's content, such as a stand-in, to a plain or tagged value.

        Raises
        ------
        UnsupportedError
            It needs to call a class or function, or is of a class that is not wanted.
        CorruptError
            It is damaged, or too large.
        """
        try:
            return self._values.of(made)
        except PicklingError as error:
            raise UnsupportedError(f"{self._name}: {error}; nothing was executed") from None
        except (ValueError, TypeError, LookupError, OverflowError, RuntimeError, AttributeError) as error:
            raise CorruptError(f"{self._name}: holds what no program saved ({error}); use another checkpoint") from None


def read_object(data: bytes, name: str, *, tagged: str | None = "") -> Any:
    """Decode the bytes of a file of ``torch.save``; see `TorchFile`, and `TorchFile.plain` for more errors."""
    file = TorchFile(name, BytesIO(data), name, tagged=tagged)
    return file.plain(file.content)


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a module that lies in a file: its FQN, its place in a storage, and the file."""

    fqn: str
    view: PickledTensor
    file: TorchFile


class FileReader:
    """Opens files of ``torch.save`` in one store. Files with equal pickles share the content; see `TorchFile` for `tagged`."""

    def __init__(self, storage: Storage, *, tagged: str | None = None) -> None:
        self._storage: Storage = storage
        self._tagged, self._known = tagged, dict[bytes, Any]()

    def open(self, key: str) -> TorchFile:
        """Open a file of the store by its key; raise a `CorruptError` if it is missing."""
        name, size = f"{self._storage.url}: {key}", self._storage.size(key)
        if size is None:
            raise CorruptError(f"{name} is missing; copy it, or use another checkpoint")
        return TorchFile(key, StoredFile(self._storage, key, size), name, tagged=self._tagged, known=self._known)
