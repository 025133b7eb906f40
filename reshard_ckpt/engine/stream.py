"""How does one process go through a checkpoint of any size? As a stream: runs of saved tensors, one after the other, proved.

1. The runs are cut into *windows* of a bounded number of bytes.
2. Each window is one load plan: its runs are the wanted pieces, a buffer is the memory (`core.load_plan`, `engine.read`). So runs
   of one window that need the same bytes of a file read them once.
3. A thread fills the next window while the caller uses this one.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from math import prod

import numpy as np
import torch

from ..core.catalog import Catalog
from ..core.geometry import I64
from ..core.load_plan import plan_load
from ..core.match import faults_of
from ..core.offer import PieceColumns
from ..core.state import Ints, row_major_strides
from ..core.tiling import describe_region
from ..errors import CorruptError
from ..format.checksums import Digests
from ..format.torch_dtypes import TORCH_DTYPES
from ..storage.protocol import Storage
from .read import WINDOW_BYTES, Blocks, Destination, check_files, execute, open_blocks

MAX_RUNS = 1 << 14
"""Runs in one window; bounds the memory of its plan."""

DIGESTS_BYTES = 32 << 20
"""Digests of the files read last, kept: those of half a terabyte."""

AHEAD = 2
"""Windows in memory: the one in use, and the one that is being read."""

_ALIGN_BYTES = 8


@dataclass(frozen=True, slots=True)
class Run:
    """A run of the row-major order of a box of tensor `tensor` of the catalog, converted to `dtype` if that is not None."""

    tensor: int
    offsets: Ints
    lengths: Ints
    start: int
    count: int
    dtype: str | None = None


def whole_run(catalog: Catalog, tensor: int) -> Run:
    """All of a tensor."""
    shape = catalog.shape(tensor)
    return Run(tensor, (0,) * len(shape), shape, 0, prod(shape))


def stream(
    storage: Storage, catalog: Catalog, runs: Sequence[Run], *, verify: bool = True, window_bytes: int = WINDOW_BYTES
) -> Iterator[memoryview]:
    """The bytes of all runs, one after the other.

    Parameters
    ----------
    runs
        Of tensors of the catalog; an alias stands for the tensor that has its bytes.
    verify
        Prove the checksum of every block that is read.
    window_bytes
        Bytes made at once; memory is bounded by a few times that.

    Yields
    ------
    memoryview
        Bytes, valid until the next are asked for. Never empty; where one begins or ends means nothing.

    Raises
    ------
    CorruptError
        A file is damaged or missing, or its catalog has no bytes, or two, for a part of a tensor.
    """
    check_covered(catalog, runs)
    reader = RunReader(storage, catalog, verify=verify)
    for window in read_ahead(reader, cut_windows(reader, runs, window_bytes)):
        yield from window.joined()


def check_covered(catalog: Catalog, runs: Iterable[Run]) -> None:
    """Refuse a catalog whose rows do not cover each tensor of these runs exactly once."""
    for fault in faults_of(catalog, np.array(sorted({run.tensor for run in runs}), np.int64)):
        region = describe_region(fault.low, fault.high, int(catalog.tensors_table.ndim[fault.tensor]))
        what = "saved shards overlap at" if fault.rows else "no saved shard holds"
        raise CorruptError(f"{catalog.tensors_table.names[fault.tensor]}: {what} {region}; use another checkpoint")


def cut_windows(reader: RunReader, runs: Iterable[Run], window_bytes: int) -> Iterator[list[Run]]:
    """The runs in order, cut where a window is full; one element may be larger than a window."""
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


@dataclass(frozen=True, slots=True)
class Window:
    """The bytes of some runs, in one buffer: where each begins, and how many there are."""

    data: memoryview
    begin: Sequence[int]
    sizes: Sequence[int]

    def parts(self) -> Iterator[memoryview]:
        """The bytes of each run."""
        return (self.data[at : at + size] for at, size in zip(self.begin, self.sizes, strict=True))

    def joined(self) -> Iterator[memoryview]:
        """The bytes of all runs in order, in as few parts as alignment allows."""
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
    """Reads windows of runs; what it has proved of files is kept for the next window. One thread at a time."""

    def __init__(self, storage: Storage, catalog: Catalog, *, verify: bool) -> None:
        self._storage, self._catalog, self._verify = storage, catalog, verify
        self._seen: set[int] = set()
        self._digests: OrderedDict[int, Digests | None] = OrderedDict()
        self._digests_bytes = 0
        self.bytes_read = 0

    def item_bytes(self, run: Run) -> int:
        """Bytes of one element, as it comes out."""
        return TORCH_DTYPES[run.dtype or self._catalog.dtype(run.tensor)].itemsize

    def num_bytes(self, runs: Sequence[Run]) -> int:
        """The size of a buffer for these runs."""
        return sum(-(-run.count * self.item_bytes(run) // _ALIGN_BYTES) * _ALIGN_BYTES for run in runs)

    def fill(self, runs: Sequence[Run], buffer: torch.Tensor) -> Window:
        """Read runs into a buffer of bytes."""
        dests, begin = self._destinations(runs, buffer)
        wanted = pieces_of(self._catalog, runs)
        source = np.array([run.tensor for run in runs], np.int64)
        plan = plan_load(self._catalog, source, wanted, WINDOW_BYTES)
        assert np.array_equal(plan.covered, wanted.count), "the rows were proved to cover every tensor"
        files = np.unique(plan.file).tolist()
        check_files(self._storage, self._catalog, [file for file in files if file not in self._seen])
        self._seen.update(files)
        self.bytes_read += execute(self._storage, self._catalog, plan, dests, blocks=self._blocks(files))
        return Window(buffer.numpy().data, begin, [dest.tensor.nbytes for dest in dests])

    def _destinations(self, runs: Sequence[Run], buffer: torch.Tensor) -> tuple[list[Destination], list[int]]:
        """A typed part of the buffer for each run, end to end as far as alignment allows, and where it begins."""
        dests, begin, at = [], [], 0
        for run in runs:
            saved = self._catalog.dtype(run.tensor)
            dtype = TORCH_DTYPES[run.dtype or saved]
            at = -(-at // dtype.itemsize) * dtype.itemsize
            part = buffer[at : at + run.count * dtype.itemsize].view(dtype)
            dests.append(Destination(self._catalog.tensors_table.names[run.tensor], part, TORCH_DTYPES[saved], passing=True))
            begin.append(at)
            at += part.nbytes
        return dests, begin

    def _blocks(self, files: Sequence[int]) -> Blocks:
        if not self._verify:
            return Blocks({})
        lacking = [file for file in files if file not in self._digests]
        opened = open_blocks(self._storage, self._catalog, lacking).of_file
        for file in lacking:
            self._digests[file] = opened.get(file)
            self._digests_bytes += _size(opened.get(file))
        of_file = {}
        for file in files:
            self._digests.move_to_end(file)
            digests = self._digests[file]
            if digests is not None:
                of_file[file] = digests
        while self._digests_bytes > DIGESTS_BYTES and len(self._digests) > len(files):
            self._digests_bytes -= _size(self._digests.popitem(last=False)[1])
        return Blocks(of_file)


def _size(digests: Digests | None) -> int:
    return 0 if digests is None else digests.values.nbytes


def pieces_of(catalog: Catalog, runs: Sequence[Run]) -> PieceColumns:
    """Runs as wanted pieces: each lies in order, in a destination of its own."""
    width = max(catalog.boxes.offsets.shape[1], 1)

    def padded(rows: Iterable[Ints], fill: int) -> I64:
        return np.array([(fill,) * (width - len(row)) + row for row in rows], np.int64).reshape(len(runs), width)

    start = np.array([run.start for run in runs], np.int64)
    return PieceColumns(
        tensor=np.arange(len(runs)),
        offsets=padded((run.offsets for run in runs), 0),
        lengths=padded((run.lengths for run in runs), 1),
        start=start,
        count=np.array([run.count for run in runs], np.int64),
        base=-start,
        strides=padded((row_major_strides(run.lengths) for run in runs), 0),
    )


def read_ahead(reader: RunReader, windows: Iterable[Sequence[Run]]) -> Iterator[Window]:
    """The bytes of the runs of each window; a thread reads the next windows meanwhile.

    Yields
    ------
    Window
        Valid until the next one is asked for.
    """
    todo = iter(windows)
    idle = [torch.empty(0, dtype=torch.uint8) for _ in range(AHEAD)]
    under_way: deque[tuple[torch.Tensor, Future[Window]]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="reshard-ckpt-stream") as pool:

        def begin() -> None:
            for runs in islice(todo, 1):
                buffer, size = idle.pop(), reader.num_bytes(runs)
                if buffer.numel() < size:
                    buffer = torch.empty(size, dtype=torch.uint8)
                under_way.append((buffer, pool.submit(reader.fill, runs, buffer)))

        try:
            for _ in range(AHEAD - 1):
                begin()
            while under_way:
                begin()
                buffer, filled = under_way.popleft()
                yield filled.result()
                idle.append(buffer)
        finally:
            pool.shutdown(cancel_futures=True)
