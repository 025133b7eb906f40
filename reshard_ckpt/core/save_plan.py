"""Which rank writes which bytes? From the offers of all ranks to one plan that covers every tensor exactly once.

1. Tables merge by name; ranks that disagree about a dtype or a shape are an error.
2. Equal runs of a tensor are one *replica group*; aliases (tied weights) offer nothing of their own.
3. `balance.assign` divides the groups over their ranks; what may not be split stays whole.
4. The assigned runs must tile every tensor (`tiling`), or the save is refused.
5. Each member of a replica group is told to fingerprint it, so that what only claims to be a replica is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import LayoutError
from .balance import Group, Parts, assign
from .catalog import TensorKind
from .dtypes import CODES, ITEM_BYTES
from .geometry import I64, as_boxes, group_ids, pad_left, strides_of, volumes
from .offer import U8, Offer
from .placement import Holding, Placement, agreed, derive, mesh_coordinates
from .report import summarize
from .state import Claim, Mesh
from .tiling import Fault, describe_region, find_faults

SPLIT_BYTES = 1 << 20
"""A replica up to this size is written whole by one rank."""


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


@dataclass(frozen=True, slots=True)
class Rows:
    """Every piece of every rank that is not an alias; `local` is its row in its rank's offer."""

    tensor: I64
    rank: I64
    local: I64
    offsets: I64
    lengths: I64
    start: I64
    count: I64
    claim: U8


@dataclass(frozen=True, slots=True)
class Checks:
    """Which rows claim to be the same: members of one `group` must fingerprint alike; `claim` is the group's weakest."""

    group: I64
    rank: I64
    local: I64
    tensor: I64
    claim: U8


@dataclass(frozen=True, slots=True)
class SavePlan:
    """One entry a write item, sorted by the rank that writes it and then in the order of its files.

    ``local, part_start, part_count`` say what to write (a run of the rank's own offered box), ``tensor, offsets, lengths, start,
    count`` where it belongs in the global tensor.
    """

    tables: Tables
    placements: tuple[Placement, ...]
    placement: I64
    tensor: I64
    rank: I64
    local: I64
    part_start: I64
    part_count: I64
    offsets: I64
    lengths: I64
    start: I64
    count: I64
    checks: Checks
    mesh: Mesh | None
    num_ranks: int

    def items_of(self, rank: int) -> slice:
        """The write items of one rank."""
        return slice(*np.searchsorted(self.rank, [rank, rank + 1]).tolist())

    def bytes_by_rank(self) -> I64:
        """Bytes that each rank writes."""
        item_bytes = item_bytes_of(self.tables.dtype)[self.tensor]
        return np.bincount(self.rank, weights=self.part_count * item_bytes, minlength=self.num_ranks).astype(np.int64)


def item_bytes_of(dtype: U8) -> I64:
    """Bytes of one element, for each dtype code."""
    return np.array([ITEM_BYTES[code] for code in CODES], np.int64)[dtype]


def plan_save(offers: Sequence[Offer]) -> SavePlan:
    """Plan one save from the offers of all ranks, in rank order.

    Raises
    ------
    LayoutError
        Ranks disagree about a tensor, or its shards overlap or leave a region uncovered.
    """
    tables, ids = _merge_tables(offers)
    rows = _merge_rows(offers, ids, tables)
    box, _ = group_ids(np.hstack([rows.offsets, rows.lengths]))
    run, first = group_ids(np.stack([rows.tensor, box, rows.start, rows.count], axis=1))
    claims = np.full(len(first), int(Claim.BUFFER), np.uint8)
    np.minimum.at(claims, run, rows.claim)
    # PLAIN forbids splitting; BUFFER decides only where every member says so, since DECLARED is the stronger word.
    parts = _assign(rows, run, first, claims, item_bytes_of(tables.dtype), len(offers))
    writer = _writer_rows(rows, run, parts)
    _check_tiling(tables, rows, first, parts, writer)
    offsets, lengths, start, count = as_boxes(
        rows.offsets[writer], rows.lengths[writer], rows.start[writer] + parts.start, parts.count
    )
    tensor = rows.tensor[writer]
    order = np.lexsort((rows.start[writer] + parts.start, box[writer], tensor, -item_bytes_of(tables.dtype)[tensor], parts.rank))
    mesh = next((offer.mesh for offer in offers if offer.mesh is not None), None)
    placements, placement = _placements(tables, rows, box, run, mesh, len(offers))
    return SavePlan(
        tables=tables,
        placements=placements,
        placement=placement,
        tensor=tensor[order],
        rank=parts.rank[order],
        local=rows.local[writer][order],
        part_start=(rows.start[writer] + parts.start)[order],
        part_count=parts.count[order],
        offsets=offsets[order],
        lengths=lengths[order],
        start=start[order],
        count=count[order],
        checks=_checks(rows, run, claims),
        mesh=mesh,
        num_ranks=len(offers),
    )


def _merge_tables(offers: Sequence[Offer]) -> tuple[Tables, list[I64]]:
    """One table of all tensors, and for each offer the place of its tensors in it."""
    keys = sorted({key for offer in offers for key in zip(offer.names, offer.kind.tolist(), strict=True)})
    index = {key: i for i, key in enumerate(keys)}
    ids = [np.array([index[k] for k in zip(o.names, o.kind.tolist(), strict=True)], np.int64) for o in offers]
    width = max((offer.shape.shape[1] for offer in offers), default=1)
    dtype = np.zeros(len(keys), np.uint8)
    ndim, shape = np.zeros(len(keys), np.int64), np.ones((len(keys), width), np.int64)
    owner = np.full(len(keys), -1, np.int64)
    problems: list[str] = []
    for rank in reversed(range(len(offers))):
        offer, at = offers[rank], ids[rank]
        wide = pad_left(offer.shape, width, 1)
        known = owner[at] >= 0
        clash = known & ((dtype[at] != offer.dtype) | (ndim[at] != offer.ndim) | (shape[at] != wide).any(axis=1))
        for i in np.flatnonzero(clash).tolist():
            other = int(owner[at[i]])
            theirs = offers[other], int(np.flatnonzero(ids[other] == at[i])[0])
            problems.append(f"{offer.names[i]}: rank {rank} has {_describe(offer, i)}, rank {other} has {_describe(*theirs)}")
        dtype[at], ndim[at], shape[at], owner[at] = offer.dtype, offer.ndim, wide, rank
    _raise(problems, "ranks disagree about tensors of one name; give different tensors different names")
    declared: list[list[Placement]] = [[] for _ in keys]
    for offer, at in zip(offers, ids, strict=True):
        for i, placement in zip(at.tolist(), offer.placements, strict=True):
            declared[i].append(placement)
    return Tables(
        names=tuple(name for name, _ in keys),
        dtype=dtype,
        kind=np.array([kind for _, kind in keys], np.uint8),
        ndim=ndim,
        shape=shape,
        alias=_merge_aliases(offers, ids, len(keys)),
        declared=tuple(agreed(d) for d in declared),
    ), ids


def _describe(offer: Offer, i: int) -> str:
    width, ndim = offer.shape.shape[1], int(offer.ndim[i])
    return f"{CODES[int(offer.dtype[i])]} {tuple(offer.shape[i, width - ndim :].tolist())}"


def _merge_aliases(offers: Sequence[Offer], ids: list[I64], num: int) -> I64:
    """A tensor is an alias where every rank that has it says so, and all name the same tensor, which is none itself."""
    unset, none = -2, -1
    alias = np.full(num, unset, np.int64)
    for offer, at in zip(offers, ids, strict=True):
        said = np.where(offer.alias >= 0, at[offer.alias], none)
        for i, target in zip(at.tolist(), said.tolist(), strict=True):
            alias[i] = target if alias[i] in (unset, target) else none
    alias[(alias >= 0) & (alias[alias] >= 0)] = none
    return np.maximum(alias, none)


def _merge_rows(offers: Sequence[Offer], ids: list[I64], tables: Tables) -> Rows:
    width = tables.shape.shape[1]
    tensor = np.concatenate([at[offer.row_tensor] for offer, at in zip(offers, ids, strict=True)])
    rows = Rows(
        tensor=tensor,
        rank=np.repeat(np.arange(len(offers)), [len(offer.row_tensor) for offer in offers]),
        local=np.concatenate([np.arange(len(offer.row_tensor)) for offer in offers]),
        offsets=np.concatenate([pad_left(offer.row_offsets, width, 0) for offer in offers]),
        lengths=np.concatenate([pad_left(offer.row_lengths, width, 1) for offer in offers]),
        start=np.concatenate([offer.row_start for offer in offers]),
        count=np.concatenate([offer.row_count for offer in offers]),
        claim=np.concatenate([offer.claim[offer.row_tensor] for offer in offers]),
    )
    # An empty piece says nothing, unless its tensor is empty: then one must stand for it.
    empty_tensor = volumes(tables.shape)[tensor] == 0
    keep = np.flatnonzero((tables.alias[tensor] < 0) & ((rows.count > 0) | empty_tensor))
    kept = {name: getattr(rows, name)[keep] for name in Rows.__slots__}
    hollow = empty_tensor[keep]
    kept["offsets"] = np.where(hollow[:, None], 0, kept["offsets"])
    kept["lengths"] = np.where(hollow[:, None], tables.shape[kept["tensor"]], kept["lengths"])
    kept["start"] = np.where(hollow, 0, kept["start"])
    return Rows(**kept)


def _assign(rows: Rows, run: I64, first: I64, claims: U8, item_bytes: I64, num_ranks: int) -> Parts:
    """Divide the distinct runs over the ranks that hold them; `Parts.item` is the run's number."""
    holders = np.unique(np.stack([run, rows.rank], axis=1), axis=0)
    begin = np.searchsorted(holders[:, 0], np.arange(len(first) + 1))
    num_holders = np.diff(begin)
    elements, each = rows.count[first], item_bytes[rows.tensor[first]]
    lengths = rows.lengths[first]
    outer = np.argmax(lengths > 1, axis=1)
    slices = np.maximum(strides_of(lengths)[np.arange(len(first)), outer], 1)
    # Buffers and empty tensors are the lowest rank's, like what one rank alone holds.
    fixed = (num_holders == 1) | (claims == Claim.BUFFER) | (elements == 0)
    alone = np.flatnonzero(fixed)
    rank = holders[begin[alone], 1]
    loads = np.zeros(num_ranks, np.int64)
    np.add.at(loads, rank, elements[alone] * each[alone])
    splits = (claims == Claim.DECLARED) & (elements * each > SPLIT_BYTES)
    by_ranks: dict[bytes, list[int]] = {}
    for i in np.flatnonzero(~fixed).tolist():
        by_ranks.setdefault(holders[begin[i] : begin[i + 1], 1].tobytes(), []).append(i)
    groups = []
    for ranks, members in by_ranks.items():
        items = np.array(members, np.int64)
        groups.append(Group(np.frombuffer(ranks, np.int64), items[splits[items]], items[~splits[items]]))
    shared = assign(groups, elements, each, slices, loads)
    return Parts(
        np.concatenate([alone, shared.item]),
        np.concatenate([rank, shared.rank]),
        np.concatenate([np.zeros_like(alone), shared.start]),
        np.concatenate([elements[alone], shared.count]),
    )


def _writer_rows(rows: Rows, run: I64, parts: Parts) -> I64:
    """For each part, the row of the rank that writes it (the first, where a rank holds a run twice)."""
    order = np.lexsort((rows.local, rows.rank, run))
    key = run[order] * (int(rows.rank.max(initial=0)) + 1) + rows.rank[order]
    wanted = parts.item * (int(rows.rank.max(initial=0)) + 1) + parts.rank
    return order[np.searchsorted(key, wanted)]


def _check_tiling(tables: Tables, rows: Rows, first: I64, parts: Parts, writer: I64) -> None:
    tensor, offsets, lengths = rows.tensor[first], rows.offsets[first], rows.lengths[first]
    box, _ = group_ids(np.hstack([tensor[:, None], offsets, lengths]))
    shape = np.where((tables.alias >= 0)[:, None], 0, tables.shape)
    holder = np.full(len(first), -1, np.int64)
    holder[parts.item] = rows.rank[writer]
    problems = [
        _describe_fault(fault, tables, holder)
        for fault in find_faults(shape, tensor, offsets, lengths, rows.start[first], rows.count[first], box)
    ]
    _raise(problems, "the shards of each tensor must cover it exactly once; correct the declared offsets, or give distinct names")


def _describe_fault(fault: Fault, tables: Tables, holder: I64) -> str:
    name, ndim = tables.names[fault.tensor], int(tables.ndim[fault.tensor])
    region = describe_region(fault.low, fault.high, ndim)
    shape = tuple(tables.shape[fault.tensor, tables.shape.shape[1] - ndim :].tolist())
    if fault.rows:
        ranks = sorted({int(holder[row]) for row in fault.rows})
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} and {ranks[1]}"
        return f"{name}: shards of {who} overlap at {region} but are not the same, global shape {shape}"
    return f"{name}: no rank holds {region} ({fault.missing} elements in all), global shape {shape}"


def _checks(rows: Rows, run: I64, claims: U8) -> Checks:
    """Rows of all runs that more than one piece offers."""
    members = np.flatnonzero((np.bincount(run, minlength=len(claims))[run] > 1) & (rows.count > 0))
    members = members[np.lexsort((rows.local[members], rows.rank[members], run[members]))]
    return Checks(run[members], rows.rank[members], rows.local[members], rows.tensor[members], claims[run[members]])


def _placements(
    tables: Tables, rows: Rows, box: I64, run: I64, mesh: Mesh | None, num_ranks: int
) -> tuple[tuple[Placement, ...], I64]:
    """The distinct placements, and the number of each tensor's; -1 where nothing is known."""
    number = np.full(len(tables.names), -1, np.int64)
    if mesh is None or mesh.size != num_ranks:
        return (), number
    coordinates = mesh_coordinates(mesh)
    order = np.argsort(rows.tensor, kind="stable")
    begin = np.searchsorted(rows.tensor[order], np.arange(len(tables.names) + 1))
    table: dict[Placement, int] = {}
    seen: dict[tuple[object, ...], int] = {}
    for t in np.flatnonzero((tables.kind == TensorKind.TENSOR) & (tables.alias < 0)).tolist():
        part = order[begin[t] : begin[t + 1]]
        ndim = int(tables.ndim[t])
        relative = run[part] - (run[part[0]] if len(part) else 0)
        # Layers alike have the same ranks, boxes and runs; placements are worked out once for all of them.
        alike = (tables.declared[t], ndim, rows.rank[part].tobytes(), box[part].tobytes(), relative.tobytes())
        if alike not in seen:
            holding = Holding(rows.rank[part], box[part], run[part], rows.offsets[part])
            placement = derive(mesh, coordinates, tables.declared[t], holding, ndim)
            seen[alike] = table.setdefault(placement, len(table))
        number[t] = seen[alike]
    aliases = np.flatnonzero(tables.alias >= 0)
    number[aliases] = number[tables.alias[aliases]]
    return tuple(table), number


def _raise(problems: list[str], advice: str) -> None:
    if problems:
        raise LayoutError(summarize(problems, advice))
