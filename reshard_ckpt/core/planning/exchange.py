"""The plan of an exchange between memories: which holder sends what to whom, and in which round.

Every rank holds runs of tensors, and wants runs of the same tensors. All are boxes once they are cut (`geometry.runs.decompose`).

1. Wanted boxes meet held ones of the same tensor (`geometry.meeting`). Equal runs of several ranks are met once.
2. What a rank wants and holds it takes from itself. Anything else comes from a holder on its own node, or else from any; of
   several, from the one that has the least to send. Large parts are cut first, so that holders of the same can share the sending.
3. The parts between each two ranks are one stream, cut into as many equal rounds as the busiest rank needs: no rank sends or
   receives more than its bytes in a round, and all streams end together.

The plan follows from what the ranks hold and want alone, not from where in memory that lies, so it outlives any step of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..geometry.columns import ColumnTable
from ..geometry.dtypes import item_bytes_of
from ..geometry.meeting import TensorBoxes, meet
from ..geometry.ordering import group_ids, lex_order
from ..geometry.runs import I64, cut_boxes, decompose, pad_left, ranges, volumes
from .balance import ReplicaGroup, assign

MIN_PART_BYTES, MAX_PART_BYTES = 64 << 10, 4 << 20
"""Larger parts are cut, into parts of a size between these: smaller ones among many ranks, so that rounds come out even."""

OWN = -1
"""The round of what a rank takes from itself."""


def _item_bytes(dtype: I64) -> I64:
    return item_bytes_of(dtype.astype(np.uint8))


@dataclass(frozen=True, slots=True)
class RankRuns(ColumnTable):
    """Runs of boxes of tensors on all ranks, one a row; `local` numbers the rows of each rank.

    ``dtype`` is a number of `geometry.dtypes.CODES`, and ``device`` 1 where the memory may travel without the host.
    """

    rank: I64
    local: I64
    tensor: I64
    offsets: I64
    lengths: I64
    start: I64
    count: I64
    dtype: I64
    device: I64


@dataclass(frozen=True, slots=True)
class Parts(ColumnTable):
    """Parts of what ranks take: boxes of a tensor, by the rows of their owner and of their taker that they lie in.

    ``wire`` is the dtype in which a part travels, the smaller of both sides; ``device`` is 1 where it does without the host.
    Parts are in order of device, round, owner and taker, and then as they lie in their message: large elements first.
    """

    device: I64
    round: I64
    owner: I64
    owner_row: I64
    taker: I64
    taker_row: I64
    wire: I64
    offsets: I64
    lengths: I64

    @property
    def num_bytes(self) -> I64:
        """Bytes of each part on its way."""
        return volumes(self.lengths) * _item_bytes(self.wire)

    def of_rank(self, rank: int) -> Parts:
        """Return what one rank sends, receives, or takes from itself."""
        return self.take(np.flatnonzero((self.owner == rank) | (self.taker == rank)))


def plan_exchange(held: RankRuns, wanted: RankRuns, node: Sequence[int], round_bytes: int) -> Parts:
    """Plan who sends what to whom.

    Parameters
    ----------
    held
        Runs that are equal, or share no element. Rows of the same run are copies of the same bytes.
    wanted
        Runs that `held` covers; what it does not is left out.
    node
        For each rank a number of the machine that it is on.
    round_bytes
        What a rank sends, or receives, in one round, about.
    """
    width = max(held.offsets.shape[1], wanted.offsets.shape[1])
    held_run, held_first = _distinct(held, width)
    want_run, want_first = _distinct(wanted, width)
    held_boxes, held_parent = _boxes(held.take(held_first), width)
    want_boxes, want_parent = _boxes(wanted.take(want_first), width)
    want_box, held_box = meet(want_boxes, held_boxes)
    low = np.maximum(want_boxes.offsets[want_box], held_boxes.offsets[held_box])
    ends = (boxes.offsets[i] + boxes.lengths[i] for boxes, i in ((want_boxes, want_box), (held_boxes, held_box)))
    lengths = np.minimum(*ends) - low
    # From here on an entry is of one taker: each rank that wants the run.
    takers, begin = _members(want_run, len(want_first))
    run = want_parent[want_box]
    pair, step = ranges(begin[run + 1] - begin[run])
    taker_row = takers[begin[run[pair]] + step]
    run = held_parent[held_box][pair]
    low, lengths = low[pair], lengths[pair]
    sizes = _item_bytes(held.dtype[held_first][run]), _item_bytes(wanted.dtype[taker_row])
    wire = np.where(sizes[1] < sizes[0], wanted.dtype[taker_row], held.dtype[held_first][run])
    own_row = _own_rows(held, held_run, run, wanted.rank[taker_row], len(node))
    limit = min(max(round_bytes // (2 * len(node)), MIN_PART_BYTES), MAX_PART_BYTES)
    source, low, lengths = cut_boxes(low, lengths, _item_bytes(wire), np.where(own_row >= 0, np.int64(2) ** 62, limit))
    run, taker_row, wire, owner_row = run[source], taker_row[source], wire[source], own_row[source]
    size = volumes(lengths) * _item_bytes(wire)
    far = np.flatnonzero(owner_row < 0)
    owner_row[far] = _choose(held, held_run, run[far], wanted.rank[taker_row[far]], size[far], np.array(node))
    parts = Parts(
        device=held.device[owner_row] & wanted.device[taker_row],
        round=np.full(len(run), OWN),
        owner=held.rank[owner_row],
        owner_row=held.local[owner_row],
        taker=wanted.rank[taker_row],
        taker_row=wanted.local[taker_row],
        wire=wire.astype(np.int64),
        offsets=low,
        lengths=lengths,
    )
    for device in (0, 1):
        rows = np.flatnonzero((parts.device == device) & (parts.owner != parts.taker))
        parts.round[rows] = spread(parts.owner[rows], parts.taker[rows], size[rows], len(node), round_bytes)
    return parts.take(lex_order(parts.device, parts.round, parts.owner, parts.taker, -_item_bytes(wire)))


def _distinct(runs: RankRuns, width: int) -> tuple[I64, I64]:
    """Number the distinct runs: the number of each row, and the first row of each number."""
    wide = [pad_left(runs.offsets, width, 0), pad_left(runs.lengths, width, 1)]
    return group_ids(np.column_stack([runs.tensor, runs.start, runs.count, runs.dtype, *wide]))


def _boxes(runs: RankRuns, width: int) -> tuple[TensorBoxes, I64]:
    """Cut runs into boxes; returns them, and the run of each."""
    cut = decompose(runs.lengths, runs.start, runs.count)
    offsets = pad_left(runs.offsets[cut.parent] + cut.offsets, width, 0)
    return TensorBoxes(runs.tensor[cut.parent], offsets, pad_left(cut.lengths, width, 1)), cut.parent


def _members(group: I64, num: int) -> tuple[I64, I64]:
    """List the rows of each group: those of group g are ``rows[begin[g] : begin[g + 1]]``."""
    rows = np.argsort(group, kind="stable")
    return rows, np.searchsorted(group[rows], np.arange(num + 1))


def _own_rows(held: RankRuns, held_run: I64, run: I64, taker: I64, num_ranks: int) -> I64:
    """Find the row in which each taker holds the run itself; -1 where it does not."""
    key = held_run * num_ranks + held.rank
    order = np.argsort(key, kind="stable")
    place = np.searchsorted(key[order], run * num_ranks + taker)
    row = order[np.minimum(place, max(len(order) - 1, 0))] if len(order) else np.zeros(len(run), np.int64)
    return np.where(key[row] == run * num_ranks + taker, row, -1) if len(order) else row - 1


def _choose(held: RankRuns, held_run: I64, run: I64, taker: I64, size: I64, node: I64) -> I64:
    """Choose the row from which each part comes that its taker does not hold: one of its node, or else any; the least loaded."""
    num_nodes = int(node.max(initial=0)) + 1
    rows, begin = _members(held_run, int(held_run.max(initial=-1)) + 1)
    # near: by run and node, the holders that are there.
    key = held_run[rows] * num_nodes + node[held.rank[rows]]
    order = np.argsort(key, kind="stable")
    near, wanted = rows[order], run * num_nodes + node[taker]
    first, last = np.searchsorted(key[order], wanted), np.searchsorted(key[order], wanted, side="right")
    is_near = last > first
    low, high = np.where(is_near, first, begin[run]), np.where(is_near, last, begin[run + 1])
    chosen = np.where(is_near, near[np.minimum(first, len(near) - 1)], rows[low]) if len(rows) else low
    several = np.flatnonzero(high - low > 1)
    alone = np.flatnonzero(high - low == 1)
    loads = np.bincount(held.rank[chosen[alone]], weights=size[alone], minlength=len(node)).astype(np.int64)
    groups: dict[bytes, list[int]] = {}
    candidates: dict[bytes, I64] = {}
    for i, (a, b, close) in enumerate(zip(low[several].tolist(), high[several].tolist(), is_near[several].tolist(), strict=True)):
        ranks = held.rank[(near if close else rows)[a:b]]
        candidates[ranks.tobytes()] = ranks
        groups.setdefault(ranks.tobytes(), []).append(int(several[i]))
    replica_groups = [
        ReplicaGroup(candidates[key_], np.zeros(0, np.int64), np.array(items, np.int64)) for key_, items in groups.items()
    ]
    one = np.ones(len(run), np.int64)
    assigned = assign(replica_groups, size, one, one, loads)
    chosen[assigned.item] = _own_rows(held, held_run, run[assigned.item], assigned.rank, len(node))
    return chosen


def spread(owner: I64, taker: I64, size: I64, num_ranks: int, round_bytes: int) -> I64:
    """Give each part a round: those between two ranks follow each other evenly over all rounds.

    >>> zero = np.zeros(4, np.int64)
    >>> spread(zero, zero + 1, zero + 10, 2, 40).tolist(), spread(zero, zero + 1, zero + 10, 2, 20).tolist()
    ([0, 0, 0, 0], [0, 1, 2, 3])
    """
    if len(owner) == 0:
        return np.zeros(0, np.int64)
    busiest = max(int(np.bincount(rank, weights=size, minlength=num_ranks).max()) for rank in (owner, taker))
    # Where one round is not enough, half of each is left for parts that reach over its end.
    num_rounds = 1 if busiest <= round_bytes else -(-2 * busiest // round_bytes)
    stream, _ = group_ids(np.column_stack([owner, taker]))
    order = np.argsort(stream, kind="stable")
    total = np.bincount(stream, weights=size).astype(np.int64)
    ends = np.cumsum(size[order])
    before = np.empty_like(size)
    before[order] = ends - size[order]
    first = np.concatenate([[0], np.cumsum(total)[:-1]])
    rounds: I64 = (before - first[stream]) * num_rounds // np.maximum(total[stream], 1)
    return rounds
