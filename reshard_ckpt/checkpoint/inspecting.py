"""`catalog`, and `inspect`: a summary of a checkpoint, a tree of names that folds equal layers, and single tensors in detail."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.catalog.model import Catalog, TensorView, ValueEntry
from ..core.catalog.name_tree import Node, fold
from ..core.catalog.specs import Ints, ValueKind, item_bytes_of
from ..core.catalog.summary import Summary, step_of, summarize_catalog
from ..core.geometry.runs import volumes
from ..engine.common.progress import OnProgress, reporter
from ..format.values import decode_value
from ..formats.source import Path, open_source
from .selecting import match_names

if TYPE_CHECKING:
    from ..engine.checking.statistics import TensorStats


@dataclass(frozen=True, slots=True)
class TensorLine:
    """One tensor as `inspect` lists it. `placement` is an index into the catalog's placements, -1 if the placement is unknown."""

    name: str
    dtype: str
    shape: Ints
    placement: int
    alias_of: str | None
    num_bytes: int
    num_shards: int


@dataclass(frozen=True, slots=True)
class ValueLine:
    """One value as `inspect` lists it. If it is too large for the catalog, or per rank, `in_catalog` is False and `value` None.

    `kind` is ``"plain"``, ``"per_rank"`` or ``"param_groups"``; `num_ranks` is the number of ranks if each has a value of its
    own.
    """

    name: str
    kind: str
    num_bytes: int
    num_ranks: int
    in_catalog: bool
    value: Any


@dataclass(frozen=True, slots=True)
class Inspection:
    """The result of `inspect`.

    Attributes
    ----------
    path, format
        The path that was opened, and the format found there.
    summary
        The summary of the whole checkpoint.
    catalog
        The catalog of the whole checkpoint.
    lines
        The tensors and the values that `names` selects, or all.
    tree
        The names of `lines` as a tree; its leaves are indices of `lines`.
    tensors, values
        The tensors, with every shard, and the values that `names` gives by their full name.
    stats
        With ``stats=True``, the statistics of every tensor in `lines`.
    """

    path: str
    format: str
    summary: Summary
    catalog: Catalog
    lines: tuple[TensorLine | ValueLine, ...]
    tree: tuple[Node, ...]
    tensors: tuple[TensorView, ...]
    values: dict[str, Any]
    stats: tuple[TensorStats, ...]


def catalog(path: Path) -> Catalog:
    """Read the catalog of a checkpoint: names, shapes, shards, files. This reads no tensor data, and needs no process group.

    Parameters
    ----------
    path
        A checkpoint of any format that can be opened.

    Returns
    -------
    Catalog

    Raises
    ------
    CheckpointNotFound
        The path holds no checkpoint.
    CorruptError
        The catalog is damaged.
    StorageError
        The store refused to read.
    """
    with open_source(path) as source:
        return source.catalog


def inspect(
    path: Path, names: Sequence[str] | None = None, *, stats: bool = False, progress: bool | OnProgress = False
) -> Inspection:
    """Describe a checkpoint: its tensors and values, their shards, a summary. Without `stats`, no tensor data are read.

    Parameters
    ----------
    path
        A checkpoint, possibly of another format.
    names
        Names of tensors and values; by default all. A name also stands for everything below it, and may be a shell-style pattern.
    stats
        Also read the tensors, and compute of each the smallest and largest element, the mean, and the numbers of NaN and
        infinities. Memory is bounded.
    progress
        True: show a line on stderr. A function is called with the name of the step, the bytes done and the bytes in all.

    Returns
    -------
    Inspection

    Raises
    ------
    MismatchError
        No tensor or value has one of these names.
    CheckpointNotFound, CorruptError
        The path holds no checkpoint, or it is damaged.
    """
    with open_source(path) as source:
        saved, found, whole = source.catalog, [], {}
        matched = match_names(saved, names)
        tensors, values, selected = matched.tensors, matched.values, set(matched.values)
        entries = [_value_line(saved, entry) for entry in saved.values_table]
        lines: tuple[TensorLine | ValueLine, ...] = (
            *_tensor_lines(saved, tensors),
            *(line for line in entries if line.name in selected),
        )
        exact = set(names or ())
        # The functions that read tensors import torch, which takes seconds. A look at the catalog does not need it.
        if stats:
            from ..engine.checking.statistics import statistics

            found = statistics(source.storage, saved, [saved.index(n) for n in tensors], reporter(progress))
        if full := [name for name in values if name in exact]:  # large values are read only by their full name
            from ..engine.loading.saved_values import plain_values

            whole = plain_values(source.storage, saved, full)
        return Inspection(
            path=str(path),
            format=source.format,
            summary=summarize_catalog(saved, step_of(saved.metadata, [(line.name, line.value) for line in entries])),
            catalog=saved,
            lines=lines,
            tree=fold([line.name for line in lines], [_fold_key(line) for line in lines]),
            tensors=tuple(saved.tensor(name) for name in tensors if name in exact),
            values={name: value for name, value in whole.items() if name in exact},
            stats=tuple(found),
        )


def _tensor_lines(catalog: Catalog, names: Sequence[str]) -> list[TensorLine]:
    """Make a `TensorLine` for each of these tensors of a catalog."""
    table = catalog.tensors_table
    # at: the index of each tensor in the table; source: the index of the tensor that has its bytes.
    at = np.array([catalog.index(name) for name in names], np.int64)
    source = catalog.sources(at)
    num_bytes = volumes(table.shape[at]) * item_bytes_of(table.dtype[at])
    num_shards = np.diff(table.row_start)[source]  # an alias has the shards of its source
    columns = (column.tolist() for column in (at, table.placement[at], table.alias[at], num_bytes, num_shards))
    lines = []
    for name, index, placement, alias, size, shards in zip(names, *columns, strict=True):
        alias_of = None if alias < 0 else table.names[alias]
        lines.append(TensorLine(name, catalog.dtype(index), catalog.shape(index), placement, alias_of, size, shards))
    return lines


def _value_line(catalog: Catalog, entry: ValueEntry) -> ValueLine:
    """Make the `ValueLine` of one value; its `num_bytes` counts the encoded bytes."""
    data = entry.data
    return ValueLine(
        name=entry.name,
        kind=entry.kind.name.lower(),
        num_bytes=sum(prod(catalog.shape(i)) for i in entry.blobs) if data is None else len(data),
        num_ranks=len(entry.blobs) if entry.kind is ValueKind.PER_RANK else 0,
        in_catalog=data is not None,
        value=None if data is None else decode_value(data, name=entry.name),
    )


def _fold_key(line: TensorLine | ValueLine) -> Hashable:
    """Return a key that is equal for tensors or values that look the same, so that equal layers share one line of the tree."""
    if isinstance(line, ValueLine):
        return line.kind, repr(line.value)
    return line.dtype, line.shape, line.placement, line.alias_of
