"""Streams of saved bytes: one process reads and verifies runs of saved tensors of any size, in bounded memory.

1. The runs are cut into *windows* of few bytes, so that a window stays in the processor's cache while it is read, verified,
   gathered, hashed and written.
2. A *batch* of windows makes one load plan. Its wanted pieces are the runs; its targets are `AHEAD` buffers, used in turn. If
   several runs of one window need the same bytes of a file, these are read once.
3. Threads fill the next windows while the caller uses the current one (`read_ahead`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from ...core.catalog.model import Catalog
from ...core.catalog.specs import Ints, PieceColumns, row_major_strides
from ...core.geometry.runs import pad_rows
from ...core.planning.load_plan import plan_load
from ...core.planning.match import fault_text, faults_of
from ...errors import CorruptError
from ...format.dtypes import TORCH_DTYPES
from ...storage.protocol import Storage
from ..common.files import FileDigests
from ..common.progress import Tally, silent
from ..common.tensor_bytes import empty_bytes
from .read import Damage, Reader, ReadTarget, ReadTask, reads_of
from .scales import Dequantizer, Scaled, multiply

WINDOW_BYTES = 4 << 20
"""Size of a window in bytes: two windows and the file bytes that go into them fit into the cache that cores share."""

BATCH_BYTES = 64 << 20
"""Size of a batch of windows in bytes. Making a load plan for many windows takes hardly longer than for one."""

MAX_RUNS = 1 << 14
"""The most runs in a window, and in a batch of windows. This bounds the memory of a load plan."""

AHEAD = 2
"""Number of windows in memory: one in use, the others being read."""

_ALIGN_BYTES = 8
"""The bytes of each run in a window are rounded up to a multiple of this, which leaves room for alignment."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a saved tensor to read: `count` elements, from element `start` of the row-major order of a box of the tensor.

    `tensor` is an index in the catalog; `offsets` and `lengths` are the box. The elements are converted to `dtype` unless it is
    None.
    """

    tensor: int
    offsets: Ints
    lengths: Ints
    start: int
    count: int
    dtype: str | None = None


def whole_run(catalog: Catalog, tensor: int) -> Run:
    """Return the run that consists of all elements of a saved tensor."""
    shape = catalog.shape(tensor)
    return Run(tensor, (0,) * len(shape), shape, 0, prod(shape))


def stream(
    storage: Storage,
    catalog: Catalog,
    runs: Sequence[Run],
    *,
    verify: bool = True,
    dequantizer: Dequantizer | None = None,
    window_bytes: int = WINDOW_BYTES,
) -> Iterator[memoryview]:
    """Yield the bytes of all runs, one after the other.

    Raise `CorruptError` if a file is damaged or missing, or the catalog does not cover each element of a tensor exactly once.

    Parameters
    ----------
    runs
        Runs of tensors of the catalog; an alias is read as the tensor that has its bytes.
    verify
        Verify the checksum of every block that is read.
    dequantizer
        Applies the scales of quantized tensors that are converted.
    window_bytes
        Size of a window. The memory used is at most a few times that.

    Yields
    ------
    memoryview
        Bytes, never empty, valid until the next ones are yielded. They are cut at arbitrary places, not at runs.
    """
    check_covered(catalog, runs)
    reader = RunReader(storage, catalog, FileDigests(storage, catalog, verify=verify), dequantizer)
    for window in read_ahead(reader, cut_windows(reader, runs, window_bytes)):
        yield from window.joined()


def check_covered(catalog: Catalog, runs: Iterable[Run]) -> None:
    """Raise a `CorruptError` if the catalog's rows do not cover each tensor of some runs exactly once."""
    for fault in faults_of(catalog, np.array(sorted({run.tensor for run in runs}), np.int64)):
        raise CorruptError(f"{fault_text(catalog, fault)}; use another checkpoint")


def cut_windows(reader: RunReader, runs: Iterable[Run], window_bytes: int) -> Iterator[list[Run]]:
    """Cut runs, in order, into windows: lists of runs with at most `window_bytes` bytes, or one element if that is larger."""
    window: list[Run] = []
    room = window_bytes
    for run in runs:
        each, done = reader.item_bytes(run), 0
        while done < run.count:
            count = min(run.count - done, max(room // each, 0 if window else 1))
            if count:
                window.append(replace(run, start=run.start + done, count=count))
                done += count
                room -= count * each
            if done < run.count or len(window) == MAX_RUNS:
                yield window
                window, room = [], window_bytes
    if window:
        yield window


class Window(NamedTuple):
    """The bytes of some runs in one buffer `data`: run i has ``sizes[i]`` bytes from byte ``begin[i]`` on."""

    data: memoryview
    begin: Sequence[int]
    sizes: Sequence[int]

    def parts(self) -> Iterator[memoryview]:
        """Yield the bytes of each run, as one view for each."""
        return (self.data[at : at + size] for at, size in zip(self.begin, self.sizes, strict=True))

    def joined(self) -> Iterator[memoryview]:
        """Yield the bytes of all runs in order. Runs that lie end to end in the buffer come as one view."""
        low = high = 0
        for at, size in zip(self.begin, self.sizes, strict=True):
            if at != high:
                if high > low:
                    yield self.data[low:high]
                low = at
            high = at + size
        if high > low:
            yield self.data[low:high]


class RunReader:
    """Plans and reads windows of runs from one checkpoint, and remembers which files it has checked.

    One thread may use it at a time.
    """

    def __init__(self, storage: Storage, catalog: Catalog, digests: FileDigests, dequantizer: Dequantizer | None = None) -> None:
        self._storage, self._catalog, self.digests, self._dequantizer = storage, catalog, digests, dequantizer
        self._buffers = [empty_bytes(0) for _ in range(AHEAD)]
        self._num_planned = 0
        self.bytes_read = 0

    def item_bytes(self, run: Run) -> int:
        """Return the size in bytes of one element of a run, in the dtype that it is converted to."""
        return TORCH_DTYPES[run.dtype or self._catalog.dtype(run.tensor)].itemsize

    def num_bytes(self, runs: Sequence[Run]) -> int:
        """Return the size in bytes of a buffer that holds these runs, with padding for alignment."""
        return sum(-(-run.count * self.item_bytes(run) // _ALIGN_BYTES) * _ALIGN_BYTES for run in runs)

    def batches(self, windows: Iterable[Sequence[Run]]) -> Iterator[list[Callable[[], Window]]]:
        """Make one load plan for each batch of windows, and yield for each batch a list of functions that fill the windows.

        There are `AHEAD` buffers, used in turn: a window is filled in the buffer that the window `AHEAD` before it had.
        """
        batch: list[Sequence[Run]] = []
        size = runs = 0
        for window in windows:
            batch.append(window)
            size, runs = size + self.num_bytes(window), runs + len(window)
            if size >= BATCH_BYTES or runs >= MAX_RUNS:
                yield self._plan(batch)
                batch, size, runs = [], 0, 0
        if batch:
            yield self._plan(batch)

    def _plan(self, windows: Sequence[Sequence[Run]]) -> list[Callable[[], Window]]:
        """Plan the reading of some windows.

        Return one function for each window that reads it; they may be called in any order and thread.
        """
        empty, targets = zip(*(self._targets(of_window) for of_window in windows), strict=True)
        runs = [run for of_window in windows for run in of_window]
        wanted = pieces_of(self._catalog, runs)
        source = np.array([run.tensor for run in runs], np.int64)
        plan = plan_load(self._catalog, source, wanted, self._storage.hints.read_bytes)
        assert np.array_equal(plan.covered, wanted.count), "the rows were checked to cover every tensor"
        blocks = self.digests.of(np.unique(plan.file).tolist())
        task = ReadTask(self._storage, self._catalog, plan, list(chain.from_iterable(targets)), blocks)
        # group[i]: window of plan item i. Requests are not joined across groups, so that each window can be read by itself.
        sizes = [len(of_window) for of_window in windows]
        group = np.repeat(np.arange(len(windows)), sizes)[plan.dest]
        reads = reads_of(task, group=group)
        reader = Reader(task, reads, Tally("read", reads.num_bytes, silent))
        self.bytes_read += reads.num_bytes
        # The reader's windows (requests) from first[i] to first[i + 1] fill window i of this batch.
        first = np.searchsorted(reads.group, np.arange(len(windows) + 1)).tolist()
        scaled = self._scaled(windows, targets)
        filled = zip(pairwise(first), empty, scaled, strict=True)
        return [partial(_fill, reader, range(*numbers), window, parts) for numbers, window, parts in filled]

    def _scaled(self, windows: Sequence[Sequence[Run]], targets: Sequence[Sequence[ReadTarget]]) -> list[list[Scaled]]:
        """Return, for each window, the parts of quantized tensors in it, with the scale numbers to multiply them by."""
        scaled: list[list[Scaled]] = [[] for _ in windows]
        if self._dequantizer is None:
            return scaled
        owner, parts = {}, []
        for number, (runs, of_window) in enumerate(zip(windows, targets, strict=True)):
            for run, target in zip(runs, of_window, strict=True):
                part = self._dequantizer.part_of_run(self._catalog, run.tensor, target, run.offsets, run.lengths, run.start)
                if part is not None:
                    owner[id(target)] = number
                    parts.append(part)
        for piece in self._dequantizer.read(parts):
            scaled[owner[id(piece.part.target)]].append(piece)
        return scaled

    def _targets(self, runs: Sequence[Run]) -> tuple[Window, list[ReadTarget]]:
        """Lay out the runs of a window end to end in a buffer, each in the dtype to deliver, and aligned to its elements.

        Return the window, still without bytes, and one target for each run.
        """
        # The buffer of the window `AHEAD` before this one, grown if need be.
        size, slot = self.num_bytes(runs), self._num_planned % AHEAD
        self._num_planned += 1
        if self._buffers[slot].numel() < size:
            self._buffers[slot] = empty_bytes(size)
        buffer = self._buffers[slot]
        targets: list[ReadTarget] = []
        begin: list[int] = []
        at = 0
        for run in runs:
            saved = self._catalog.dtype(run.tensor)
            dtype = TORCH_DTYPES[run.dtype or saved]
            at = -(-at // dtype.itemsize) * dtype.itemsize
            part = buffer[at : at + run.count * dtype.itemsize].view(dtype)
            name = self._catalog.tensors_table.names[run.tensor]
            targets.append(ReadTarget(name, part, TORCH_DTYPES[saved], is_buffer=True))
            begin.append(at)
            at += part.nbytes
        return Window(buffer.numpy().data, begin, [dest.tensor.nbytes for dest in targets]), targets


def _fill(reader: Reader, numbers: Iterable[int], window: Window, scaled: Sequence[Scaled]) -> Window:
    """Let `reader` make its reads `numbers`, which fill `window`; multiply quantized parts by their scales; return `window`."""
    try:
        for number in numbers:
            reader.read_window(number)
    except Damage as damage:
        raise reader.explain(damage) from None
    if scaled:
        multiply(scaled)
    return window


def pieces_of(catalog: Catalog, runs: Sequence[Run]) -> PieceColumns:
    """Return runs as the wanted pieces of a load plan: target i is 1-D, and holds the elements of run i."""
    # `base` is the place of a box's element 0; element `start` shall lie at place 0, so it is -start.
    width = max(catalog.boxes.offsets.shape[1], 1)
    start = np.array([run.start for run in runs], np.int64)
    return PieceColumns(
        tensor=np.arange(len(runs)),
        offsets=pad_rows((run.offsets for run in runs), width, 0),
        lengths=pad_rows((run.lengths for run in runs), width, 1),
        start=start,
        count=np.array([run.count for run in runs], np.int64),
        base=-start,
        strides=pad_rows((row_major_strides(run.lengths) for run in runs), width, 0),
    )


def read_ahead(reader: RunReader, windows: Iterable[Sequence[Run]]) -> Generator[Window, None, None]:
    """Read windows of runs and yield them in order; threads read the next ones meanwhile, until the generator ends or is closed.

    Raise `StorageError` if a file without checksums was changed meanwhile; raised in place of the last window.

    Yields
    ------
    Window
        A filled window, valid until the next one is asked for.
    """
    with ThreadPoolExecutor(AHEAD - 1, thread_name_prefix="reshard-ckpt-stream") as pool:
        try:
            under_way: deque[Future[Window]] = deque()
            for fill in chain.from_iterable(reader.batches(windows)):
                under_way.append(pool.submit(fill))
                if len(under_way) == AHEAD:
                    yield under_way.popleft().result()
            while under_way:
                last = under_way.popleft().result()
                if not under_way:  # before the yield: nobody resumes some callers' generators after the last bytes
                    reader.digests.refuse_changed()
                yield last
        finally:
            pool.shutdown(cancel_futures=True)
