"""The plan of a save: the part of each tensor that each rank writes, so that every element is written exactly once.

1. Merge the local metadata of all ranks into one table of tensors and one of rows (`merge`). Ranks that disagree about a dtype or
   a shape are an error.
2. Cut runs of one box that overlap without being equal (`cut_overlaps`). Equal rows of several ranks are then one run, with
   several holders. Aliases (tied weights) have no runs of their own.
3. Divide the runs over the ranks that hold them (`balance.assign`). A run that may not be split stays whole.
4. Check that the runs tile every tensor (`tiling`), and refuse the save if they do not.
5. List the runs that several rows hold (`Checks`): each rank hashes its own rows, and rows with different hashes are no replicas.
6. List the rows of the catalog (`CatalogTables`). A later save with this plan only fills in where their bytes lie.

Rows and runs stay in the order of their tensor, box and start throughout, so no step repeats the sort of an earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ...errors import LayoutError
from ..catalog.model import BoxTable, Catalog, FileEntry, RowTable, TensorKind, TensorTable, ValueEntry
from ..catalog.specs import Mesh, Placement, Replication, item_bytes_of
from ..geometry.columns import ColumnTable, concatenated, group_ids, is_new, lex_order, rows_by_id
from ..geometry.runs import I64, Mask, as_boxes, strides_of, volumes
from ..geometry.tiling import Fault, cut_overlaps, find_faults
from ..report import describe_region, plural, summarize
from .balance import Assigned, ReplicaGroup, assign
from .local_metadata import U8, JobMetadata
from .merge import MergedRows, MergedTables, merge_metadata, tensor_table
from .placement import PieceTable, derive

SPLIT_BYTES = 1 << 20
"""The largest size in bytes of a replica that one rank always writes whole; larger ones may be split among ranks."""


@dataclass(frozen=True, slots=True)
class _Runs:
    """The distinct runs that ranks hold, sorted by tensor, box and start, and the rows of the ranks that hold each.

    The rows that hold run r, one for each rank in order of rank, are ``holder[begin[r] : begin[r + 1]]``. ``of_row[i]`` is the
    run of row i. ``replication`` is the weakest declaration that any of a run's rows makes.
    """

    tensor: I64
    box: I64
    start: I64
    count: I64
    replication: U8
    of_row: I64
    holder: I64
    begin: I64


@dataclass(frozen=True, slots=True)
class Checks(ColumnTable):
    """The rows that hold the same run as another row: each is hashed, and compared with the first row of its `group`.

    Rows are in order of rank; a rank may have several of one group. ``leader[i]`` is the index of the first row of row i's group.
    ``replication`` is the weakest declaration in the group.
    """

    group: I64
    leader: I64
    rank: I64
    local: I64
    start: I64
    count: I64
    tensor: I64
    replication: U8


@dataclass(frozen=True, slots=True)
class CatalogTables:
    """The tables of a save's catalog that are known before any file is written: tensors, boxes, and rows.

    A row is a part of a tensor that one rank writes: write item ``item[i]`` of the save plan, the run ``start[i], count[i]`` of
    box ``box[i]`` of `boxes`. Rows are sorted by tensor, box and start.
    """

    tensors: TensorTable
    boxes: BoxTable
    item: I64
    box: I64
    start: I64
    count: I64


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The plan of a save, as columns with one entry for each write item: a part of a tensor that one rank writes.

    Items are sorted by the rank that writes them and then in the order of its files. Rank ``rank[i]`` writes item i:
    ``part_count[i]`` elements from element ``part_start[i]`` on of the box in row ``local[i]`` of its local metadata. They are
    part of tensor ``tensor[i]`` of `tables`. `catalog` has the box of the item in that tensor.
    """

    tables: MergedTables
    placements: tuple[Placement, ...]
    tensor: I64
    rank: I64
    local: I64
    part_start: I64
    part_count: I64
    catalog: CatalogTables
    checks: Checks
    mesh: Mesh | None
    num_ranks: int

    def items_of(self, rank: int) -> slice:
        """Return the slice of the columns with the write items of one rank."""
        return slice(*np.searchsorted(self.rank, [rank, rank + 1]).tolist())

    def cut(self, item: I64, start: I64, count: I64) -> CatalogTables:
        """Return the tables of the catalog with each write item cut into parts, which must add up to the item.

        Part i is ``count[i]`` elements of item ``item[i]`` from ``start[i]`` on, counted like `part_start`. In the result, `item`
        is the number of a part.
        """
        assert np.array_equal(np.bincount(item, count, len(self.part_count)).astype(np.int64), self.part_count)
        # row[i]: the row of the catalog that is write item i of this plan
        tables = self.catalog
        row = np.empty_like(tables.item)
        row[tables.item] = np.arange(len(row))
        whole = row[item]
        begin, tensor = tables.start[whole] + start - self.part_start[item], self.tensor[item]
        return _catalog_tables(self.tables, tables.tensors.placement, tables.boxes, tensor, tables.box[whole], begin, count)

    def bytes_by_rank(self) -> I64:
        """Return the number of bytes that each rank writes, (ranks,)."""
        item_bytes = item_bytes_of(self.tables.dtype)[self.tensor]
        return np.bincount(self.rank, weights=self.part_count * item_bytes, minlength=self.num_ranks).astype(np.int64)


def plan_save(job_metadata: JobMetadata, *, splits: bool = True) -> SavePlan:
    """Plan a save: decide which rank writes which part of each tensor, from the local metadata of all ranks.

    Raise `LayoutError` if ranks disagree about a tensor, or its shards overlap or leave a region uncovered.

    Parameters
    ----------
    splits
        Whether several ranks may each write a part of a run that all of them hold. False if replicas are compared by samples
        alone: if ranks have drifted apart unnoticed, a run written in parts would mix their values.
    """
    tables, boxes, rows, runs = _merged_runs(job_metadata)
    item_bytes = item_bytes_of(tables.dtype)
    parts = _assign(rows, runs, boxes, item_bytes, job_metadata.num_ranks, splits)
    mesh = next((table.mesh for table in job_metadata.tables if table.mesh is not None), None)
    placements, placement = _placements(tables, boxes, rows, runs, mesh, job_metadata.num_ranks)
    # parts: one row for each write item from here on, sorted by rank, then large elements first, then run.
    # parts.item[i]: the run that item i is a part of.
    parts = parts.take(lex_order(parts.rank, -item_bytes[runs.tensor[parts.item]], parts.item, parts.start))
    # begin[i]: where item i begins, in elements of its box.
    begin, tensor = runs.start[parts.item] + parts.start, runs.tensor[parts.item]
    return SavePlan(
        tables=tables,
        placements=placements,
        tensor=tensor,
        rank=parts.rank,
        local=rows.local[_row_of(rows, runs, parts.item, parts.rank)],
        part_start=begin,
        part_count=parts.count,
        catalog=_catalog_tables(tables, placement, boxes, tensor, runs.box[parts.item], begin, parts.count),
        checks=_checks(rows, runs),
        mesh=mesh,
        num_ranks=job_metadata.num_ranks,
    )


def _catalog_tables(
    tables: MergedTables, placement: I64, boxes: BoxTable, tensor: I64, box: I64, start: I64, count: I64
) -> CatalogTables:
    """Build the catalog's tables from the write items: tensors, boxes, and rows. A run that is exactly a box becomes that box."""
    # part: runs that are not all of their box; after the third line, the runs that are boxes themselves.
    part = np.flatnonzero((count > 0) & (count != volumes(boxes.lengths)[box]))
    is_box, offsets, lengths = as_boxes(boxes.lengths.take(box[part], axis=0), start[part], count[part])
    part, offsets, lengths = part[is_box], offsets[is_box], lengths[is_box]
    offsets += boxes.offsets[box[part]]
    # box[i]: the box of run i, as an index in the given boxes, which are followed by the new boxes of `part`.
    box, start = box.copy(), start.copy()
    box[part], start[part] = len(boxes.offsets) + np.arange(len(part)), 0
    all_boxes = np.hstack([np.vstack([boxes.offsets, offsets]), np.vstack([boxes.lengths, lengths])])
    # number[b]: the number in the catalog of box b, if a run uses it.
    is_used = np.zeros(len(all_boxes), bool)
    is_used[box] = True
    used, number = np.flatnonzero(is_used), np.zeros(len(all_boxes), np.int64)
    number[used], first = group_ids(all_boxes[used])
    box = number[box]
    item = lex_order(tensor, box, start)
    return CatalogTables(
        tensors=tensor_table(tables, placement, tensor[item]),
        boxes=BoxTable(*(np.ascontiguousarray(half) for half in np.hsplit(all_boxes[used[first]], 2))),
        item=item,
        box=box[item],
        start=start[item],
        count=count[item],
    )


def _merged_runs(job_metadata: JobMetadata, *, may_lack: bool = False) -> tuple[MergedTables, BoxTable, MergedRows, _Runs]:
    """Merge the metadata of all ranks, find the distinct runs, and check that they tile every tensor.

    With `may_lack`, check only that they do not overlap.
    """
    tables, boxes, rows = merge_metadata(job_metadata)
    # Declared rows of one box that overlap without being equal are cut; a piece may become several rows.
    cut = cut_overlaps(rows.tensor, rows.box, rows.start, rows.count, rows.replication == Replication.DECLARED)
    if cut is not None:
        rows = replace(rows.take(cut.source), start=cut.start, count=cut.count)
        rows = rows.take(lex_order(rows.tensor, rows.box, rows.start, rows.rank))
    runs = _distinct_runs(rows)
    _check_tiling(tables, boxes, rows, runs, may_lack=may_lack)
    return tables, boxes, rows, runs


def _distinct_runs(rows: MergedRows) -> _Runs:
    """Find the distinct runs among rows sorted by tensor, box and start."""
    # new[i]: row i is not the same run as row i - 1; first[r]: the first row of run r; of_row[i]: the run of row i.
    new = is_new(rows.tensor, rows.box, rows.start, rows.count)
    first = np.flatnonzero(new)
    of_row = np.cumsum(new) - 1
    # holder: the rows, without those of a rank that holds the same run a second time.
    holder = np.flatnonzero(is_new(of_row, rows.rank))
    return _Runs(
        tensor=rows.tensor[first],
        box=rows.box[first],
        start=rows.start[first],
        count=rows.count[first],
        replication=np.minimum.reduceat(rows.replication, first) if len(first) else rows.replication,
        of_row=of_row,
        holder=holder,
        begin=np.searchsorted(holder, np.append(first, len(rows.tensor))),
    )


def _assign(rows: MergedRows, runs: _Runs, boxes: BoxTable, item_bytes: I64, num_ranks: int, may_split: bool) -> Assigned:
    """Divide the runs over the ranks that hold them, so that all ranks write about equally many bytes.

    Only large runs of declared replicas are split, and only with `may_split`. In the result, `Assigned.item` is the index of the
    run, and `Assigned.start` counts from its beginning.
    """
    # each[r]: bytes of one element of run r.
    elements, each = runs.count, item_bytes[runs.tensor]
    # fixed[r]: the lowest rank that holds run r writes it whole: only one rank has it, or it is a buffer, or it is empty.
    fixed = (np.diff(runs.begin) == 1) | (runs.replication == Replication.BUFFER) | (elements == 0)
    alone, shared = np.flatnonzero(fixed), np.flatnonzero(~fixed)
    # rank[i]: the rank that writes run alone[i]; loads: bytes that each rank writes of these.
    rank = rows.rank[runs.holder[runs.begin[alone]]]
    loads = np.bincount(rank, weights=elements[alone] * each[alone], minlength=num_ranks).astype(np.int64)
    own = Assigned(alone, rank, np.zeros_like(alone), elements[alone])
    if not len(shared):
        return own
    # slices[r]: elements of one slice of run r's box along its outermost dim that is longer than 1.
    outer = np.argmax(boxes.lengths > 1, axis=1)
    slices = np.maximum(strides_of(boxes.lengths)[np.arange(len(outer)), outer], 1)[runs.box]
    # A run is split only if all of its rows are DECLARED; PLAIN, the weakest, forbids it for the whole run.
    splits = (runs.replication == Replication.DECLARED) & (elements * each > SPLIT_BYTES) & may_split
    cut = assign(_replica_groups(rows, runs, shared, splits), elements, each, slices, loads)
    return concatenated([own, cut])


def _replica_groups(rows: MergedRows, runs: _Runs, shared: I64, splits: Mask) -> list[ReplicaGroup]:
    """Group the runs that several ranks hold by the set of these ranks."""
    ranks = rows.rank[runs.holder]
    # The ranks of one run are consecutive bytes of raw, and these bytes are the key of its group.
    raw, width = ranks.tobytes(), ranks.itemsize
    bounds = zip((runs.begin[shared] * width).tolist(), (runs.begin[shared + 1] * width).tolist(), strict=True)
    number: dict[bytes, int] = {}
    group = np.array([number.setdefault(raw[begin:end], len(number)) for begin, end in bounds], np.int64)
    # group[i]: the group of run shared[i]; items: the runs of a group.
    members = [shared[rows] for rows in rows_by_id(group, len(number))]
    return [
        ReplicaGroup(np.frombuffer(key, ranks.dtype), items[splits[items]], items[~splits[items]])
        for key, items in zip(number, members, strict=True)
    ]


def _row_of(rows: MergedRows, runs: _Runs, item: I64, rank: I64) -> I64:
    """Return for each i the index in `rows` at which ``rank[i]`` holds run ``item[i]``."""
    # row[i]: the row of the first holder of the run. It is right unless another rank was asked for.
    row = runs.holder[runs.begin[item]]
    several = np.flatnonzero(rows.rank[row] != rank)
    # key: run and rank of each holder as one number, ascending, so the right row is found by bisection.
    step = int(rows.rank.max(initial=0)) + 1
    key = runs.of_row[runs.holder] * step + rows.rank[runs.holder]
    row[several] = runs.holder[np.searchsorted(key, item[several] * step + rank[several])]
    return row


def _check_tiling(tables: MergedTables, boxes: BoxTable, rows: MergedRows, runs: _Runs, *, may_lack: bool) -> None:
    """Raise LayoutError if shards of a tensor overlap or, without `may_lack`, leave a part of it uncovered."""
    # An alias has no runs, so it is checked as an empty tensor.
    shape = np.where((tables.alias >= 0)[:, None], 0, tables.shape)
    problems = [
        _describe_fault(fault, tables, rows.rank[runs.holder[runs.begin[list(fault.rows)]]])
        for fault in find_faults(shape, boxes.offsets, boxes.lengths, runs.tensor, runs.box, runs.start, runs.count)
        if fault.rows or not may_lack
    ]
    if problems:
        advice = "the shards of each tensor must cover it exactly once; correct the declared offsets, or give distinct names"
        raise LayoutError(summarize(problems, advice))


def _describe_fault(fault: Fault, tables: MergedTables, ranks: I64) -> str:
    name, ndim = tables.names[fault.tensor], int(tables.ndim[fault.tensor])
    region = describe_region(fault.low, fault.high, ndim)
    shape = tables.shape_of(fault.tensor)
    if fault.rows:
        distinct = np.unique(ranks).tolist()
        who = f"rank {distinct[0]}" if len(distinct) == 1 else f"ranks {distinct[0]} and {distinct[1]}"
        return f"{name}: shards of {who} overlap at {region} but are not the same, global shape {shape}"
    return f"{name}: no rank holds {region} ({plural(fault.missing, 'element')} in all), global shape {shape}"


def _checks(rows: MergedRows, runs: _Runs, chosen: Mask | bool = True) -> Checks:
    """List the rows of each chosen run that more than one row holds, for their bytes to be compared."""
    several = (np.bincount(runs.of_row, minlength=len(runs.count)) > 1) & (runs.count > 0) & chosen
    members = np.flatnonzero(several[runs.of_row])
    members = members[lex_order(rows.rank[members])]
    run, held = runs.of_row[members], rows.take(members)
    # The rows of a group are in order of rank, so of several values for one run, the first row's is kept: it is assigned last.
    first = np.zeros(len(runs.count), np.int64)
    first[run[::-1]] = np.arange(len(run))[::-1]
    return Checks(run, first[run], held.rank, held.local, held.start, held.count, held.tensor, runs.replication[run])


def _placements(
    tables: MergedTables, boxes: BoxTable, rows: MergedRows, runs: _Runs, mesh: Mesh | None, num_ranks: int
) -> tuple[tuple[Placement, ...], I64]:
    """Find the distinct placements, and the index of each tensor's placement among them, (T,); -1 if it is not known."""
    number = np.full(len(tables.names), -1, np.int64)
    if mesh is None or mesh.size != num_ranks:
        return (), number
    chosen = np.flatnonzero((tables.kind == TensorKind.TENSOR) & (tables.alias < 0))
    # place[t]: the position of tensor t among the chosen ones, or -1; tensor: the same for the tensor of each row.
    place = np.full(len(tables.names), -1, np.int64)
    place[chosen] = np.arange(len(chosen))
    tensor = place[rows.tensor]
    keep = tensor >= 0
    holding = PieceTable(tensor[keep], rows.rank[keep], rows.box[keep], runs.of_row[keep])
    declared = [tables.declared[i] for i in chosen.tolist()]
    derived = derive(mesh, declared, tables.shape[chosen], tables.ndim[chosen], holding, boxes.offsets, boxes.lengths)
    # A catalog lists placements in the order in which the tensors, sorted by name, first use them.
    used, first = np.unique(derived.of_tensor, return_index=True)
    table: dict[Placement, int] = {}
    place_of = np.zeros(len(derived.placements), np.int64)
    for i in used[np.argsort(first)].tolist():
        place_of[i] = table.setdefault(derived.placements[i], len(table))
    number[chosen] = place_of[derived.of_tensor]
    # An alias lies as its tensor does.
    aliases = np.flatnonzero(tables.alias >= 0)
    number[aliases] = number[tables.alias[aliases]]
    return tuple(table), number


class HeldRows(NamedTuple):
    """The distinct runs of every tensor, in order of tensor, box and start, and the ranks that hold each.

    The runs tile every tensor, unless `find_holders` was called with `may_lack`.

    `runs` has for each run the row of the lowest rank that holds it, `held` the rows of all ranks that hold it. A buffer of a
    module under DDP counts as held by its lowest rank only, so it is not in `checks`.
    """

    tables: MergedTables
    boxes: BoxTable
    runs: MergedRows
    held: MergedRows
    checks: Checks


def find_holders(job_metadata: JobMetadata, *, may_lack: bool) -> HeldRows:
    """Find the ranks that hold each run of each tensor. With `may_lack`, ranks may lack parts of tensors.

    Raise `LayoutError` if ranks disagree about a tensor, or its shards overlap or, without `may_lack`, leave a region uncovered.
    """
    tables, boxes, rows, runs = _merged_runs(job_metadata, may_lack=may_lack)
    # first[i]: entry i of runs.holder is the lowest rank of its run; chosen: all holders, but of a buffer only that one.
    first = np.zeros(len(runs.holder), bool)
    first[runs.begin[:-1]] = True
    run = runs.of_row[runs.holder]
    chosen = runs.holder[first | (runs.replication[run] != Replication.BUFFER)]
    checks = _checks(rows, runs, runs.replication != Replication.BUFFER)
    return HeldRows(tables, boxes, rows.take(runs.holder[first]), rows.take(chosen), checks)


def build_catalog(
    plan: SavePlan,
    file: I64,
    offset: I64,
    *,
    files: Sequence[FileEntry],
    values: Sequence[ValueEntry],
    save_id: str,
    created_s: float,
    metadata: Any,
    lossy: Mapping[str, str] | None = None,
    folder: str = "",
) -> Catalog:
    """Build the catalog of a save whose bytes are all written.

    Parameters
    ----------
    file, offset
        Where each write item of the plan lies: the index of its file, and bytes from the beginning of that file.
    """
    tables = plan.catalog
    return Catalog(
        save_id=save_id,
        created_s=created_s,
        mesh=plan.mesh,
        metadata=metadata,
        tensors_table=tables.tensors,
        placements=plan.placements,
        boxes=tables.boxes,
        rows=RowTable(tables.box, tables.start, tables.count, file[tables.item], offset[tables.item]),
        files=tuple(files),
        values_table=tuple(values),
        lossy=lossy or {},
        folder=folder,
    )
