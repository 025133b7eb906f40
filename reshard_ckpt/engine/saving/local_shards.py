"""The tensors and values that a rank saves, as columns with the memory of each piece; and merging all ranks' values on rank 0.

1. `local_values` splits values: small ones go into the catalog, large and per-rank ones become blobs, which are saved as tensors.
2. `describe_local` puts the specs of tensors and blobs into columns, with the memory of each row beside them. A `Memo` keeps them
   for the next save.
3. On rank 0, `merge_values` merges the values of all ranks into the value table of the catalog.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...core.catalog import param_groups
from ...core.catalog.model import ValueEntry
from ...core.catalog.specs import Mesh, StateLink, TensorSpec, ValueKind, ValueSpec, blob_name, box_piece, row_major_strides
from ...core.planning.local_metadata import LocalMetadata, Memo, build_local_metadata
from ...core.planning.merge import OWN_VALUES, MergedTables
from ...core.report import summarize
from ...errors import LayoutError
from ...format.shard_file import opaque_name
from ...format.values import decode_value, encode_value
from ..common.tensor_bytes import LocalPiece, LocalRun, LocalTensor, byte_blob, has_streams
from .messages import RunColumns

INLINE_BYTES = 4096
"""A plain value that is larger than this in encoded bytes is kept in the shard files, as a blob, and not in the catalog."""


@dataclass(frozen=True, slots=True)
class LocalShards:
    """The tensors that this rank saves, and the memory of their pieces.

    Attributes
    ----------
    specs
        One spec for each tensor and each blob.
    rows
        For each piece, the index of its spec, and the memory of the piece.
    local_metadata
        The same as columns, one row for each piece, and the values.
    """

    specs: Sequence[TensorSpec]
    rows: Sequence[tuple[int, LocalPiece]]
    local_metadata: LocalMetadata

    def runs(self, columns: RunColumns) -> list[LocalRun]:
        """Return each run in `columns` together with the memory that holds it."""
        return [LocalRun(self.rows[row][1], start, count) for row, start, count in columns.rows()]

    @property
    def device_to_pin(self) -> torch.device | None:
        """The first device of the tensors that copies to the host faster through pinned memory; None if there is no such one."""
        devices = dict.fromkeys([local.tensor.device for _, local in self.rows])
        return next(filter(has_streams, devices), None)


def describe_local(tensors: Sequence[LocalTensor], values: Sequence[ValueSpec], mesh: Mesh | None, rank: int) -> LocalShards:
    """Put the tensors and values that this rank saves into columns, with the memory behind each row."""
    inline, blobs, own = local_values(values, rank)
    # A tensor with no elements and no pieces gets one empty piece, so that some rank writes its name.
    specs = [spec for spec, _ in (*tensors, *blobs)]
    for i, spec in enumerate(specs):
        if not spec.pieces and 0 in spec.shape:
            piece = box_piece((0,) * len(spec.shape), spec.shape, 0, row_major_strides(spec.shape))
            specs[i] = replace(spec, pieces=(piece,))
    memory = [memory for _, memory in (*tensors, *blobs)]
    rows = [(i, LocalPiece(memory[i], piece)) for i, spec in enumerate(specs) for piece in spec.pieces]
    per_rank = {len(tensors) + i: name for i, name in own.items()}
    key = specs, len(blobs), mesh, per_rank
    local_metadata = _LOCAL_METADATA.get(key, lambda: build_local_metadata(*key))
    return LocalShards(specs, rows, replace(local_metadata, values=tuple(inline)))


_LOCAL_METADATA: Memo[tuple[list[TensorSpec], int, Mesh | None, dict[int, str]], LocalMetadata] = Memo(2)
"""Cache of the metadata columns of the last two states that were saved, without their values, which change between saves."""


def local_values(values: Sequence[ValueSpec], rank: int) -> tuple[list[ValueSpec], list[LocalTensor], dict[int, str]]:
    """Make blobs, which are saved like tensors, of some values: the opaque, the per-rank and the large values.

    Another program has encoded an opaque value. A large value does not fit in the catalog.

    Returns
    -------
    tuple
        All values that are not opaque, without their bytes if they became blobs; the blobs; and for each per-rank blob,
        by its index, the name of its value.
    """
    inline: list[ValueSpec] = []
    blobs: list[LocalTensor] = []
    own: dict[int, str] = {}
    for value in values:
        is_own = value.kind is ValueKind.PER_RANK
        is_large = value.kind is ValueKind.PLAIN and value.data is not None and len(value.data) > INLINE_BYTES
        if value.data is not None and (value.is_opaque or is_own or is_large):
            if is_own and not value.is_opaque:
                own[len(blobs)] = value.name
            name = opaque_name(value.name) if value.is_opaque else blob_name(value.name, rank if is_own else None)
            blobs.append(byte_blob(name, torch.frombuffer(bytearray(value.data), dtype=torch.uint8)))
        if not value.is_opaque:
            inline.append(replace(value, data=None) if is_own or is_large else value)
    return inline, blobs, own


_KINDS = {ValueKind.PLAIN: "a plain value", ValueKind.PARAM_GROUPS: "groups of an optimizer", ValueKind.PER_RANK: "a PerRank"}


def merge_values(of_ranks: Sequence[tuple[int, Sequence[ValueSpec]]], tables: MergedTables) -> tuple[ValueEntry, ...]:
    """Merge the values of all ranks into one table.

    Raise `LayoutError` if ranks disagree about a value that is not declared per rank, or about an optimizer's hyperparameters for
    a parameter; or a rank has no value of a `PerRank` name.

    Parameters
    ----------
    of_ranks
        Pairs of a rank and its values, lowest ranks first. Ranks with equal values may be given once, by the lowest of them. The
        table keeps this order of values, so that dicts keep their order of keys.
    tables
        The merged tensors of the save, whose names are sorted; blobs of values are among them.
    """
    by_name: dict[str, list[tuple[int, ValueSpec]]] = {}
    for rank, values in of_ranks:
        for value in values:
            by_name.setdefault(value.name, []).append((rank, value))
    problems: list[str] = []
    entries = [_merge(name, by_name[name], tables, problems) for name in by_name]
    if problems:
        raise LayoutError(summarize(problems, OWN_VALUES))
    return tuple(entries)


def _merge(name: str, found: Sequence[tuple[int, ValueSpec]], tables: MergedTables, problems: list[str]) -> ValueEntry:
    """Merge the values that ranks have under one name into one entry. Append a line to `problems` if they disagree."""
    first_rank, first = found[0]
    at = bisect_left(tables.names, name)
    if at < len(tables.names) and tables.names[at] == name:
        problems.append(f"{name}: a value on rank {first_rank}, a tensor on another rank")
    for rank, value in found[1:]:
        if value.kind is not first.kind:
            problems.append(f"{name}: {_KINDS[first.kind]} on rank {first_rank}, {_KINDS[value.kind]} on rank {rank}")
        elif first.kind is ValueKind.PLAIN and value.data != first.data:
            problems.append(f"{name}: rank {first_rank} has {_show(first)}, rank {rank} has {_show(value)}")
    if first.kind is ValueKind.PARAM_GROUPS:
        # Distinct encoded groups and the lowest rank of each: reversed, so that lower ranks overwrite higher ones.
        distinct = {v.data: f"rank {rank}" for rank, v in reversed(found) if v.data is not None}
        groups = [(rank_name, decode_value(data, name=name)) for data, rank_name in reversed(distinct.items())]
        return ValueEntry(name, first.path, first.kind, encode_value(param_groups.merge(groups, name=name), name))
    if first.kind is ValueKind.PER_RANK:
        blobs = tables.own[name]
        absent = np.flatnonzero(blobs < 0).tolist()
        if absent:
            problems.append(f"{name}: a PerRank value is missing on ranks {absent}; save PerRank(None) there")
        return ValueEntry(name, first.path, first.kind, None, tuple(blobs.tolist()))
    if first.data is not None:
        return ValueEntry(name, first.path, first.kind, first.data, link=_link(found))
    # The value is a blob, whose tensor is found by its name in the sorted names.
    return ValueEntry(name, first.path, first.kind, None, (bisect_left(tables.names, blob_name(name, None)),), _link(found))


def _link(held: Sequence[tuple[int, ValueSpec]]) -> StateLink | None:
    """Return the link of a value to its optimizer, if possible one that names the parameter. None if no rank has a link."""
    links = [value.link for _, value in held if value.link is not None]
    return next((link for link in links if link.parameter is not None), links[0] if links else None)


def _show(value: ValueSpec) -> str:
    if value.data is None:
        return "a large value"
    text = repr(decode_value(value.data))
    return text if len(text) <= 60 else text[:57] + "…"
