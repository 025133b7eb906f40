"""Loading with each byte read from storage once: of several ranks that need it, one reads, verifies and sends it to the others.

1. Ranks exchange lists of the extents that they need, and each works out the same schedule (`core.planning.shared_reads`).
2. Bytes that one rank alone needs, it reads as in any load.
3. Bytes that several need are read and verified by one of them, and sent to the others round by round; these put them in place as
   if they had read them. While one round is sent, the next is read. Both stay within a few times `ROUND_BYTES` of memory, and a
   window for each thread.
4. Every part of a round says whether its sender has failed. So all ranks stop after the same round, none waits in a collective
   that another one never enters, and the session then raises the error on all of them.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgpack
import numpy as np
import torch

from ...comm import Exchange
from ...comm.protocol import Comm
from ...core.planning.read_plan import ReadPlan
from ...core.planning.shared_reads import Extents, Schedule, SharedWindow, Wants, share
from ...errors import PeerError
from ..common.progress import OnProgress, Tally, silent
from .read import MAX_THREADS, Damage, Reader, ReadTask, in_threads, reads_of

ROUND_BYTES = 16 << 20
"""The most that a rank sends in one round, and that it receives; or one window, if that is larger."""

PLACERS = 4
"""Threads that put received bytes in place: each has a buffer as large as a window."""


def execute_once(comm: Comm, exchange: Exchange, task: ReadTask, report: OnProgress = silent) -> int:
    """Read the items of the plans of all ranks together; returns how many bytes this rank read from storage. Collective.

    Raises
    ------
    CorruptError
        A block is damaged: on the rank that read it. The session raises it on the others.
    """
    reads = reads_of(task)
    wants = wants_of(reads)
    schedule = share(_of_all_ranks(comm, wants), ROUND_BYTES)
    # A window is known to all ranks by its file and its number there; the reader counts this rank's windows in their order.
    keys = dict.fromkeys(zip(wants.file.tolist(), wants.window.tolist(), strict=True))
    number = {key: i for i, key in enumerate(keys)}
    shared = {(window.file, window.window) for window in schedule.windows}
    alone = [i for key, i in number.items() if key not in shared]
    mine = [window for window in schedule.windows if window.owner == comm.rank]
    own_bytes = sum(_size(window.extents) for window in mine)
    for i in alone:
        extents = slice(reads.extent_start[i], reads.extent_start[i + 1])
        own_bytes += int((reads.high[extents] - reads.low[extents]).sum())
    # Without copying, bytes of other ranks are not received, so they do not count.
    tally = Tally("load", reads.num_bytes, report) if task.copy else Tally("verify", own_bytes, report)
    reader = Reader(task, reads, tally)
    rounds = _Rounds(comm.rank, exchange, reader, number, schedule)
    try:
        if task.copy:
            rounds.run(alone)
        else:
            in_threads(reader.read_window, alone)
            in_threads(lambda i: tally.add(len(rounds.read(mine[i]))), range(len(mine)))
    except Damage as damage:
        raise reader.explain(damage) from None
    if rounds.stopped:
        comm.gather(b"")  # raises the error of the rank that failed
        raise PeerError("another rank gave up this load without saying why; its log may")
    return own_bytes


def wants_of(reads: ReadPlan) -> Wants:
    """List the extents that a rank would read, by window."""
    counts = np.diff(reads.extent_start)
    return Wants(np.repeat(reads.file, counts), np.repeat(reads.window, counts), reads.low, reads.high)


def _of_all_ranks(comm: Comm, wants: Wants) -> list[Wants]:
    """Gather the wants of all ranks, on every rank."""
    # Differences of columns of windows that follow each other compress to next to nothing.
    table = np.diff(np.stack([wants.file, wants.window, wants.low, wants.high]), prepend=0, axis=1)
    gathered = comm.gather(zlib.compress(table.astype("<i8").tobytes(), 1))
    tables = msgpack.unpackb(comm.broadcast(None if gathered is None else msgpack.packb(gathered)))
    columns = (np.frombuffer(zlib.decompress(data), "<i8").reshape(4, -1).cumsum(axis=1) for data in tables)
    return [Wants(*rows) for rows in columns]


class _Rounds:
    """This rank's part of the rounds: the windows that it reads, sends and receives in each."""

    def __init__(
        self, rank: int, exchange: Exchange, reader: Reader, number: dict[tuple[int, int], int], schedule: Schedule
    ) -> None:
        self._rank, self._exchange, self._reader, self._number = rank, exchange, reader, number
        self._num_rounds = schedule.num_rounds
        self._failure: BaseException | None = None
        self.stopped = False
        # The bytes of windows that this rank has read and has not yet sent to all.
        self._windows: dict[tuple[int, int], memoryview] = {}
        self._to_read: dict[int, list[SharedWindow]] = defaultdict(list)
        self._done: dict[int, list[tuple[int, int]]] = defaultdict(list)
        # By round: the rank at the other end, the window, and its extents; in the order of windows on both sides.
        self._sends: dict[int, list[tuple[int, SharedWindow, Extents]]] = defaultdict(list)
        self._receives: dict[int, list[tuple[int, SharedWindow, Extents]]] = defaultdict(list)
        for window in schedule.windows:
            if window.owner == rank:
                self._to_read[window.first_round].append(window)
                self._done[window.messages[-1].round].append((window.file, window.window))
            for message in window.messages:
                if window.owner == rank:
                    self._sends[message.round].append((message.dest, window, message.extents))
                elif message.dest == rank:
                    self._receives[message.round].append((window.owner, window, message.extents))

    def run(self, alone: Sequence[int]) -> None:
        """Read what this rank alone needs, and take part in all rounds; raises what failed on this rank."""
        try:
            in_threads(self._reader.read_window, alone)
        except BaseException as error:
            self._failure = error
        name = "reshard-ckpt-once"
        with (
            ThreadPoolExecutor(MAX_THREADS, thread_name_prefix=name) as self._readers,
            ThreadPoolExecutor(PLACERS, thread_name_prefix=name) as self._placers,
            ThreadPoolExecutor(1, thread_name_prefix="reshard-ckpt-ahead") as one,
        ):
            ahead = one.submit(self._read_for, 0)
            for number in range(self._num_rounds):
                message = self._outgoing(number, ahead)
                ahead = one.submit(self._read_for, number + 1)
                self._swap(number, *message)
                del message  # or it would take memory beside the next one
                if self.stopped:
                    break
        if self._failure is not None:
            raise self._failure

    def _swap(self, number: int, outgoing: torch.Tensor, sent: list[int]) -> None:
        received = [1] * self._exchange.size
        for source, _, extents in self._receives[number]:
            received[source] += _size(extents)
        incoming = self._exchange.all_to_all(outgoing, sent, received).numpy().data
        starts = np.cumsum([0, *received[:-1]]).tolist()
        self.stopped = any(incoming[start] for start in starts)
        if not self.stopped:
            self._attempt(lambda: self._place_received(number, incoming, starts))

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do some work, unless something has failed; the next round tells the others of a failure."""
        if self._failure is None:
            try:
                work()
            except BaseException as error:
                self._failure = error

    def _read_for(self, number: int) -> list[memoryview]:
        """Read the windows that this rank reads for a round, and verify them."""
        windows = self._to_read[number]
        out: list[memoryview] = [memoryview(b"")] * len(windows)

        def read(i: int) -> None:
            out[i] = self.read(windows[i])

        in_threads(read, range(len(windows)), self._readers)
        return out

    def read(self, window: SharedWindow) -> memoryview:
        """Read the extents of a window, end to end, and verify them."""
        data = torch.empty(_size(window.extents), dtype=torch.uint8).numpy().data
        task = self._reader.task
        key = task.catalog.files[window.file].key
        number = self._number[window.file, window.window]
        at = 0
        for low, high in window.extents:
            part = data[at : at + high - low]
            task.storage.read_into(key, low, [part])
            self._reader.verify(window.file, low, [part], number)
            at += high - low
        return data

    def _outgoing(self, number: int, ahead: Future[list[memoryview]]) -> tuple[torch.Tensor, list[int]]:
        """Make the message of a round, once its windows are read and what this rank itself needs of them is in place."""
        self._attempt(lambda: self._take_own(number, ahead.result()))
        sent = [1] * self._exchange.size
        for dest, _, extents in self._sends[number]:
            sent[dest] += _size(extents)
        outgoing = torch.zeros(sum(sent), dtype=torch.uint8)
        view = outgoing.numpy().data
        place = np.cumsum([0, *sent[:-1]]).tolist()
        for start in place:  # the first byte of each part says whether this rank has failed
            view[start] = self._failure is not None
        if self._failure is None:
            place = [start + 1 for start in place]
            for dest, window, extents in self._sends[number]:
                size = _size(extents)
                self._source(window).read_all(extents, view[place[dest] : place[dest] + size])
                place[dest] += size
        for key in self._done[number]:
            self._windows.pop(key, None)
        return outgoing, sent

    def _take_own(self, number: int, data: list[memoryview]) -> None:
        windows = self._to_read[number]
        for window, window_data in zip(windows, data, strict=True):
            self._windows[window.file, window.window] = window_data
        in_threads(lambda i: self._place(windows[i], self._source(windows[i])), range(len(data)), self._placers)

    def _source(self, window: SharedWindow) -> _ExtentsInMemory:
        return _ExtentsInMemory(window.extents, self._windows[window.file, window.window])

    def _place_received(self, number: int, incoming: memoryview, starts: list[int]) -> None:
        place = [start + 1 for start in starts]
        parts: list[tuple[SharedWindow, _ExtentsInMemory]] = []
        for source, window, extents in self._receives[number]:
            size = _size(extents)
            parts.append((window, _ExtentsInMemory(extents, incoming[place[source] : place[source] + size])))
            place[source] += size
        in_threads(lambda i: self._place(*parts[i]), range(len(parts)), self._placers)

    def _place(self, window: SharedWindow, source: _ExtentsInMemory) -> None:
        self._reader.take_window(self._number[window.file, window.window], source.read_into, verify=False)


class _ExtentsInMemory:
    """Extents of a file that lie end to end in memory, and are read as from a store."""

    def __init__(self, extents: Extents, data: memoryview) -> None:
        self._lows = [low for low, _ in extents]
        sizes = [high - low for low, high in extents]
        self._starts = np.cumsum([0, *sizes]).tolist()
        self._data = data

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        extent = bisect_right(self._lows, offset) - 1
        at = self._starts[extent] + offset - self._lows[extent]
        for buffer in buffers:
            buffer[:] = self._data[at : at + len(buffer)]
            at += len(buffer)
        assert at <= self._starts[extent + 1]

    def read_all(self, extents: Extents, into: memoryview) -> None:
        """Copy some of these extents, or parts of them, end to end."""
        at = 0
        for low, high in extents:
            self.read_into("", low, [into[at : at + high - low]])
            at += high - low


def _size(extents: Iterable[tuple[int, int]]) -> int:
    return sum(high - low for low, high in extents)
