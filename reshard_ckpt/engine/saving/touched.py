"""Saves that write only some rows of embedding tables, and refer to a base checkpoint for the other rows.

1. Each rank scores the rows of its tables. The scores of all ranks are merged, and all ranks choose the same rows (`choose`).
2. Each write item of a table, or of optimizer state with as many rows, is divided. Rows that are not chosen and that the base
   holds are *stored*: the catalog refers to them there. All other rows are gathered at once into memory of their own, a *pack*,
   which becomes one write item (`pick`). So a save copies and stages no more than it writes. On request, a pack of a table has
   8 or 4 bits an element in its file (`core.catalog.packed`).
3. The rest of the save goes on with these items. At its end `Picked.restored` says where each run of a pack lies.

Collectives, after the agreement of the save: a gather and a broadcast; if rows are chosen and there are several ranks, two rounds
of an exchange (`_merged`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ...comm import interrupts_held
from ...comm.exchange import Exchange, open_exchange
from ...comm.protocol import Comm, merge_of_all
from ...core.catalog.model import TensorKind
from ...core.catalog.packed import PackedRows
from ...core.catalog.specs import CODES, TensorSpec, box_piece, escape, row_major_strides
from ...core.geometry.columns import concatenated, lex_order
from ...core.geometry.runs import I64, ranges
from ...core.planning.merge import MergedTables
from ...errors import UsageError
from ..common.tensor_bytes import LocalPiece, LocalRun, LocalTensor, empty_bytes, region
from .local_shards import LocalShards
from .messages import RunColumns, StoredRuns
from .unchanged import Base, Spans, Unchanged, is_equal, merged, spans_of

Scores = NDArray[Any]
"""One score for each row of a table: bool, int64 or float32. Rows with a score of 0 need no saving."""

Rows = Mapping[str, NDArray[np.bool_]]
"""The chosen rows: for the name of each table, a mask over all its rows."""


class Table(Protocol):
    """This rank's part of an embedding table, or all of it, with a score for each of its rows.

    `num_rows` counts the rows of the whole table; the scores begin at row `first`.
    """

    name: str
    num_rows: int
    first: int

    def scores(self) -> Scores: ...

    def take(self, chosen: NDArray[np.bool_]) -> None: ...


@runtime_checkable
class Tracker(Protocol):
    """The object that a user passes as ``rows=`` of a save (`state.touched_rows.TouchedRows`); it tracks changed rows."""

    policy: str
    fraction: float | None
    bits: int | None
    since: str | None

    def begin(self, tensors: Iterable[LocalTensor]) -> Sequence[Table]: ...

    def committed(self, save_id: str) -> None: ...


_SCORES = {"touched": bool, "sampled": bool, "most_used": np.int64, "largest_change": np.float32}


@interrupts_held()
def choose(
    comm: Comm,
    tracker: Tracker,
    tables: Sequence[Table],
    base: Base | None,
    save_id: str,
    *,
    process_group: Any,
    timeout_s: float,
) -> Rows | None:
    """Choose the rows of embedding tables that a save writes, the same on all ranks. Collective.

    Raise `UsageError` if ranks have trackers with different options.

    Returns
    -------
    Mapping or None
        For each table, a mask over all its rows. None if all rows are to be saved: there is no base, or some rank has tracked
        changes since another checkpoint than the base.
    """
    # Before the ranks meet: a rank that failed between the meeting and the exchange would leave the others waiting in it.
    counts = base is not None and tracker.since == base.catalog.save_id
    own_scores = [table.scores() for table in tables] if counts else []
    options = [tracker.policy, tracker.fraction, tracker.bits, tracker.since, {table.name: table.num_rows for table in tables}]
    policy, fraction, _, since, sizes = merge_of_all(comm, options, _agreed)
    if base is None or since != base.catalog.save_id:
        for table in tables:
            table.take(np.ones(table.num_rows, bool))
        return None
    # first[name]: where the scores of a table begin in the scores of all tables, end to end.
    first = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
    scores = np.zeros(sum(sizes.values()), _SCORES[policy])
    for table, own in zip(tables, own_scores, strict=True):
        part = scores[first[table.name] + table.first :][: len(own)]
        part += own
    if comm.size > 1:
        exchange = open_exchange(process_group, timeout_s=timeout_s)
        assert exchange is not None
        scores = _merged(exchange, scores)
    chosen: dict[str, NDArray[np.bool_]] = {}
    for name, num_rows in sizes.items():
        of_table = scores[first[name] : first[name] + num_rows]
        chosen[name] = of_table if policy == "touched" else _highest(of_table, ceil(fraction * num_rows), save_id)
    for table in tables:
        table.take(chosen[table.name])
    return chosen


def _agreed(of_ranks: list[Any]) -> Any:
    """Merge all ranks' trackers: return their options, the save since which all have tracked, and the rows of each table.

    The save is None if ranks have tracked since different saves. Raise a `UsageError` if ranks have different options.
    """
    options = {tuple(of_rank[:3]) for of_rank in of_ranks}
    if len(options) > 1:
        raise UsageError(f"rows=: ranks passed trackers with different policy=, fraction= and bits=: {sorted(options, key=repr)}")
    bases = {since for *_, since, _ in of_ranks}
    sizes = dict(sorted({name: num for *_, tables in of_ranks for name, num in tables.items()}.items()))
    return [*options.pop(), bases.pop() if len(bases) == 1 else None, sizes]


def _merged(exchange: Exchange, scores: Scores) -> Scores:
    """Add up the scores of all ranks, or combine them by "or" if they are bool. Each rank merges a part, and sends it to all."""
    is_bool = scores.dtype == bool
    # sent: this rank's scores, 8 to a byte if they are bool. Rank r merges entries bounds[r] to bounds[r + 1] of all ranks.
    sent = np.packbits(scores) if is_bool else scores
    bounds = np.linspace(0, len(sent), exchange.size + 1).astype(np.int64)
    sizes = (np.diff(bounds) * sent.itemsize).tolist()
    own = sizes[exchange.rank]
    parts = empty_bytes(own * exchange.size)
    exchange.start(_as_bytes(sent), sizes, parts, [own] * exchange.size)()
    # of_ranks (ranks, part): the part of this rank from every rank; merged: all merged parts, by rank.
    of_ranks = parts.numpy().view(sent.dtype).reshape(exchange.size, -1)
    part = np.bitwise_or.reduce(of_ranks, axis=0) if is_bool else of_ranks.sum(axis=0, dtype=sent.dtype)
    merged = empty_bytes(sum(sizes))
    exchange.start(_as_bytes(np.tile(part, exchange.size)), [own] * exchange.size, merged, sizes)()
    found = merged.numpy().view(sent.dtype)
    return np.unpackbits(found, count=len(scores)).astype(bool) if is_bool else found


def _as_bytes(values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).view(np.uint8).copy())


def _highest(scores: Scores, num: int, save_id: str) -> NDArray[np.bool_]:
    """Return a mask of at most `num` rows: those with the highest scores above 0, among equal scores at random.

    The choice is the same on all ranks, because `save_id` seeds it.
    """
    rows = np.flatnonzero(scores)
    if len(rows) > num:
        # Shuffled first, so that the rows next to the limit, which have equal scores, are not always the first ones.
        rows = np.random.default_rng(xxhash.xxh32_intdigest(save_id.encode())).permutation(rows)
        rows = rows[np.argsort(-scores[rows].astype(np.float64), kind="stable")[:num]]
    chosen = np.zeros(len(scores), bool)
    chosen[rows] = True
    return chosen


@dataclass(frozen=True, slots=True)
class Picked:
    """Maps the write items that `pick` made back to the write items of the save's plan.

    Attributes
    ----------
    origin
        For each new item, the index of the plan's item that it is a part of.
    stored
        The parts of the plan's items that the base holds; ``file`` is an index into the files of the base.
    runs
        The runs of elements that packs hold, sorted by ``local``, the pack's index among the new items. ``start`` and ``count``
        count elements of the plan's item.
    ahead
        For each of `runs`, the byte of its pack at which it begins.
    num_bytes
        Bytes of the stored parts.
    bits
        Bits of an element in the file, for each row of the new local shards that is narrowed.
    """

    origin: I64
    stored: StoredRuns
    runs: RunColumns
    ahead: I64
    num_bytes: int
    bits: Mapping[int, int]

    def restored(self, found: Unchanged) -> Unchanged:
        """Convert the parts that `find_unchanged` found in the items of `pick` to parts of the items of the save's plan."""
        written = found.written
        # num[i]: the number of runs in item i if it is a pack, else 0; first[i]: the first of them.
        num = np.bincount(self.runs.local, minlength=len(self.origin))
        first = np.cumsum(num) - num
        # One row for each run in a pack, and for each other written part.
        part, step = ranges(np.maximum(num[written.local], 1))
        packed = np.flatnonzero(num[written.local[part]])
        run = first[written.local[part[packed]]] + step[packed]
        start, count, ahead = written.start[part], written.count[part], np.zeros(len(part), np.int64)
        start[packed], count[packed], ahead[packed] = self.runs.start[run], self.runs.count[run], self.ahead[run]
        return Unchanged(
            stored=concatenated([replace(found.stored, item=self.origin[found.stored.item]), self.stored]),
            written=RunColumns(self.origin[written.local[part]], start, count),
            num_bytes=found.num_bytes + self.num_bytes,
            member=part,
            ahead=ahead,
        )


@dataclass(frozen=True, slots=True)
class _Item:
    """One write item that `pick` makes from a write item of the save's plan: a run of elements of one row (piece) of the shards.

    Attributes
    ----------
    local, start, count
        The row of the local shards, the first element, and the number of elements.
    origin
        Index of the plan's item that this is a part of.
    pack, runs
        If the item is a pack: the tensor of gathered rows; and where they were in the plan's item, as starts and counts.
    bits
        Bits of an element in the file, if the pack is narrowed there, else 0.
    """

    local: int
    start: int
    count: int
    origin: int
    pack: torch.Tensor | None = None
    runs: Sequence[I64] = ()
    bits: int = 0


def pick(
    base: Base, local_shards: LocalShards, items: RunColumns, rows: Rows, bits: int | None
) -> tuple[LocalShards, RunColumns, Picked]:
    """Divide the write items of tables: rows that stay in files of the base, and packs (new tensors) of the other rows.

    With `bits`, the packs of the tables themselves have that many bits an element in the file. Optimizer state is never narrowed.

    Returns
    -------
    tuple
        The local shards with the packs added, the items to write, and the map from these back to the plan's items.
    """
    specs, kinds = local_shards.specs, local_shards.local_metadata.tensors.kind.tolist()
    tables = {i: rows[name] for i, spec in enumerate(specs) if kinds[i] == TensorKind.TENSOR and (name := table_of(spec, rows))}
    is_table = np.array([local_shards.rows[row][0] in tables for row in items.local.tolist()], bool)
    tracked = np.flatnonzero(is_table)
    spans = spans_of(base, local_shards, items.take(tracked))
    spans = spans.take(lex_order(spans.item, spans.start))
    first = np.searchsorted(spans.item, np.cumsum(np.append(0, is_table))).tolist()  # first[i]: the first span of item i or later
    each_of = np.array([local_shards.rows[row][1].tensor.element_size() for row in items.local.tolist()], np.int64)
    new: list[_Item] = []
    stored = [StoredRuns.empty()]
    for i, (row, start, count) in enumerate(items.rows()):
        index, local = local_shards.rows[row]
        width = prod(local.piece.lengths[1:])
        # low, high: the whole rows of the piece's box in this item.
        low, high = (-(-start // width), (start + count) // width) if index in tables and width else (0, 0)
        if low >= high:
            new.append(_Item(row, start, count, i))
            continue
        beside = ((start, low * width), (high * width, start + count))
        new += [_Item(row, begin, end - begin, i) for begin, end in beside if begin < end]
        offset = local.piece.offsets[0]
        held = _held(spans.take(slice(first[i], first[i + 1])), tables[index][offset + low : offset + high], low, width, i)
        if base.verify:
            scratch, run = empty_bytes(1 << 20), LocalRun(local, start, count)
            held = held.take(np.array([is_equal(base, [run], (0, *part[1:]), scratch) for part in held.rows()], bool))
        stored.append(held)
        # begins, ends: the runs of rows that are written.
        begins, ends = np.append(low, (held.start + held.count) // width), np.append(held.start // width, high)
        begins, ends = begins[begins < ends], ends[begins < ends]
        if len(begins):
            pack = _pack(local, low, high, begins, ends)
            is_narrow = bits and specs[index].name in rows and _can_narrow(bits, pack, specs[index].dtype)
            runs = begins * width, (ends - begins) * width
            new.append(_Item(row, 0, pack.numel(), i, pack, runs, bits if bits and is_narrow else 0))
    new.sort(key=lambda item: -each_of[item.origin])  # so that each member of a file is aligned
    joined = merged(concatenated(stored), each_of)
    shards, local_of = _with_packs(local_shards, new)
    begin, count, origin = np.array([(item.start, item.count, item.origin) for item in new], np.int64).reshape(-1, 3).T
    in_packs = [RunColumns(np.full(len(item.runs[0]), i), *item.runs) for i, item in enumerate(new) if item.runs]
    packed = concatenated([RunColumns.empty(), *in_packs])
    # ahead: the bytes of all runs before each run; then without those before its own pack.
    num_bytes = packed.count * each_of[origin[packed.local]]
    ahead = np.cumsum(num_bytes) - num_bytes
    ahead -= ahead[np.searchsorted(packed.local, packed.local)]
    picked = Picked(
        origin=origin,
        stored=joined,
        runs=packed,
        ahead=ahead,
        num_bytes=int((joined.count * each_of[joined.item]).sum()),
        bits={int(row): item.bits for row, item in zip(local_of, new, strict=True) if item.bits},
    )
    return shards, RunColumns(local_of, begin, count), picked


def _can_narrow(bits: int, pack: torch.Tensor, dtype: str) -> bool:
    """Whether the rows of a pack can be stored in `bits` bits an element: each has finite floats alone, and takes fewer bytes."""
    if not PackedRows(0, len(pack), prod(pack.shape[1:]), dtype, bits).is_sound():
        return False
    values = pack.float().flatten(1)
    return bool((values.amax(1) - values.amin(1)).isfinite().all())


def table_of(spec: TensorSpec, rows: Rows) -> str:
    """Return the name of the table in `rows` that a tensor is, or whose optimizer state it is; "" if it is neither.

    Optimizer state counts only if it has as many rows as the table.
    """
    name = spec.name if spec.name in rows or spec.link is None else spec.link.parameter or ""
    return name if name in rows and spec.shape[:1] == rows[name].shape else ""


def _held(spans: Spans, chosen: NDArray[np.bool_], low: int, width: int, item: int) -> StoredRuns:
    """Find the runs of rows of one item that are not chosen and that the base holds, in `spans`.

    ``chosen[0]`` is row `low` of the box, and a row has `width` elements.
    """
    # lows, highs: the runs of rows that are not chosen; begins, ends: the whole rows of each span.
    edges = np.flatnonzero(np.diff(chosen, prepend=True, append=True)) + low
    lows, highs = edges[::2], edges[1::2]
    begins, ends = -(-spans.start // width), (spans.start + (spans.end - spans.begin) // spans.each) // width
    keep = begins < ends
    spans, begins, ends = spans.take(keep), begins[keep], ends[keep]
    # Run r meets the spans met[r] to until[r]; one row for each such pair from here on.
    met, until = np.searchsorted(ends, lows, side="right"), np.searchsorted(begins, highs, side="left")
    owner, step = ranges(until - met)
    at = met[owner] + step
    begin, end = np.maximum(lows[owner], begins[at]), np.minimum(highs[owner], ends[at])
    start = begin * width
    offset = spans.begin[at] + (start - spans.start[at]) * spans.each[at]
    return StoredRuns(np.full(len(at), item), start, (end - begin) * width, spans.file[at], offset)


def _pack(local: LocalPiece, low: int, high: int, begins: I64, ends: I64) -> torch.Tensor:
    """Copy rows ``begins[i]`` to ``ends[i]``, for all i, of a piece's box into one new tensor on their device.

    All of them lie between rows `low` and `high`.
    """
    piece = local.piece
    run, step = ranges(ends - begins)
    rows = torch.from_numpy(begins[run] + step - low).to(local.tensor.device)
    view = region(local.tensor, piece.base + low * piece.strides[0], (high - low, *piece.lengths[1:]), piece.strides)
    return view.index_select(0, rows)


def _with_packs(local_shards: LocalShards, items: Sequence[_Item]) -> tuple[LocalShards, I64]:
    """Add each pack to the local shards as a tensor of its own, which no base has. Return the shards, and each item's row."""
    specs, rows = list(local_shards.specs), list(local_shards.rows)
    local = np.array([item.local for item in items], np.int64)
    for i, item in enumerate(items):
        if item.pack is not None:
            spec, shape = specs[rows[item.local][0]], tuple(item.pack.shape)
            piece = box_piece((0,) * len(shape), shape, 0, row_major_strides(shape))
            local[i] = len(rows)
            rows.append((len(specs), LocalPiece(item.pack, piece)))
            specs.append(TensorSpec(f"{escape(spec.name)}@[rows,{item.origin}]", spec.dtype, shape, (piece,)))
    metadata = local_shards.local_metadata
    added = len(specs) - len(local_shards.specs)
    kind = np.append(metadata.tensors.kind, np.full(added, TensorKind.BLOB, np.uint8))
    metadata = replace(metadata, tensors=replace(metadata.tensors, kind=kind))
    return replace(local_shards, specs=specs, rows=rows, local_metadata=metadata), local


def lossy_tensors(tables: MergedTables, rows: Rows, tracker: Tracker) -> dict[str, str]:
    """Return, for each tensor saved with rows older than the save or in fewer bits, a text with the policy and the bits."""
    older = "" if tracker.policy == "touched" else f"{tracker.policy}, {tracker.fraction:g} of the rows"
    narrow = "" if tracker.bits is None else f"rows in {tracker.bits} bits"
    names, width = tables.names, tables.shape.shape[1]
    found: dict[str, str] = {}
    for i, (name, parameter, ndim) in enumerate(zip(names, tables.parameter.tolist(), tables.ndim.tolist(), strict=True)):
        # The state of an optimizer has the rows of its parameter. Only the parameter itself may be in fewer bits.
        table = name if name in rows or parameter < 0 else names[parameter]
        if table in rows and ndim and tables.shape[i, width - ndim] == len(rows[table]):
            whole = PackedRows(
                0, 1, int(tables.shape[i, width - ndim + 1 :].prod()), CODES[int(tables.dtype[i])], tracker.bits or 0
            )
            text = ", ".join(part for part in (older, narrow if table == name and whole.is_sound() else "") if part)
            found |= {name: text} if text else {}
    return found
