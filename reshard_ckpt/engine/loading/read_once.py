"""How do ranks that want the same bytes load them without reading them twice? One reads, proves and sends them to the others.

1. Ranks tell each other which extents of which windows they want, and each works out the same schedule (`core.sharing`).
2. What only one rank wants, it reads as it always does.
3. What several want is read and proved by one of them, and then sent, round by round, to the others, who place it as if they had
   read it. While one round is sent, the next is read. Both stay within a few times `ROUND_BYTES` of memory,
   and a window for each thread.
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
from ...core.catalog.model import Catalog
from ...core.planning.load_plan import LoadPlan
from ...core.planning.read_plan import ReadPlan
from ...core.planning.shared_reads import Extents, Schedule, SharedWindow, Wants, share
from ...errors import PeerError
from ...storage.protocol import Storage
from ..common.progress import OnProgress, Tally, silent
from .read import MAX_THREADS, BlockDigests, Damage, Reader, ReadTarget, in_threads, reads_of

ROUND_BYTES = 16 << 20
"""What a rank sends in one round, and what it receives, at most, or one window."""

PLACERS = 4
"""Threads that place what was received: each has a buffer as large as a window."""


def execute_once(
    comm: Comm,
    exchange: Exchange,
    storage: Storage,
    catalog: Catalog,
    plan: LoadPlan,
    targets: Sequence[ReadTarget],
    *,
    blocks: BlockDigests,
    copy: bool = True,
    report: OnProgress = silent,
) -> int:
    """Read all items of the plans of all ranks together; returns the number of bytes that this one read from storage. Collective.

    Parameters
    ----------
    copy
        False proves the blocks and changes no destination.

    Raises
    ------
    CorruptError
        A block is damaged: on the rank that read it. The others hear of it by the session.
    """
    reads = reads_of(catalog, plan, targets, blocks=blocks, copy=copy)
    wants = wants_of(reads)
    schedule = share(_of_all_ranks(comm, wants), ROUND_BYTES)
    number = {key: i for i, key in enumerate(dict.fromkeys(zip(wants.file.tolist(), wants.window.tolist(), strict=True)))}
    shared = {(window.file, window.window) for window in schedule.windows}
    alone = [i for key, i in number.items() if key not in shared]
    mine = [window for window in schedule.windows if window.owner == comm.rank]
    own_bytes = sum(_size(window.extents) for window in mine)
    own_bytes += int(sum(reads.high[e] - reads.low[e] for i in alone for e in range(*reads.extent_start[i : i + 2])))
    tally = Tally("load" if copy else "verify", reads.num_bytes if copy else own_bytes, report)
    reader = Reader(storage, catalog, plan, reads, targets, blocks=blocks, copy=copy, tally=tally)
    rounds = _Rounds(comm.rank, exchange, reader, number, schedule)
    try:
        if copy:
            rounds.run(alone)
        else:
            in_threads(reader.read_window, alone)
            in_threads(lambda i: tally.add(len(rounds.read(mine[i]))), range(len(mine)))
    except Damage as damage:
        raise reader.explain(damage) from None
    if rounds.stopped:
        comm.gather(b"")  # raises what the rank raised that failed
        raise PeerError("another rank gave up this load without saying why; its log may")
    return own_bytes


def wants_of(reads: ReadPlan) -> Wants:
    """Return the extents that a rank would read, by window."""
    counts = np.diff(reads.extent_start)
    return Wants(np.repeat(reads.file, counts), np.repeat(reads.window, counts), reads.low, reads.high)


def _of_all_ranks(comm: Comm, wants: Wants) -> list[Wants]:
    """Everyone's wants, on every rank."""
    # Differences of columns of windows that follow each other compress to next to nothing.
    table = np.diff(np.stack([wants.file, wants.window, wants.low, wants.high]), prepend=0, axis=1)
    gathered = comm.gather(zlib.compress(table.astype("<i8").tobytes(), 1))
    tables = msgpack.unpackb(comm.broadcast(None if gathered is None else msgpack.packb(gathered)))
    columns = (np.frombuffer(zlib.decompress(data), "<i8").reshape(4, -1).cumsum(axis=1) for data in tables)
    return [Wants(*rows) for rows in columns]


class _Rounds:
    """This rank's part of the rounds."""

    def __init__(
        self, rank: int, exchange: Exchange, reader: Reader, number: dict[tuple[int, int], int], schedule: Schedule
    ) -> None:
        self._rank, self._exchange, self._reader, self._number = rank, exchange, reader, number
        self._num_rounds = schedule.num_rounds
        self._failure: BaseException | None = None
        self.stopped = False
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
        """Read what this rank wants alone, and go through all rounds; raises what failed on this rank."""
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
                del message  # or it would be there beside the next one
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
        """Do it, unless something has failed; a failure is for the next round to tell."""
        if self._failure is None:
            try:
                work()
            except BaseException as error:
                self._failure = error

    def _read_for(self, number: int) -> list[memoryview]:
        """Return the windows that this rank reads for a round, proved."""
        windows = self._to_read[number]
        out: list[memoryview] = [memoryview(b"")] * len(windows)

        def read(i: int) -> None:
            out[i] = self.read(windows[i])

        in_threads(read, range(len(windows)), self._readers)
        return out

    def read(self, window: SharedWindow) -> memoryview:
        """Return the extents of a window, end to end, from storage and proved."""
        data = torch.empty(_size(window.extents), dtype=torch.uint8).numpy().data
        at, reader = 0, self._reader
        number = self._number[window.file, window.window]
        for low, high in window.extents:
            part = data[at : at + high - low]
            reader.storage.read_into(reader.catalog.files[window.file].key, low, [part])
            reader.verify(window.file, low, [part], number)
            at += high - low
        return data

    def _outgoing(self, number: int, ahead: Future[list[memoryview]]) -> tuple[torch.Tensor, list[int]]:
        """Return what this rank sends in a round, once that is read and what this rank itself wants of it is placed."""
        self._attempt(lambda: self._take_own(number, ahead.result()))
        sent = [1] * self._exchange.size
        for dest, _, extents in self._sends[number]:
            sent[dest] += _size(extents)
        outgoing = torch.zeros(sum(sent), dtype=torch.uint8)
        view = outgoing.numpy().data
        place = np.cumsum([0, *sent[:-1]]).tolist()
        for start in place:
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
        for window, window_data in zip(self._to_read[number], data, strict=True):
            self._windows[window.file, window.window] = window_data
        in_threads(
            lambda i: self._place(self._to_read[number][i], self._source(self._to_read[number][i])),
            range(len(data)),
            self._placers,
        )

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
    """Extents of a file that lie end to end in memory, read as from a store."""

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
        """Return some of these extents, or parts of them, end to end."""
        at = 0
        for low, high in extents:
            self.read_into("", low, [into[at : at + high - low]])
            at += high - low


def _size(extents: Iterable[tuple[int, int]]) -> int:
    return sum(high - low for low, high in extents)
