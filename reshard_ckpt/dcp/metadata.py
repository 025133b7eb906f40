"""A checkpoint as DCP's `Metadata`: its tensors and values, under the names that DCP would have given them.

Each tensor is shown as one chunk. The places of its bytes are in the catalog, which DCP does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ..core.catalog.model import Catalog, TensorKind
from ..core.catalog.names import STATE, optimizer_of
from ..core.catalog.specs import ValueKind
from ..core.report import plural
from ..core.trees import name_of
from ..engine.loading.saved_values import open_values, read_blobs
from ..errors import CheckpointNotFound, MismatchError
from ..format.dtypes import TORCH_DTYPES
from ..format.shard_file import opaque_value
from ..formats.dcp.names import KeyPath, inner_paths, key_path, taken_apart, tensor_path
from ..formats.dcp.values import torch_saved
from ..formats.numbered import numbered_optimizers
from ..formats.source import Path, Source, open_source, with_options
from ..state.layouts import RankSet, group_of
from ..storage import Buffer

FORMATS_AS_SAVED = with_options({"as_saved": True}, only=["dcp"])
"""The formats to try when a checkpoint is opened. A DCP folder is opened with the tensor names that DCP saved."""


@dataclass(frozen=True, slots=True)
class DcpValue:
    """One value as DCP's planner gets it.

    Attributes
    ----------
    path
        The keys that lead to it; an index into a list is an int.
    encoded
        Returns the bytes for the planner to decode. Raises a `MismatchError` if this rank cannot load the value.
    """

    path: tuple[str | int, ...]
    encoded: Callable[[], Buffer]


def all_values(source: Source, verify: bool, group: RankSet) -> Iterator[tuple[str, DcpValue]]:
    """Yield each value of a source with the name that DCP would give it. If a name occurs twice, the later value counts."""
    saved, table = source.catalog, source.catalog.tensors_table
    for name, why in saved.unreadable.items():
        yield name, _unavailable(name, str(why))
    # Values that only DCP's planner can decode, such as pickled objects.
    for blob in np.flatnonzero(table.kind == TensorKind.BLOB).tolist():
        if (opaque := opaque_value(table.names[blob])) is not None:
            yield opaque, DcpValue((opaque,), partial(_read_blob, source, blob, verify))
    values = open_values(source.storage, saved, saved.value_names, verify=verify)
    optimizers = numbered_optimizers(saved, {name: each.value for name, each in values.items()})
    for entry in saved.values_table:
        value = values[entry.name].value
        if entry.kind is ValueKind.PER_RANK:
            if len(value) != group.size:
                problem = (
                    f"{entry.name}: saved by {plural(len(value), 'rank')}, wanted on {group.size}; load it with checkpoint.load "
                    "and PerRank(value, combine=...)"
                )
                yield entry.name, _unavailable(entry.name, problem)
                continue
            value = value[group.rank]
        # The leaves of dicts, and of lists that hold dicts.
        path = key_path(entry.path)
        own = optimizers[optimizer_of(entry.name) or ""] if entry.kind is ValueKind.PARAM_GROUPS else None
        leaves = list(taken_apart(path, own.named(value) if own else value))
        if own:
            # Two sets of names: by number (``param_groups.0.lr``) as above, and by parameter (``param_groups.w.lr``).
            leaves += (((*path[:-1], name), part) for name, part in own.flat(value))
        yield from ((name_of(at), DcpValue(at, partial(torch_saved, part))) for at, part in leaves)
    yield from ((name, DcpValue(raw.path, partial(raw.read, source.storage))) for name, raw in source.raw.items())


def _unavailable(name: str, problem: str) -> DcpValue:
    def encoded() -> Buffer:
        raise MismatchError(problem, [problem])

    return DcpValue((name,), encoded)


def _read_blob(source: Source, blob: int, verify: bool) -> Buffer:
    return read_blobs(source.storage, source.catalog, [blob], verify)[0]


def metadata_of(saved: Catalog, values: Mapping[str, DcpValue], path: Path) -> Metadata:
    """Convert the catalog of a source to the `Metadata` that DCP's planners use."""
    described: dict[str, Any] = {}
    for name in saved.names:
        index = saved.index(name)
        properties, size = TensorProperties(dtype=TORCH_DTYPES[saved.dtype(index)]), torch.Size(saved.shape(index))
        chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
        described[name] = TensorStorageMetadata(properties=properties, size=size, chunks=[chunk])
    described |= {name: BytesStorageMetadata() for name in values}
    return Metadata(
        state_dict_metadata=described,
        planner_data=_paths(saved, {name: value.path for name, value in values.items()}),
        storage_meta=StorageMeta(checkpoint_id=path, save_id=saved.save_id),
    )


def _paths(saved: Catalog, of_values: Mapping[str, KeyPath]) -> dict[str, KeyPath]:
    """Map each name to the keys that lead to it. torch rebuilds a state dict from these keys.

    A catalog has the keys of values and of optimizer state. They show dicts and lists, which tensors below them go into. Any
    other tensor has its whole name as one key.
    """
    inner = inner_paths(of_values.values())
    keys_of = {name_of(path): path for path in inner}  # a name does not tell which of its dots belong to a key
    of_state = {
        name: (*keys_of.get(link.optimizer, link.optimizer.split(".")), STATE, link.fqn, *link.key.split("."))
        for name, link in saved.links().items()
        if link.name == name and link.optimizer
    }
    of_tensors = {name: tensor_path(name, inner) for name in saved.names}
    of_tensors = {name: path if path[:1] in inner else (name,) for name, path in of_tensors.items()}
    return {**of_tensors, **{name: path for name, path in of_state.items() if name in of_tensors}, **of_values}


_FIELDS = frozenset(field.name for field in fields(Metadata))


class SavedMetadata(Metadata):
    """The `Metadata` of a save, read from its catalog when a field is first used; a field that was set stays as it is.

    Most trainers do not use it, so no rank reads the catalog for them. A copy is a plain `Metadata`, and so is an unpickled one.
    """

    _read: Callable[[], Metadata]

    @classmethod
    def of(cls, path: Path, at: str, save_id: str) -> SavedMetadata:
        """Make the metadata of a save to `path`; `at` is its absolute path at the time of the save.

        Using a field raises `CheckpointNotFound` if that path holds another save by then, or no checkpoint.
        """
        new = cls.__new__(cls)
        new._read = partial(_read_metadata, path, at, save_id)
        return new

    def __getattribute__(self, name: str) -> Any:
        if name in _FIELDS and name not in vars(self):
            vars(self).update({**vars(self._read()), **vars(self)})
        return super().__getattribute__(name)

    def __reduce__(self) -> tuple[type[Metadata], tuple[Any, ...]]:
        return Metadata, tuple(getattr(self, field.name) for field in fields(Metadata))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Metadata):
            return NotImplemented
        return all(getattr(self, field.name) == getattr(other, field.name) for field in fields(Metadata))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        if not vars(self).keys() >= _FIELDS:
            return f"<{type(self).__name__}, not read yet>"
        return super().__repr__()


def _read_metadata(path: Path, at: str, save_id: str) -> Metadata:
    with open_source(at) as source:
        if source.catalog.save_id != save_id:
            raise CheckpointNotFound(
                f"{source.storage.url}: holds save {source.catalog.save_id} by now, and not {save_id}; look at the metadata of "
                "a save before the next one replaces it"
            )
        return metadata_of(source.catalog, dict(all_values(source, verify=True, group=group_of(None))), path)
