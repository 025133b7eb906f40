"""How do bytes get from the files into the tensors? Window by window, several at once, each block proved before its bytes count.

1. `core.reads` says which extents of each window are read, and which of its bytes land in their destination directly.
2. A window's other bytes land in one buffer a thread; every touched block is hashed where it lies.
3. What is in the buffer is copied to its place: strided, cast, or to another device.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ...core.catalog.model import Catalog
from ...core.geometry.runs import I64
from ...core.planning.load_plan import LoadPlan
from ...core.planning.read_plan import ReadPlan, item_spans, plan_reads
from ...core.words import few
from ...errors import CorruptError
from ...format.checksums import Digests, decode_digests, digest128, digests_file_bytes, wrong_blocks
from ...storage.protocol import MissingKey, Storage
from ..common.file_contents import contents_from
from ..common.progress import OnProgress, Tally, silent
from ..common.tensor_bytes import RAW, region, storage_bytes

WINDOW_BYTES = 1 << 20
"""A multiple of all block sizes. What is copied to its place is read in such parts, to be in the processor's cache when it is."""

REQUEST_BYTES = 8 << 20
"""What lands without a copy is read in such parts; with the number of threads they bound what is under way."""

JOIN_WINDOWS = REQUEST_BYTES // WINDOW_BYTES

MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class ReadTarget:
    """A tensor to fill, under the name that messages use, and the dtype its bytes have in the files.

    One that is `is_buffer` is a buffer of ours: messages do not speak of it as overwritten.
    """

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype
    is_buffer: bool = False

    @property
    def may_land(self) -> bool:
        """Whether file bytes may be read straight into its memory."""
        return self.tensor.device.type == "cpu" and self.tensor.dtype == self.dtype


@dataclass(frozen=True, slots=True)
class CopyItems:
    """The columns of items that are copied, as lists: one element of a numpy array at a time is slow."""

    src: list[int]
    lengths: list[tuple[int, ...]]
    src_strides: list[tuple[int, ...]]
    item_bytes: list[int]
    dest: list[int]
    dst: list[int]
    dst_strides: list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class BlockDigests:
    """The digests of the files being read; files without are not verified."""

    of_file: Mapping[int, Digests]


MAX_REQUESTS = 16
"""Requests under way at once for what is small, where a store's answer takes long and its bytes no time."""


def open_files(storage: Storage, catalog: Catalog, files: Sequence[int], digests_of: Sequence[int]) -> BlockDigests:
    """Every file of `files` is there, whole, and the digests of `digests_of` are read and proved: all asked for together.

    Foreign files have no digests.

    Raises
    ------
    CorruptError
        A file is missing or has another size than the catalog says, or digests are damaged.
    """
    proved = [index for index in digests_of if catalog.files[index].digests_key]
    sizes = [partial(_check_size, storage, catalog, index) for index in files]
    found = _request_all([*sizes, *(partial(_file_digests, storage, catalog, index) for index in proved)])
    return BlockDigests(
        {index: digests for index, digests in zip(proved, found[len(sizes) :], strict=True) if digests is not None}
    )


def check_files(storage: Storage, catalog: Catalog, files: Sequence[int]) -> None:
    """As `open_files`, of sizes alone."""
    open_files(storage, catalog, files, [])


def open_blocks(storage: Storage, catalog: Catalog, files: Sequence[int]) -> BlockDigests:
    """As `open_files`, of digests alone."""
    return open_files(storage, catalog, [], files)


def _request_all(requests: Sequence[Callable[[], Digests | None]]) -> list[Digests | None]:
    """Return the answers to all requests; of several errors, that of the first in order."""
    if len(requests) <= 1:
        return [request() for request in requests]
    with ThreadPoolExecutor(min(MAX_REQUESTS, len(requests)), thread_name_prefix="reshard-ckpt-ask") as pool:
        return list(pool.map(lambda request: request(), requests))


def _check_size(storage: Storage, catalog: Catalog, index: int) -> None:
    entry = catalog.files[index]
    size = storage.size(entry.key)
    if size == entry.size:
        return
    found = "is missing" if size is None else f"has {size} bytes"
    begin = size if size is not None and size < entry.size else 0  # a longer file is another one, so nothing of it counts
    raise CorruptError(
        f"{storage.url}: {entry.key} {found}, the catalog says {entry.size} bytes; bytes {begin}:{entry.size} hold "
        f"{contents_from(catalog, index, begin)}; use another checkpoint"
    )


def _file_digests(storage: Storage, catalog: Catalog, index: int) -> Digests:
    entry = catalog.files[index]
    try:
        data = storage.read(entry.digests_key, limit=digests_file_bytes(entry.size, 64 << 10))
        wrong = "" if digest128(data) == entry.digest else "is damaged: its own digest differs"
    except MissingKey:
        wrong = "is missing"
    except CorruptError:
        wrong = "is damaged: it is too large"
    if wrong:
        raise CorruptError(
            f"{storage.url}: {entry.digests_key} {wrong}; without it, nothing proves bytes 0:{entry.size} of {entry.key}, "
            f"which hold {contents_from(catalog, index)}; use another checkpoint, or verify=False to load them unproved"
        )
    return decode_digests(data, entry.size, name=f"{storage.url}: {entry.digests_key}")


def execute(
    storage: Storage,
    catalog: Catalog,
    plan: LoadPlan,
    targets: Sequence[ReadTarget],
    *,
    blocks: BlockDigests,
    copy: bool = True,
    report: OnProgress = silent,
) -> int:
    """Read all items of a plan; returns the number of bytes read.

    Parameters
    ----------
    copy
        False proves the blocks and changes no destination.
    report
        Told of the bytes read, from the reading threads, one at a time.

    Raises
    ------
    CorruptError
        A block is damaged; the message names it, what wanted it, and the tensors that already have new values.
    """
    reads = reads_of(catalog, plan, targets, blocks=blocks, copy=copy, join=JOIN_WINDOWS)
    tally = Tally("load" if copy else "verify", reads.num_bytes, report)
    reader = Reader(storage, catalog, plan, reads, targets, blocks=blocks, copy=copy, tally=tally)
    try:
        in_threads(reader.read_window, range(reads.num_windows))
    except Damage as damage:
        # Said only now, when no thread reads any more: the list of what was overwritten is complete.
        raise reader.explain(damage) from None
    return reads.num_bytes


def reads_of(
    catalog: Catalog,
    plan: LoadPlan,
    targets: Sequence[ReadTarget],
    *,
    blocks: BlockDigests,
    copy: bool = True,
    group: I64 | None = None,
    join: int = 1,
) -> ReadPlan:
    """Return the requests for all items of a plan (see `plan_reads`); whole blocks where there are digests of them."""
    block_bytes = np.zeros(len(catalog.files), np.int64)
    for index, digests in blocks.of_file.items():
        block_bytes[index] = digests.block_bytes
    sizes = np.array([entry.size for entry in catalog.files], np.int64)
    may_land = np.array([copy and dest.may_land for dest in targets], bool)
    return plan_reads(plan, block_bytes, sizes, may_land, group, join=join)


def _item_lists(plan: LoadPlan, i: I64) -> CopyItems:
    def rows(columns: I64) -> list[tuple[int, ...]]:
        return list(map(tuple, columns[i].tolist()))

    return CopyItems(
        plan.src[i].tolist(),
        rows(plan.lengths),
        rows(plan.src_strides),
        plan.item_bytes[i].tolist(),
        plan.dest[i].tolist(),
        plan.dst[i].tolist(),
        rows(plan.dst_strides),
    )


def num_threads(tasks: int) -> int:
    """Return how many threads read that many windows."""
    return max(min(MAX_THREADS, tasks, 2 * (os.cpu_count() or 1)), 1)


def in_threads(task: Callable[[int], None], numbers: Sequence[int], pool: ThreadPoolExecutor | None = None) -> None:
    """Run a task for each number, in order of beginning; after a failure no new one begins, and the first failure is raised.

    No task runs any more when this returns, or raises. Who calls it often passes a pool: threads keep memory of their own.
    """
    threads = num_threads(len(numbers))
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


ReadInto = Callable[[str, int, Sequence[memoryview]], None]
"""What `Storage.read_into` does."""


class Damage(Exception):
    """A block whose digest differs: its file, its first byte, its size, and the window that wanted it."""

    def __init__(self, file: int, low: int, size: int, window: int) -> None:
        super().__init__()
        self.file, self.low, self.size, self.window = file, low, size, window


class Reader:
    """One execution of a plan; windows are independent, so its methods run in several threads."""

    def __init__(
        self,
        storage: Storage,
        catalog: Catalog,
        plan: LoadPlan,
        reads: ReadPlan,
        targets: Sequence[ReadTarget],
        *,
        blocks: BlockDigests,
        copy: bool,
        tally: Tally,
    ) -> None:
        self.storage, self.catalog, self.targets, self.blocks, self.copy = storage, catalog, targets, blocks, copy
        self.plan, self.reads, self.tally = plan, reads, tally
        self.items = _item_lists(plan, reads.items)
        self.file = reads.file.tolist()
        self.extent_start, self.low, self.high = reads.extent_start.tolist(), reads.low.tolist(), reads.high.tolist()
        self.run_start, self.run_src, self.item_start = (
            reads.run_start.tolist(),
            reads.run_src.tolist(),
            reads.item_start.tolist(),
        )
        # Looked up before anything is read: a read empties the processor's caches, so between reads this would take far longer.
        self._memories = {i: _memory_of(targets[i].tensor) for i in np.unique(plan.dest).tolist() if copy and targets[i].may_land}
        self._landings = self._landing_views()
        self._local = threading.local()
        self._landed: list[int] = []
        self._copied: list[int] = []

    def _landing_views(self) -> list[memoryview]:
        views = []
        rows = zip(*(column.tolist() for column in (self.reads.run_dest, self.reads.run_dst, self.reads.run_bytes)), strict=True)
        for dest, dst, size in rows:
            memory, first = self._memories[dest]
            views.append(memory[first + dst : first + dst + size])
        return views

    def read_window(self, window: int) -> None:
        """Read, prove and place what one window holds."""
        self.take_window(window, self.storage.read_into, verify=True)

    def take_window(self, window: int, read_into: ReadInto, *, verify: bool) -> None:
        """Place what one window holds, from wherever its bytes come."""
        file = self.file[window]
        key = self.catalog.files[file].key
        first, end = self.extent_start[window], self.extent_start[window + 1]
        origin = self.low[first]
        buffer = self._buffer(self.high[end - 1] - origin)
        self._landed.append(window)
        run, last_run = self.run_start[window], self.run_start[window + 1]
        size = 0
        for extent in range(first, end):
            low, high = self.low[extent], self.high[extent]
            parts: list[memoryview] = []
            at = low
            while run < last_run and (begin := self.run_src[run]) < high:
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
        if self.copy:
            self._copied.append(window)
            for item in range(self.item_start[window], self.item_start[window + 1]):
                self._place(item, buffer, origin)
        self.tally.add(size)

    def _buffer(self, size: int) -> memoryview:
        """This thread's memory for what does not land directly."""
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._local.buffer = torch.empty(size, dtype=torch.uint8).numpy().data
        return buffer

    def _place(self, item: int, buffer: memoryview, origin: int) -> None:
        items, dest = self.items, self.targets[self.items.dest[item]]
        each, lengths, offset = items.item_bytes[item], items.lengths[item], items.src[item] - origin
        source = np.ndarray(lengths, RAW[each], buffer, offset, items.src_strides[item])
        if items.dest[item] in self._memories:
            memory, first = self._memories[items.dest[item]]
            strides = tuple(stride * each for stride in items.dst_strides[item])
            # torch would divide this among threads of its own, for each of ours again, which then wait in loops for more to do.
            np.copyto(np.ndarray(lengths, RAW[each], memory, first + items.dst[item] * each, strides), source)
            return
        aligned = source if offset % each == 0 else source.copy()  # a foreign file need not align its elements
        values = torch.from_numpy(aligned).view(dest.dtype)
        region(dest.tensor, items.dst[item], lengths, items.dst_strides[item]).copy_(values)

    def verify(self, file: int, low: int, parts: Sequence[memoryview], window: int) -> None:
        """Compare the blocks of an extent, where there are digests of them; `window` is the one that wants it."""
        digests = self.blocks.of_file.get(file)
        if digests is None:
            return
        for wrong in wrong_blocks(parts, low, digests.values, digests.block_bytes):
            raise Damage(file, wrong, digests.block_bytes, window)

    def explain(self, damage: Damage) -> CorruptError:
        """Return the error for a damaged block, with what it holds and what has been overwritten."""
        entry, low = self.catalog.files[damage.file], damage.low
        high = min(low + damage.size, entry.size)
        holds = few(self._names(self._dests_near(damage.window, low, high))) or "nothing that this rank wants"
        changed = self._changed()
        after = "no tensor was changed"
        if changed:
            after = f"already overwritten, wholly or in part: {few(changed)}; verify_first=True would have changed none"
        return CorruptError(
            f"{self.storage.url}: {entry.key} is damaged in bytes {low}:{high}, which hold {holds}; {after}; "
            "load another checkpoint"
        )

    def _dests_near(self, window: int, low: int, high: int) -> set[int]:
        """Return the destinations that want some of these bytes of a window, or bytes around them."""
        runs, items = self._runs_of(window), self.reads.items[self._items_of(window)]
        run_src, src = self.reads.run_src[runs], self.plan.src[items]
        near_runs = (run_src < high) & (run_src + self.reads.run_bytes[runs] > low)
        near_items = (src < high) & (src + item_spans(self.plan)[items] > low)
        return {*self.reads.run_dest[runs][near_runs].tolist(), *self.plan.dest[items[near_items]].tolist()}

    def _changed(self) -> list[str]:
        """Return the names of destinations that have new values, wholly or in part."""
        landed = {dest for window in self._landed for dest in self.reads.run_dest[self._runs_of(window)].tolist()}
        copied = {dest for window in self._copied for dest in self.plan.dest[self.reads.items[self._items_of(window)]].tolist()}
        return self._names(dest for dest in landed | copied if not self.targets[dest].is_buffer)

    def _runs_of(self, window: int) -> slice:
        return slice(self.run_start[window], self.run_start[window + 1])

    def _items_of(self, window: int) -> slice:
        return slice(self.item_start[window], self.item_start[window + 1])

    def _names(self, targets: Iterable[int]) -> list[str]:
        return sorted({self.targets[dest].name for dest in targets})


def _memory_of(tensor: torch.Tensor) -> tuple[memoryview, int]:
    """Return the bytes of a CPU tensor's storage, and where among them its first element begins."""
    return storage_bytes(tensor), int(tensor.storage_offset()) * tensor.element_size()
