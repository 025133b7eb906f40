"""Shared reads: which rank reads what for whom, so that bytes that several ranks want are read and verified once.

1. The unit is a window of a file. All that any rank wants of it is read by one of those that want some of it: the one that has
   the least to read so far.
2. What a rank wants of a window goes to it in one message: just the bytes that its tensors take. Messages travel in *rounds*, in
   each of which no rank sends or receives more than a given number of bytes (or one message, if that alone is more); so memory is
   bounded.
3. Ranks go through the windows in one order, so a rank's rounds are in that order too; ranks that share nothing do not wait for
   each other's windows.

Every rank computes the same schedule from what all of them want.
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
    """What one rank wants: byte ranges ``[low, high)``, each of one window of one file; sorted by file, window and `low`.

    ``size`` are the bytes of the window that go into its tensors, told with the first range of the window, and 0 at the others.
    """

    file: I64
    window: I64
    low: I64
    high: I64
    size: I64


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank wants of a window that another one reads: the round in which it travels, and its bytes."""

    round: int
    dest: int
    size: int


@dataclass(frozen=True, slots=True)
class SharedWindow:
    """A window that a rank reads for itself and for others: who reads which parts of it, and to whom they go."""

    file: int
    window: int
    owner: int
    extents: Extents
    messages: tuple[Message, ...]

    @property
    def first_round(self) -> int:
        """When the owner needs it."""
        return self.messages[0].round


@dataclass(frozen=True, slots=True)
class Schedule:
    """All windows that are shared, in order, and how many rounds their messages take."""

    windows: tuple[SharedWindow, ...]
    num_rounds: int


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What one rank wants of one window: the byte ranges, and the bytes of them that its tensors take."""

    extents: Extents
    size: int


def share(wants: Sequence[Wants], round_bytes: int) -> Schedule:
    """Divide the reading of what several ranks want.

    Parameters
    ----------
    wants
        By rank.
    round_bytes
        What a rank sends, or receives, in one round at most.
    """
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
        messages = tuple(
            Message(rounds.next(owner, dest, one.size), dest, one.size) for dest, one in wanted.items() if dest != owner
        )
        windows.append(SharedWindow(file, window, owner, extents, messages))
    return Schedule(tuple(windows), rounds.count)


class _Rounds:
    """How full each rank's current round is."""

    def __init__(self, num_ranks: int, round_bytes: int) -> None:
        self._limit = round_bytes
        self._now = [0] * num_ranks
        self._sent, self._received = [0] * num_ranks, [0] * num_ranks
        self.count = 0

    def next(self, source: int, dest: int, size: int) -> int:
        """The first round, not before either's current one, that has room for a message of this size."""
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
    """Each window that is wanted, in order, with what each rank wants of it."""
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
    """The same bytes as few extents: those that meet are one.

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
