"""Reading the bytes of a load plan from files into tensors, several windows at once; every block is verified.

1. `core.planning.read_plan` decides which extents of each window are read, and which of its bytes *land*: are read straight into
   the memory of their target.
2. The other bytes of a window are read into a buffer, one for each thread. Every block that was read is hashed where it lies.
3. Bytes in the buffer are then copied into their targets: many small runs at once, other items one by one, strided or cast; for
   targets on devices by `device_targets`.

Bytes that land change their target before their block is verified. So after a damaged block, targets of the windows under way
may hold damaged bytes; `Reader.changed` names every target that may have changed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.catalog.model import Catalog
from ...core.catalog.specs import Ints
from ...core.geometry.columns import group_bounds, is_new
from ...core.geometry.runs import I64, ranges
from ...core.planning.load_plan import LoadPlan
from ...core.planning.read_plan import ReadPlan, plan_reads
from ...core.report import few
from ...errors import CorruptError
from ...format.files import Digests, wrong_blocks
from ...storage.protocol import Storage
from ..common.files import in_threads, num_threads
from ..common.host_memory import ask_for_large_pages
from ..common.progress import OnProgress, Tally, silent
from ..common.rounds import NOTHING_CHANGED, USE_ANOTHER, VERIFY_FIRST, overwritten_text
from ..common.tensor_bytes import RAW, count_up, empty_bytes, has_streams, memory_bytes, region
from .device_targets import DevicePart, DeviceTargets

REQUEST_BYTES = 8 << 20
"""Size of a read whose bytes are neither hashed nor copied while they are in the processor's cache."""

LARGE_BYTES = 4 << 20
"""Targets of at least this many bytes are filled in large pages if their memory was never touched."""

UNITS_OF_A_COPY, FEW_COPIES = 8, 32
"""Costs by which small runs of a window are copied to a target one by one or all together. A *unit* is the largest number of
bytes that divides their sizes and the distances between them. One by one, each run costs `UNITS_OF_A_COPY` units. Together, they
cost all their units, and `FEW_COPIES` single runs in addition."""


class ReadTarget(NamedTuple):
    """A tensor to fill from files: its name in messages, its memory, and the dtype of its elements in the files."""

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype
    is_buffer: bool = False
    """Whether the tensor is a temporary buffer of this package. Messages do not list it as overwritten."""


class ReadTask(NamedTuple):
    """A read for `execute`: the checkpoint's store and catalog, the load plan, the tensors to fill, and the files' digests."""

    storage: Storage
    catalog: Catalog
    plan: LoadPlan
    targets: Sequence[ReadTarget]
    blocks: Mapping[int, Digests]
    """Block digests of files, by the file's index in the catalog. Bytes of files without an entry are not verified."""
    copy: bool = True
    """Whether to fill the targets; False only verifies the blocks."""


def execute(task: ReadTask, report: OnProgress = silent, *, is_alone: bool = True) -> int:
    """Read all items of a load plan into their target tensors, and return the number of bytes read from storage.

    Raise `CorruptError` if a block is damaged; the message names it, the tensors that need it, and the tensors that already have
    new values.

    Parameters
    ----------
    report
        Called with the progress in bytes, from the reading threads, one at a time.
    is_alone
        Whether no other rank fills tensors meanwhile. If one may, the message speaks of the tensors of this rank.
    """
    reads = reads_of(task)
    reader = Reader(task, reads, Tally("load" if task.copy else "verify", reads.num_bytes, report))
    try:
        in_threads(reader.read_window, range(reads.num_windows), num_threads(reads.num_windows, task.storage.hints))
    except Damage as damage:
        # Here no thread reads any more, so the list of overwritten tensors is complete.
        is_known = is_alone or not task.copy
        raise reader.explain(damage, "" if is_known else overwritten_text(reader.changed(), " on this rank")) from None
    finally:
        reader.finish()
    return reads.num_bytes


def reads_of(task: ReadTask, *, group: I64 | None = None) -> ReadPlan:
    """Plan the requests to the store for all items of a load plan (see `plan_reads`).

    Files with digests are read in whole blocks.
    """
    # block_bytes[file]: size of the blocks that a file is verified by; 0 if it is not verified
    block_bytes = np.zeros(len(task.catalog.files), np.int64)
    for index, digests in task.blocks.items():
        block_bytes[index] = digests.block_bytes
    sizes = np.array([entry.size for entry in task.catalog.files], np.int64)
    lands = [task.copy and target.tensor.is_cpu and target.tensor.dtype == target.dtype for target in task.targets]
    return plan_reads(task.plan, block_bytes, sizes, np.array(lands, bool), group)


Elements = NDArray[Any]
"""The elements of a tensor, as a numpy array of plain numbers or raw bytes of the same size."""


class _Copy(NamedTuple):
    """A strided copy of one plan item: from a window's buffer (first byte `offset`, `strides` in bytes) into array `place`."""

    place: Elements
    lengths: Ints
    offset: int
    strides: Ints

    def fill(self, buffer: memoryview) -> None:
        # Not by torch: each of our threads would start a pool of torch's own threads, which busy-wait for work.
        np.copyto(self.place, np.ndarray(self.lengths, self.place.dtype, buffer, self.offset, self.strides))


class _Cast(NamedTuple):
    """A copy of one plan item by torch, which may convert it: from `dtype` in a window's buffer into the region `place`.

    `offset` is the item's first byte in the buffer, `strides` are in bytes there.
    """

    place: torch.Tensor
    dtype: torch.dtype
    lengths: Ints
    offset: int
    strides: Ints

    def fill(self, buffer: memoryview) -> None:
        source: Elements = np.ndarray(self.lengths, RAW[self.dtype.itemsize], buffer, self.offset, self.strides)
        aligned = source if source.flags.aligned else source.copy()  # a foreign file need not align its elements
        self.place.copy_(torch.from_numpy(aligned).view(self.dtype))


class _EachRun(NamedTuple):
    """Copies of several runs of one window, one by one. Each run has its target memory, and its begin and end in the buffer."""

    runs: list[tuple[memoryview, int, int]]

    def fill(self, buffer: memoryview) -> None:
        for memory, begin, end in self.runs:
            memory[:] = buffer[begin:end]


class _ShortRuns(NamedTuple):
    """A copy of many short runs of one window into one target, all at once by numpy indices.

    Run i has ``size[i]`` bytes, at ``src[i]`` in the window's buffer and at ``dst[i]`` in the bytes `memory` of the target. The
    sizes, and the distances between runs, are multiples of `unit` bytes.
    """

    memory: memoryview
    unit: int
    src: I64
    dst: I64
    size: I64

    def fill(self, buffer: memoryview) -> None:
        owner, step = ranges(self.size // self.unit)

        def units(data: memoryview, first: I64) -> tuple[Elements, I64]:
            """View bytes as units whose borders fit the runs that begin at `first`.

            Return the view, and the index of each unit of the runs.
            """
            begin = int(first[0]) % self.unit
            kind = np.dtype((np.void, self.unit))
            return np.ndarray((len(data) - begin) // self.unit, kind, data, begin), (first // self.unit)[owner] + step

        (source, at), (target, to) = units(buffer, self.src), units(self.memory, self.dst)
        target[to] = source.take(at)


_Fill = _Copy | _Cast | _EachRun | _ShortRuns
"""A copy from the buffer of a window into a target. Its method ``fill(buffer)`` makes the copy."""


class Damage(Exception):
    """The error of a block that differs from its digest, before it has a message.

    `file` is the index of the file in the catalog, `low` the block's first byte, and `size` its bytes. `window` is the number of
    the window that needs the block; -1 if no window of this rank does.
    """

    def __init__(self, file: int, low: int, size: int, window: int) -> None:
        super().__init__()
        self.file, self.low, self.size, self.window = file, low, size, window


class _Extent(NamedTuple):
    """Bytes ``[low, high)`` of a file that are read in one request, and the memory for each part of them.

    A part goes into the memory of a target, or, given as a slice, into the window's buffer.
    """

    low: int
    high: int
    parts: Sequence[memoryview | slice]


class Reader:
    """Executes one read task: reads windows, verifies them, and fills the targets. Several threads may read windows at once.

    Make it in the thread that loads: copies to devices run after the work which that thread has queued. End with `finish`.
    """

    def __init__(self, task: ReadTask, reads: ReadPlan, tally: Tally) -> None:
        self.task, self._reads, self._tally = task, reads, tally
        # Everything below is made before the first read: a read empties the processor's caches, so that Python is far slower
        # afterwards.
        targets = task.targets
        used = np.unique(task.plan.dest).tolist() if task.copy else []
        # _memories[target]: the bytes of the target's memory, from its first element on
        may_land = reads.may_land.tolist()
        landing = {i: targets[i].tensor for i in used if may_land[i]}
        for tensor in landing.values():
            if tensor.nbytes >= LARGE_BYTES and tensor.is_contiguous():
                ask_for_large_pages(tensor)
        self._memories = {i: memory_bytes(tensor) for i, tensor in landing.items()}
        streamed = [targets[i].tensor for i in used if i not in landing and has_streams(targets[i].tensor.device)]
        self.devices = DeviceTargets(streamed) if streamed else None
        self._file = reads.file.tolist()
        # _origin[w]: byte of the file that is byte 0 of the buffer of window w
        self._origin = reads.low[reads.extent_start[:-1]]
        self._extents = self._extents_of_windows()
        # _fills[w], _parts[w]: copies from the buffer of window w into host memory, and to devices
        self._fills: list[list[_Fill]] = [[] for _ in self._file]
        self._parts: list[list[DevicePart]] = [[] for _ in self._file]
        if task.copy:
            self._add_runs()
            self._add_items()
        self._local = threading.local()
        # Windows that may have changed a target: with bytes that landed (noted before the read), and with items that are copied
        # (noted before the first copy).
        self._landed: list[int] = []
        self._copied: list[int] = []

    def _extents_of_windows(self) -> list[list[_Extent]]:
        """Return, for each window, its extents (bytes read in one request), with the memory that each part is read into."""
        reads, landing = self._reads, self._reads.landing
        views, run_src = [], landing.src.tolist()
        for dest, dst, size in zip(landing.dest.tolist(), landing.dst.tolist(), landing.size.tolist(), strict=True):
            views.append(self._memories[dest][dst : dst + size])
        columns = (reads.extent_start, reads.landing_start, self._origin, reads.low, reads.high)
        extent_start, run_start, origins, lows, highs = map(np.ndarray.tolist, columns)
        out: list[list[_Extent]] = []
        for window, origin in enumerate(origins):
            run, last_run = run_start[window : window + 2]
            out.append([])
            for extent in range(extent_start[window], extent_start[window + 1]):
                low, high = lows[extent], highs[extent]
                # Landing runs go straight into their targets, the bytes between them into the buffer.
                parts: list[memoryview | slice] = []
                at = low
                while run < last_run and (begin := run_src[run]) < high:
                    if begin > at:
                        parts.append(slice(at - origin, begin - origin))
                    parts.append(views[run])
                    at = begin + len(views[run])
                    run += 1
                if at < high:
                    parts.append(slice(at - origin, high - origin))
                out[-1].append(_Extent(low, high, parts))
        return out

    def _add_runs(self) -> None:
        """Prepare the copies of short runs from the windows' buffers into targets.

        Runs of one window and target are copied together where that is less work than one by one.
        """
        runs = self._reads.copied
        window = np.repeat(np.arange(len(self._file)), np.diff(self._reads.copied_start))
        src, dst = runs.src - self._origin[window], runs.dst
        new = is_new(window, runs.dest)
        # begin[g]: first run of group g. group[r]: group of run r. unit[g]: largest unit of all runs of the group.
        begin, end = group_bounds(new)
        group = np.cumsum(new) - 1
        head = begin[group]
        unit = np.gcd.reduceat(np.gcd(np.gcd(runs.size, src - src[head]), dst - dst[head]), begin)
        # together[g]: whether the runs of group g are copied at once, because one by one would take longer
        together = np.add.reduceat(runs.size, begin) // unit <= UNITS_OF_A_COPY * (end - begin - FEW_COPIES)
        for g in np.flatnonzero(together).tolist():
            part, w, dest = slice(begin[g], end[g]), int(window[begin[g]]), int(runs.dest[begin[g]])
            runs_of = _ShortRuns(self._memories[dest], int(unit[g]), src[part], dst[part], runs.size[part])
            self._fills[w].append(runs_of)
        alone = ~together[group]
        columns = (column[alone].tolist() for column in (runs.dest, src, dst, runs.size))
        each = [(self._memories[dest][to : to + num], at, at + num) for dest, at, to, num in zip(*columns, strict=True)]
        bounds = np.searchsorted(window[alone], np.arange(len(self._file) + 1)).tolist()
        for fills, (low, high) in zip(self._fills, pairwise(bounds), strict=True):
            if low < high:
                fills.append(_EachRun(each[low:high]))

    def _add_items(self) -> None:
        """Prepare the copies of the other plan items: strided copies on the host, casts, and copies to devices."""
        plan, items = self.task.plan, self._reads.items
        window = np.repeat(np.arange(len(self._file)), np.diff(self._reads.item_start))
        # Columns as lists: taking single elements of numpy arrays is slow. offset: first byte of each item in its window's buffer
        offset = plan.src[items] - self._origin[window]
        flat = [column.tolist() for column in (window, plan.dest[items], plan.item_bytes[items], offset, plan.dst[items])]
        wide = [map(tuple, column[items].tolist()) for column in (plan.lengths, plan.src_strides, plan.dst_strides)]
        for w, dest, each, at, base, lengths, strides, dst_strides in zip(*flat, *wide, strict=True):
            target = self.task.targets[dest]
            if dest in self._memories:
                in_bytes = tuple(stride * each for stride in dst_strides)
                place: Elements = np.ndarray(lengths, RAW[each], self._memories[dest], base * each, in_bytes)
                self._fills[w].append(_Copy(place, lengths, at, strides))
            elif self.devices and self.devices.has(target.tensor):
                self._parts[w].append(DevicePart(target.tensor, base, dst_strides, target.dtype, at, lengths, strides))
            else:
                self._fills[w].append(
                    _Cast(region(target.tensor, base, lengths, dst_strides), target.dtype, lengths, at, strides)
                )

    def finish(self) -> None:
        """Wait for queued copies to devices, and increase the targets' version counters.

        Call it once no thread reads, errors or not.
        """
        if self.devices:
            self.devices.finish()
        count_up([self.task.targets[dest].tensor for dest in self._memories])

    def read_window(self, window: int, held: memoryview | None = None, first: int = 0) -> None:
        """Read one window from storage, verify its blocks, and put its bytes into their targets.

        With `held`, which holds verified bytes of the file from byte `first` on, nothing is read. Some runs land: they are read
        straight into their targets. If this raises, these targets may hold part of the new bytes, verified or not. Targets of
        copied items have changed only if the error came after verification.
        """
        file = self._file[window]
        key = self.task.catalog.files[file].key
        extents = self._extents[window]
        on_devices = self._parts[window]
        size = extents[-1].high - extents[0].low
        if self.devices and on_devices:
            buffer = self.devices.buffer(size)
        else:
            buffer = self._buffer(size) if held is None else held[extents[0].low - first :]
        # Before the first read, as a read that fails may have overwritten part of a target.
        self._landed.append(window)
        size_read = 0
        for low, high, where in extents:
            size_read += high - low
            parts = [part if isinstance(part, memoryview) else buffer[part] for part in where]
            if held is None:
                self.task.storage.read_into(key, low, parts)
                self.verify(file, low, parts, window)
                continue
            at = low - first
            for part, place in zip(parts, where, strict=True):
                if part is place or on_devices:  # the others are where they are held
                    part[:] = held[at : at + len(part)]
                at += len(part)
        # Only after every extent of the window was verified.
        self._copied.append(window)
        for job in self._fills[window]:
            job.fill(buffer)
        if self.devices and on_devices:
            self.devices.place(on_devices)
        self._tally.add(size_read)

    def _buffer(self, size: int) -> memoryview:
        """Return this thread's buffer in host memory, with room for at least `size` bytes."""
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._local.buffer = empty_bytes(size).numpy().data
        return buffer

    def verify(self, file: int, low: int, parts: Sequence[memoryview], window: int) -> None:
        """Compare the blocks in a range of a file with their digests; do nothing if the file has no digests.

        Parameters
        ----------
        low, parts
            The range's first byte in the file, and its bytes in order.
        window
            Number of the window that needs these bytes, for the error.

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
        """Turn a `Damage` into a `CorruptError` that names the block, the tensors in it, and the overwritten tensors.

        `overwritten` is the text about overwritten tensors of all ranks; if empty, those of this rank are named.
        """
        entry, low = self.task.catalog.files[damage.file], damage.low
        high = min(low + damage.size, entry.size)
        near = self._reads.targets(self.task.plan, damage.window, low, high) if damage.window >= 0 else ()
        holds = few(self._names(near)) or "nothing that this rank wants"
        parts = [f"{self.task.storage.url}: {entry.key} is damaged in bytes {low}:{high}, which hold {holds}"]
        if not all(target.is_buffer for target in self.task.targets):  # else only buffers of the library were written
            parts.append(overwritten or overwritten_text(self.changed()))
            if parts[-1] != NOTHING_CHANGED:
                parts.append(VERIFY_FIRST)
        return CorruptError("; ".join([*parts, USE_ANOTHER]))

    def changed(self) -> list[str]:
        """Return the sorted names of the targets that may have new values, wholly or in part. Temporary buffers are left out."""
        found: set[int] = set()
        for windows, lands in ((self._landed, True), (self._copied if self.task.copy else (), False)):
            found.update(*(self._reads.targets(self.task.plan, window, lands=lands) for window in windows))
        return self._names(dest for dest in found if not self.task.targets[dest].is_buffer)

    def _names(self, dests: Iterable[int]) -> list[str]:
        return sorted({self.task.targets[dest].name for dest in dests})
