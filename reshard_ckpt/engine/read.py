"""How do bytes get from the files into the tensors? Window by window, several at once, each block proved before its bytes count.

1. `core.reads` says which extents of each window are read, and which items land in their destination directly.
2. A window's other bytes land in one buffer a thread; every touched block is hashed where it lies.
3. What is in the buffer is copied to its place: strided, cast, or to another device, as `torch` does it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from ..core.catalog import Catalog
from ..core.geometry import I64
from ..core.load_plan import LoadPlan
from ..core.reads import ReadPlan, plan_reads
from ..errors import CorruptError
from ..format.checksums import Digests, block_digest, decode_digests, digest128, digests_file_bytes
from ..storage.protocol import MissingKey, Storage
from .holders import few, held
from .memory import copy_values, element_bytes, region
from .progress import OnProgress, Tally, silent

WINDOW_BYTES = 8 << 20
"""A multiple of every block size; with the number of threads it bounds the memory that reading takes."""

PROVE_BYTES = 512 << 10
"""Bytes read and hashed at once, a multiple of every block size: few enough to be in the processor's cache for the second."""

MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class Destination:
    """A tensor to fill, under the name that messages use, and the dtype its bytes have in the files.

    One that is `passing` is a buffer of ours: messages do not speak of it as overwritten.
    """

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype
    passing: bool = False

    @property
    def may_land(self) -> bool:
        """Whether file bytes may be read straight into its memory."""
        return self.tensor.device.type == "cpu" and self.tensor.dtype == self.dtype


@dataclass(frozen=True, slots=True)
class Items:
    """The load plan's columns as lists: one element of a numpy array at a time is slow."""

    src: list[int]
    lengths: list[tuple[int, ...]]
    src_strides: list[tuple[int, ...]]
    item_bytes: list[int]
    dest: list[int]
    dst: list[int]
    dst_strides: list[tuple[int, ...]]
    direct: list[bool]
    span: list[int]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The digests of the files being read; files without are not verified."""

    of_file: Mapping[int, Digests]


def check_files(storage: Storage, catalog: Catalog, files: Sequence[int]) -> None:
    """Every file that will be read is there, whole.

    Raises
    ------
    CorruptError
        A file is missing or has another size than the catalog says.
    """
    for index in files:
        entry = catalog.files[index]
        size = storage.size(entry.key)
        if size == entry.size:
            continue
        found = "is missing" if size is None else f"has {size} bytes"
        begin = size if size is not None and size < entry.size else 0  # a longer file is another one, so nothing of it counts
        raise CorruptError(
            f"{storage.url}: {entry.key} {found}, the catalog says {entry.size} bytes; bytes {begin}:{entry.size} hold "
            f"{held(catalog, index, begin)}; use another checkpoint"
        )


def open_blocks(storage: Storage, catalog: Catalog, files: Sequence[int]) -> Blocks:
    """Read and prove the digests of these files; foreign ones have none."""
    return Blocks({index: _file_digests(storage, catalog, index) for index in files if catalog.files[index].digests_key})


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
            f"which hold {held(catalog, index)}; use another checkpoint, or verify=False to load them unproved"
        )
    return decode_digests(data, entry.size, name=f"{storage.url}: {entry.digests_key}")


def execute(
    storage: Storage,
    catalog: Catalog,
    plan: LoadPlan,
    dests: Sequence[Destination],
    *,
    blocks: Blocks,
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
    reads = reads_of(catalog, plan, dests, blocks=blocks, copy=copy)
    tally = Tally("load" if copy else "prove", reads.num_bytes, report)
    reader = Reader(storage, catalog, plan, reads, dests, blocks=blocks, copy=copy, tally=tally)
    try:
        in_threads(reader.read_window, range(reads.num_windows))
    except Damage as damage:
        # Said only now, when no thread reads any more: the list of what was overwritten is complete.
        raise reader.explain(damage) from None
    return reads.num_bytes


def reads_of(
    catalog: Catalog,
    plan: LoadPlan,
    dests: Sequence[Destination],
    *,
    blocks: Blocks,
    copy: bool = True,
    group: I64 | None = None,
) -> ReadPlan:
    """The requests for all items of a plan, those of each group apart; whole blocks where there are digests of them."""
    block_bytes = np.zeros(len(catalog.files), np.int64)
    for index, digests in blocks.of_file.items():
        block_bytes[index] = digests.block_bytes
    sizes = np.array([entry.size for entry in catalog.files], np.int64)
    may_land = np.array([copy and dest.may_land for dest in dests], bool)
    return plan_reads(plan, block_bytes, sizes, may_land, group)


def _item_lists(plan: LoadPlan, reads: ReadPlan) -> Items:
    i = reads.items

    def rows(columns: I64) -> list[tuple[int, ...]]:
        return [tuple(row) for row in columns[i].tolist()]

    span = ((plan.lengths[i] - 1) * plan.src_strides[i]).sum(axis=1) + plan.item_bytes[i]
    return Items(
        plan.src[i].tolist(),
        rows(plan.lengths),
        rows(plan.src_strides),
        plan.item_bytes[i].tolist(),
        plan.dest[i].tolist(),
        plan.dst[i].tolist(),
        rows(plan.dst_strides),
        reads.direct.tolist(),
        span.tolist(),
    )


def num_threads(tasks: int) -> int:
    """How many threads read that many windows."""
    return max(min(MAX_THREADS, tasks, 2 * (os.cpu_count() or 1)), 1)


def in_threads(task: Callable[[int], None], numbers: Sequence[int]) -> None:
    """Run a task for each number, in order of beginning; after a failure no new one begins, and the first failure is raised."""
    threads = num_threads(len(numbers))
    if threads <= 1:
        for i in numbers:
            task(i)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="reshard-ckpt-read") as pool:
        futures = [pool.submit(task, i) for i in numbers]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


ReadInto = Callable[[str, int, Sequence[memoryview]], None]
"""What `Storage.read_into` does."""


class Damage(Exception):
    """A block whose digest differs: its file, its first byte, its size, and the items of its window."""

    def __init__(self, file: int, low: int, size: int, items: range) -> None:
        super().__init__()
        self.file, self.low, self.size, self.items = file, low, size, items


class Reader:
    """One execution of a plan; windows are independent, so its methods run in several threads."""

    def __init__(
        self,
        storage: Storage,
        catalog: Catalog,
        plan: LoadPlan,
        reads: ReadPlan,
        dests: Sequence[Destination],
        *,
        blocks: Blocks,
        copy: bool,
        tally: Tally,
    ) -> None:
        self.storage, self.catalog, self.dests, self.blocks, self.copy = storage, catalog, dests, blocks, copy
        self.items, self.tally = _item_lists(plan, reads), tally
        self.file = reads.file.tolist()
        self.extent_start, self.item_start = reads.extent_start.tolist(), reads.item_start.tolist()
        self.low, self.high = reads.low.tolist(), reads.high.tolist()
        self.local = threading.local()
        self.changed: set[str] = set()

    def read_window(self, window: int) -> None:
        """Read, prove and place what one window holds."""
        self.take_window(window, self.storage.read_into, prove=True)

    def items_of(self, window: int) -> range:
        """The items of a window."""
        return range(self.item_start[window], self.item_start[window + 1])

    def take_window(self, window: int, read_into: ReadInto, *, prove: bool) -> None:
        """Place what one window holds, from wherever its bytes come."""
        file, items = self.file[window], self.items_of(window)
        extents = range(self.extent_start[window], self.extent_start[window + 1])
        origin = self.low[extents[0]]
        buffer = self._buffer(self.high[extents[-1]] - origin)
        view = buffer.numpy().data
        direct = [i for i in items if self.items.direct[i]]
        self._will_change(direct)
        landing = iter(direct)
        pending = next(landing, None)
        for extent in extents:
            low, high = self.low[extent], self.high[extent]
            parts: list[memoryview] = []
            at = low
            while pending is not None and self.items.src[pending] < high:
                begin = self.items.src[pending]
                if begin > at:
                    parts.append(view[at - origin : begin - origin])
                parts.append(self._landing(pending))
                at = begin + self.items.span[pending]
                pending = next(landing, None)
            if at < high:
                parts.append(view[at - origin : high - origin])
            key = self.catalog.files[file].key
            if not prove or file not in self.blocks.of_file:
                read_into(key, low, parts)
                continue
            for step, step_parts in zip(range(low, high, PROVE_BYTES), _in_blocks(parts, PROVE_BYTES), strict=True):
                read_into(key, step, step_parts)
                self.prove(file, step, step_parts, items)
        if self.copy:
            rest = [i for i in items if not self.items.direct[i]]
            self._will_change(rest)
            for i in rest:
                self._place(i, buffer, origin)
        self.tally.add(sum(self.high[extent] - self.low[extent] for extent in extents))

    def _will_change(self, items: Sequence[int]) -> None:
        dests = (self.dests[self.items.dest[i]] for i in items)
        self.changed.update(dest.name for dest in dests if not dest.passing)

    def _buffer(self, size: int) -> torch.Tensor:
        buffer: torch.Tensor | None = getattr(self.local, "buffer", None)
        if buffer is None or buffer.numel() < size:
            buffer = self.local.buffer = torch.empty(size, dtype=torch.uint8)
        return buffer

    def _landing(self, item: int) -> memoryview:
        dest = self.dests[self.items.dest[item]]
        return element_bytes(dest.tensor, self.items.dst[item], self.items.span[item] // self.items.item_bytes[item])

    def _place(self, item: int, buffer: torch.Tensor, origin: int) -> None:
        items, dest = self.items, self.dests[self.items.dest[item]]
        each, offset = items.item_bytes[item], items.src[item] - origin
        lengths, strides = items.lengths[item], items.src_strides[item]
        if offset % each == 0 and all(s % each == 0 for s in strides):
            usable = buffer[: buffer.numel() // each * each].view(dest.dtype)
            source = torch.as_strided(usable, lengths, [s // each for s in strides], offset // each)
        else:  # a foreign file need not align its elements
            raw = torch.as_strided(buffer, (*lengths, each), (*strides, 1), offset)
            source = raw.clone(memory_format=torch.contiguous_format).view(dest.dtype).squeeze(-1)
        copy_values(region(dest.tensor, items.dst[item], lengths, items.dst_strides[item]), source)

    def prove(self, file: int, low: int, parts: Sequence[memoryview], items: range) -> None:
        """Compare the blocks of an extent, where there are digests of them; `items` are those that may want it."""
        digests = self.blocks.of_file.get(file)
        if digests is None:
            return
        first = low // digests.block_bytes
        for i, fragments in enumerate(_in_blocks(parts, digests.block_bytes)):
            if block_digest(*fragments) != int(digests.values[first + i]):
                raise Damage(file, (first + i) * digests.block_bytes, digests.block_bytes, items)

    def explain(self, damage: Damage) -> CorruptError:
        """The error for a damaged block, with what it holds and what has been overwritten."""
        entry, low = self.catalog.files[damage.file], damage.low
        high = min(low + damage.size, entry.size)
        near = [i for i in damage.items if self.items.src[i] < high and self.items.src[i] + self.items.span[i] > low]
        holds = few(sorted({self.dests[self.items.dest[i]].name for i in near})) if near else "nothing that this rank wants"
        if not self.copy or not self.changed:
            after = "no tensor was changed"
        else:
            after = (
                f"already overwritten, wholly or in part: {few(sorted(self.changed))}; verify_first=True would have changed none"
            )
        return CorruptError(
            f"{self.storage.url}: {entry.key} is damaged in bytes {low}:{high}, which hold {holds}; {after}; "
            "load another checkpoint"
        )


def _in_blocks(parts: Sequence[memoryview], block_bytes: int) -> Iterator[list[memoryview]]:
    """The fragments of each block, of buffers laid end to end; the last block may be shorter."""
    fragments: list[memoryview] = []
    room = block_bytes
    for part in parts:
        at = 0
        while at < len(part):
            piece = part[at : at + room]
            fragments.append(piece)
            at += len(piece)
            room -= len(piece)
            if room == 0:
                yield fragments
                fragments, room = [], block_bytes
    if fragments:
        yield fragments
