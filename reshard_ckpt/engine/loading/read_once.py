"""Loading with each byte read and verified once: if several ranks need it, one of them reads it and sends it to the others.

1. Ranks that need bytes of one file, directly or through other ranks, form a group; with the layout of the save that is each
   replica group. Files with next to nothing that a rank needs do not join it to a group. So tensor-parallel ranks, which share
   norms, stay apart, and each group reads the norms. Rank 0 finds the groups from the files that join each rank. Everything after
   that stays within a group, over a process group of its own, so lists and messages do not grow with the job.
2. The ranks of a group exchange lists of the extents that they need, and each computes the same schedule
   (`core.planning.shared_reads`). Ranks that need the same send one list.
3. A rank reads the windows that it alone needs itself, as in any load.
4. A window that several ranks need has an owner among them, which reads and verifies it. Each other rank asks the owner for
   *boxes* of the file: the items of its load plan. The owner packs just these bytes, round by round (`engine.common.rounds`), and
   the receiver copies them from the message into its targets. While one round is under way, the next is read. This takes a few
   times `ROUND_BYTES` of memory, and a window for each thread.

Collectives of `execute_once`, in order: a gather of the files and a broadcast of the groups; in each group, two swaps of wants;
an empty gather, as the last point at which a rank may fail alone; in each group with shared windows, a swap of boxes and the
rounds; and a settlement, if any rank failed or there are several groups.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from ...comm import Exchange
from ...comm.protocol import Comm
from ...core.catalog.model import Catalog
from ...core.catalog.specs import Ints
from ...core.geometry.columns import is_new
from ...core.geometry.runs import I64, volumes
from ...core.planning.load_plan import LoadPlan
from ...core.planning.read_plan import ReadPlan
from ...core.planning.shared_reads import Extents, SharedWindow, Wants, share, union
from ...errors import CheckpointError
from ...format.files import digest128
from ...storage.protocol import Storage
from ..common.progress import OnProgress, Tally, silent
from ..common.rounds import Rounds, named_error, pack_table, settle, unpack_table
from ..common.tensor_bytes import RAW
from .read import MAX_THREADS, Damage, Reader, ReadTask, in_threads, item_lists, reads_of

ROUND_BYTES = 12 << 20
"""Most bytes that a rank sends in one round, and most that it receives; or one message, if that is larger."""

PLACERS = 4
"""Threads that pack messages and put received bytes into targets; each has a buffer as large as a window."""


_NEXT_TO_NOTHING = 1 / 200
"""Files that together have at most this share of the bytes that a rank needs do not join it to a group."""

SMALL_BYTES = 128 << 20
"""A checkpoint up to this size is read sooner by each rank than the ranks agree who reads which part."""


def pays(storage: Storage, catalog: Catalog) -> bool:
    """Whether reading once pays where several ranks want the same bytes: a request to the store takes longer than a message."""
    is_slow = not storage.hints.has_locks  # so far only stores of objects lack them
    return is_slow and sum(file.size for file in catalog.files) > SMALL_BYTES


def execute_once(
    comm: Comm, open_exchange: Callable[[Sequence[int]], Exchange], task: ReadTask, report: OnProgress = silent
) -> int:
    """Read the items of the plans of all ranks together, and return the bytes that this rank read from storage. Collective.

    Parameters
    ----------
    open_exchange
        Opens the exchange of host memory among some ranks of the session; these ranks call it.

    Raises
    ------
    CheckpointError
        Any rank failed; all ranks raise its error, a `CorruptError` if a block is damaged.
    """
    reads = reads_of(task)
    wants = wants_of(reads, task.plan)
    members = _group_of(comm, joining_files(wants))
    exchange = open_exchange(members)
    schedule = share(_of_group(exchange, wants), ROUND_BYTES)
    # All ranks know a window by its file and its number in the file. number[file, window]: its number in this rank's reader.
    number = {key: i for i, key in enumerate(_keys(wants))}
    rank = exchange.rank
    windows = [_in_blocks(window, task) if window.owner == rank else window for window in schedule.windows]
    # mine: the shared windows that this rank reads. served: those, and the ones that another rank sends it.
    mine = [window for window in windows if window.owner == rank]
    served = {(w.file, w.window) for w in windows if any(message.dest == rank for message in w.messages)}
    served |= {(window.file, window.window) for window in mine}
    # alone: the windows that no other rank needs
    alone = [i for key, i in number.items() if key not in served]
    own_bytes = sum(_size(window.extents) for window in mine)
    for i in alone:
        extents = slice(reads.extent_start[i], reads.extent_start[i + 1])
        own_bytes += int((reads.high[extents] - reads.low[extents]).sum())
    # With ``copy=False`` no bytes are received from other ranks, so only this rank's own reads count as progress.
    tally = Tally("load", reads.num_bytes, report) if task.copy else Tally("verify", own_bytes, report)
    reader = Reader(task, reads, tally)
    comm.gather(b"")  # a rank that failed above stops all here: from now on each rank must enter the same collectives
    traffic = _Windows(rank, exchange, reader, number, windows)
    rounds = Rounds(exchange, traffic)

    def changed() -> set[str]:
        return {*reader.changed(), *traffic.changed()}

    try:
        rounds.attempt(lambda: in_threads(reader.read_window, alone))
        if task.copy:
            with traffic:
                rounds.run(changed)
        else:
            rounds.attempt(lambda: in_threads(lambda i: tally.add(len(traffic.read(mine[i]))), range(len(mine))))
    finally:
        reader.finish()

    def explain(failure: BaseException, overwritten: str) -> CheckpointError:
        return reader.explain(failure, overwritten) if isinstance(failure, Damage) else named_error(failure, overwritten)

    if not rounds.complete or len(members) < comm.size:
        settle(comm, rounds.failure, changed, explain)
    return own_bytes


def wants_of(reads: ReadPlan, plan: LoadPlan) -> Wants:
    """Return the extents that a rank would read, by window, and the number of bytes of each window that its tensors take."""
    counts = np.diff(reads.extent_start)
    size = np.zeros(len(reads.low), np.int64)
    # of_item[i]: window of item i. taken[w]: bytes of window w that go into tensors; stored at the window's first extent
    of_item = _window_of(reads, plan.file, plan.window)
    taken = np.bincount(of_item, weights=volumes(plan.lengths) * plan.item_bytes, minlength=reads.num_windows)
    size[reads.extent_start[:-1]] = taken.astype(np.int64)
    return Wants(np.repeat(reads.file, counts), np.repeat(reads.window, counts), reads.low, reads.high, size)


def _window_of(reads: ReadPlan, file: I64, window: I64) -> I64:
    """Return the number, among a rank's windows, of the window in which each item lies. A rank's windows are sorted."""
    # file * step + window is unique and keeps the order, so one binary search finds each item's window.
    step = int(max(reads.window.max(initial=0), window.max(initial=0))) + 1
    return np.searchsorted(reads.file * step + reads.window, file * step + window)


def _keys(wants: Wants) -> Iterator[tuple[int, int]]:
    """Return the file and number of each window that a rank wants, once each, in order."""
    return iter(dict.fromkeys(zip(wants.file.tolist(), wants.window.tolist(), strict=True)))


def _in_blocks(window: SharedWindow, task: ReadTask) -> SharedWindow:
    """Grow the extents of a shared window to whole blocks. Wants of ranks that do not verify are not in whole blocks."""
    digests = task.blocks.get(window.file)
    if digests is None:
        return window
    block, size = digests.block_bytes, task.catalog.files[window.file].size
    return replace(
        window, extents=union((low // block * block, min(-(-high // block) * block, size)) for low, high in window.extents)
    )


def joining_files(wants: Wants) -> I64:
    """Return the files that join a rank to the others that need them, ascending.

    >>> low, high, size = [0, 0, 90, 10], [128, 90, 2000, 138], [4, 2000, 0, 5]
    >>> joining_files(Wants(*np.array([[0, 3, 3, 7], [0, 0, 0, 0], low, high, size]))).tolist()
    [3]
    """
    files, number = np.unique(wants.file, return_inverse=True)
    num_bytes = np.bincount(number, weights=wants.size, minlength=len(files))
    order = np.argsort(num_bytes, kind="stable")
    least = np.cumsum(num_bytes[order]) <= num_bytes.sum() * _NEXT_TO_NOTHING
    return np.delete(files, order[least])


def _group_of(comm: Comm, files: I64) -> list[int]:
    """Return the ranks that files join to this one, directly or through other ranks. Collective: a gather and a broadcast."""
    gathered = comm.gather(pack_table(files[:, None]))
    data = comm.broadcast(None if gathered is None else pack_table(groups_of(gathered)[:, None]))
    group = unpack_table(data)[:, 0]
    return [int(rank) for rank in np.flatnonzero(group == group[comm.rank])]


def groups_of(packed: Sequence[bytes]) -> I64:
    """Return the number of each rank's group, from the packed `joining_files` of each rank.

    >>> groups_of([pack_table(np.array(files)[:, None]) for files in ([0, 1], [5], [1, 2], [5, 6], [2])]).tolist()
    [0, 1, 0, 1, 0]
    """
    group_of_file: dict[int, int] = {}
    group = list(range(len(set(packed))))  # group[i]: a lower group that group i has become part of, or i

    def first(i: int) -> int:
        while group[i] != i:
            group[i] = i = group[group[i]]
        return i

    # Replicas need the same files, so there are far fewer distinct lists than ranks.
    number = {data: i for i, data in enumerate(dict.fromkeys(packed))}
    for data, i in number.items():
        for file in unpack_table(data)[:, 0].tolist():
            a, b = sorted((first(group_of_file.setdefault(file, i)), first(i)))
            group[b] = a
    return np.array([first(number[data]) for data in packed], np.int64)


def _of_group(exchange: Exchange, wants: Wants) -> list[Wants]:
    """Return the wants of the ranks of the group, by rank, on each of them. Collective: two swaps."""
    mine = pack_table(np.column_stack([wants.file, wants.window, wants.low, wants.high, wants.size]))
    digests = exchange.swap([digest128(mine)] * exchange.size)
    first = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
    sends = first[digests[exchange.rank]] == exchange.rank
    tables = exchange.swap([mine if sends else b""] * exchange.size)
    distinct = {digest: Wants(*unpack_table(tables[rank]).T) for digest, rank in first.items()}
    return [distinct[digest] for digest in digests]


@dataclass(frozen=True, slots=True)
class _Boxes:
    """The boxes that another rank takes from one window.

    `src` is the first byte in the file, `strides` are bytes in the file, and `at` is the first byte in the message.
    """

    src: list[int]
    item_bytes: list[int]
    lengths: list[tuple[int, ...]]
    strides: list[tuple[int, ...]]
    at: list[int]


def _boxes(rows: I64) -> _Boxes:
    """Make boxes from rows; a row is: window, first byte in the file, size of an element, lengths, strides."""
    width = (rows.shape[1] - 3) // 2
    lengths, strides = (list(map(tuple, columns.tolist())) for columns in (rows[:, 3 : 3 + width], rows[:, 3 + width :]))
    return _Boxes(rows[:, 1].tolist(), rows[:, 2].tolist(), lengths, strides, _places(rows[:, 3 : 3 + width], rows[:, 2]))


def _places(lengths: I64, item_bytes: I64) -> list[int]:
    """Return the byte at which each box begins if the boxes are packed end to end."""
    size = volumes(lengths) * item_bytes
    places: list[int] = (np.cumsum(size) - size).tolist()
    return places


def _items_in(plan: LoadPlan, file: I64, window: I64) -> list[I64]:
    """Return, for each of these windows, the indices of the plan's items in it, in order of their bytes in the file."""
    step = int(max(plan.window.max(initial=0), window.max(initial=0))) + 1
    # order: the items by window, then by first byte. keys: a sorted number for the window of each
    order = np.lexsort((plan.src, plan.file * step + plan.window))
    keys, wanted = (plan.file * step + plan.window)[order], file * step + window
    bounds = zip(np.searchsorted(keys, wanted).tolist(), np.searchsorted(keys, wanted, side="right").tolist(), strict=True)
    return [order[low:high] for low, high in bounds]


class _Windows:
    """The `Traffic` of shared windows: sends boxes of the windows that this rank reads, receives its items of the others.

    Its constructor is collective if there are shared windows: a swap of boxes. Its threads live in its ``with`` block.
    """

    def __init__(
        self, rank: int, exchange: Exchange, reader: Reader, number: dict[tuple[int, int], int], windows: Sequence[SharedWindow]
    ) -> None:
        self._rank, self._size, self._reader, self._number = rank, exchange.size, reader, number
        rounds = [message.round for window in windows for message in window.messages]
        self.num_rounds = max(rounds, default=-1) + 1
        # _windows[i]: bytes of shared window i, from reading it until it is sent to all
        self._windows: dict[int, memoryview] = {}
        self._schedule = windows
        self._to_read: dict[int, list[int]] = defaultdict(list)
        self._done: dict[int, list[int]] = defaultdict(list)
        # _to_read[round]: windows whose first message is in this round. _done[round]: windows whose last one is.
        # _sends[round], _receives[round]: messages as (other rank, window, bytes), in the same order of windows on both sides.
        self._sends: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self._receives: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for i, window in enumerate(windows):
            if window.owner == rank:
                self._to_read[window.first_round].append(i)
                self._done[max(message.round for message in window.messages)].append(i)
            for message in window.messages:
                if window.owner == rank:
                    self._sends[message.round].append((message.dest, i, message.size))
                elif message.dest == rank:
                    self._receives[message.round].append((window.owner, i, message.size))
        plan = reader.task.plan
        mine = [i for _, received in sorted(self._receives.items()) for _, i, _ in received]
        keys = np.array([(self._schedule[i].file, self._schedule[i].window) for i in mine], np.int64).reshape(-1, 2)
        # _items[i]: items of this rank's plan in window i, which another rank reads. _wanted[i]: their columns, and places in
        # the message
        self._items = dict(zip(mine, _items_in(plan, keys[:, 0], keys[:, 1]), strict=True))
        self._wanted = {
            i: (item_lists(plan, items), _places(plan.lengths[items], plan.item_bytes[items])) for i, items in self._items.items()
        }
        self._asked = self._swap_boxes(exchange) if self.num_rounds else {}
        self._changed: set[int] = set()
        """Windows received from other ranks whose bytes may have changed a target."""

    def _swap_boxes(self, exchange: Exchange) -> dict[tuple[int, int], _Boxes]:
        """Send each owner the boxes that this rank takes from its windows; return the boxes of others, by window and rank.

        Collective: one swap.
        """
        plan, rows_for = self._reader.task.plan, defaultdict[int, list[I64]](list)
        for i, at in self._items.items():
            columns = [np.full(len(at), i), plan.src[at], plan.item_bytes[at], plan.lengths[at], plan.src_strides[at]]
            rows_for[self._schedule[i].owner].append(np.column_stack(columns))
        messages = []
        for rank in range(self._size):
            messages.append(pack_table(np.vstack(rows_for[rank]) if rank in rows_for else np.zeros((0, 3), np.int64)))
        asked = {}
        # rows: those of one rank, sorted by window; they are cut where the window changes.
        for rank, message in enumerate(exchange.swap(messages)):
            rows = unpack_table(message)
            begins = np.flatnonzero(is_new(rows[:, 0]))
            for part in np.split(rows, begins[1:]) if len(rows) else []:
                asked[int(part[0, 0]), rank] = _boxes(part)
        return asked

    def __enter__(self) -> _Windows:
        name = "reshard-ckpt-once"
        self._readers = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix=name)
        self._placers = ThreadPoolExecutor(PLACERS, thread_name_prefix=name)
        self._one = ThreadPoolExecutor(1, thread_name_prefix="reshard-ckpt-ahead")
        self._ahead: Future[list[memoryview]] = self._one.submit(self._read_for, 0)
        return self

    def __exit__(self, *error: object) -> None:
        for pool in (self._one, self._readers, self._placers):
            pool.shutdown()

    def sizes(self, number: int) -> tuple[Sequence[int], Sequence[int]]:
        sent, received = [0] * self._size, [0] * self._size
        for dest, _, size in self._sends[number]:
            sent[dest] += size
        for source, _, size in self._receives[number]:
            received[source] += size
        return sent, received

    def pack(self, number: int, out: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        """Wait for the windows of a round, begin to read the next round's, place this rank's own items, and pack the messages."""
        data = self._ahead.result()
        self._ahead = self._one.submit(self._read_for, number + 1)
        windows = self._to_read[number]
        self._windows.update(zip(windows, data, strict=True))
        in_threads(lambda k: self._place_own(windows[k]), range(len(windows)), self._placers)
        views, sends, begin = [part.numpy().data for part in out], self._sends[number], _begins(self._sends[number], starts)
        in_threads(lambda k: self._pack(*sends[k], views[sends[k][0]][begin[k] :]), range(len(sends)), self._placers)
        for i in self._done[number]:
            del self._windows[i]

    def _pack(self, dest: int, i: int, size: int, out: memoryview) -> None:
        window, boxes = _InMemory(self._schedule[i].extents, self._windows[i]), self._asked[i, dest]
        columns = zip(boxes.src, boxes.item_bytes, boxes.lengths, boxes.strides, boxes.at, strict=True)
        for src, each, lengths, strides, at in columns:
            window.copy_box(src, each, lengths, strides, out, at)

    def unpack(self, number: int, data: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        receives, begin = self._receives[number], _begins(self._receives[number], starts)
        views = [part.numpy().data for part in data]
        in_threads(lambda k: self._unpack(*receives[k], views[receives[k][0]][begin[k] :]), range(len(receives)), self._placers)

    def _unpack(self, source: int, i: int, size: int, data: memoryview) -> None:
        self._changed.add(i)
        window = self._number[self._schedule[i].file, self._schedule[i].window]
        self._reader.place_received(window, self._wanted[i][0], data, self._wanted[i][1])

    def changed(self) -> set[str]:
        """Return the names of targets that may have new values from other ranks; without temporary buffers."""
        targets = self._reader.task.targets
        dests = {dest for i in self._changed for dest in self._wanted[i][0].dest}
        return {targets[dest].name for dest in dests if not targets[dest].is_buffer}

    def _read_for(self, number: int) -> list[memoryview]:
        """Read and verify the windows that this rank first sends in a round, and return the bytes of each."""
        windows = self._to_read[number]
        out: list[memoryview] = [memoryview(b"")] * len(windows)

        def read(k: int) -> None:
            out[k] = self.read(self._schedule[windows[k]])

        in_threads(read, range(len(windows)), self._readers)
        return out

    def read(self, window: SharedWindow) -> memoryview:
        """Read the extents of a window into new memory, end to end, and verify them."""
        data = torch.empty(_size(window.extents), dtype=torch.uint8, device="cpu").numpy().data
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

    def _place_own(self, i: int) -> None:
        """Put this rank's own items of a shared window that it has read into their targets."""
        window = self._schedule[i]
        source = _InMemory(window.extents, self._windows[i])
        self._reader.take_window(self._number[window.file, window.window], source.read_into, verify=False)


def _begins(messages: Sequence[tuple[int, int, int]], starts: Sequence[int]) -> list[int]:
    """Return the byte at which each message of a round begins: behind the earlier ones to (or from) the same rank."""
    at, out = list(starts), []
    for rank, _, size in messages:
        out.append(at[rank])
        at[rank] += size
    return out


class _InMemory:
    """Extents of a file that lie end to end in memory; `read_into` reads them like a store."""

    def __init__(self, extents: Extents, data: memoryview) -> None:
        self._lows = [low for low, _ in extents]
        sizes = [high - low for low, high in extents]
        self._starts = np.cumsum([0, *sizes]).tolist()
        self._data = data

    def place(self, offset: int) -> int:
        """Return the index in memory of a byte of the file."""
        extent = bisect_right(self._lows, offset) - 1
        place: int = self._starts[extent] + offset - self._lows[extent]
        return place

    def copy_box(self, src: int, each: int, lengths: Ints, strides: Ints, out: memoryview, at: int) -> None:
        """Copy a box of the file into `out` from byte `at` on, in row-major order.

        If the box spans several extents, the bytes between them are not in memory, so it is copied slice by slice.
        """
        last = src + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
        if bisect_right(self._lows, src) == bisect_right(self._lows, last):
            source = np.ndarray(lengths, RAW[each], self._data, self.place(src), strides)
            np.copyto(np.ndarray(lengths, RAW[each], out, at), source)
            return
        dim = next(d for d, length in enumerate(lengths) if length > 1)
        size = prod(lengths[dim + 1 :]) * each
        for k in range(lengths[dim]):
            self.copy_box(src + k * strides[dim], each, lengths[dim + 1 :], strides[dim + 1 :], out, at + k * size)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        at = self.place(offset)
        for buffer in buffers:
            buffer[:] = self._data[at : at + len(buffer)]
            at += len(buffer)


def _size(extents: Extents) -> int:
    return sum(high - low for low, high in extents)
