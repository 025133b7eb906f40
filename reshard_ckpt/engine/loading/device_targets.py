"""Placing what is read into the memory of devices: through pinned buffers, by copies that are queued.

1. Each reading thread reads into two pinned buffers by turns: while one is copied, the next is read.
2. A window that goes into its target as it lies in the file is copied there; any other crosses the link as a whole, and is
   unpacked on the device: scattered, and cast.
3. All of that comes after what the streams of the thread that loads have queued, and is there when `finish` returns.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...core.catalog.specs import Ints, is_row_major
from ..common.copy_streams import SMALL_BYTES, CopyStreams, DeviceStreams, Mark
from ..common.host_memory import allocate
from ..common.tensor_bytes import region


class DevicePart(NamedTuple):
    """A part of a window that goes to a device.

    Attributes
    ----------
    target, base, strides
        The tensor, and where in it the part goes: the first element, counted from the tensor's own, and the strides.
    dtype, offset, lengths, src_strides
        What lies in the window, from this byte on; `src_strides` are bytes.
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
        """The byte of the window after the last one."""
        last = sum((length - 1) * stride for length, stride in zip(self.lengths, self.src_strides, strict=True))
        return self.offset + last + self.dtype.itemsize

    @property
    def goes_as_it_is(self) -> bool:
        """Whether one copy over the link puts it in place."""
        in_order = is_row_major(self.lengths, self.source_strides) and is_row_major(self.lengths, self.strides)
        return in_order and self.dtype == self.target.dtype and self.end - self.offset >= SMALL_BYTES

    def take_from(self, window: torch.Tensor, *, non_blocking: bool) -> None:
        """Copy it from the bytes of the window, on the host or on the device."""
        first = (window.storage_offset() + self.offset) // self.dtype.itemsize
        source = torch.as_strided(window.view(self.dtype), self.lengths, self.source_strides, first)
        region(self.target, self.base, self.lengths, self.strides).copy_(source, non_blocking=non_blocking)


class _Slot:
    """One pinned buffer of a thread, with its counterparts on devices, and the marks after which it is free."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.scratch: dict[torch.device, torch.Tensor] = {}
        self.marks: list[Mark] = []

    def reserve(self, num_bytes: int) -> None:
        """Wait until it is free, and make it large enough."""
        for mark in self.marks:
            mark.synchronize()
        if self.memory.numel() < num_bytes:
            self.memory, self.scratch = allocate(num_bytes, pinned=True), {}

    def on(self, streams: DeviceStreams) -> torch.Tensor:
        """Return the counterpart on a device."""
        if streams.device not in self.scratch:
            self.scratch[streams.device] = torch.empty(self.memory.numel(), dtype=torch.uint8, device=streams.device)
        return self.scratch[streams.device]


class DeviceTargets:
    """The devices that a load fills; to be made in the thread that loads, and used in any.

    Memory that a device may still copy from is kept until `finish`, whoever ends before.
    """

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        self._copy_streams = CopyStreams(targets)
        self._local = threading.local()
        self._slots: list[_Slot] = []

    def __bool__(self) -> bool:
        return bool(self._copy_streams)

    def has(self, target: torch.Tensor) -> bool:
        """Tell whether a tensor is filled by queued copies."""
        return target.device in self._copy_streams.by_device

    def buffer(self, num_bytes: int) -> memoryview:
        """Return memory of this thread to read a window into."""
        slots = getattr(self._local, "slots", None)
        if slots is None:
            slots = self._local.slots = [_Slot(), _Slot()]
            self._slots += slots
        slots.reverse()
        with self._copy_streams.entered():  # as it may allocate for the device that is current
            slots[0].reserve(num_bytes)
        view: memoryview = slots[0].memory.numpy().data
        return view

    def place(self, parts: Sequence[DevicePart]) -> None:
        """Queue the copies of parts of the window that was read into this thread's buffer."""
        slot: _Slot = self._local.slots[0]
        with self._copy_streams.entered():
            for streams in self._copy_streams:
                of_device = [part for part in parts if part.target.device == streams.device]
                aligned = [part for part in of_device if part.offset % part.dtype.itemsize == 0]
                if len(aligned) < len(of_device):
                    self._place_unaligned([part for part in of_device if part.offset % part.dtype.itemsize])
                if all(part.goes_as_it_is for part in aligned):
                    for part in aligned:
                        part.take_from(slot.memory, non_blocking=True)
                else:
                    used = slice(min(part.offset for part in aligned), max(part.end for part in aligned))
                    slot.on(streams)[used].copy_(slot.memory[used], non_blocking=True)
                    for part in aligned:
                        part.take_from(slot.on(streams), non_blocking=True)
            slot.marks = self._copy_streams.record()

    def _place_unaligned(self, parts: Sequence[DevicePart]) -> None:
        """Copy what a foreign file has not aligned, one by one."""
        memory = self._local.slots[0].memory
        for part in parts:
            moved = memory[part.offset : part.end].clone()
            part._replace(offset=0).take_from(moved, non_blocking=False)

    def finish(self) -> None:
        """Wait until all is in place; to be called when no thread reads any more, also after a failure."""
        self._copy_streams.synchronize()
        self._slots.clear()
