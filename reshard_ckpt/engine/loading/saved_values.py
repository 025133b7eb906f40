"""Reading the values of a checkpoint (anything but tensors). Small ones are in the catalog, large ones in the shard files.

A value that each rank has of its own (`PerRank`) is read from its file only when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...core.catalog.model import Catalog, ValueEntry
from ...core.catalog.names import is_below
from ...core.catalog.specs import TensorSpec, ValueKind, piece_columns
from ...core.planning.load_plan import plan_load
from ...format.values import decode_value
from ...storage.protocol import Storage
from ..common.tensor_bytes import byte_blob
from .load import check_whole
from .read import ReadTarget, ReadTask, execute


class SavedValue(NamedTuple):
    """A saved value with its kind. For a per-rank one, `value` is a sequence of all ranks' values."""

    kind: ValueKind
    value: Any

    @property
    def plain(self) -> Any:
        """The value as an ordinary object; for a per-rank one, the list of all ranks' values."""
        return list(self.value) if self.kind is ValueKind.PER_RANK else self.value


def open_values(storage: Storage, catalog: Catalog, prefixes: Iterable[str], *, verify: bool) -> dict[str, SavedValue]:
    """Return the saved values whose names are in `prefixes` or below one of them, by name.

    Raise `CorruptError` if the bytes of a value are damaged.
    """
    at = frozenset(prefixes)  # of a whole checkpoint, these are the names of all values
    found, large = {}, []
    for entry in catalog.values_table:
        if not is_below(entry.name, at):
            continue
        if entry.data is not None:
            found[entry.name] = SavedValue(entry.kind, decode_value(entry.data, name=entry.name))
        elif entry.kind is ValueKind.PER_RANK:
            found[entry.name] = SavedValue(entry.kind, _RankValues(storage, catalog, entry, verify))
        else:
            large.append(entry)
    for entry, data in zip(large, read_blobs(storage, catalog, [entry.blobs[0] for entry in large], verify), strict=True):
        found[entry.name] = SavedValue(entry.kind, decode_value(data, name=entry.name))
    return found


def plain_values(storage: Storage, catalog: Catalog, names: Iterable[str], *, verify: bool = True) -> dict[str, Any]:
    """Return the saved values at or below these names as ordinary objects, by name.

    A per-rank value becomes the list of all ranks' values.
    """
    return {name: value.plain for name, value in open_values(storage, catalog, names, verify=verify).items()}


class _RankValues(Sequence[Any]):
    """The values of all ranks under one name, as a sequence. Each is read when it is indexed: a rank need read only its own."""

    def __init__(self, storage: Storage, catalog: Catalog, entry: ValueEntry, verify: bool) -> None:
        self._storage, self._catalog, self._entry, self._verify = storage, catalog, entry, verify

    def __len__(self) -> int:
        return len(self._entry.blobs)

    def __getitem__(self, rank: Any) -> Any:
        [data] = read_blobs(self._storage, self._catalog, [self._entry.blobs[rank]], self._verify)
        return decode_value(data, name=self._entry.name)


def blob_reader(storage: Storage, catalog: Catalog, *, verify: bool) -> Callable[[ValueEntry], bytes]:
    """Return a function that reads the bytes of a value kept in a file. `renamed` needs it for large parameter groups."""
    return lambda value: bytes(read_blobs(storage, catalog, [value.blobs[0]], verify)[0])


def read_blobs(storage: Storage, catalog: Catalog, blobs: Sequence[int], verify: bool) -> list[memoryview]:
    """Read blobs (values that are stored like tensors, as encoded bytes) together; `blobs` are their indices in the catalog."""
    if not blobs:
        return []
    names = [catalog.tensors_table.names[index] for index in blobs]
    found = [
        byte_blob(name, torch.empty(catalog.shape(index), dtype=torch.uint8, device="cpu"))
        for name, index in zip(names, blobs, strict=True)
    ]
    read_whole(storage, catalog, blobs, found, verify=verify)
    return [blob.memory.numpy().data for blob in found]


def read_whole(
    storage: Storage, catalog: Catalog, source: Sequence[int], wanted: Sequence[tuple[TensorSpec, torch.Tensor]], *, verify: bool
) -> None:
    """Read parts of saved tensors into memory: for each pair in `wanted`, the pieces of the spec into the tensor beside it.

    ``source[i]`` is the index in the catalog of the tensor that pair i wants. Raise `CorruptError` if the bytes of a tensor are
    damaged, or it was not saved whole.
    """
    blocks = check_whole(storage, catalog, source, with_digests=verify)
    plan = plan_load(catalog, np.array(source), piece_columns([spec for spec, _ in wanted]), storage.hints.read_bytes)
    targets = [ReadTarget(spec.name, memory, memory.dtype, is_buffer=True) for spec, memory in wanted]
    execute(ReadTask(storage, catalog, plan, targets, blocks))
