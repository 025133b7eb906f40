"""Putting file bytes into tensors on devices such as GPUs: through pinned host buffers, by copies queued on streams.

1. Each reading thread has two pinned buffers and uses them in turn: while one is copied to the device, it reads into the other.
2. If all parts of a window have the layout and dtype of their targets, each is copied straight into its target. Else the window's
   bytes are copied to the device together, and scattered and cast there.
3. The copies run after the work that the streams of the loading thread have queued. They are done when `finish` returns.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...core.catalog.specs import Ints, is_row_major
from ..common.host_memory import allocate
from ..common.tensor_bytes import SMALL_BYTES, CopyStreams, DeviceStreams, Mark, empty_bytes, region


class DevicePart(NamedTuple):
    """A part of a window of file bytes, and the place in a tensor on a device that it fills.

    Attributes
    ----------
    target, base, strides
        The tensor to fill, and the place of the part in it: its first element, counted from the tensor's first, and its strides
        in elements.
    dtype, offset, lengths, src_strides
        The part in the window: its dtype, its first byte, its lengths, and its strides in bytes.
    """

    target: torch.Tensor
    base: int
    strides: Ints
    dtype: torch.dtype
    offset: int
    lengths: Ints
    src_strides: Ints

    @property
    def source_strides(self) -> Ints:
        return tuple(stride // self.dtype.itemsize for stride in self.src_strides)

    @property
    def end(self) -> int:
        """The byte offset in the window at which the part ends."""
        last = sum((length - 1) * stride for length, stride in zip(self.lengths, self.src_strides, strict=True))
        return self.offset + last + self.dtype.itemsize

    @property
    def goes_as_it_is(self) -> bool:
        """Whether one copy can move the part from host to target: it has the target's layout and dtype, and is not too small."""
        in_order = is_row_major(self.lengths, self.source_strides) and is_row_major(self.lengths, self.strides)
        return in_order and self.dtype == self.target.dtype and self.end - self.offset >= SMALL_BYTES

    def take_from(self, window: torch.Tensor, *, non_blocking: bool) -> None:
        """Copy the part into its target tensor, from the bytes of the whole window on the host or on the device."""
        first = (window.storage_offset() + self.offset) // self.dtype.itemsize
        source = torch.as_strided(window.view(self.dtype), self.lengths, self.source_strides, first)
        region(self.target, self.base, self.lengths, self.strides).copy_(source, non_blocking=non_blocking)


class _Slot:
    """One pinned host buffer of a reading thread, its scratch buffer on each device, and the marks of the copies from it.

    The buffer is free once the devices have passed all `marks`.
    """

    def __init__(self) -> None:
        self.memory = empty_bytes(0)
        self.scratch: dict[torch.device, torch.Tensor] = {}
        self.marks: list[Mark] = []

    def reserve(self, num_bytes: int) -> None:
        """Wait until no device copies from the pinned buffer, and make it at least `num_bytes` large."""
        for mark in self.marks:
            mark.synchronize()
        if self.memory.numel() < num_bytes:
            self.memory, self.scratch = allocate(num_bytes, pinned=True), {}

    def scratch_on(self, streams: DeviceStreams) -> torch.Tensor:
        """Return the scratch buffer on a device; it is as large as the pinned buffer."""
        if streams.device not in self.scratch:
            self.scratch[streams.device] = empty_bytes(self.memory.numel(), streams.device)
        return self.scratch[streams.device]


class DeviceTargets:
    """Copies windows of file bytes into the tensors of a load that lie on devices.

    Make it in the thread that loads; its methods may be called in any thread. Memory that a device may still copy from is kept
    until `finish`, also when the thread that allocated it ends earlier.
    """

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        self._copy_streams = CopyStreams(targets)
        self._local = threading.local()
        self._slots: list[_Slot] = []

    def has(self, target: torch.Tensor) -> bool:
        """Return whether a tensor lies on a device to which copies are queued on a stream."""
        return target.device in self._copy_streams.by_device

    def buffer(self, num_bytes: int) -> memoryview:
        """Return one of this thread's two pinned buffers, to read a window into; `place` copies from it."""
        slots = getattr(self._local, "slots", None)
        if slots is None:
            slots = self._local.slots = [_Slot(), _Slot()]
            self._slots += slots
        slots.reverse()
        with self._copy_streams.entered():  # pinned memory is allocated for the current device
            slots[0].reserve(num_bytes)
        view: memoryview = slots[0].memory.numpy().data
        return view

    def place(self, parts: Sequence[DevicePart]) -> None:
        """Queue the copies of parts of the window that this thread has read into its buffer."""
        slot: _Slot = self._local.slots[0]
        with self._copy_streams.entered():
            for streams in self._copy_streams:
                # Three ways: unaligned parts one by one, else each part straight into its target, else all bytes of the window
                # to the device and each part from there.
                of_device = [part for part in parts if part.target.device == streams.device]
                aligned = [part for part in of_device if part.offset % part.dtype.itemsize == 0]
                for part in of_device:
                    if part.offset % part.dtype.itemsize:  # in a foreign file; this waits for the copy
                        moved = slot.memory[part.offset : part.end].clone()
                        part._replace(offset=0).take_from(moved, non_blocking=False)
                if all(part.goes_as_it_is for part in aligned):
                    for part in aligned:
                        part.take_from(slot.memory, non_blocking=True)
                else:
                    used = slice(min(part.offset for part in aligned), max(part.end for part in aligned))
                    slot.scratch_on(streams)[used].copy_(slot.memory[used], non_blocking=True)
                    for part in aligned:
                        part.take_from(slot.scratch_on(streams), non_blocking=True)
            slot.marks = self._copy_streams.record()

    def finish(self) -> None:
        """Wait for all queued copies. Call it once no thread reads any more, also after a failure."""
        self._copy_streams.synchronize()
        self._slots.clear()
