"""Shared reads: choose the rank that reads each part of a file for all ranks that want it, so that it is read only once.

1. The unit is a window, a part of a file. If several ranks want bytes of it, one of them is its *owner*, and reads the bytes that
   any of them wants: the rank that has the least to read so far.
2. Each other rank gets its bytes of the window in one message, which contains only the bytes that its tensors take. Messages
   travel in *rounds*. In a round no rank sends or receives more than a given number of bytes (or one message, if that alone is
   more), so memory is bounded.
3. All ranks go through the windows in one order, so the rounds of each rank are in that order too. Ranks that share nothing do
   not wait for each other's windows.

Every rank knows the windows that all ranks want, and computes the same schedule from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..geometry.columns import ColumnTable, concatenated, is_new, lex_order
from ..geometry.runs import I64


@dataclass(frozen=True, slots=True)
class Wants(ColumnTable):
    """The windows (parts of files) that one rank wants, wholly or in part, as columns sorted by file and window.

    ``read`` is the number of bytes that this rank would read of the window, ``taken`` the number of bytes that go into its
    tensors.
    """

    file: I64
    window: I64
    read: I64
    taken: I64


@dataclass(frozen=True, slots=True)
class Messages(ColumnTable):
    """The messages in which owners of windows (parts of files) send bytes to other ranks, as columns in the order of the windows.

    Each has its round, the owner that sends it, the taker that receives it, and its size in bytes.
    """

    file: I64
    window: I64
    owner: I64
    taker: I64
    round: I64
    size: I64

    @property
    def num_rounds(self) -> int:
        """The number of rounds in which all of these messages travel."""
        return int(self.round.max(initial=-1)) + 1


def divide_reads(wants: Sequence[Wants], round_bytes: int) -> Messages:
    """Choose the rank that reads each window that several ranks want, and the rounds in which it sends bytes to the others.

    Parameters
    ----------
    wants
        The windows that each rank wants, by rank.
    round_bytes
        The most bytes that a rank sends, or receives, in one round.
    """
    # One row for each window and rank that wants it, by window and then by rank; begins: the first row of each window.
    table = concatenated(wants)
    rank = np.repeat(np.arange(len(wants)), [len(of_rank.file) for of_rank in wants])
    order = lex_order(table.file, table.window, rank) if len(rank) else rank
    table, rank = table.take(order), rank[order]
    begins = np.flatnonzero(is_new(table.file, table.window))
    count = np.diff(np.append(begins, len(rank)))
    # loads: the bytes that each rank reads. Windows that one rank alone wants count first.
    alone = np.repeat(count == 1, count)
    loads = np.bincount(rank[alone], weights=table.read[alone], minlength=len(wants)).tolist()
    rounds = _Rounds(len(wants), round_bytes)
    ranks, reads, sizes = rank.tolist(), table.read.tolist(), table.taken.tolist()
    found: list[tuple[int, int, int]] = []  # of each message: its row, the owner, the round
    for low, num in zip(begins[count > 1].tolist(), count[count > 1].tolist(), strict=True):
        rows = range(low, low + num)
        owner = min((ranks[row] for row in rows), key=lambda candidate: (loads[candidate], candidate))
        loads[owner] += max(reads[row] for row in rows)
        found += [(row, owner, rounds.next(owner, ranks[row], sizes[row])) for row in rows if ranks[row] != owner]
    row, owners, numbers = np.array(found, np.int64).reshape(-1, 3).T
    return Messages(table.file[row], table.window[row], owners, rank[row], numbers, table.taken[row])


class _Rounds:
    """The current round of each rank, and the bytes that the rank sends and receives in it."""

    def __init__(self, num_ranks: int, round_bytes: int) -> None:
        self._limit = round_bytes
        self._now = [0] * num_ranks
        self._sent, self._received = [0] * num_ranks, [0] * num_ranks

    def next(self, source: int, dest: int, size: int) -> int:
        """Add a message; return the first round that has room for it and is not before the current round of either rank."""
        number = max(self._now[source], self._now[dest])
        sent = self._sent[source] if self._now[source] == number else 0
        received = self._received[dest] if self._now[dest] == number else 0
        if (sent and sent + size > self._limit) or (received and received + size > self._limit):
            number += 1
        for rank in (source, dest):
            if self._now[rank] < number:
                self._now[rank], self._sent[rank], self._received[rank] = number, 0, 0
        self._sent[source] += size
        self._received[dest] += size
        return number
