"""The plan of an exchange between the memories of ranks: for each wanted part of a tensor, the rank that sends it and the round.

Every rank holds runs of tensors, and wants runs of the same tensors. Both are cut into boxes (`geometry.runs.decompose`).

1. Pair wanted boxes with held ones of the same tensor (`geometry.tiling`). A run that several ranks hold or want is paired once.
2. Choose a source for each part. A rank takes from itself everything that it also holds. All other parts come from a holder on
   its own node if there is one, else from any holder; of several, from the one that has the least to send. Large parts are cut
   before that, so that ranks which hold the same run can share the sending.
3. All parts from one rank to another are a stream. Cut every stream into the same number of equal rounds, as many as the busiest
   rank needs: no rank sends or receives more than its bytes in a round, and all streams end together.

The plan depends only on the runs that the ranks hold and want, not on their addresses in memory, so it stays valid while training
goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..catalog.specs import item_bytes_of
from ..geometry.columns import ColumnTable, group_ids, lex_order
from ..geometry.runs import I64, cut_boxes, decompose, pad_left, ranges, volumes
from ..geometry.tiling import TensorBoxes, meet
from .balance import ReplicaGroup, assign

MIN_PART_BYTES, MAX_PART_BYTES = 64 << 10, 4 << 20
"""The smallest and the largest limit in bytes above which a part is cut. With more ranks the limit is smaller, to fill rounds
evenly."""

OWN = -1
"""The round number of a part that a rank takes from its own memory."""


@dataclass(frozen=True, slots=True)
class RankRuns(ColumnTable):
    """The runs that each rank holds (or wants), as columns: a run of a box of a tensor in each row.

    ``local`` is the index of the row among the rows of its rank. ``dtype`` is an index into `specs.CODES`. ``device`` is 1 if the
    memory can be sent without a copy through the host.
    """

    rank: I64
    local: I64
    tensor: I64
    start: I64
    count: I64
    dtype: I64
    device: I64
    offsets: I64
    lengths: I64


@dataclass(frozen=True, slots=True)
class Parts(ColumnTable):
    """The parts of tensors that ranks take, from each other or from themselves (round `OWN`), as columns; each part is a box.

    ``owner_row`` and ``taker_row`` are the rows of the sender (owner) and of the receiver (taker) that the part lies in. ``wire``
    is the dtype in which a part travels, the smaller one of both sides. ``device`` is 1 if the part does not pass through the
    host. Parts are sorted by device, round, owner and taker, and then by size of element, large ones first, which is their order
    in the message.
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
        """The size of each part in the message, in bytes, (parts,)."""
        return volumes(self.lengths) * item_bytes_of(self.wire)

    def of_rank(self, rank: int) -> Parts:
        """Return the parts that one rank sends, receives, or takes from its own memory."""
        return self.take(np.flatnonzero((self.owner == rank) | (self.taker == rank)))


def plan_exchange(held: RankRuns, wanted: RankRuns, node: Sequence[int], round_bytes: int) -> Parts:
    """Plan the exchange: the parts of tensors that each rank sends to each other rank, and the round of each part.

    Parameters
    ----------
    held
        The runs that ranks hold; any two are equal or share no element. Equal runs are copies of the same bytes.
    wanted
        The runs that ranks want. Elements that `held` lacks are left out of the plan.
    node
        For each rank the number of its machine.
    round_bytes
        About how many bytes a rank sends, or receives, in one round.
    """
    width = max(held.offsets.shape[1], wanted.offsets.shape[1])
    # held_run[i], want_run[i]: the distinct run of row i; held_first[r], want_first[r]: the first row of distinct run r.
    held_run, held_first = _distinct(held, width)
    want_run, want_first = _distinct(wanted, width)
    # held_parent[b], want_parent[b]: the distinct run that box b was cut out of.
    held_boxes, held_parent = _boxes(held.take(held_first), width)
    want_boxes, want_parent = _boxes(wanted.take(want_first), width)
    # One entry for each pair of a wanted and a held box that overlap; low, lengths: the overlap, in global coordinates.
    want_box, held_box = meet(want_boxes, held_boxes)
    low = np.maximum(want_boxes.offsets[want_box], held_boxes.offsets[held_box])
    ends = (boxes.offsets[i] + boxes.lengths[i] for boxes, i in ((want_boxes, want_box), (held_boxes, held_box)))
    lengths = np.minimum(*ends) - low
    # One entry for each pair and each rank that wants its run from here on; pair[i]: the pair.
    # takers[begin[r] : begin[r + 1]]: the rows that want distinct run r.
    takers = np.argsort(want_run, kind="stable")
    begin = np.searchsorted(want_run[takers], np.arange(len(want_first) + 1))
    run = want_parent[want_box]
    pair, step = ranges(begin[run + 1] - begin[run])
    # taker_row[i]: the row of `wanted` that takes the part; run[i]: the distinct run of `held` that it comes from.
    taker_row = takers[begin[run[pair]] + step]
    run = held_parent[held_box][pair]
    low, lengths = low[pair], lengths[pair]
    # sizes: bytes of an element on both sides; wire[i]: the dtype of the smaller one.
    sizes = item_bytes_of(held.dtype[held_first][run]), item_bytes_of(wanted.dtype[taker_row])
    wire = np.where(sizes[1] < sizes[0], wanted.dtype[taker_row], held.dtype[held_first][run])
    # own_row[i]: the row in which the taker itself holds the run, or -1.
    own_row = _own_rows(held, held_run, run, wanted.rank[taker_row], len(node))
    # Cut large parts; a part that its taker holds itself is never cut. source[i]: the uncut part that part i comes from.
    limit = min(max(round_bytes // (2 * len(node)), MIN_PART_BYTES), MAX_PART_BYTES)
    source, low, lengths = cut_boxes(low, lengths, item_bytes_of(wire), np.where(own_row >= 0, np.int64(2) ** 62, limit))
    run, taker_row, wire, owner_row = run[source], taker_row[source], wire[source], own_row[source]
    size = volumes(lengths) * item_bytes_of(wire)
    # far: the parts that another rank must send; each gets a row of `held` as its owner.
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
    # Parts that travel with and without the host are two exchanges, each with rounds of its own.
    for device in (0, 1):
        rows = np.flatnonzero((parts.device == device) & (parts.owner != parts.taker))
        parts.round[rows] = spread_over_rounds(parts.owner[rows], parts.taker[rows], size[rows], len(node), round_bytes)
    return parts.take(lex_order(parts.device, parts.round, parts.owner, parts.taker, -item_bytes_of(wire)))


def _distinct(runs: RankRuns, width: int) -> tuple[I64, I64]:
    """Number the distinct runs. Return the number of each row's run, and the first row of each run."""
    wide = [pad_left(runs.offsets, width, 0), pad_left(runs.lengths, width, 1)]
    return group_ids(np.column_stack([runs.tensor, runs.start, runs.count, runs.dtype, *wide]))


def _boxes(runs: RankRuns, width: int) -> tuple[TensorBoxes, I64]:
    """Cut runs into boxes of `width` dims. Return the boxes, and for each box the index of its run."""
    cut = decompose(runs.lengths, runs.start, runs.count)
    offsets = pad_left(runs.offsets[cut.parent] + cut.offsets, width, 0)
    return TensorBoxes(runs.tensor[cut.parent], offsets, pad_left(cut.lengths, width, 1)), cut.parent


def _own_rows(held: RankRuns, held_run: I64, run: I64, taker: I64, num_ranks: int) -> I64:
    """Find for each part the row of `held` in which its taker itself holds run ``run[i]``; -1 if it does not hold the run."""
    # key: run and rank of each row as one number; bisection finds where the wanted number would stand.
    key, wanted = held_run * num_ranks + held.rank, run * num_ranks + taker
    order = np.argsort(key, kind="stable")
    row = order[np.minimum(np.searchsorted(key[order], wanted), len(order) - 1)]
    # The row found there is right only if its number is the wanted one.
    return np.where(key[row] == wanted, row, -1)


def _choose(held: RankRuns, held_run: I64, run: I64, taker: I64, size: I64, node: I64) -> I64:
    """Choose the row of `held` that sends each part. Takers hold none of these parts themselves.

    A rank on the taker's node is preferred, and among several ranks the one that has the least to send.
    """
    num_nodes = int(node.max(initial=0)) + 1
    # rows: the holders of each run, those on one node side by side; key: the run and the node of each as one number.
    key = held_run * num_nodes + node[held.rank]
    rows = np.argsort(key, kind="stable")
    key = key[rows]
    # low, high: the bounds in rows of the candidates of part i: the holders on the taker's node, or all if there are none there.
    wanted = run * num_nodes + node[taker]
    low, high = np.searchsorted(key, wanted), np.searchsorted(key, wanted, side="right")
    far = np.flatnonzero(low == high)
    low[far], high[far] = (np.searchsorted(key, (run[far] + more) * num_nodes) for more in (0, 1))
    chosen = rows[low]
    # A part with one candidate is settled. All others are divided among theirs, so that the loads come out level.
    several, alone = np.flatnonzero(high - low > 1), np.flatnonzero(high - low == 1)
    loads = np.bincount(held.rank[chosen[alone]], weights=size[alone], minlength=len(node)).astype(np.int64)
    # groups: for each set of candidate ranks the parts that may come from any of them.
    groups: dict[bytes, tuple[I64, list[int]]] = {}
    for i, a, b in zip(several.tolist(), low[several].tolist(), high[several].tolist(), strict=True):
        ranks = held.rank[rows[a:b]]
        groups.setdefault(ranks.tobytes(), (ranks, []))[1].append(i)
    replica_groups = [ReplicaGroup(ranks, np.zeros(0, np.int64), np.array(items)) for ranks, items in groups.values()]
    one = np.ones(len(run), np.int64)
    assigned = assign(replica_groups, size, one, one, loads)
    chosen[assigned.item] = _own_rows(held, held_run, run[assigned.item], assigned.rank, len(node))
    return chosen


def spread_over_rounds(owner: I64, taker: I64, size: I64, num_ranks: int, round_bytes: int) -> I64:
    """Return the round of each part, (parts,), such that the parts from one rank to another are spread evenly over all rounds.

    >>> zero = np.zeros(4, np.int64)
    >>> [spread_over_rounds(zero, zero + 1, zero + 10, 2, round_bytes).tolist() for round_bytes in (40, 20)]
    [[0, 0, 0, 0], [0, 1, 2, 3]]
    """
    if len(owner) == 0:
        return np.zeros(0, np.int64)
    busiest = max(int(np.bincount(rank, weights=size, minlength=num_ranks).max()) for rank in (owner, taker))
    # A part may reach over the end of its round, so rounds are planned to be half full if one is not enough.
    num_rounds = 1 if busiest <= round_bytes else -(-2 * busiest // round_bytes)
    # stream[i]: the number of the pair of ranks that part i travels between; total[s]: the bytes of stream s.
    stream, _ = group_ids(np.column_stack([owner, taker]))
    order = np.argsort(stream, kind="stable")
    total = np.bincount(stream, weights=size).astype(np.int64)
    # before[i]: bytes of all parts before part i, streams end to end; first[s]: where stream s begins on that scale.
    ends = np.cumsum(size[order])
    before = np.empty_like(size)
    before[order] = ends - size[order]
    first = np.concatenate([[0], np.cumsum(total)[:-1]])
    # The round is proportional to the position in the stream.
    rounds: I64 = (before - first[stream]) * num_rounds // np.maximum(total[stream], 1)
    return rounds
