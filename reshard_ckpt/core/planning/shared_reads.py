"""Shared reads: the rank that reads each window for all others, so that bytes that several ranks want are read and verified once.

1. The unit is a window of a file. If several ranks want bytes of it, one of them reads the bytes that any of them wants: the one
   that has the least to read so far.
2. Each other rank gets its bytes of the window in one message, which contains only the bytes that its tensors take. Messages
   travel in *rounds*. In a round no rank sends or receives more than a given number of bytes (or one message, if that alone is
   more), so memory is bounded.
3. All ranks go through the windows in one order, so the rounds of each rank are in that order too. Ranks that share nothing do
   not wait for each other's windows.

Every rank computes the same schedule from the wants of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from ..geometry.runs import I64

Extents = tuple[tuple[int, int], ...]
"""Byte ranges ``(low, high)`` of a file, in order, disjoint."""


@dataclass(frozen=True, slots=True)
class Wants:
    """The byte ranges ``[low, high)`` that one rank wants, each within one window of one file; sorted by file, window and `low`.

    ``size`` is the number of bytes of the window that go into the rank's tensors: it stands at the first range of the window, and
    0 at the others.
    """

    file: I64
    window: I64
    low: I64
    high: I64
    size: I64


@dataclass(frozen=True, slots=True)
class Message:
    """The bytes of a window that its reader sends to another rank: the round, the receiver, and the number of bytes."""

    round: int
    dest: int
    size: int


@dataclass(frozen=True, slots=True)
class SharedWindow:
    """A window that its `owner` reads for itself and for others: the byte ranges it reads, and a message for each other rank."""

    file: int
    window: int
    owner: int
    extents: Extents
    messages: tuple[Message, ...]

    @property
    def first_round(self) -> int:
        """The first round in which the owner sends bytes of this window."""
        return self.messages[0].round


@dataclass(frozen=True, slots=True)
class Schedule:
    """All windows that are shared, in order, and the number of rounds of their messages."""

    windows: tuple[SharedWindow, ...]
    num_rounds: int


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The byte ranges of one window that one rank wants, and the number of their bytes that its tensors take."""

    extents: Extents
    size: int


def share(wants: Sequence[Wants], round_bytes: int) -> Schedule:
    """Divide the reading of windows that several ranks want.

    Parameters
    ----------
    wants
        By rank.
    round_bytes
        The most bytes that a rank sends, or receives, in one round.
    """
    # load: the bytes that each rank reads. Windows that one rank alone wants count first.
    load = [0] * len(wants)
    shared: list[tuple[int, int, dict[int, _Wanted]]] = []
    for file, window, wanted in _by_window(wants):
        if len(wanted) == 1:
            load[next(iter(wanted))] += sum(_size(one.extents) for one in wanted.values())
        else:
            shared.append((file, window, wanted))
    rounds = _Rounds(len(wants), round_bytes)
    windows = []
    for file, window, wanted in shared:
        owner = min(wanted, key=lambda rank: (load[rank], rank))
        extents = union(extent for one in wanted.values() for extent in one.extents)
        load[owner] += _size(extents)
        # The owner reads all ranges, and sends each other rank its bytes in the first round with room.
        messages = tuple(
            Message(rounds.next(owner, dest, one.size), dest, one.size) for dest, one in wanted.items() if dest != owner
        )
        windows.append(SharedWindow(file, window, owner, extents, messages))
    return Schedule(tuple(windows), rounds.count)


class _Rounds:
    """The current round of each rank, and the bytes that it sends and receives in it."""

    def __init__(self, num_ranks: int, round_bytes: int) -> None:
        self._limit = round_bytes
        self._now = [0] * num_ranks
        self._sent, self._received = [0] * num_ranks, [0] * num_ranks
        self.count = 0

    def next(self, source: int, dest: int, size: int) -> int:
        """Return the first round that has room for a message, and that is not before the current one of either rank."""
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
        self.count = max(self.count, number + 1)
        return number


def _by_window(wants: Sequence[Wants]) -> Iterator[tuple[int, int, dict[int, _Wanted]]]:
    """Yield each wanted window, in order, with the byte ranges of each rank."""
    rank = np.repeat(np.arange(len(wants)), [len(w.file) for w in wants])
    file, window, low, high, size = (
        np.concatenate([getattr(w, name) for w in wants]).astype(np.int64) for name in ("file", "window", "low", "high", "size")
    )
    order = np.lexsort((low, rank, window, file))
    rows = zip(*(column[order].tolist() for column in (file, window, rank, low, high, size)), strict=True)
    for key, of_window in groupby(rows, key=lambda row: row[:2]):
        wanted: dict[int, _Wanted] = {}
        for one, of_rank in groupby(of_window, key=lambda row: row[2]):
            extents = list(of_rank)
            wanted[one] = _Wanted(tuple((row[3], row[4]) for row in extents), sum(row[5] for row in extents))
        yield *key, wanted


def union(extents: Iterable[tuple[int, int]]) -> Extents:
    """Merge byte ranges that overlap or touch.

    >>> union(iter([(4, 6), (0, 2), (2, 3), (5, 9)]))
    ((0, 3), (4, 9))
    """
    out: list[list[int]] = []
    for low, high in sorted(extents):
        if out and low <= out[-1][1]:
            out[-1][1] = max(out[-1][1], high)
        else:
            out.append([low, high])
    return tuple((low, high) for low, high in out)


def _size(extents: Extents) -> int:
    return sum(high - low for low, high in extents)
