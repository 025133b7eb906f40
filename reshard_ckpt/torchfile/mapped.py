"""Finding the place of each tensor's bytes in a file that ``torch.save`` wrote.

Such a file is a zip of uncompressed records: a pickle that describes the tensors, and a record for each storage.

1. Read the place and the size of each record from the zip's directory (`read_records`).
2. Load the pickle with ``torch.load`` over a memory map, with ``weights_only``, which allows only tensors and plain values. The
   map is lazy, so no storage is read; but each storage has an address in the map.
3. Match storages with records to find the address at which the map begins. That gives the place of every tensor (`MappedFile`).
   Each storage must be exactly one record.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.report import few
from ..errors import CheckpointError, CorruptError, UnsupportedError
from .bounds import refuse_bombs, refuse_hash_collisions
from .zip_records import ZipRecords

_DTENSOR = b"ctorch.distributed.tensor\nDTensor\n"
"""The bytes in a pickle that name torch's class DTensor."""

_PROTOCOL = b"\x80\x02"
"""The first bytes of a pickle of protocol 2, the newest one that ``torch.load(weights_only=True)`` reads whole."""


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A file that is mapped into memory, at the address `base`."""

    base: int
    size: int


def find_mapped(files: Sequence[MappedFile], tensor: torch.Tensor) -> tuple[int, int] | None:
    """Find the mapped file that a tensor's memory is part of; return the file's index, and the tensor's first byte in the file.

    None means that the tensor lies in none of these files.
    """
    at = tensor.data_ptr()
    return next(((i, at - file.base) for i, file in enumerate(files) if file.base <= at < file.base + file.size), None)


def load_archive(path: str, size: int) -> tuple[Any, MappedFile]:
    """Load a torch file; its tensors are views of a memory map of the file.

    Raise `CorruptError` if it is damaged, and `UnsupportedError` if it holds more than tensors and plain values, or is another
    kind of torch's files.
    """
    records, pickle_bytes = read_records(path)
    storages: list[tuple[int, int]] = []

    def keep(storage: Any, location: str) -> Any:
        if storage.nbytes():
            storages.append((storage.data_ptr(), storage.nbytes()))
        return storage  # keep it on the CPU, whichever device it was saved from

    try:
        loaded = torch.load(path, map_location=keep, mmap=True, weights_only=True)
    except (OSError, MemoryError):  # the file need not be damaged: too many open files, or a disk that fails
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise _load_error(path, error) from error
    refuse_bombs(loaded, pickle_bytes, size, path)
    return loaded, MappedFile(_mapping_base(records, storages, path), size)


def _load_error(path: str, error: Exception) -> CheckpointError:
    """Return the error for a file that ``torch.load`` refused: `UnsupportedError` for a class or protocol that is not allowed.

    Any other error becomes a `CorruptError`.
    """
    try:
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:
        foreign = []
    if foreign:
        return UnsupportedError(
            f"{path}: holds {few(foreign, 3)}, not only tensors and plain values, and "
            "loading those could run any code; save it again without them, or allow them with "
            "torch.serialization.add_safe_globals if you trust the file"
        )
    with open(path, "rb") as file:
        version = ZipRecords(file, path).read_pickle(sys.byteorder)[:2]
    if version > _PROTOCOL:
        return UnsupportedError(
            f"{path}: was saved with pickle_protocol={version[1]}, which torch reads only if the file may run code; load it with "
            "torch if you trust it, and save it again without pickle_protocol="
        )
    return CorruptError(
        f"{path}: torch cannot load it ({str(error).splitlines()[0][:200] if str(error) else error!r}); use another copy"
    )


def read_records(path: str) -> tuple[list[tuple[int, int]], int]:
    """Return the offset and the size of the record of each storage that is not empty, in the order of the file.

    The second result is the size of the pickle.
    """
    with open(path, "rb") as file:
        zipped = ZipRecords(file, path)
        pickled = zipped.read_pickle(sys.byteorder)
        if _DTENSOR in pickled:
            raise UnsupportedError(
                f"{path}: holds DTensors, so it has one rank's part of each; pass the folder that has the files of all ranks, "
                "named as in model_world_size_4_rank_0.pt"
            )
        refuse_hash_collisions(pickled, path)
        found = ((zipped.begin(key), zipped.size(key)) for key in zipped.storages() if zipped.size(key))
        return sorted(found), zipped.size("data.pkl")


def _mapping_base(records: Sequence[tuple[int, int]], storages: Sequence[tuple[int, int]], path: str) -> int:
    """Find the address at which the file is mapped: the only one at which every storage is exactly one record."""
    found = sorted(set(storages))
    if not found:
        return 0
    known = set(records)
    first, first_size = found[0]
    # A map begins at a page. The other storages lie behind the first one, so the first one's record is not among the last
    # len(found) - 1 records.
    candidates = records[: len(records) - len(found) + 1]
    bases = {first - at for at, size in candidates if size == first_size and (first - at) % mmap.PAGESIZE == 0}
    consistent = [base for base in bases if all((at - base, size) in known for at, size in found)]
    if len(consistent) != 1:
        what = "are not its records" if not consistent else "may be several of its records"
        raise CorruptError(f"{path}: the storages that it describes {what}; load and save it again with torch")
    return consistent[0]
