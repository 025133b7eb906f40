"""Loading with each byte read and verified once: if several ranks need it, one of them reads it and sends it to the others.

1. Ranks that need bytes of one file, directly or through other ranks, form a group; with the layout of the save that is each
   replica group. A file with next to nothing that a rank needs does not join the rank to a group. So tensor-parallel ranks, which
   share the small weights of norms, stay apart, and each group reads these weights. Rank 0 finds the groups from the files that
   join each rank. Everything after that stays within a group, over a process group of its own, so lists and messages do not grow
   with the job.
2. The ranks of a group exchange lists of the windows that they need, and each computes the same schedule
   (`core.planning.shared_reads`). Ranks that need the same send one list.
3. A rank reads the windows that it alone needs itself, as in any load.
4. A window that several ranks need has an owner among them. Each other rank asks the owner for *boxes* of the file: the items of
   its load plan. The owner reads and verifies what all of them need of the window. It then holds the boxes in memory, like a rank
   of a live reshard, and the same exchange (`engine.common.mover`) brings them into the takers' tensors, round by round. While
   one round is under way, the next is read. This takes a few times `ROUND_BYTES` of memory, and the windows of two rounds.

Collectives of `execute_once`, in order: a gather of the files and a broadcast of the groups; in each group, two swaps of the
wanted windows; an empty gather, as the last point at which a rank may fail alone; in each group with shared windows, a swap of
boxes and the rounds; and `settle`, if any rank failed or there are several groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ...comm import Exchange, interrupts_allowed, interrupts_held
from ...comm.protocol import Comm
from ...core.catalog.model import Catalog
from ...core.catalog.specs import row_major_strides
from ...core.geometry.columns import ColumnTable, columns_of, concatenated, lex_order
from ...core.geometry.runs import I64, Mask, volumes
from ...core.planning.load_plan import LoadPlan
from ...core.planning.read_plan import ReadPlan
from ...core.planning.shared_reads import Messages, Wants, divide_reads
from ...errors import CheckpointError
from ...format.files import digest128
from ...storage.protocol import Storage
from ..common.files import in_threads, num_threads
from ..common.mover import Array, Boxes, Memories, Mover, Transfers, View
from ..common.progress import OnProgress, Tally, silent
from ..common.rounds import Rounds, named_error, pack_columns, pack_table, settle, unpack_columns, unpack_table
from ..common.tensor_bytes import RAW, empty_bytes
from .device_targets import DevicePart, DeviceTargets
from .read import Damage, Reader, ReadTarget, ReadTask, reads_of
from .ties import INTS

ROUND_BYTES = 12 << 20
"""The most bytes that a rank sends in one round of the exchange, and the most that it receives; one message may be larger."""

_NEXT_TO_NOTHING = 1 / 200
"""Files that together have at most this share of the bytes that a rank needs do not join the rank to a group."""

SMALL_BYTES = 128 << 20
"""Up to this size of a checkpoint in bytes each rank reads for itself: it would take longer to agree on who reads which part."""


def pays_off(storage: Storage, catalog: Catalog) -> bool:
    """Whether reading once pays: only if the store is slow (an object store) and the checkpoint is large."""
    is_slow = not storage.hints.has_locks  # so far only stores of objects lack them
    return is_slow and sum(file.size for file in catalog.files) > SMALL_BYTES


@interrupts_held()
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
    messages, rank = divide_reads(_of_group(exchange, wants), ROUND_BYTES), exchange.rank
    # owned: the windows of this rank's reads that it reads for others too. given[w]: the message that brings window w, or -1.
    sent, to_me = messages.take(messages.owner == rank), np.flatnonzero(messages.taker == rank)
    owned = np.unique(_window_of(reads, sent.file, sent.window))
    given = np.full(reads.num_windows, -1)
    given[_window_of(reads, messages.file[to_me], messages.window[to_me])] = to_me
    alone = np.setdiff1d(np.flatnonzero(given < 0), owned)
    of_item = _window_of(reads, task.plan.file, task.plan.window)
    items, taken = _boxes_in_messages(task.plan, given[of_item], messages)
    asked = _send_wanted_boxes(exchange, taken) if messages.num_rounds else taken.take(slice(0))
    # served: the reads of the owned windows, for the items of this rank and of all others.
    served = reads_of(task._replace(plan=_plan_for_all(task.plan, np.isin(of_item, owned), asked), copy=False))
    own_bytes = int(wants.read[alone].sum()) + served.num_bytes
    # With ``copy=False`` no bytes are received from other ranks, so only this rank's own reads count as progress.
    tally = Tally("load", reads.num_bytes, report) if task.copy else Tally("verify", own_bytes, report)
    reader = Reader(task, reads, tally)
    # came[r]: bytes of this rank's reads that it need not make, because messages of round r bring their items
    came = np.bincount(messages.round[given[given >= 0]], weights=wants.read[given >= 0], minlength=messages.num_rounds)
    came = came.astype(np.int64).tolist()
    with interrupts_allowed():
        windows = _SharedWindows(exchange, reader, tally, served, owned.tolist(), items, taken, asked, came)
    comm.gather(b"")  # a rank that failed above stops all here: from now on each rank must enter the same collectives
    rounds = Rounds(exchange, windows)

    def changed() -> set[str]:
        received = [task.targets[row] for row in windows.changed()]  # before `reader.changed`: it ends the reads
        return {*reader.changed(), *(target.name for target in received if not target.is_buffer)}

    hints = task.storage.hints
    try:
        rounds.attempt(lambda: in_threads(reader.read_window, alone.tolist(), num_threads(len(alone), hints)))
        if task.copy:
            with windows:
                rounds.run(changed)
        else:
            rounds.attempt(lambda: in_threads(windows.read, range(len(owned)), num_threads(len(owned), hints)))
    finally:
        reader.finish()

    def explain(failure: BaseException, overwritten: str) -> CheckpointError:
        return reader.explain(failure, overwritten) if isinstance(failure, Damage) else named_error(failure, overwritten)

    if not rounds.complete or len(members) < comm.size:
        settle(comm, rounds.failure, changed, explain)
    return own_bytes


def wants_of(reads: ReadPlan, plan: LoadPlan) -> Wants:
    """Return the windows of files that a rank wants: for each, the bytes that it would read, and the bytes it needs of them."""
    begins = reads.extent_start[:-1]
    read = np.add.reduceat(reads.high - reads.low, begins) if len(begins) else begins
    of_item = _window_of(reads, plan.file, plan.window)
    taken = np.bincount(of_item, weights=volumes(plan.lengths) * plan.item_bytes, minlength=reads.num_windows)
    return Wants(reads.file, reads.window, read, taken.astype(np.int64))


def _window_of(reads: ReadPlan, file: I64, window: I64) -> I64:
    """Return the index in `reads` of each window, which is given by its file and its number there.

    `reads` must be sorted, and have all these windows.
    """
    # file * step + window is unique and keeps the order, so one binary search finds each item's window.
    step = int(max(reads.window.max(initial=0), window.max(initial=0))) + 1
    return np.searchsorted(reads.file * step + reads.window, file * step + window)


def joining_files(wants: Wants) -> I64:
    """Return the files that put a rank into a group with the other ranks that need them, ascending.

    These are the files that it needs, except the smallest shares, which together are at most `_NEXT_TO_NOTHING` of its bytes.

    >>> read, taken = [128, 2000, 128], [4, 2000, 5]
    >>> joining_files(Wants(*np.array([[0, 3, 7], [0, 0, 0], read, taken]))).tolist()
    [3]
    """
    files, number = np.unique(wants.file, return_inverse=True)
    num_bytes = np.bincount(number, weights=wants.taken, minlength=len(files))
    order = np.argsort(num_bytes, kind="stable")
    least = np.cumsum(num_bytes[order]) <= num_bytes.sum() * _NEXT_TO_NOTHING
    return np.delete(files, order[least])


def _group_of(comm: Comm, files: I64) -> list[int]:
    """Return the ranks of this rank's group: all that its files join to it, directly or through other ranks.

    Collective: a gather and a broadcast.
    """
    gathered = comm.gather(pack_table(files[:, None]))
    data = comm.broadcast(None if gathered is None else pack_table(groups_of(gathered)[:, None]))
    group = unpack_table(data)[:, 0]
    return [int(rank) for rank in np.flatnonzero(group == group[comm.rank])]


def groups_of(packed: Sequence[bytes]) -> I64:
    """Divide the ranks into groups that share files, and return the number of each rank's group.

    ``packed[rank]`` is the packed `joining_files` of a rank.

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
    """Exchange the wanted windows within a group, and return those of each of its ranks. Equal wants are sent by one rank only.

    Collective: two swaps.
    """
    own = pack_table(np.column_stack(columns_of(wants)))
    digests = exchange.swap([digest128(own)] * exchange.size)
    first = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
    sends = first[digests[exchange.rank]] == exchange.rank
    tables = exchange.swap([own if sends else b""] * exchange.size)
    distinct = {digest: Wants(*unpack_table(tables[rank]).T) for digest, rank in first.items()}
    return [distinct[digest] for digest in digests]


@dataclass(frozen=True, slots=True)
class _Boxes(ColumnTable):
    """Boxes of elements that ranks take from file windows, in their order in the messages. Another rank, the owner, reads them.

    `src` is a box's first byte in the file; `src_strides` are bytes in the file.
    """

    owner: I64
    taker: I64
    round: I64
    file: I64
    window: I64
    src: I64
    item_bytes: I64
    lengths: I64
    src_strides: I64


def _boxes_in_messages(plan: LoadPlan, message: I64, messages: Messages) -> tuple[I64, _Boxes]:
    """Return the items of this rank's load plan that arrive in messages, and the box of the file that each item is.

    Item i arrives in message ``message[i]``; -1 if this rank reads it itself.
    """
    items = np.flatnonzero(message >= 0)
    sources = messages.take(message[items])
    if len(items):
        # Large elements come first in each message, so that all elements are aligned in it.
        order = lex_order(sources.round, sources.owner, -plan.item_bytes[items], message[items], plan.src[items])
        items, sources = items[order], sources.take(order)
    boxes = (plan.src[items], plan.item_bytes[items], plan.lengths[items], plan.src_strides[items])
    return items, _Boxes(sources.owner, sources.taker, sources.round, sources.file, sources.window, *boxes)


def _send_wanted_boxes(exchange: Exchange, taken: _Boxes) -> _Boxes:
    """Tell each owner of windows which boxes this rank takes from them; return the boxes that other ranks take from this rank.

    Collective: one swap.
    """
    messages = [pack_columns(taken.take(taken.owner == rank)) for rank in range(exchange.size)]
    return concatenated([unpack_columns(_Boxes, data) for data in exchange.swap(messages)])


def _plan_for_all(plan: LoadPlan, own: Mask, asked: _Boxes) -> LoadPlan:
    """Return a plan that reads this rank's own items where `own` is true, and the boxes in `asked` for other ranks.

    The plan is only for reading; it has no targets.
    """
    both = {
        name: np.concatenate([getattr(plan, name)[own], getattr(asked, name)])
        for name in ("file", "window", "src", "item_bytes", "lengths", "src_strides")
    }
    nowhere, strides = np.zeros_like(both["file"]), np.zeros_like(both["lengths"])
    return LoadPlan(**both, dest=nowhere, dst=nowhere, dst_strides=strides, covered=nowhere)


class _WindowMemory(Memories):
    """The memory that a `Mover` packs from: windows of files, each under its number.

    In its `Boxes`, `row` is the number of a window; `first` and `strides` count bytes of that window, not elements.
    """

    def __init__(self) -> None:
        super().__init__(())
        self.windows: dict[int, memoryview] = {}

    def view(self, boxes: Boxes, i: int, wire: torch.dtype) -> Array:
        window = self.windows[boxes.row[i]]
        raw: Array = np.ndarray(boxes.lengths[i], RAW[wire.itemsize], window, boxes.first[i], boxes.strides[i])
        return raw


class _Targets(Memories):
    """The memory that a `Mover` unpacks into: the targets of a load.

    A box for a device is first unpacked into a pinned host buffer, and copied from there by `DeviceTargets`.
    """

    def __init__(self, targets: Sequence[ReadTarget], devices: DeviceTargets | None) -> None:
        super().__init__([target.tensor for target in targets])
        self._devices, self._parts, self._at = devices, list[DevicePart](), 0

    def view(self, boxes: Boxes, i: int, wire: torch.dtype) -> View:
        target, lengths, each = self.tensors[boxes.row[i]], boxes.lengths[i], wire.itemsize
        if self._devices is None or not self._devices.has(target):
            return super().view(boxes, i, wire)
        begin = -(-self._at // each) * each
        strides = tuple(stride * each for stride in row_major_strides(lengths))
        self._parts.append(DevicePart(target, boxes.first[i], boxes.strides[i], wire, begin, lengths, strides))
        self._at = self._parts[-1].end
        raw: Array = np.ndarray(lengths, RAW[each], self._buffer, begin)
        return raw

    @contextmanager
    def filled(self, num_bytes: int, num_parts: int) -> Iterator[None]:
        """Prepare host memory for the boxes that are unpacked in the ``with`` block; at its end, queue their copies to devices.

        There may be at most `num_parts` boxes with at most `num_bytes` bytes.
        """
        if self._devices is not None:
            # Room to align each part: no element has more than 16 bytes.
            self._buffer, self._at = self._devices.buffer(num_bytes + 16 * num_parts), 0
        yield
        if self._devices is not None and self._parts:
            self._devices.place(self._parts)
            self._parts.clear()


class _SharedWindows(Mover):
    """A `Mover` within a group of ranks: each window of a file is read by one rank, and sent in parts to all that need it.

    It packs boxes from the windows that this rank reads for other ranks, and unpacks the boxes that this rank gets from them.
    A window is in memory from when it is read until its last box is packed. Threads read the windows of a round while the round
    before is packed; the ``with`` block ends these threads.

    Parameters
    ----------
    reader
        Puts this rank's own items of the windows that it reads into their targets.
    reads, numbers
        The reads of these windows, for this rank and for others, and the number of each window in `reader`.
    items, taken
        The items of this rank's plan that arrive in messages, and their boxes.
    asked
        The boxes that other ranks want from the windows that this rank reads.
    came
        For each round, the number of bytes that this rank reports as read after it has unpacked the round.
    """

    def __init__(
        self,
        exchange: Exchange,
        reader: Reader,
        tally: Tally,
        reads: ReadPlan,
        numbers: Sequence[int],
        items: I64,
        taken: _Boxes,
        asked: _Boxes,
        came: Sequence[int],
    ) -> None:
        self._reader, self._tally, self._reads, self._numbers, self._came = reader, tally, reads, numbers, came
        plan, targets = reader.task.plan, reader.task.targets
        self._memory, self._targets = _WindowMemory(), _Targets(targets, reader.devices)
        parts, dest = concatenated([taken, asked]), plan.dest[items]
        transfers = Transfers(parts.round, parts.owner, parts.taker, volumes(parts.lengths) * parts.item_bytes)
        # An owner does not know the dtypes of the boxes that it sends, and need not: any dtype of the size will do.
        wire = [targets[i].dtype for i in dest.tolist()] + [INTS[size] for size in asked.item_bytes.tolist()]
        super().__init__(exchange.rank, exchange.size, len(came), transfers, wire, keeps_views=False)
        # window[i], first[i]: the window of asked box i, and its first byte there.
        window = _window_of(reads, asked.file, asked.window)
        first = asked.src - reads.low[reads.extent_start[:-1]][window]
        # A box is in this rank's memory on one side only: row -1 stands for the other side.
        not_sent, not_taken = np.full(len(items), -1), np.full(len(window), -1)
        sent_strides = np.vstack([np.zeros_like(taken.src_strides), asked.src_strides])
        taken_strides = np.vstack([plan.dst_strides[items], np.zeros_like(asked.src_strides)])
        self.bind(
            self._memory,
            Boxes.of(np.append(not_sent, window), np.append(not_sent, first), parts.lengths, sent_strides),
            self._targets,
            Boxes.of(np.append(dest, not_taken), np.append(plan.dst[items], not_taken), parts.lengths, taken_strides),
        )
        # _begins[r], _ends[r]: the windows whose first, or last, boxes travel in round r
        bounds = np.full(len(numbers), len(came)), np.full(len(numbers), -1)
        np.minimum.at(bounds[0], window, asked.round)
        np.maximum.at(bounds[1], window, asked.round)
        self._begins, self._ends = ([np.flatnonzero(at == r).tolist() for r in range(len(came))] for at in bounds)
        threads = num_threads(max(map(len, self._begins), default=0), reader.task.storage.hints)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="reshard-ckpt-once")

    def __enter__(self) -> _SharedWindows:
        self._read_ahead(0)
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def changed(self) -> set[int]:
        """Return the indices of the targets that boxes from other ranks have changed.

        It first ends the reading threads, which put boxes that this rank reads into targets: see `Reader.changed`.
        """
        self.__exit__()
        return super().changed()

    def _read_ahead(self, number: int) -> None:
        windows = self._begins[number] if number < len(self._begins) else ()
        self._ahead = {window: self._pool.submit(self.read, window) for window in windows}

    def pack(self, number: int, out: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        """Wait for the windows of a round, begin to read those of the next round, and copy this round's boxes into messages."""
        self._memory.windows.update((window, read.result()) for window, read in self._ahead.items())
        self._read_ahead(number + 1)
        super().pack(number, out, starts)
        for window in self._ends[number]:
            del self._memory.windows[window]

    def unpack(self, number: int, data: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        """Copy the boxes of a round out of the messages into their targets."""
        with self._targets.filled(sum(self.sizes(number)[1]), len(self._receives.rows(number))):
            super().unpack(number, data, starts)
        self._tally.add(self._came[number])

    def read(self, window: int) -> memoryview:
        """Read and verify a window, and put this rank's own items of it into their targets.

        Return the window's bytes, as one buffer from the first to the last byte read. It has gaps: bytes between the extents that
        were read are undefined. With ``copy=False`` in the task, only verify.
        """
        task, reads, number = self._reader.task, self._reads, self._numbers[window]
        extents, file = slice(*reads.extent_start[window : window + 2]), int(reads.file[window])
        lows, highs = reads.low[extents].tolist(), reads.high[extents].tolist()
        data = empty_bytes(highs[-1] - lows[0]).numpy().data
        for low, high in zip(lows, highs, strict=True):
            part = data[low - lows[0] : high - lows[0]]
            task.storage.read_into(task.catalog.files[file].key, low, [part])
            self._reader.verify(file, low, [part], number)
            if not task.copy:
                self._tally.add(high - low)

        if task.copy:
            self._reader.read_window(number, data, lows[0])
        return data
