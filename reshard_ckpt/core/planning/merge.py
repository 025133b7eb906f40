"""Merge the local metadata of all ranks into one table of tensors and one of rows.

1. Merge tensors by name, once for each distinct table. Ranks that disagree about a dtype or a shape are an error. A blob (the
   bytes of a value) that each rank has for itself becomes one tensor for each rank.
2. Give equal boxes one number, over all tensors and ranks.
3. Sort rows by tensor, box and start, and then by rank, so that equal pieces of several ranks (replicas) are neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from ...errors import LayoutError
from ..catalog.model import BoxTable, TensorDescriptions, TensorKind, TensorTable
from ..catalog.specs import CODES, Placement, blob_name
from ..geometry.columns import ColumnTable, group_ids, is_new, lex_order
from ..geometry.runs import I64, pad_left
from ..report import summarize
from .local_metadata import U8, JobMetadata
from .placement import agreed_placement

OWN_VALUES = "wrap a value that differs on purpose in checkpoint.PerRank, or give different values different names"
"""Advice in the error when ranks have different values under one name."""


@dataclass(frozen=True, slots=True)
class MergedTables(TensorDescriptions):
    """The tensors of all ranks, sorted by name. ``declared`` is the placement of each that all ranks declare."""

    declared: tuple[Placement, ...]
    own: Mapping[str, I64]
    """For the name of each value that ranks have for themselves: the index of each rank's blob, (ranks,); -1 if a rank has no
    such value."""


@dataclass(frozen=True, slots=True)
class MergedRows(ColumnTable):
    """The pieces of all ranks in one table, without those of aliases, sorted by tensor, box and start.

    ``local[i]`` is the row of piece i in the metadata of rank ``rank[i]``.
    """

    tensor: I64
    box: I64
    start: I64
    count: I64
    rank: I64
    local: I64
    replication: U8


class _Ids(NamedTuple):
    """The index in the merged table of each entry of each distinct table.

    Entry e of table k is tensor ``value[first[k] + e]``. A negative number ``-1 - n`` stands for a blob that each rank has for
    itself: the tensor of rank r is ``own[n, r]``, or -1 if rank r has no such blob.
    """

    value: I64
    first: I64
    own: I64


def merge_metadata(job_metadata: JobMetadata) -> tuple[MergedTables, BoxTable, MergedRows]:
    """Merge the metadata of all ranks into one table of tensors, the distinct boxes, and the pieces of all ranks.

    Raise `LayoutError` if ranks disagree about a tensor.
    """
    tables, ids = _merge_tables(job_metadata)
    # entry[i]: the place of row i's tensor among the entries of all tables end to end; tensor[i]: the merged tensor.
    entry = ids.first[job_metadata.table][job_metadata.rank] + job_metadata.tensor
    tensor, replication = ids.value[entry], _concatenate(job_metadata, "replication")[entry]
    # own_row: the rows of blobs that each rank has for itself. The shape of such a blob is that of its box.
    own_row = np.flatnonzero(tensor < 0)
    tensor[own_row] = ids.own[-1 - tensor[own_row], job_metadata.rank[own_row]]
    tables.shape[tensor[own_row]] = pad_left(job_metadata.box_lengths, tables.shape.shape[1], 1)[job_metadata.box[own_row]]
    empty_tensor = (tables.shape == 0).any(axis=1)
    # A piece without elements is dropped, unless its tensor is empty: then one such piece must represent it.
    keep = (tables.alias < 0)[tensor] & ((job_metadata.count > 0) | empty_tensor[tensor])
    boxes, box = _merge_boxes(job_metadata, tables, empty_tensor, tensor)
    start = np.where(empty_tensor[tensor], 0, job_metadata.start) if empty_tensor.any() else job_metadata.start
    rows = MergedRows(tensor, box, start, job_metadata.count, job_metadata.rank, job_metadata.local, replication)
    if not keep.all():  # it nearly always is, and rows may be many
        rows = rows.take(keep)
    # Not sorted by count: runs that begin alike but differ in length overlap. They are cut (`overlaps`) or refused in any order.
    return tables, boxes, rows.take(lex_order(rows.tensor, rows.box, rows.start))


def _merge_boxes(job_metadata: JobMetadata, tables: MergedTables, empty_tensor: I64, tensor: I64) -> tuple[BoxTable, I64]:
    """Find the distinct boxes of all ranks, and the box of each piece.

    Each piece of an empty tensor gets the whole tensor as its box.
    """
    width = tables.shape.shape[1]
    empty = np.flatnonzero(empty_tensor)
    # The boxes of all ranks, then the whole box of each empty tensor; ids[i]: the distinct box that entry i is.
    offsets = np.vstack([pad_left(job_metadata.box_offsets, width, 0), np.zeros((len(empty), width), np.int64)])
    lengths = np.vstack([pad_left(job_metadata.box_lengths, width, 1), tables.shape[empty]])
    ids, first = group_ids(np.hstack([offsets, lengths]))
    box = ids[job_metadata.box]
    if len(empty):
        rows = np.flatnonzero(empty_tensor[tensor])
        box[rows] = ids[len(job_metadata.box_offsets) + np.searchsorted(empty, tensor[rows])]
    return BoxTable(offsets[first], lengths[first]), box


def _merge_tables(job_metadata: JobMetadata) -> tuple[MergedTables, _Ids]:
    """Merge the distinct tables of tensors by name. Return the merged table, and where each entry went."""
    entries = [name for table in job_metadata.tables for name in table.names]
    first = np.cumsum([0] + [len(table.names) for table in job_metadata.tables])
    # number: by name, a number for the blobs that each rank has for itself: one tensor for each rank, named after the rank.
    own = np.flatnonzero(_concatenate(job_metadata, "own"))
    number = {name: n for n, name in enumerate(dict.fromkeys(entries[i] for i in own.tolist()))}
    # holds[n, r]: rank r has a blob of its own with name n.
    holds = np.zeros((len(number), job_metadata.num_ranks), bool)
    for i, table in zip(own.tolist(), (np.searchsorted(first, own, side="right") - 1).tolist(), strict=True):
        holds[number[entries[i]], job_metadata.table == table] = True
    blob_names = list(number)
    own_names = [blob_name(blob_names[n], rank) for n, rank in np.argwhere(holds).tolist()]
    value = np.zeros(len(entries), np.int64)
    value[own] = [-1 - number[entries[i]] for i in own.tolist()]
    names = sorted({entries[i] for i in np.flatnonzero(value == 0).tolist()}.union(own_names))
    index = {name: i for i, name in enumerate(names)}
    value = np.where(value < 0, value, np.array([index.get(name, -1) for name in entries], np.int64))
    of_rank = np.full(holds.shape, -1, np.int64)
    of_rank[holds] = [index[name] for name in own_names]
    ids = _Ids(value, first, of_rank)
    return _fill(job_metadata, ids, tuple(names), dict(zip(blob_names, of_rank, strict=True))), ids


def _concatenate(job_metadata: JobMetadata, column: str) -> NDArray[Any]:
    """Concatenate one column of all distinct tables of tensors."""
    parts = [getattr(table, column) for table in job_metadata.tables]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _fill(job_metadata: JobMetadata, ids: _Ids, names: tuple[str, ...], own: Mapping[str, I64]) -> MergedTables:
    """Fill the columns of the merged table of tensors. The shapes of blobs that ranks have for themselves are set later."""
    width = max((table.shape.shape[1] for table in job_metadata.tables), default=1)
    shared, blobs = np.flatnonzero(ids.value >= 0), np.flatnonzero(ids.value < 0)
    # blob[n]: one of the entries of ranks' own blobs of name n, which are all described alike.
    blob = np.zeros(len(ids.own), np.int64)
    blob[-1 - ids.value[blobs]] = blobs
    # at[i], source[i]: merged tensor and an entry that describes it.
    which, rank = np.nonzero(ids.own >= 0)
    at = np.concatenate([ids.value[shared], ids.own[which, rank]])
    source = np.concatenate([shared, blob[which]])
    # owner[t]: the first entry that describes tensor t. Assigned in reverse: of several values for one place, numpy keeps the
    # last.
    owner = np.zeros(len(names), np.int64)
    owner[at[::-1]] = source[::-1]
    shape = np.concatenate([*(pad_left(table.shape, width, 1) for table in job_metadata.tables), np.ones((0, width), np.int64)])
    dtype, kind, ndim = (_concatenate(job_metadata, column) for column in ("dtype", "kind", "ndim"))
    _check_alike(job_metadata, ids, names, owner, [dtype, kind, ndim, *shape.T])
    return MergedTables(
        names=names,
        shape=shape[owner],
        alias=_merge_aliases(job_metadata, ids, len(names)),
        declared=_merge_placements(job_metadata, ids, len(names)),
        own=own,
        dtype=dtype[owner],
        kind=kind[owner],
        ndim=ndim[owner],
        **_merge_links(job_metadata, ids, len(names)),
    )


def _check_alike(job_metadata: JobMetadata, ids: _Ids, names: Sequence[str], owner: I64, columns: Sequence[I64]) -> None:
    """Raise LayoutError if ranks describe a tensor differently in one of these columns."""
    shared = np.flatnonzero(ids.value >= 0)
    first = owner[ids.value[shared]]
    differs = np.zeros(len(shared), bool)
    for column in columns:
        differs |= column[shared] != column[first]
    problems: dict[bool, list[str]] = {False: [], True: []}  # by whether both are the bytes of a value
    for i, j in zip(first[differs].tolist(), shared[differs].tolist(), strict=True):
        name, are_values = names[ids.value[i]], columns[1][i] == columns[1][j] == TensorKind.BLOB
        name = unquote(name.removesuffix(blob_name("", None))) if are_values else name
        problems[are_values].append(f"{name}: {_describe(job_metadata, ids, i)}, {_describe(job_metadata, ids, j)}")
    if problems[False]:
        advice = "ranks disagree about tensors of one name; give different tensors different names"
        raise LayoutError(summarize(problems[False], advice))
    if problems[True]:
        raise LayoutError(summarize(problems[True], OWN_VALUES))


def _describe(job_metadata: JobMetadata, ids: _Ids, entry: int) -> str:
    """Describe an entry of a rank's table for a message: the first rank that has it, its dtype and its shape."""
    table_number = int(np.searchsorted(ids.first, entry, side="right")) - 1
    table, i = job_metadata.tables[table_number], entry - int(ids.first[table_number])
    rank = int(np.argmax(job_metadata.table == table_number))
    shape = table.shape_of(i)
    if table.kind[i] == TensorKind.BLOB:
        return f"rank {rank} has a value of {shape[0]:,} bytes"
    return f"rank {rank} has {CODES[int(table.dtype[i])]} {shape}"


def _merge_aliases(job_metadata: JobMetadata, ids: _Ids, num: int) -> I64:
    """Return for each merged tensor the index of the tensor that it is an alias of, or -1.

    A tensor is an alias only if every rank that has it names the same tensor, and that tensor is not an alias itself.
    """
    none = -1
    # alias_of: for each entry the entry of its table that it is an alias of, or -1. target: the merged index of that entry.
    # low, high: the least and the largest target of each tensor.
    alias_of = _concatenate(job_metadata, "alias")
    target = np.where(alias_of >= 0, ids.value[alias_of + np.repeat(ids.first[:-1], np.diff(ids.first))], none)
    shared = np.flatnonzero(ids.value >= 0)
    low, high = np.full(num, num, np.int64), np.full(num, none, np.int64)
    np.minimum.at(low, ids.value[shared], target[shared])
    np.maximum.at(high, ids.value[shared], target[shared])
    alias = np.where(low == high, high, none)
    # An alias of an alias counts as a tensor of its own.
    alias[(alias >= 0) & (alias[alias] >= 0)] = none
    return alias


def _merge_links(job_metadata: JobMetadata, ids: _Ids, num: int) -> dict[str, I64]:
    """Merge the links from optimizer state to its parameter into columns of the merged table.

    A rank may have the state of a parameter without the parameter, and then has no link. So one rank with the link is enough.
    """
    optimizer, key, parameter_of = (_concatenate(job_metadata, column) for column in ("optimizer", "key", "parameter"))
    entries = np.flatnonzero((key > 0) & (ids.value >= 0))
    first = np.repeat(ids.first[:-1], np.diff(ids.first))[entries]
    tensor = ids.value[entries]
    parameter = np.full(num, -1, np.int64)
    np.maximum.at(parameter, tensor, np.where(parameter_of[entries] >= 0, ids.value[parameter_of[entries] + first], -1))
    # Bit packing: optimizer in the high 32 bits, key in the low ones, so that the maximum takes both from one rank.
    divided = np.zeros(num, np.int64)
    np.maximum.at(divided, tensor, (optimizer[entries] << 32) + key[entries])
    return {"optimizer": divided >> 32, "key": divided & 0xFFFFFFFF, "parameter": parameter}


def _merge_placements(job_metadata: JobMetadata, ids: _Ids, num: int) -> tuple[Placement, ...]:
    """Return for each tensor the placement that all ranks declare. An axis on which ranks differ is left out."""
    # number: distinct placements of all tables; of_entry: the placement of each entry.
    number: dict[Placement, int] = {}
    local = [np.array([number.setdefault(p, len(number)) for p in table.placements], np.int64) for table in job_metadata.tables]
    of_entry = np.concatenate([*(n[t.placement] for n, t in zip(local, job_metadata.tables, strict=True)), np.zeros(0, np.int64)])
    shared = np.flatnonzero(ids.value >= 0)
    # first: one entry for each distinct pair of tensor and placement, sorted by tensor.
    _, first = group_ids(np.stack([ids.value[shared], of_entry[shared]], axis=1))
    known = list(number)
    tensors, placements = ids.value[shared[first]], of_entry[shared[first]]
    declared: list[Placement] = [()] * num
    # Nearly always all ranks declare the same placement of a tensor.
    begin = np.append(np.flatnonzero(is_new(tensors)), len(tensors)).tolist()
    for low, high in pairwise(begin):
        distinct = [known[i] for i in placements[low:high].tolist()]
        declared[int(tensors[low])] = distinct[0] if high - low == 1 else agreed_placement(distinct)
    return tuple(declared)


def tensor_table(tables: MergedTables, placement: I64, tensor: I64) -> TensorTable:
    """Build the catalog's table of tensors from the merged table.

    Parameters
    ----------
    placement
        The index of each tensor's placement, or -1.
    tensor
        The tensor that each row of the catalog belongs to; ascending.
    """
    described = {field.name: getattr(tables, field.name) for field in fields(TensorDescriptions)}
    row_start = np.searchsorted(tensor, np.arange(len(tables.names) + 1)).astype(np.int64)
    return TensorTable(**described, placement=placement, row_start=row_start)
