"""Locating every element of every tensor in the files of a DCP folder.

1. Read the heads (the first bytes) of all chunks in order of file and position, in several threads. Heads that are close together
   are read in one request.
2. Parse each head: it tells where the chunk's elements begin, and their order. A chunk in row-major order is one part.
3. A chunk in another order (a transposed weight, channels_last) becomes several parts (`parts`): boxes whose row-major order is
   their order in the file. A chunk may also hold runs of other tensors (`ChunkRun`).

A chunk that cannot be read (compressed, a tensor subclass, damaged or missing) makes its own tensor unreadable, and no other.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from ...errors import CheckpointError, CorruptError, UnsupportedError
from ...format.dtypes import TORCH_DTYPES
from ...format.shard_file import parse_header
from ...storage.protocol import Storage, read_range
from ...torchfile.bounds import FileBudget
from ...torchfile.zip_records import ZIP_MAGIC
from ..catalog_builder import CatalogBuilder
from ..parts import Part, parts_of_box
from .heads import HEAD_BYTES, LONG_HEAD_BYTES, HeadParser, HeadTooShort, TensorLayout, raw_layout
from .metadata import Chunk, Extent, SavedTensor

NAME = "dcp"

WINDOW_BYTES = 1 << 20
"""The most bytes of one request that reads several heads of chunks."""

BATCH = 256
"""The number of requests in one batch; a thread reads a batch before it hands the bytes over."""

MAX_THREADS = 8
"""The most threads that read heads of chunks. They wait for the store more than they compute."""

MAX_SAFETENSORS_HEADER = 100 << 20
"""The largest header of a safetensors file that is read; safetensors itself refuses larger ones."""

_OF_RANK = re.compile(r"(?:^|/)__(\d{1,6})_\d+\.distcp$", re.ASCII)
"""Matches the name of a file that DCP wrote, such as ``__3_0.distcp``; its group is the rank that wrote the file."""

Place = tuple[str, Chunk]
"""The FQN of a tensor, and one of the tensor's chunks."""


def locate(builder: CatalogBuilder, storage: Storage, tensors: Mapping[str, SavedTensor]) -> ChunkPlaces:
    """Find where the elements of all chunks lie in files, and add these files to the catalog."""
    found = ChunkPlaces(builder, storage, tensors)
    # In order of file and offset, so that neighbouring heads are read together.
    places = sorted(
        ((fqn, chunk) for fqn, tensor in tensors.items() for chunk in tensor.chunks),
        key=lambda place: (place[1].extent.file, place[1].extent.offset),
    )
    for fqn, chunk in places:
        found.check(fqn, chunk.extent)
    readable = [place for place in places if place[0] not in found.unreadable]
    # Chunks whose heads are in the metadata need no read.
    for fqn, chunk in readable:
        if chunk.head is not None:
            found.add(fqn, chunk, memoryview(b""))
    for window, data in _read_windows(storage, [place for place in readable if place[1].head is None]):
        for fqn, chunk in window.places:
            begin = chunk.extent.offset - window.low
            found.add(fqn, chunk, data[begin : begin + min(HEAD_BYTES, chunk.extent.length)])
    return found


class FileSizes(dict[str, int | None]):
    """The sizes of a folder's files. A missing file has the size None; each file is looked up once."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def __missing__(self, file: str) -> int | None:
        size = self[file] = self.storage.size(file)
        return size

    def problem(self, fqn: str, extent: Extent) -> CheckpointError | None:
        """Return the error of a tensor or value whose bytes, `extent`, cannot be read; None if they can be read."""
        size, end = self[extent.file], extent.offset + extent.length
        if size is None or size < end:
            found = "is missing" if size is None else f"has {size} bytes"
            wanted = f"bytes {extent.offset}:{end} of {extent.file}"
            return CorruptError(f"{self.storage.url}: {fqn} should be in {wanted}, which {found}; use another checkpoint")
        if extent.transforms:
            through = ", ".join(extent.transforms)
            return UnsupportedError(
                f"{self.storage.url}: {fqn} was written through the extension {through}; load it with "
                "torch.distributed.checkpoint and that extension, and save it again without"
            )
        return None


@dataclass(frozen=True, slots=True)
class _Window:
    """Bytes ``[low, high)`` of one file, which one request reads: they have the heads of the chunks in `places`."""

    file: str
    low: int
    high: int
    places: Sequence[Place]


def _windows(places: Sequence[Place], near_bytes: int) -> Iterator[_Window]:
    group: list[Place] = []
    low = high = 0
    for place in places:
        extent = place[1].extent
        end = extent.offset + min(HEAD_BYTES, extent.length)
        # A head joins the window before it if the gap is small and the window does not get too large.
        near = (
            group and extent.file == group[0][1].extent.file and extent.offset <= high + near_bytes and end - low <= WINDOW_BYTES
        )
        if group and not near:
            yield _Window(group[0][1].extent.file, low, high, group)
            group = []
        if not group:
            low = high = extent.offset
        group.append(place)
        high = max(high, end)
    if group:
        yield _Window(group[0][1].extent.file, low, high, group)


def _read_windows(storage: Storage, places: Sequence[Place]) -> Iterator[tuple[_Window, memoryview]]:
    """Yield each window of heads with its bytes, in order of file and offset. Threads read some batches ahead."""

    def read(batch: Sequence[_Window]) -> list[memoryview]:
        buffers = [memoryview(bytearray(window.high - window.low)) for window in batch]
        storage.read_ranges([(window.file, window.low, [buffer]) for window, buffer in zip(batch, buffers, strict=True)])
        return buffers

    windows = _windows(places, storage.hints.near_bytes)
    threads = min(MAX_THREADS, 2 * (os.cpu_count() or 1))
    under_way: deque[tuple[list[_Window], Future[list[memoryview]]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="reshard-ckpt-heads") as pool:
        while True:
            while len(under_way) < 2 * threads and (batch := list(islice(windows, BATCH))):
                under_way.append((batch, pool.submit(read, batch)))
            if not under_way:
                return
            batch, buffers = under_way.popleft()
            yield from zip(batch, buffers.result(), strict=True)


class ChunkPlaces:
    """The parts of each tensor, found from the heads of its chunks, and the errors of tensors that cannot be read.

    Call `check` for all chunks, then `add` for those of readable tensors.
    """

    def __init__(self, builder: CatalogBuilder, storage: Storage, tensors: Mapping[str, SavedTensor]) -> None:
        self.parts: dict[str, list[Part]] = {fqn: [] for fqn in tensors}
        self.unreadable: dict[str, CheckpointError] = {}
        self._builder, self._storage, self._tensors = builder, storage, tensors
        self._files: dict[str, int] = {}
        self._sizes, self._budget = FileSizes(storage), FileBudget()
        self._heads = HeadParser()
        self._safetensors: dict[tuple[str, int], dict[str, TensorLayout]] = {}

    def check(self, fqn: str, extent: Extent) -> None:
        """Check that the bytes of one chunk can be read, and add its file to the catalog; else note the error of its tensor."""
        if fqn in self.unreadable:
            return
        if (why := self._sizes.problem(fqn, extent)) is not None:
            self.unreadable[fqn] = why
        elif (file := extent.file) not in self._files:
            writer = _OF_RANK.search(file)
            self._files[file] = self._builder.file(file, self._sizes[file] or 0, int(writer[1]) if writer else 0)

    def add(self, fqn: str, chunk: Chunk, data: memoryview) -> None:
        """Parse the head of one chunk, and add its parts to its tensor; if that fails, note the tensor's error.

        `data` are the first bytes of the chunk; they are ignored if the head is in the metadata.
        """
        if fqn in self.unreadable:
            return
        name = f"{self._storage.url}: {fqn}"
        try:
            head = self._layout(fqn, chunk, data, name)
            if head.dtype != self._tensors[fqn].dtype or head.shape != chunk.lengths:
                raise CorruptError(
                    f"{name}: .metadata has {self._tensors[fqn].dtype} of size {chunk.lengths} at {chunk.offsets}, and its file "
                    f"{head.dtype} of size {head.shape}; torch saved it wrongly, so use another checkpoint"
                )
            key, run, each = chunk.extent.file, chunk.run, head.dtype.itemsize
            self._budget.spend(key, self._sizes[key] or 0, chunk.num_elements * each, name)
            file, base = self._files[key], chunk.extent.offset + head.at
            if run is None:
                self.parts[fqn] += parts_of_box(chunk.offsets, chunk.lengths, head.strides, file, base, each, name)
            elif head.is_row_major:
                self.parts[fqn].append(Part(run.offsets, run.lengths, file, base + run.skip * each, run.start, run.count))
            else:
                raise CorruptError(f"{name}: its flat chunk has strides {head.strides}; use another checkpoint")
        except CheckpointError as error:
            self.unreadable[fqn] = error

    def _layout(self, fqn: str, chunk: Chunk, data: memoryview, name: str) -> TensorLayout:
        """Find where the elements of a chunk lie in its bytes, from the head in the metadata or in the file."""
        extent = chunk.extent
        if chunk.head:
            layout = self._heads.parse_alone(chunk.head, name=name)
        elif chunk.head is not None:
            layout = raw_layout(self._tensors[fqn].dtype, chunk.lengths)
        elif bytes(data[:4]) == ZIP_MAGIC:
            layout = self._zip_head(extent, data, name)
        else:
            return self._safetensors_layout(fqn, extent, name)  # its file may hold other chunks, too
        if layout.end > extent.length:
            raise CorruptError(f"{name}: its chunk in {extent.file} ends before its data do; use another checkpoint")
        return layout

    def _zip_head(self, extent: Extent, data: memoryview, name: str) -> TensorLayout:
        try:
            return self._heads.parse(data, name=name)
        except HeadTooShort:
            longer = read_range(self._storage, extent.file, extent.offset, min(LONG_HEAD_BYTES, extent.length))
        try:
            return self._heads.parse(longer, name=name)
        except HeadTooShort:
            raise CorruptError(f"{name}: its chunk in {extent.file} has no tensor; use another checkpoint") from None

    def _safetensors_layout(self, fqn: str, extent: Extent, name: str) -> TensorLayout:
        """Return the layout of a tensor that DCP wrote with its option for safetensors.

        All chunks of such a file begin at the file's one header, so `extent` begins there. The header lists a name
        only once: of several chunks of a tensor in one file, torch writes only the last.
        """
        place = extent.file, extent.offset
        if place not in self._safetensors:
            self._safetensors[place] = self._read_safetensors(extent, name)
        try:
            return self._safetensors[place].pop(fqn)
        except KeyError:
            raise CorruptError(
                f"{name}: .metadata has a part of it in {extent.file} that the safetensors header there lacks; use another "
                "checkpoint"
            ) from None

    def _read_safetensors(self, extent: Extent, name: str) -> dict[str, TensorLayout]:
        size = (self._storage.size(extent.file) or 0) - extent.offset
        wanted = 8 + int.from_bytes(read_range(self._storage, extent.file, extent.offset, min(8, size)), "little")
        if wanted > min(size, MAX_SAFETENSORS_HEADER):
            raise CorruptError(
                f"{name}: its chunk in {extent.file} is neither a zip of torch.save nor safetensors; use another copy"
            )
        header = parse_header(read_range(self._storage, extent.file, extent.offset, wanted), name=name)
        placed = zip(header.members, header.offsets, strict=True)
        layouts = {tensor.name: raw_layout(TORCH_DTYPES[tensor.dtype], tensor.shape, at) for tensor, at in placed}
        if max((layout.end for layout in layouts.values()), default=0) > size:
            raise CorruptError(f"{name}: {extent.file} is shorter than its safetensors header says; use another checkpoint")
        return layouts
