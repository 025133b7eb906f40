"""What do all ranks hold together? Their offers as one table of tensors and one of rows.

1. Tensors merge by name, once for each distinct table; ranks that disagree about a dtype or a shape are an error. A blob of
   each rank's own becomes a tensor for each rank.
2. Equal boxes get one number, over all tensors and ranks.
3. Rows come in the order of their tensor, box and run, and then of their rank: those of one *replica group* are neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import LayoutError
from .dtypes import CODES
from .geometry import I64, pad_left, ranges
from .offer import U8, Offers, Placement
from .ordering import group_ids, is_new, lex_order
from .placement import agreed
from .report import summarize

NameOwn = Callable[[str, int], str]
"""The name of a rank's own blob: from the name that all ranks have for theirs, and the rank."""


@dataclass(frozen=True, slots=True)
class Tables:
    """The tensors of all ranks, sorted by name; `alias` is -1 or the index of the tensor that holds the bytes."""

    names: tuple[str, ...]
    dtype: U8
    kind: U8
    ndim: I64
    shape: I64
    alias: I64
    declared: tuple[Placement, ...]
    own: Mapping[str, I64]
    """Of each blob that ranks have of their own, the index of every rank's; -1 for those that have none."""


@dataclass(frozen=True, slots=True)
class Boxes:
    """The distinct boxes, in lexicographic order."""

    offsets: I64
    lengths: I64


@dataclass(frozen=True, slots=True)
class Rows:
    """Every piece of every rank that is not an alias, sorted; `local` is its row in its rank's offer."""

    tensor: I64
    box: I64
    start: I64
    count: I64
    rank: I64
    local: I64
    claim: U8


@dataclass(frozen=True, slots=True)
class _Ids:
    """Where each entry of each distinct table is in the merged one: those of table k are ``value[first[k] : first[k + 1]]``.

    ``own_key`` is ``rank · own_step + entry`` of every rank's own blobs, sorted, and ``own_value`` their place.
    """

    value: I64
    first: I64
    own_key: I64
    own_value: I64
    own_step: int


def merge_offers(offers: Offers, name_own: NameOwn) -> tuple[Tables, Boxes, Rows]:
    """One table of all tensors, the distinct boxes, and all rows.

    Raises
    ------
    LayoutError
        Ranks disagree about a tensor.
    """
    tables, ids = _merge_tables(offers, name_own)
    tensor, claim, own = _look_up(offers, ids)
    mine = np.flatnonzero(own)
    tables.shape[tensor[mine]] = pad_left(offers.box_lengths, tables.shape.shape[1], 1)[offers.box[mine]]
    hollow = (tables.shape == 0).any(axis=1)
    # An empty piece says nothing, unless its tensor is empty: then one must stand for it.
    keep = (tables.alias < 0)[tensor] & ((offers.count > 0) | hollow[tensor])
    boxes, box = _merge_boxes(offers, tables, hollow, tensor)
    chosen = np.flatnonzero(keep)
    start = np.where(hollow[tensor], 0, offers.start) if hollow.any() else offers.start
    tensor, box, start, count = (c if keep.all() else c[chosen] for c in (tensor, box, start, offers.count))
    # Not by count: runs that begin alike but differ in length overlap, which no order makes right.
    order = lex_order(tensor, box, start)
    source = chosen[order]
    return (
        tables,
        boxes,
        Rows(tensor[order], box[order], start[order], count[order], offers.rank[source], offers.local[source], claim[source]),
    )


def _look_up(offers: Offers, ids: _Ids) -> tuple[I64, U8, U8]:
    """Of each row its tensor in the merged table, its claim, and whether it is its rank's own."""
    entry = ids.first[offers.table][offers.rank] + offers.tensor
    tensor = ids.value[entry]
    own = np.concatenate([table.own for table in offers.tables])[entry]
    mine = np.flatnonzero(own)
    tensor[mine] = ids.own_value[np.searchsorted(ids.own_key, offers.rank[mine] * ids.own_step + offers.tensor[mine])]
    return tensor, np.concatenate([table.claim for table in offers.tables])[entry], own


def _merge_boxes(offers: Offers, tables: Tables, hollow: I64, tensor: I64) -> tuple[Boxes, I64]:
    """The distinct boxes, and that of each row; pieces of an empty tensor all are the one box that is the tensor."""
    width = tables.shape.shape[1]
    empty = np.flatnonzero(hollow)
    offsets = np.vstack([pad_left(offers.box_offsets, width, 0), np.zeros((len(empty), width), np.int64)])
    lengths = np.vstack([pad_left(offers.box_lengths, width, 1), tables.shape[empty]])
    ids, first = group_ids(np.hstack([offsets, lengths]))
    box = ids[offers.box]
    if len(empty):
        rows = np.flatnonzero(hollow[tensor])
        box[rows] = ids[len(offers.box_offsets) + np.searchsorted(empty, tensor[rows])]
    return Boxes(offsets[first], lengths[first]), box


def _merge_tables(offers: Offers, name_own: NameOwn) -> tuple[Tables, _Ids]:
    own = _concatenate(offers, "own") > 0
    own_rank, own_entry = _own_entries(offers)
    tables_of = offers.table[own_rank].tolist()
    common = [offers.tables[t].names[e] for t, e in zip(tables_of, own_entry.tolist(), strict=True)]
    own_names = [name_own(name, rank) for name, rank in zip(common, own_rank.tolist(), strict=True)]
    entries = [name for table in offers.tables for name in table.names]
    names = sorted({name for name, mine in zip(entries, own.tolist(), strict=True) if not mine}.union(own_names))
    index = {name: i for i, name in enumerate(names)}
    value = np.array([index.get(name, -1) for name in entries], np.int64)
    value[own] = -1
    step = max((len(table.names) for table in offers.tables), default=0)
    ids = _Ids(
        value=value,
        first=np.cumsum([0] + [len(table.names) for table in offers.tables]),
        own_key=own_rank * step + own_entry,
        own_value=np.array([index[name] for name in own_names], np.int64),
        own_step=step,
    )
    return _fill(offers, ids, tuple(names), _by_rank(common, own_rank, ids.own_value, offers.num_ranks)), ids


def _concatenate(offers: Offers, column: str) -> NDArray[Any]:
    """A column of all tables end to end."""
    parts = [getattr(table, column) for table in offers.tables]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _own_entries(offers: Offers) -> tuple[I64, I64]:
    """Rank and entry of every blob that is a rank's own, in this order."""
    entries = [np.flatnonzero(table.own) for table in offers.tables]
    num = np.array([len(e) for e in entries], np.int64)
    rank, step = ranges(num[offers.table])
    first = (np.cumsum(num) - num)[offers.table[rank]]
    return rank, np.concatenate([*entries, np.zeros(0, np.int64)])[first + step]


def _by_rank(names: Sequence[str], rank: I64, value: I64, num_ranks: int) -> dict[str, I64]:
    members: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        members.setdefault(name, []).append(i)
    found: dict[str, I64] = {}
    for name, at in members.items():
        found[name] = np.full(num_ranks, -1, np.int64)
        found[name][rank[at]] = value[at]
    return found


def _fill(offers: Offers, ids: _Ids, names: tuple[str, ...], own: Mapping[str, I64]) -> Tables:
    """The columns of the merged table; the shapes of ranks' own blobs are still to come."""
    width = max((table.shape.shape[1] for table in offers.tables), default=1)
    # Each blob of a rank's own is like its entry in the first table that has it.
    entry = ids.first[offers.table[ids.own_key // max(ids.own_step, 1)]] + ids.own_key % max(ids.own_step, 1)
    shared = np.flatnonzero(ids.value >= 0)
    at, source = np.concatenate([ids.value[shared], ids.own_value]), np.concatenate([shared, entry])
    # The first table that has a tensor counts: of several assignments to one place, numpy keeps the last.
    owner = np.zeros(len(names), np.int64)
    owner[at[::-1]] = source[::-1]
    shape = np.concatenate([*(pad_left(table.shape, width, 1) for table in offers.tables), np.ones((0, width), np.int64)])
    dtype, kind, ndim = (_concatenate(offers, column) for column in ("dtype", "kind", "ndim"))
    _check_alike(offers, ids, names, owner, [dtype, kind, ndim, *shape.T])
    return Tables(
        names=names,
        shape=shape[owner],
        alias=_merge_aliases(offers, ids, len(names)),
        declared=_merge_placements(offers, ids, len(names)),
        own=own,
        dtype=dtype[owner],
        kind=kind[owner],
        ndim=ndim[owner],
    )


def _check_alike(offers: Offers, ids: _Ids, names: Sequence[str], owner: I64, columns: Sequence[I64]) -> None:
    shared = np.flatnonzero(ids.value >= 0)
    first = owner[ids.value[shared]]
    differs = np.zeros(len(shared), bool)
    for column in columns:
        differs |= column[shared] != column[first]
    problems = [
        f"{names[ids.value[i]]}: {_describe(offers, ids, i)}, {_describe(offers, ids, j)}"
        for i, j in zip(first[differs].tolist(), shared[differs].tolist(), strict=True)
    ]
    if problems:
        raise LayoutError(summarize(problems, "ranks disagree about tensors of one name; give different tensors different names"))


def _describe(offers: Offers, ids: _Ids, entry: int) -> str:
    which = int(np.searchsorted(ids.first, entry, side="right")) - 1
    table, i = offers.tables[which], entry - int(ids.first[which])
    rank = int(np.argmax(offers.table == which))
    width, ndim = table.shape.shape[1], int(table.ndim[i])
    return f"rank {rank} has {CODES[int(table.dtype[i])]} {tuple(table.shape[i, width - ndim :].tolist())}"


def _merge_aliases(offers: Offers, ids: _Ids, num: int) -> I64:
    """A tensor is an alias where every rank that has it says so, and all name the same tensor, which is none itself."""
    none = -1
    said = _concatenate(offers, "alias")
    target = np.where(said >= 0, ids.value[said + np.repeat(ids.first[:-1], np.diff(ids.first))], none)
    shared = np.flatnonzero(ids.value >= 0)
    low, high = np.full(num, num, np.int64), np.full(num, none, np.int64)
    np.minimum.at(low, ids.value[shared], target[shared])
    np.maximum.at(high, ids.value[shared], target[shared])
    alias = np.where(low == high, high, none)
    alias[(alias >= 0) & (alias[alias] >= 0)] = none
    return alias


def _merge_placements(offers: Offers, ids: _Ids, num: int) -> tuple[Placement, ...]:
    """What all ranks declare alike of each tensor."""
    number: dict[Placement, int] = {}
    local = [np.array([number.setdefault(p, len(number)) for p in table.placements], np.int64) for table in offers.tables]
    said = np.concatenate([*(n[t.placement] for n, t in zip(local, offers.tables, strict=True)), np.zeros(0, np.int64)])
    shared = np.flatnonzero(ids.value >= 0)
    _, first = group_ids(np.stack([ids.value[shared], said[shared]], axis=1))
    known = list(number)
    tensors, placements = ids.value[shared[first]], said[shared[first]]
    declared: list[Placement] = [()] * num
    # Nearly all say the same of a tensor.
    begin = np.append(np.flatnonzero(is_new(tensors)), len(tensors)).tolist()
    for low, high in pairwise(begin):
        distinct = [known[i] for i in placements[low:high].tolist()]
        declared[int(tensors[low])] = distinct[0] if high - low == 1 else agreed(distinct)
    return tuple(declared)
