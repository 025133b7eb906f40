"""Staging: a ring of host memory that holds the images of this rank's files, where training cannot change them.

1. The images of all files lie end to end in one address space; the item at address ``a`` is kept at ``a`` modulo the ring's size.
2. One thread *fills*: it copies items, and waits where the ring is full of bytes not yet written.
3. Another *drains*: it writes what is filled, front to back, and so makes room.

A ring as large as the images never waits, and may be filled in any order; a smaller one (``host_buffer_bytes``) streams.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from ..common.tensor_bytes import copy_run
from .local_shards import LocalShards
from .messages import Assignment
from .write import WRITE_BYTES, FileLayout

STEP_BYTES = 4 << 20
"""Bytes copied at once into a ring that streams; a multiple of every element size."""

MIN_RING_BYTES = 16 << 20


class Staging:
    """The images of one rank's files while they go from the state to the store."""

    def __init__(
        self, local_shards: LocalShards, assignment: Assignment, layouts: Sequence[FileLayout], ring: torch.Tensor
    ) -> None:
        self._local_shards, self._layouts, self._ring = local_shards, layouts, ring
        columns = (assignment.local, assignment.start, assignment.count)
        self._items = list(zip(*(column.tolist() for column in columns), strict=True))
        self._capacity = ring.numel() // STEP_BYTES * STEP_BYTES
        self._changed = threading.Condition()
        self._filled = 0
        self._written = 0
        self._finished = False
        self._error: BaseException | None = None
        self._begin, self.num_bytes = _addresses(layouts)
        self._item_at = _item_addresses(layouts, self._begin)
        self._streams = _Streams(local.tensor.device for _, local in local_shards.rows)
        # Copies are fastest in few large pieces; a ring that streams must hand over small ones.
        self._step = self._capacity if self.holds_all else STEP_BYTES
        self._non_blocking = bool(self._streams) and ring.is_pinned()

    @property
    def holds_all(self) -> bool:
        """Whether the ring never has to wait."""
        return self._capacity >= self.num_bytes

    def fill(self, chosen: Callable[[int], bool]) -> int:
        """Copy headers, and the items of chosen rows, into the ring, in the order of the files.

        Once this returns they are there, and may change, also those of a device. All rows at once, unless the ring holds all.
        Raises whatever stopped the draining thread.

        Returns
        -------
        int
            The bytes copied, without the headers.
        """
        num_bytes = 0
        with self.copying():
            for layout, begin in zip(self._layouts, self._begin, strict=True):
                self._put_bytes(begin, layout.header)
                for item in range(layout.items.start, layout.items.stop):
                    if chosen(self._items[item][0]):
                        num_bytes += self._put_item(item)
        return num_bytes

    def copying(self) -> AbstractContextManager[None]:
        """What reads the state belongs in this: it comes after what the job's streams had queued when staging began."""
        return self._streams.copying()

    def finish(self) -> None:
        """All is copied: the rest may be drained."""
        with self._changed:
            self._filled, self._finished = self.num_bytes, True
            self._changed.notify_all()

    def wait_finished(self) -> None:
        """Wait for `finish`; raises what stopped the filling thread."""
        self._wait(lambda: self._finished)

    def fail(self, error: BaseException) -> None:
        """Wake the other side with an error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def drain(self, layout: FileLayout) -> Iterator[memoryview]:
        """The bytes of one file as they are filled; files in order. A chunk is valid until the next is asked for."""
        at = self._begin[self._layouts.index(layout)]
        end = at + layout.num_bytes
        self._advance(written=at)  # what lies between two files is nobody's, and must not keep room
        view = self._ring.numpy().data
        while at < end:
            filled = self._wait_filled(at)
            place = at % self._capacity
            size = min(filled - at, end - at, WRITE_BYTES, self._capacity - place)
            yield view[place : place + size]
            at += size
            self._advance(written=at)

    def _put_item(self, item: int) -> int:
        row, start, count = self._items[item]
        local = self._local_shards.rows[row][1]
        each, at = local.tensor.element_size(), self._item_at[item]
        while count:
            place = at % self._capacity
            num = min(count, self._step // each, (self._capacity - place) // each)
            self._reserve(at, num * each)
            copy_run(local, start, num, self._ring[place : place + num * each], non_blocking=self._non_blocking)
            start, count, at = start + num, count - num, at + num * each
        return at - self._item_at[item]

    def _put_bytes(self, at: int, data: bytes) -> None:
        while data:
            place = at % self._capacity
            size = min(len(data), self._capacity - place, STEP_BYTES)
            self._reserve(at, size)
            self._ring[place : place + size] = torch.frombuffer(bytearray(data[:size]), dtype=torch.uint8)
            data, at = data[size:], at + size

    def _reserve(self, at: int, size: int) -> None:
        """Wait for room; where the ring streams, what lies before is complete, since it fills in order."""
        if self.holds_all:
            return
        self._streams.wait()
        self._advance(filled=at)
        self._wait(lambda: at + size <= self._written + self._capacity)

    def _wait_filled(self, at: int) -> int:
        self._wait(lambda: self._filled > at)
        return self._filled

    def _wait(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or ready())
            if self._error is not None:
                raise self._error

    def _advance(self, *, filled: int = 0, written: int = 0) -> None:
        with self._changed:
            self._filled, self._written = max(self._filled, filled), max(self._written, written)
            self._changed.notify_all()


class _Streams:
    """Copies from CUDA run on streams of their own, after what the job's streams have queued by now; the CPU has none.

    To be made in the thread that trains: its current streams are those that have the last step's work. A thread of ours has other
    current streams, which would wait for nothing.
    """

    def __init__(self, devices: Iterator[torch.device]) -> None:
        cuda = {device for device in devices if device.type == "cuda"}
        self._streams = [torch.cuda.Stream(device) for device in cuda]  # type: ignore[no-untyped-call]
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    def __bool__(self) -> bool:
        return bool(self._streams)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Run what is inside on these streams, and wait for it: whoever leaves may change the sources, or reuse the ring."""
        try:
            with ExitStack() as stack:
                for stream in self._streams:
                    stack.enter_context(torch.cuda.stream(stream))
                yield
        finally:
            self.wait()

    def wait(self) -> None:
        """Until all copies are done."""
        for stream in self._streams:
            stream.synchronize()


def ring_bytes(layouts: Sequence[FileLayout]) -> int:
    """The size of a ring that holds these files whole."""
    return -(-_addresses(layouts)[1] // STEP_BYTES) * STEP_BYTES


def image_addresses(layouts: Sequence[FileLayout]) -> list[int]:
    """Where the image of each file begins in a ring that holds all."""
    return _addresses(layouts)[0]


def _addresses(layouts: Sequence[FileLayout]) -> tuple[list[int], int]:
    """Where each file begins, aligned for every element, and where the last one ends."""
    begin, at = [], 0
    for layout in layouts:
        at = -(-at // 64) * 64
        begin.append(at)
        at += layout.num_bytes
    return begin, at


def _item_addresses(layouts: Sequence[FileLayout], begin: Sequence[int]) -> list[int]:
    """Where each item of the assignment lies."""
    out: list[int] = []
    for layout, at in zip(layouts, begin, strict=True):
        at += len(layout.header)
        for member in layout.members:
            out.append(at)
            at += member.num_bytes
    return out
