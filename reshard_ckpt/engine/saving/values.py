"""The values of all ranks, merged on rank 0 into the value table of the catalog."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from ...core.catalog import param_groups
from ...core.catalog.model import ValueEntry
from ...core.catalog.specs import StateLink, ValueKind, ValueSpec, blob_name
from ...core.planning.merge import OWN_VALUES, MergedTables
from ...core.report import summarize
from ...errors import LayoutError
from ...format.values import decode_value, encode_value

_KINDS = {ValueKind.PLAIN: "a plain value", ValueKind.PARAM_GROUPS: "groups of an optimizer", ValueKind.PER_RANK: "a PerRank"}


def merge_values(of_ranks: Sequence[tuple[int, Sequence[ValueSpec]]], tables: MergedTables) -> tuple[ValueEntry, ...]:
    """Merge the values of all ranks into one table.

    Parameters
    ----------
    of_ranks
        Pairs of a rank and its values, lowest ranks first. Ranks with equal values may be given once, by the lowest of them. The
        table keeps this order of values, so that dicts keep their order of keys.
    tables
        The merged tensors of the save, whose names are sorted; blobs of values are among them.

    Raises
    ------
    LayoutError
        Ranks disagree about a value that is not declared per rank, or about an optimizer's hyperparameters for a parameter; or a
        rank has no value of a `PerRank` name.
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
    """Merge the values that ranks have under one name into one entry, and append to `problems` where they disagree."""
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
    """Return the link of a value of optimizer state; None for other values. A link that names the parameter is preferred."""
    links = [value.link for _, value in held if value.link is not None]
    return next((link for link in links if link.parameter is not None), links[0] if links else None)


def _show(value: ValueSpec) -> str:
    if value.data is None:
        return "a large value"
    text = repr(decode_value(value.data))
    return text if len(text) <= 60 else text[:57] + "…"
