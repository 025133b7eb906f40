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
from ..common.files import open_files
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
    return {entry.name: SavedValue(entry.kind, _value(storage, catalog, entry, verify)) for entry in chosen}


def _value(storage: Storage, catalog: Catalog, entry: ValueEntry, verify: bool) -> Any:
    if entry.data is not None:
        return decode_value(entry.data, name=entry.name)
    ranks = _RankValues(storage, catalog, entry, verify)
    return ranks if entry.kind is ValueKind.PER_RANK else ranks[0]


class _RankValues(Sequence[Any]):
    """Sequence of the values of all ranks. A value is read when it is indexed, so a rank need read only its own."""

    def __init__(self, storage: Storage, catalog: Catalog, entry: ValueEntry, verify: bool) -> None:
        self._storage, self._catalog, self._entry, self._verify = storage, catalog, entry, verify

    def __len__(self) -> int:
        return len(self._entry.blobs)

    def __getitem__(self, rank: Any) -> Any:
        data = read_blob(self._storage, self._catalog, self._entry.blobs[rank], self._verify)
        return decode_value(data, name=self._entry.name)


def blob_reader(storage: Storage, catalog: Catalog, *, verify: bool) -> Callable[[ValueEntry], bytes]:
    """Return a function that reads the bytes of a large value. `renamed` uses it to rename parameters in optimizers' groups."""
    return lambda value: bytes(read_blob(storage, catalog, value.blobs[0], verify))


def read_blob(storage: Storage, catalog: Catalog, index: int, verify: bool) -> memoryview:
    """Read the bytes of a blob; `index` is its index among the tensors of the catalog."""
    check_whole(storage, catalog, [index])
    blob = byte_blob(catalog.tensors_table.names[index], torch.empty(catalog.shape(index), dtype=torch.uint8, device="cpu"))
    plan = plan_load(catalog, np.array([index]), piece_columns([blob.spec], 1), WINDOW_BYTES)
    files = np.unique(plan.file).tolist()
    blocks = open_files(storage, catalog, [], [file for file in files if verify or catalog.files[file].checkpoint])
    target = ReadTarget(blob.spec.name, blob.tensor, torch.uint8)
    execute(ReadTask(storage, catalog, plan, [target], blocks))
    return blob.tensor.numpy().data
