"""Values of a checkpoint. Small values are in the catalog. Large ones are read when opened, per-rank ones when they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...core.catalog.model import Catalog, ValueEntry
from ...core.catalog.specs import ValueKind
from ...core.planning.load_plan import plan_load
from ...core.planning.local_metadata import piece_columns
from ...format.values import decode_value
from ...storage.protocol import Storage
from ..common.tensor_bytes import byte_blob
from .load import check_whole
from .read import WINDOW_BYTES, ReadTarget, ReadTask, execute


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A value of a checkpoint; the `value` of a per-rank one is a sequence of all ranks' values."""

    kind: ValueKind
    value: Any

    @property
    def plain(self) -> Any:
        """The value as one plain value; a per-rank one is the list of all ranks' values."""
        return list(self.value) if self.kind is ValueKind.PER_RANK else self.value


def open_values(storage: Storage, catalog: Catalog, prefixes: Iterable[str], *, verify: bool) -> dict[str, SavedValue]:
    """Return the values at or below the names `prefixes`, by name.

    Raises
    ------
    CorruptError
        The bytes of a value are damaged.
    """
    at = tuple(prefixes)
    below = tuple(f"{prefix}." for prefix in at)
    chosen = [entry for entry in catalog.values_table if entry.name in at or entry.name.startswith(below)]
    found, large = {}, []
    for entry in chosen:
        if entry.data is not None:
            found[entry.name] = SavedValue(entry.kind, decode_value(entry.data, name=entry.name))
        elif entry.kind is ValueKind.PER_RANK:
            found[entry.name] = SavedValue(entry.kind, _RankValues(storage, catalog, entry, verify))
        else:
            large.append(entry)
    for entry, data in zip(large, read_blobs(storage, catalog, [entry.blobs[0] for entry in large], verify), strict=True):
        found[entry.name] = SavedValue(entry.kind, decode_value(data, name=entry.name))
    return found


class _RankValues(Sequence[Any]):
    """Sequence of the values of all ranks. A value is read when it is indexed, so a rank need read only its own."""

    def __init__(self, storage: Storage, catalog: Catalog, entry: ValueEntry, verify: bool) -> None:
        self._storage, self._catalog, self._entry, self._verify = storage, catalog, entry, verify

    def __len__(self) -> int:
        return len(self._entry.blobs)

    def __getitem__(self, rank: Any) -> Any:
        [data] = read_blobs(self._storage, self._catalog, [self._entry.blobs[rank]], self._verify)
        return decode_value(data, name=self._entry.name)


def blob_reader(storage: Storage, catalog: Catalog, *, verify: bool) -> Callable[[ValueEntry], bytes]:
    """Return a function that reads the bytes of a large value. `renamed` uses it to rename parameters in optimizers' groups."""
    return lambda value: bytes(read_blobs(storage, catalog, [value.blobs[0]], verify)[0])


def read_blobs(storage: Storage, catalog: Catalog, blobs: Sequence[int], verify: bool) -> list[memoryview]:
    """Read the bytes of blobs, all together; `blobs` are their indices among the tensors of the catalog."""
    if not blobs:
        return []
    blocks = check_whole(storage, catalog, blobs, with_digests=verify)
    names = [catalog.tensors_table.names[index] for index in blobs]
    memory = [
        byte_blob(name, torch.empty(catalog.shape(index), dtype=torch.uint8, device="cpu"))
        for name, index in zip(names, blobs, strict=True)
    ]
    plan = plan_load(catalog, np.array(blobs), piece_columns([blob.spec for blob in memory], 1), WINDOW_BYTES)
    targets = [ReadTarget(blob.spec.name, blob.tensor, torch.uint8) for blob in memory]
    execute(ReadTask(storage, catalog, plan, targets, blocks))
    return [blob.tensor.numpy().data for blob in memory]
