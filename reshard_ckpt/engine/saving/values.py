"""How are values saved? Small ones in the catalog, large and per-rank ones as bytes in the shard files.

`local_values` turns this rank's values into offered ones and blobs; `merge_values`, on rank 0, makes one table of all
ranks' values.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch

from ...core.catalog import param_groups
from ...core.catalog.model import ValueEntry
from ...core.catalog.specs import StateLink, ValueKind, ValueSpec
from ...core.planning.local_metadata import LocalValue
from ...core.planning.merge import MergedTables
from ...core.report import summarize
from ...errors import LayoutError
from ...format.shard_file import blob_name
from ...format.values import decode_value, encode_value
from ..common.blobs import Blob, byte_blob

INLINE_BYTES = 4096
"""Larger plain values are kept in the shard files."""


def local_values(values: Sequence[ValueSpec], rank: int) -> tuple[list[LocalValue], list[Blob]]:
    """This rank's values as offered ones, and the blobs of those whose bytes are not in there."""
    offered: list[LocalValue] = []
    blobs: list[Blob] = []
    for value in values:
        own = value.kind is ValueKind.PER_RANK
        aside = own or (value.kind is ValueKind.PLAIN and len(value.data) > INLINE_BYTES)
        offered.append(LocalValue(value.name, value.path, value.kind, None if aside else value.data, value.link))
        if aside:
            data = torch.frombuffer(bytearray(value.data), dtype=torch.uint8)
            blobs.append(byte_blob(blob_name(value.name, rank if own else None), data, value.name if own else None))
    return offered, blobs


def merge_values(held: Sequence[tuple[int, Sequence[LocalValue]]], tables: MergedTables) -> tuple[ValueEntry, ...]:
    """One table of the values of all ranks.

    Parameters
    ----------
    held
        Values, and the rank that has them; ranks that have the same need be given only once, and the lowest ranks first.

    Raises
    ------
    LayoutError
        Ranks disagree about a value that is not declared per rank, or about an optimizer's hyperparameters for a parameter.
    """
    by_name: dict[str, list[tuple[int, LocalValue]]] = {}
    for rank, values in held:
        for value in values:
            by_name.setdefault(value.name, []).append((rank, value))
    problems: list[str] = []
    entries = [_merge(name, by_name[name], tables, problems) for name in sorted(by_name)]
    if problems:
        advice = "wrap a value of each rank's own in checkpoint.PerRank, or give different values different names"
        raise LayoutError(summarize(problems, advice))
    return tuple(entries)


def _merge(name: str, held: Sequence[tuple[int, LocalValue]], tables: MergedTables, problems: list[str]) -> ValueEntry:
    first_rank, first = held[0]
    at = bisect_left(tables.names, name)
    if at < len(tables.names) and tables.names[at] == name:
        problems.append(f"{name}: a value on rank {first_rank}, a tensor on another rank")
    for rank, value in held[1:]:
        if value.kind is not first.kind:
            problems.append(f"{name}: {first.kind.name} on rank {first_rank}, {value.kind.name} on rank {rank}")
        elif first.kind is ValueKind.PLAIN and value.data != first.data:
            problems.append(f"{name}: rank {first_rank} has {_show(first)}, rank {rank} has {_show(value)}")
    if first.kind is ValueKind.PARAM_GROUPS:
        distinct = {v.data: f"rank {rank}" for rank, v in reversed(held) if v.data is not None}
        groups = [(who, decode_value(data, name=name)) for data, who in reversed(distinct.items())]
        return ValueEntry(name, first.path, first.kind, encode_value(param_groups.merge(groups, name=name), name))
    if first.kind is ValueKind.PER_RANK:
        blobs = tables.own[name]
        absent = np.flatnonzero(blobs < 0).tolist()
        if absent:
            problems.append(f"{name}: a PerRank value is missing on ranks {absent}; save PerRank(None) there")
        return ValueEntry(name, first.path, first.kind, None, tuple(blobs.tolist()))
    if first.data is not None:
        return ValueEntry(name, first.path, first.kind, first.data, link=_link(held))
    # The names are sorted, and that of the blob is among them.
    return ValueEntry(name, first.path, first.kind, None, (bisect_left(tables.names, blob_name(name, None)),), _link(held))


def _link(held: Sequence[tuple[int, LocalValue]]) -> StateLink | None:
    """What the value is state of; a rank may have that without the parameter."""
    links = [value.link for _, value in held if value.link is not None]
    return next((link for link in links if link.parameter is not None), links[0] if links else None)


def _show(value: LocalValue) -> str:
    if value.data is None:
        return "a large value"
    text = repr(decode_value(value.data))
    return text if len(text) <= 60 else text[:57] + "…"
