"""Staging: a ring of host memory that holds the images of this rank's files, where training cannot change them.

An *image* is the bytes of one file as it will be written: header and items.

1. The images of all files lie end to end in one address space; the item at address ``a`` is kept at ``a`` modulo the ring's size.
2. One thread *fills*: it copies items into the ring, and waits while the ring is full of bytes not yet written. From a device it
   only queues copies. Every so often it closes a *batch*: it records marks on the device's streams, and once they have passed,
   all bytes before the batch's end are in the ring. To *settle* a batch is to wait for its marks. Batches settle in order.
3. Another thread *drains*: it writes settled bytes, front to back, and so makes room.

A ring as large as all images never waits, and may be filled in any order. A smaller one (``host_buffer_bytes``) streams: it is
filled in order.

Small items on a device, and items whose elements are not in order, are gathered in scratch memory on the device (a *pack*), and
copied to the host together. If a small item of the host lies between two of them, the copy of the pack overwrites its place in
the ring; so that item is put there *late*, after the copy.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from ...core.catalog.specs import box_piece, row_major_strides
from ..common.tensor_bytes import (
    PACK_BYTES,
    SMALL_BYTES,
    CopyStreams,
    DeviceStreams,
    LocalPiece,
    LocalRun,
    Mark,
    Scratch,
    copy_run,
    empty_bytes,
    is_in_order,
)
from .local_shards import LocalShards
from .messages import Assignment, RunColumns
from .write import WRITE_BYTES, FileLayout, member_offsets

STEP_BYTES = 4 << 20
"""Bytes of one copy into a ring that is smaller than the files; a multiple of every element size."""

BATCH_BYTES = 256 << 20
"""Bytes in one batch of copies if the ring holds all images. Writing begins after the first batch, not after the last."""

MIN_RING_BYTES = 16 << 20
"""Size in bytes of the smallest ring that is filled and written at the same time."""


class _Batch(NamedTuple):
    """A batch of queued copies. The ring has all bytes up to the address `end` once `marks` have passed and `late` is put in.

    `late` lists addresses and bytes of host items whose places a pack overwrites.
    """

    end: int
    marks: Sequence[Mark]
    late: Sequence[tuple[int, torch.Tensor]]


@dataclass(slots=True)
class _Pack:
    """A pack: consecutive items, at addresses ``[begin, end)``, that are gathered on a device and copied to the host together.

    Further items fit up to the address `limit`. Address `origin` is byte 0 of `scratch`, the memory on the device.
    """

    streams: DeviceStreams
    scratch: torch.Tensor
    origin: int
    begin: int
    end: int
    limit: int


class Staging:
    """The images of one rank's files while they go from the state to the store.

    Make it in the thread that trains: copies from a device run after the work that its current streams have queued by then.
    """

    def __init__(
        self, local_shards: LocalShards, assignment: Assignment, layouts: Sequence[FileLayout], ring: torch.Tensor
    ) -> None:
        self._layouts, self._ring = layouts, ring
        self._columns, self._items = assignment.items, local_shards.runs(assignment.items)
        self._capacity = ring.numel() // STEP_BYTES * STEP_BYTES
        self._changed = threading.Condition()
        self._filled = 0
        self._written = 0
        self._finished = False
        self._error: BaseException | None = None
        # _filled: all bytes before this address are in the ring. _written: all before this one are in the store.
        *self._begin, self.num_bytes = image_addresses(layouts)
        # _item_at[i]: address of write item i
        self._item_at = [
            at + offset for layout, at in zip(layouts, self._begin, strict=True) for offset in member_offsets(layout).tolist()
        ]
        self.tensors = [local.tensor for _, local in local_shards.rows]
        """The tensors of all rows, also of rows that other ranks write."""
        self.copy_streams = CopyStreams(self.tensors)
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
        """Whether the ring has room for all images, so that filling it never waits."""
        return self._capacity >= self.num_bytes

    @property
    def is_under_way(self) -> bool:
        """Whether some queued copies into the ring may still be running."""
        return any(batch.marks for batch in self._batches)

    def fill(self, chosen: Callable[[torch.Tensor], bool], *, last: bool = True) -> int:
        """Put the headers and the items of chosen tensors into the ring, in the order of the files.

        When this returns, items of the host are in the ring, and items of a device are there or queued. A ring that streams must
        be filled by one call for all tensors. An error of the draining thread is raised here.

        Parameters
        ----------
        chosen
            Tells whether a tensor's items are copied by this call.
        last
            After this call all tensors have been copied. If False, more calls follow, and this one waits for its queued copies.

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
                        self._send()  # end the pack: its copy would overwrite this item's place in the ring
                        continue
                    if last and self._item_at[item] - self._batched >= self._batch_bytes:
                        self._close_batch(self._item_at[item])
                    num_bytes += self._put_item(item)
            self._close_batch(self.num_bytes if last else 0)
        if not last:
            self.settle()
        return num_bytes

    def copied_runs(self, chosen: Callable[[torch.Tensor], bool]) -> tuple[list[LocalRun], list[LocalRun]]:
        """Return two lists of runs for chosen tensors: each item in the tensor's own memory, and its copy in the ring.

        The ring must hold all images.
        """
        items = [(run, at) for run, at in zip(self._items, self._item_at, strict=True) if chosen(run.local.tensor)]
        whole = LocalPiece(self._ring, box_piece((0,), (self._ring.numel(),), 0, (1,)))
        return [run for run, _ in items], [LocalRun(whole, at, run.num_bytes) for run, at in items]

    def copied_items(self, local_shards: LocalShards) -> tuple[LocalShards, RunColumns]:
        """Return local shards whose memory is the ring, and items for them: each copied item is a row of its own.

        The ring must be large enough for all of this rank's files at once.
        """
        rows = []
        for (row, _, _), run, at in zip(self._columns.rows(), self._items, self._item_at, strict=True):
            memory = self._ring[at : at + run.num_bytes].view(run.local.tensor.dtype)
            piece = run.local.piece
            copied = replace(piece, base=-run.start, strides=row_major_strides(piece.lengths))
            rows.append((local_shards.rows[row][0], LocalPiece(memory, copied)))
        items = RunColumns(np.arange(len(rows)), self._columns.start, self._columns.count)
        return replace(local_shards, rows=rows), items

    def settle(self) -> None:
        """Wait until all copies queued on devices have ended, and their bytes are in the ring."""
        while self._batches:
            self._settle_one()

    def finish(self) -> None:
        """Settle all batches (wait for their copies), and let the draining thread write to the end.

        The filling thread calls it last.
        """
        self.settle()
        with self._changed:
            self._filled, self._finished = self.num_bytes, True
            self._changed.notify_all()

    def close(self) -> None:
        """Free the scratch memory on devices. After a failed save, first wait for queued copies, which write to the ring."""
        if self._batches:
            with self.copy_streams.entered():
                self.copy_streams.synchronize()
        self._scratch.clear()

    def wait_finished(self) -> None:
        """Wait until the filling thread has called `finish`, or raise its error."""
        self._wait(lambda: self._finished)

    def refuse_failed(self) -> None:
        """Raise the error of `fail`, if it was called."""
        self._wait(lambda: True)

    def fail(self, error: BaseException) -> None:
        """Record an error of one thread, and wake the other thread, which raises it."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def drain(self, layout: FileLayout) -> Iterator[memoryview]:
        """Yield the bytes of one file image in chunks, as soon as their copies are settled. Call it for the files in order.

        A chunk is a view of the ring, valid until the next chunk is asked for.
        """
        at = self._begin[self._layouts.index(layout)]
        end = at + layout.num_bytes
        self._advance(written=at)  # the padding between two images is not drained, and must not take up room
        view = self._ring.numpy().data
        while at < end:
            self._wait(lambda: self._filled > at)  # noqa: B023
            place = at % self._capacity
            size = min(self._filled - at, end - at, WRITE_BYTES, self._capacity - place)
            yield view[place : place + size]
            at += size
            self._advance(written=at)

    def _scratch_of(self, streams: DeviceStreams) -> Scratch:
        if streams.device not in self._scratch:
            self._scratch[streams.device] = Scratch(streams)
        return self._scratch[streams.device]

    def _put_item(self, item: int) -> int:
        """Copy one item into the ring, or queue the copy, and return its size in bytes.

        Small or non-contiguous items of a device go through a pack. A small host item may lie inside an open pack: its bytes are
        kept, and put in their place after the pack, which would overwrite them.
        """
        run, at = self._items[item], self._item_at[item]
        local, num_bytes = run.local, run.num_bytes
        # None for an item of the host, and for all items if the ring is not pinned.
        streams = self.copy_streams.by_device.get(local.tensor.device) if self._non_blocking else None
        if streams is not None and (num_bytes < SMALL_BYTES or not is_in_order(local.piece)):
            self._pack_run(streams, run, at)
        elif streams is None and self._pack is not None and at + num_bytes <= self._pack.limit and num_bytes < SMALL_BYTES:
            # A host item inside an open pack: the pack goes on over its place, and its bytes are put there late.
            self._pack.end = at + num_bytes
            copied = empty_bytes(num_bytes)
            copy_run(*run, copied)
            self._late.append((at, copied))
        else:
            self._put_run(run, at)
        return num_bytes

    def _put_run(self, run: LocalRun, at: int) -> None:
        """Copy a run straight into the ring, in parts of at most one step that do not wrap around the ring's end."""
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
        """Copy a run of a device into the open pack. Begin a new pack when it is full, or belongs to another device."""
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
        origin = at - place % 64  # the scratch begins at a multiple of 64 too, so elements are aligned alike in both
        limit = min(origin + min(PACK_BYTES, STEP_BYTES), at - place + self._capacity)
        return _Pack(streams, self._scratch_of(streams).begin(), origin, at, at, limit)

    def _send(self) -> None:
        """Queue the copy of the open pack into the ring, and close the pack. If there is no open pack, do nothing."""
        pack, self._pack = self._pack, None
        if pack is None:
            return
        late, self._late = self._late, []  # they must come after this pack, but `_reserve` may close a batch before it
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
        """Wait until the ring has room for `size` bytes at the address `at`. All bytes before it have been queued by then.

        A ring that holds all images always has room.
        """
        if self.holds_all:
            return
        self._close_batch(at)
        # One batch may be under way while the next is queued. But without room it is settled here: the writer may be waiting for
        # just that batch, and only this thread settles it.
        while self._batches and not (self._batches[0].marks and len(self._batches) == 1 and self._has_room(at + size)):
            self._settle_one()
        self._wait(lambda: self._has_room(at + size))

    def _has_room(self, end: int) -> bool:
        return end <= self._written + self._capacity

    def _close_batch(self, end: int) -> None:
        """Close the batch of all copies queued so far. Once it is settled, the ring has all bytes up to address `end`."""
        self._send()
        # Without queued copies, a mark would only wait for the training job's own work.
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
    """Return the size in bytes of a ring that holds the images of some files, rounded up to `STEP_BYTES`."""
    return -(-image_addresses(layouts)[-1] // STEP_BYTES) * STEP_BYTES


def image_addresses(layouts: Sequence[FileLayout]) -> list[int]:
    """Return the address at which each file's image begins, a multiple of 64, and at last the end of the last image."""
    addresses, end = [], 0
    for layout in layouts:
        begin = -(-end // 64) * 64
        addresses.append(begin)
        end = begin + layout.num_bytes
    return [*addresses, end]
