"""Staging: a ring of host memory that holds the images of this rank's files, where training cannot change them.

1. The images of all files lie end to end in one address space; the item at address ``a`` is kept at ``a`` modulo the ring's size.
2. One thread *fills*: it copies items, and waits where the ring is full of bytes not yet written. From a device it only queues
   copies, and closes a *batch* every so often: marks, after which all before an address is there. It settles batches in turn.
3. Another *drains*: it writes what is settled, front to back, and so makes room.

A ring as large as the images never waits, and may be filled in any order; a smaller one (``host_buffer_bytes``) streams.

On a device small items, and those that are not in order, are packed into scratch memory, which goes over the link at once. A
small item of the host between two of them is put into the ring later, as the copy of the whole pack passes over its place.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ...core.catalog.specs import box_piece
from ..common.copy_streams import PACK_BYTES, SMALL_BYTES, CopyStreams, DeviceStreams, Mark, Scratch
from ..common.tensor_bytes import LocalPiece, LocalRun, copy_run, is_in_order
from .local_shards import LocalShards
from .messages import Assignment
from .write import WRITE_BYTES, FileLayout, member_offsets

STEP_BYTES = 4 << 20
"""Bytes copied at once into a ring that streams; a multiple of every element size."""

BATCH_BYTES = 256 << 20
"""Bytes queued between two events where the ring never waits, so that writing begins long before all is copied."""

MIN_RING_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Batch:
    """Copies that are queued: once the marks have passed, and `late` is put, the images are whole up to an address."""

    end: int
    marks: Sequence[Mark]
    late: Sequence[tuple[int, torch.Tensor]]


@dataclass(slots=True)
class _Pack:
    """Consecutive items that are gathered on a device: their addresses, and where the address `origin` is in the scratch."""

    streams: DeviceStreams
    scratch: torch.Tensor
    origin: int
    begin: int
    end: int
    limit: int


class Staging:
    """The images of one rank's files while they go from the state to the store.

    To be made in the thread that trains: copies from a device come after what its current streams have queued then.
    """

    def __init__(
        self, local_shards: LocalShards, assignment: Assignment, layouts: Sequence[FileLayout], ring: torch.Tensor
    ) -> None:
        self._layouts, self._ring = layouts, ring
        self._items = local_shards.runs(assignment.items)
        self._capacity = ring.numel() // STEP_BYTES * STEP_BYTES
        self._changed = threading.Condition()
        self._filled = 0
        self._written = 0
        self._finished = False
        self._error: BaseException | None = None
        *self._begin, self.num_bytes = image_addresses(layouts)
        self._item_at = [
            at + offset for layout, at in zip(layouts, self._begin, strict=True) for offset in member_offsets(layout).tolist()
        ]
        self.copy_streams = CopyStreams(local.tensor for _, local in local_shards.rows)
        # Copies are fastest in few large pieces; a ring that streams must hand over small ones.
        self._step = self._capacity if self.holds_all else STEP_BYTES
        self._batch_bytes = BATCH_BYTES if self.holds_all else STEP_BYTES
        self._non_blocking = bool(self.copy_streams) and ring.is_pinned()
        self._scratch: dict[torch.device, Scratch] = {}
        self._pack: _Pack | None = None
        self._late: list[tuple[int, torch.Tensor]] = []
        self._batches: deque[_Batch] = deque()
        self._batched = 0
        self._queues = False

    @property
    def holds_all(self) -> bool:
        """Whether the ring never has to wait."""
        return self._capacity >= self.num_bytes

    @property
    def is_under_way(self) -> bool:
        """Whether copies are queued that may not have ended."""
        return any(batch.marks for batch in self._batches)

    def fill(self, chosen: Callable[[torch.Tensor], bool], *, last: bool = True) -> int:
        """Put headers, and the items of chosen tensors, into the ring, in the order of the files.

        Once this returns they are there, or queued, where they lie on a device. All at once, unless the ring holds all.
        Raises whatever stopped the draining thread.

        Parameters
        ----------
        last
            With this all have been chosen. Else what was queued is there, too, when this returns.

        Returns
        -------
        int
            The bytes copied, without the headers.
        """
        num_bytes = 0
        with self.copy_streams.entered():
            for layout, begin in zip(self._layouts, self._begin, strict=True):
                self._put_bytes(begin, layout.header)
                for item in range(layout.items.start, layout.items.stop):
                    if not chosen(self._items[item].local.tensor):
                        self._send()  # a pack passes over all that lies in it
                        continue
                    if last and self._item_at[item] - self._batched >= self._batch_bytes:
                        self._close_batch(self._item_at[item])
                    num_bytes += self._put_item(item)
            self._close_batch(self.num_bytes if last else 0)
        if not last:
            self.settle()
        return num_bytes

    def copied_runs(self, chosen: Callable[[torch.Tensor], bool]) -> tuple[list[LocalRun], list[LocalRun]]:
        """Return the items of chosen tensors, and where the copy of each lies in a ring that holds all."""
        items = [(run, at) for run, at in zip(self._items, self._item_at, strict=True) if chosen(run.local.tensor)]
        whole = LocalPiece(self._ring, box_piece((0,), (self._ring.numel(),), 0, (1,)))
        return [run for run, _ in items], [LocalRun(whole, at, run.num_bytes) for run, at in items]

    def settle(self) -> None:
        """Wait until all that is queued is there."""
        while self._batches:
            self._settle_one()

    def finish(self) -> None:
        """Settle, and let the rest be drained."""
        self.settle()
        with self._changed:
            self._filled, self._finished = self.num_bytes, True
            self._changed.notify_all()

    def close(self) -> None:
        """Give scratch memory back; where the save failed, first wait for copies that nobody waits for, into the ring too."""
        if self._batches:
            with self.copy_streams.entered():
                self.copy_streams.synchronize()
        self._scratch.clear()

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

    def _scratch_of(self, streams: DeviceStreams) -> Scratch:
        if streams.device not in self._scratch:
            self._scratch[streams.device] = Scratch(streams)
        return self._scratch[streams.device]

    def _put_item(self, item: int) -> int:
        run, at = self._items[item], self._item_at[item]
        local, num_bytes = run.local, run.num_bytes
        streams = self.copy_streams.by_device.get(local.tensor.device) if self._non_blocking else None
        if streams is not None and (num_bytes < SMALL_BYTES or not is_in_order(local.piece)):
            self._pack_run(streams, run, at)
        elif streams is None and self._pack is not None and at + num_bytes <= self._pack.limit and num_bytes < SMALL_BYTES:
            self._pack.end = at + num_bytes
            copied = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            copy_run(*run, copied)
            self._late.append((at, copied))
        else:
            self._put_run(run, at)
        return num_bytes

    def _put_run(self, run: LocalRun, at: int) -> None:
        self._send()
        local, start, count = run
        each = local.tensor.element_size()
        while count:
            place = at % self._capacity
            num = min(count, self._step // each, (self._capacity - place) // each)
            self._reserve(at, num * each)
            copy_run(local, start, num, self._ring[place : place + num * each], non_blocking=self._non_blocking)
            self._queues |= local.tensor.device in self.copy_streams.by_device
            start, count, at = start + num, count - num, at + num * each

    def _pack_run(self, streams: DeviceStreams, run: LocalRun, at: int) -> None:
        local, start, count = run
        each = local.tensor.element_size()
        while count:
            pack = self._pack
            if pack is None or pack.streams is not streams or pack.limit - at < each:
                self._send()
                pack = self._pack = self._begin_pack(streams, at)
            num = min(count, (pack.limit - at) // each)
            low = at - pack.origin
            copy_run(local, start, num, pack.scratch[low : low + num * each])
            start, count, at = start + num, count - num, at + num * each
            pack.end = at

    def _begin_pack(self, streams: DeviceStreams, at: int) -> _Pack:
        place = at % self._capacity
        origin = at - place % 64  # aligned there as it is here
        limit = min(origin + min(PACK_BYTES, STEP_BYTES), at - place + self._capacity)
        return _Pack(streams, self._scratch_of(streams).begin(), origin, at, at, limit)

    def _send(self) -> None:
        """Queue the copy of what is packed, if anything is."""
        pack, self._pack = self._pack, None
        if pack is None:
            return
        late, self._late = self._late, []  # not before this pack
        self._reserve(pack.begin, pack.end - pack.begin)
        place = pack.begin % self._capacity
        part = slice(pack.begin - pack.origin, pack.end - pack.origin)
        self._scratch_of(pack.streams).send(part, self._ring[place : place + pack.end - pack.begin])
        self._queues = True
        self._late += late

    def _put_bytes(self, at: int, data: bytes) -> None:
        self._send()
        while data:
            place = at % self._capacity
            size = min(len(data), self._capacity - place, STEP_BYTES)
            self._reserve(at, size)
            self._ring[place : place + size] = torch.frombuffer(bytearray(data[:size]), dtype=torch.uint8)
            data, at = data[size:], at + size

    def _reserve(self, at: int, size: int) -> None:
        """Wait for room; where the ring streams, what lies before is queued, since it fills in order."""
        if self.holds_all:
            return
        self._close_batch(at)
        # One batch may be under way while the next is queued, but one that the writer waits for must be settled.
        while self._batches and not (self._batches[0].marks and len(self._batches) == 1 and self._has_room(at + size)):
            self._settle_one()
        self._wait(lambda: self._has_room(at + size))

    def _has_room(self, end: int) -> bool:
        return end <= self._written + self._capacity

    def _close_batch(self, end: int) -> None:
        """Mark all that is queued so far; after that the images are whole up to `end`."""
        self._send()
        # Where nothing was queued, a mark would only wait for the work of the job.
        marks = self.copy_streams.record() if self._queues else ()
        self._queues = False
        late, self._late = self._late, []
        self._batches.append(_Batch(end, marks, late))
        self._batched = end

    def _settle_one(self) -> None:
        batch = self._batches.popleft()
        for mark in batch.marks:
            mark.synchronize()
        for at, data in batch.late:
            place = at % self._capacity
            self._ring[place : place + data.numel()] = data
        self._advance(filled=batch.end)

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


def ring_bytes(layouts: Sequence[FileLayout]) -> int:
    """The size of a ring that holds these files whole."""
    return -(-image_addresses(layouts)[-1] // STEP_BYTES) * STEP_BYTES


def image_addresses(layouts: Sequence[FileLayout]) -> list[int]:
    """Where the image of each file begins in a ring that holds all, aligned for every element; and where the last one ends."""
    addresses, end = [], 0
    for layout in layouts:
        begin = -(-end // 64) * 64
        addresses.append(begin)
        end = begin + layout.num_bytes
    return [*addresses, end]
