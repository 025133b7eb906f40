"""Reading the bytes of a load plan from files into tensors, several windows at once; every block is verified.

1. `core.planning.read_plan` decides which extents of each window are read, and which of its bytes *land*: are read straight into
   the memory of their target.
2. The other bytes of a window are read into a buffer, one for each thread. Every block that was read is hashed where it lies.
3. Bytes in the buffer are then copied into their targets, strided or cast; for targets on devices by `device_targets`.

Bytes that land change their target before their block is verified. So after a damaged block, targets of the windows under way
may hold damaged bytes; `Reader.changed` names every target that may have changed.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.catalog.model import Catalog
from ...core.catalog.specs import Ints, row_major_strides
from ...core.geometry.runs import I64
from ...core.planning.load_plan import LoadPlan
from ...core.planning.read_plan import ReadPlan, item_spans, plan_reads
from ...core.report import few
from ...errors import CorruptError
from ...format.files import Digests, wrong_blocks
from ...storage.protocol import DISK, Hints, Storage
from ..common.host_memory import ask_for_large_pages
from ..common.progress import OnProgress, Tally, silent
from ..common.rounds import ANOTHER, NOTHING_CHANGED, VERIFY_FIRST, overwritten_text
from ..common.tensor_bytes import RAW, count_up, region, storage_bytes
from .device_targets import DevicePart, DeviceTargets

REQUEST_BYTES = 8 << 20
"""Size of a read whose bytes are neither hashed nor copied while they are in the processor's cache."""

LARGE_BYTES = 4 << 20
"""Targets from this size on are filled in large pages if their memory was never touched."""

MAX_THREADS = 8
"""Most threads that read at once on one rank."""


@dataclass(frozen=True, slots=True)
class ReadTarget:
    """A tensor to fill: its name in messages, and the dtype of its bytes in the files."""

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype
    is_buffer: bool = False
    """Whether the tensor is a temporary buffer of this package. Messages do not list it as overwritten."""

    @property
    def may_land(self) -> bool:
        """Whether file bytes may be read straight into its memory."""
        return self.tensor.device.type == "cpu" and self.tensor.dtype == self.dtype


@dataclass(frozen=True, slots=True)
class CopyItems:
    """Columns of the plan's items that are copied from a buffer, as lists: taking single elements of numpy arrays is slow.

    `src` is the first byte in the file, `src_strides` are bytes; `dst` is the first element in target `dest`, `dst_strides` are
    elements.
    """

    src: list[int]
    lengths: list[tuple[int, ...]]
    src_strides: list[tuple[int, ...]]
    item_bytes: list[int]
    dest: list[int]
    dst: list[int]
    dst_strides: list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Arguments of `execute`: the checkpoint, the plan, the targets to fill, and the digests to verify with."""

    storage: Storage
    catalog: Catalog
    plan: LoadPlan
    targets: Sequence[ReadTarget]
    blocks: Mapping[int, Digests]
    """Block digests of files, by the file's index in the catalog. Bytes of files without an entry are not verified."""
    copy: bool = True
    """False verifies the blocks and changes no target."""


def execute(task: ReadTask, report: OnProgress = silent) -> int:
    """Read all items of a plan into their targets, and return the number of bytes read.

    Parameters
    ----------
    report
        Called with the progress in bytes, from the reading threads, one at a time.

    Raises
    ------
    CorruptError
        A block is damaged; the message names it, the tensors that need it, and the tensors that already have new values.
    """
    reads = reads_of(task)
    reader = Reader(task, reads, Tally("load" if task.copy else "verify", reads.num_bytes, report))
    try:
        in_threads(reader.read_window, range(reads.num_windows), hints=task.storage.hints)
    except Damage as damage:
        # Here no thread reads any more, so the list of overwritten tensors is complete.
        raise reader.explain(damage) from None
    finally:
        reader.finish()
    return reads.num_bytes


def reads_of(task: ReadTask, *, group: I64 | None = None) -> ReadPlan:
    """Plan the requests for all items of a plan (see `plan_reads`). Files with digests are read in whole blocks."""
    # block_bytes[file]: size of the blocks that a file is verified by; 0 if it is not verified
    block_bytes = np.zeros(len(task.catalog.files), np.int64)
    for index, digests in task.blocks.items():
        block_bytes[index] = digests.block_bytes
    sizes = np.array([entry.size for entry in task.catalog.files], np.int64)
    may_land = np.array([task.copy and target.may_land for target in task.targets], bool)
    return plan_reads(task.plan, block_bytes, sizes, may_land, group)


def item_lists(plan: LoadPlan, items: I64) -> CopyItems:
    """Return the columns of some items of a plan as lists; `items` are their indices."""

    def rows(columns: I64) -> list[tuple[int, ...]]:
        return list(map(tuple, columns[items].tolist()))

    return CopyItems(
        src=plan.src[items].tolist(),
        lengths=rows(plan.lengths),
        src_strides=rows(plan.src_strides),
        item_bytes=plan.item_bytes[items].tolist(),
        dest=plan.dest[items].tolist(),
        dst=plan.dst[items].tolist(),
        dst_strides=rows(plan.dst_strides),
    )


def num_threads(tasks: int, hints: Hints = DISK) -> int:
    """Return how many threads read `tasks` windows.

    One thread for each core that this rank has, but at most `MAX_THREADS`: more would push each other's buffers out of the
    caches. From a store with slow round trips, as many threads read as it serves well.
    """
    if hints.requests > DISK.requests:
        return max(min(hints.requests, tasks), 1)
    cores = (os.cpu_count() or 1) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(min(MAX_THREADS, tasks, round(cores)), 1)


def in_threads(
    task: Callable[[int], None], numbers: Sequence[int], pool: ThreadPoolExecutor | None = None, hints: Hints = DISK
) -> None:
    """Call `task` with each number, in several threads; calls begin in order. After an error no more begin, and it is raised.

    No call runs any more when this returns or raises. A caller that uses this often passes a `pool`, because threads keep their
    buffers.
    """
    threads = num_threads(len(numbers), hints)
    if threads <= 1:
        for i in numbers:
            task(i)
        return
    left = deque(numbers)

    def work() -> None:
        while left:
            try:
                number = left.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                task(number)
            except BaseException:
                left.clear()
                raise

    with nullcontext(pool) if pool else ThreadPoolExecutor(threads, thread_name_prefix="reshard-ckpt-read") as workers:
        futures = [workers.submit(work) for _ in range(threads)]
        try:
            for future in futures:
                future.result()
        finally:
            left.clear()
            wait(futures)


Elements = NDArray[Any]
"""Elements of a tensor, viewed as plain numbers of the same size."""

ReadInto = Callable[[str, int, Sequence[memoryview]], None]
"""A function with the arguments of `Storage.read_into`: key, first byte, and the buffers to fill in order."""


class Damage(Exception):
    """Raised for a block whose digest differs.

    `file` is its index in the catalog, `low` its first byte, `size` its bytes, `window` the number of the window that needs it,
    or -1 if no window of this rank does.
    """

    def __init__(self, file: int, low: int, size: int, window: int) -> None:
        super().__init__()
        self.file, self.low, self.size, self.window = file, low, size, window


class Reader:
    """One execution of a read task. Windows are independent, so several threads may read windows at once.

    Make it in the thread that loads: copies to devices run after the work which that thread has queued. End with `finish`.
    """

    def __init__(self, task: ReadTask, reads: ReadPlan, tally: Tally) -> None:
        self.task, self._reads, self._tally = task, reads, tally
        self._items = item_lists(task.plan, reads.items)
        self._file = reads.file.tolist()
        self._low, self._high = reads.low.tolist(), reads.high.tolist()
        self._run_src = reads.run_src.tolist()
        # _low[e], _high[e]: bytes of extent e in its file. _run_src[r]: first byte of landing run r. _items: the copied items.
        # _extent_start[w], _run_start[w], _item_start[w]: first extent, run and item of window w; the next window's are the end.
        self._extent_start = reads.extent_start.tolist()
        self._run_start = reads.run_start.tolist()
        self._item_start = reads.item_start.tolist()
        # All views of memory are made before the first read: a read empties the processor's caches, so that a view takes far
        # longer afterwards.
        targets = task.targets
        used = np.unique(task.plan.dest).tolist() if task.copy else []
        # _memories[target]: the bytes of the target's storage, and the byte at which its first element begins
        landing = {i: targets[i].tensor for i in used if targets[i].may_land}
        for tensor in landing.values():
            if tensor.nbytes >= LARGE_BYTES and tensor.is_contiguous():
                ask_for_large_pages(tensor)
        self._memories = {i: (storage_bytes(t), int(t.storage_offset()) * t.element_size()) for i, t in landing.items()}
        self._devices = DeviceTargets([targets[i].tensor for i in used])
        self._on_device = {i for i in used if self._devices.has(targets[i].tensor)}
        # _landings[r]: memory of landing run r. _places[i]: elements of the target that copied item i fills, or None
        self._landings = self._landing_views()
        self._places = [self._place_of(self._items, item) for item in range(len(reads.items))]
        self._local = threading.local()
        # Windows that may have changed a target: with bytes that landed (noted before the read), and with items that are copied
        # (noted before the first copy).
        self._landed: list[int] = []
        self._copied: list[int] = []

    def _landing_views(self) -> list[memoryview]:
        """Return the memory of each landing run, as bytes of its target."""
        views = []
        columns = (self._reads.run_dest, self._reads.run_dst, self._reads.run_bytes)
        for dest, dst, size in zip(*(column.tolist() for column in columns), strict=True):
            memory, first = self._memories[dest]
            views.append(memory[first + dst : first + dst + size])
        return views

    def finish(self) -> None:
        """Wait for queued copies to devices, and count up the targets' versions. Call it once no thread reads, errors or not."""
        self._devices.finish()
        for dest in self._memories:
            count_up(self.task.targets[dest].tensor)

    def read_window(self, window: int) -> None:
        """Read one window from storage, verify it, and put its bytes into their targets."""
        self.take_window(window, self.task.storage.read_into, verify=True)

    def take_window(self, window: int, read_into: ReadInto, *, verify: bool) -> None:
        """Get the bytes of one window from `read_into`, and put them into their targets.

        If this raises, the targets of the window's landing runs may hold part of the new bytes, verified or not. Targets of its
        copied items have changed only if the error came after verification.
        """
        file = self._file[window]
        key = self.task.catalog.files[file].key
        first, end = self._extent_start[window], self._extent_start[window + 1]
        origin = self._low[first]
        buffer = self._buffer(self._high[end - 1] - origin)
        # Before the first read, as a read that fails may have overwritten part of a target.
        self._landed.append(window)
        run, last_run = self._run_start[window], self._run_start[window + 1]
        size = 0
        for extent in range(first, end):
            low, high = self._low[extent], self._high[extent]
            # One request for each extent: landing runs go straight into their targets, the bytes between them into the buffer.
            parts: list[memoryview] = []
            at = low
            while run < last_run and (begin := self._run_src[run]) < high:
                if begin > at:
                    parts.append(buffer[at - origin : begin - origin])
                parts.append(self._landings[run])
                at = begin + len(self._landings[run])
                run += 1
            if at < high:
                parts.append(buffer[at - origin : high - origin])
            read_into(key, low, parts)
            if verify:
                self.verify(file, low, parts, window)
            size += high - low
        if self.task.copy:
            self._copied.append(window)
            numbers = range(self._item_start[window], self._item_start[window + 1])
            for item in numbers:
                # Only after every extent of the window was verified.
                if self._items.dest[item] not in self._on_device:
                    self._place(item, buffer, origin)
            if self._on_device:
                there = [i for i in numbers if self._items.dest[i] in self._on_device]
                items = self._items
                self._devices.place([self._part(items, i, items.src[i] - origin, items.src_strides[i]) for i in there])
        self._tally.add(size)

    def _buffer(self, size: int) -> memoryview:
        """Return this thread's buffer for the bytes of a window that do not land."""
        if self._on_device:
            return self._devices.buffer(size)
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._local.buffer = torch.empty(size, dtype=torch.uint8, device="cpu").numpy().data
        return buffer

    def _place(self, item: int, buffer: memoryview, origin: int) -> None:
        """Copy an item from the buffer to its target; the buffer begins at byte `origin` of the file."""
        items = self._items
        lengths, kind, first = items.lengths[item], RAW[items.item_bytes[item]], items.src[item] - origin
        self._put(items, item, np.ndarray(lengths, kind, buffer, first, items.src_strides[item]), self._places[item])

    def place_received(self, window: int, items: CopyItems, data: memoryview, at: Sequence[int]) -> None:
        """Put the items of a window that another rank has read into their targets.

        Parameters
        ----------
        window
            Number of the window on this rank.
        data
            Bytes that the other rank sent: item i in row-major order, from byte ``at[i]`` on. They need no verification.
        """
        there = [i for i, dest in enumerate(items.dest) if dest in self._on_device]
        if there:
            # Copy the message into a pinned buffer: that is kept while a device copies from it, the message's memory is not.
            parts = []
            for i in there:
                strides = tuple(stride * items.item_bytes[i] for stride in row_major_strides(items.lengths[i]))
                parts.append(self._part(items, i, at[i], strides))
            end = max(part.end for part in parts)
            self._devices.buffer(end)[:end] = data[:end]
            self._devices.place(parts)
        for i, offset in enumerate(at):
            if items.dest[i] not in self._on_device:
                source = np.ndarray(items.lengths[i], RAW[items.item_bytes[i]], data, offset)
                self._put(items, i, source, self._place_of(items, i))
        extents = slice(self._extent_start[window], self._extent_start[window + 1])
        self._tally.add(sum(self._high[extents]) - sum(self._low[extents]))

    def _place_of(self, items: CopyItems, item: int) -> Elements | None:
        """Return the elements of the target that an item fills, as a view; None if its bytes must be cast or go to a device."""
        dest, each = items.dest[item], items.item_bytes[item]
        if dest not in self._memories:
            return None
        memory, first = self._memories[dest]
        strides = tuple(stride * each for stride in items.dst_strides[item])
        place: Elements = np.ndarray(items.lengths[item], RAW[each], memory, first + items.dst[item] * each, strides)
        return place

    def _put(self, items: CopyItems, item: int, source: Elements, place: Elements | None) -> None:
        """Copy an item's elements to `place`, or convert them into the target if that is None."""
        if place is not None:
            # Not by torch: each of our threads would start a pool of torch's own threads, which busy-wait for work.
            np.copyto(place, source)
            return
        target = self.task.targets[items.dest[item]]
        aligned = source if source.flags.aligned else source.copy()  # a foreign file need not align its elements
        values = torch.from_numpy(aligned).view(target.dtype)
        region(target.tensor, items.dst[item], items.lengths[item], items.dst_strides[item]).copy_(values)

    def _part(self, items: CopyItems, item: int, offset: int, src_strides: Ints) -> DevicePart:
        """Return an item that goes to a device; it lies at byte `offset` of this thread's buffer, with strides in bytes."""
        target = self.task.targets[items.dest[item]]
        base, strides, lengths = items.dst[item], items.dst_strides[item], items.lengths[item]
        return DevicePart(target.tensor, base, strides, target.dtype, offset, lengths, src_strides)

    def verify(self, file: int, low: int, parts: Sequence[memoryview], window: int) -> None:
        """Compare the blocks of an extent with their digests; do nothing if the file has none.

        Parameters
        ----------
        low, parts
            First byte of the extent in its file, and its bytes in order.
        window
            Number of the window that needs the extent, for the error.

        Raises
        ------
        Damage
            A block differs.
        """
        digests = self.task.blocks.get(file)
        if digests is None:
            return
        for wrong in wrong_blocks(parts, low, digests.values, digests.block_bytes):
            raise Damage(file, wrong, digests.block_bytes, window)

    def explain(self, damage: Damage, overwritten: str = "") -> CorruptError:
        """Return the error of a damaged block. It names the tensors in the block, and the overwritten tensors.

        `overwritten` is the text about overwritten tensors of all ranks; if empty, those of this rank are named.
        """
        entry, low = self.task.catalog.files[damage.file], damage.low
        high = min(low + damage.size, entry.size)
        holds = few(self._names(self._targets_near(damage.window, low, high))) or "nothing that this rank wants"
        parts = [f"{self.task.storage.url}: {entry.key} is damaged in bytes {low}:{high}, which hold {holds}"]
        if not all(target.is_buffer for target in self.task.targets):  # else only buffers of the library were written
            parts.append(overwritten or overwritten_text(self.changed()))
            if parts[-1] != NOTHING_CHANGED:
                parts.append(VERIFY_FIRST)
        return CorruptError("; ".join([*parts, ANOTHER]))

    def _targets_near(self, window: int, low: int, high: int) -> set[int]:
        """Return the targets that need bytes ``[low, high)`` of a window; a strided item counts with the bytes in its gaps.

        Window -1, which this rank does not need, has no targets.
        """
        if window < 0:
            return set()
        runs, items = self._runs_of(window), self._items_of(window)
        run_src, src = self._reads.run_src[runs], self.task.plan.src[items]
        near_runs = (run_src < high) & (run_src + self._reads.run_bytes[runs] > low)
        near_items = (src < high) & (src + item_spans(self.task.plan)[items] > low)
        landed = self._reads.run_dest[runs][near_runs].tolist()
        copied = self.task.plan.dest[items[near_items]].tolist()
        return {*landed, *copied}

    def changed(self) -> list[str]:
        """Return the names of targets that may have new values, wholly or in part, sorted; without temporary buffers."""
        landed = {dest for window in self._landed for dest in self._reads.run_dest[self._runs_of(window)].tolist()}
        copied = {dest for window in self._copied for dest in self.task.plan.dest[self._items_of(window)].tolist()}
        return self._names(dest for dest in landed | copied if not self.task.targets[dest].is_buffer)

    def _runs_of(self, window: int) -> slice:
        return slice(self._run_start[window], self._run_start[window + 1])

    def _items_of(self, window: int) -> I64:
        """Return the items of a window that are copied, as indices into the load plan."""
        return self._reads.items[self._item_start[window] : self._item_start[window + 1]]

    def _names(self, dests: Iterable[int]) -> list[str]:
        return sorted({self.task.targets[dest].name for dest in dests})
