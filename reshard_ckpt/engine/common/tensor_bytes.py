"""The bytes of local tensors and their pieces, and the streams on which this package copies them.

A piece has a base and strides in memory (see `core.catalog.specs.Piece`), so `torch.as_strided` gives a view of it. If the
strides are the row-major strides of its box, the piece is one slice of the storage, and else it is copied.

Public calls leave torch's inference mode (`public_call`), because tensors that are made in it stay read-only outside.
Otherwise one save in a validation function would leave a staging buffer that no later save can fill, and optimizer state that a
load creates could never be stepped.

Streams, one pair for each device, and their order with the streams of the job:

1. A device has one stream that packs, and one that copies over the link to the host. They are made once and kept: torch caches a
   device's memory by stream, so new streams in each save would strand the memory that earlier saves had cached.
2. `CopyStreams` is made in the thread whose work it follows: all copies come after the work that the thread's current streams
   have queued.
3. Copies are queued inside `CopyStreams.entered`, in any thread.
4. No thread makes a device current that the job does not use, not even the device that is current on entry. With CUDA, each rank
   would make a context of half a gigabyte there, and all ranks on device 0. torch's events do so when they are recorded, waited
   for by a stream, and destroyed. So `Mark` switches devices by guards, which avoid it, and keeps its events.

It serves any accelerator by the type of its device, through `torch.accelerator`, `torch.Stream` and `torch.Event`. The CPU, and
devices for which torch has no streams, need none: their copies have ended when the call returns.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ...comm.group import current_accelerator
from ...core.catalog.specs import Ints, Piece, TensorSpec, box_piece, is_row_major
from .collector import PAUSING


class LocalTensor(NamedTuple):
    """One tensor of this rank: its spec (name, dtype, shape, pieces), and the local memory that holds its pieces.

    The memory may be on any device, with any strides.
    """

    spec: TensorSpec
    memory: torch.Tensor


class LocalPiece(NamedTuple):
    """A piece (a part of a global tensor), and the local tensor whose memory holds it."""

    tensor: torch.Tensor
    piece: Piece


class LocalRun(NamedTuple):
    """Consecutive elements of a local piece: `num_elements` from element `start` of the row-major order of the piece's box.

    All of them lie within the piece's own run of the box.
    """

    local: LocalPiece
    start: int
    num_elements: int

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.local.tensor.element_size()


_VIEW_OF: Any = ctypes.pythonapi.PyMemoryView_FromMemory
_VIEW_OF.restype, _VIEW_OF.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200  # PyBUF_WRITE


def empty_bytes(num_bytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Allocate uninitialized 1-D uint8 memory on a device. It ignores the default device that the job may have set in torch."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def memory_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a CPU tensor's storage from the tensor's first element on; fewer than the tensor's if it was freed.

    The view does not keep the tensor alive; the caller must.

    >>> len(memory_bytes(torch.zeros(10)[4:6]))
    24
    """
    num_bytes = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize
    # By address: by way of a second tensor and of numpy, which would keep the storage, a view takes eight times as long.
    view: memoryview = _VIEW_OF(tensor.data_ptr(), num_bytes if num_bytes > 0 else 0, _WRITABLE)
    return view


def region(tensor: torch.Tensor, base: int, lengths: Ints, strides: Ints) -> torch.Tensor:
    """View memory as ``torch.as_strided`` does, from `base` elements after the tensor's first element on.

    Works in inference mode too.
    """
    first = tensor.storage_offset() + base
    if tensor.is_inference():  # outside inference mode its views are read-only, its storage is not
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage(), first, lengths, strides)
    return torch.as_strided(tensor, lengths, strides, first)


def count_up(tensors: Iterable[torch.Tensor]) -> None:
    """Increase the version counters of tensors that were written without torch, so that autograd notices the change."""
    written = list(tensors)
    try:
        torch.autograd.graph.increment_version(written)
    except (TypeError, RuntimeError):  # this release of torch takes one tensor at a time, and refuses tensors without a version
        for tensor in written:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


RAW = {size: np.dtype(name) for size, name in ((1, "u1"), (2, "i2"), (4, "i4"), (8, "i8"), (16, "c16"))}
"""For each element size in bytes, a numpy dtype with which elements of any dtype are copied as raw bytes."""


def is_in_order(piece: Piece) -> bool:
    """Whether consecutive elements of the piece's box are consecutive in memory."""
    return is_row_major(piece.lengths, piece.strides)


def bytes_in_place(local: LocalPiece, start: int, count: int) -> memoryview | None:
    """View the bytes of `count` elements of a piece's box from element `start` on, without a copy.

    Return None if they lie on a device, or are not consecutive in memory.
    """
    tensor, piece = local.tensor, local.piece
    if not tensor.is_cpu or not is_row_major(piece.lengths, piece.strides):
        return None
    each = tensor.dtype.itemsize
    begin = (piece.base + start) * each
    return memory_bytes(tensor)[begin : begin + count * each]


def slices(data: memoryview, size: int) -> Iterable[memoryview]:
    """Cut bytes into parts of `size` bytes; the last one may be shorter."""
    if 0 < len(data) <= size:
        return (data,)
    return (data[at : at + size] for at in range(0, len(data), size))


def chunks(local: LocalPiece, start: int, count: int, scratch: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of `count` elements of a piece's box, in row-major order, in chunks of at most the size of `scratch`.

    CPU memory that is in this order is not copied. Other memory is copied into `scratch`, which the next chunk overwrites.

    Parameters
    ----------
    start, count
        Elements of the box, within the piece's own run.
    scratch
        1-D uint8 host memory, aligned for every dtype.
    """
    data = bytes_in_place(local, start, count)
    if data is not None:
        yield from slices(data, scratch.numel())
        return
    each = local.tensor.element_size()
    step = max(scratch.numel() // each, 1)
    for begin in range(start, start + count, step):
        num = min(step, start + count - begin)
        out = scratch[: num * each]
        copy_run(local, begin, num, out)
        yield out.numpy().data


def copy_run(local: LocalPiece, start: int, count: int, out: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy `count` elements of a piece's box, in row-major order, into `out`: host memory, or memory of the same device.

    Parameters
    ----------
    start, count
        Elements of the box, within the piece's own run.
    out
        1-D uint8 of the run's size in bytes, aligned for its dtype.
    non_blocking
        Only queue the copy from a device, on the current stream. `out` must be pinned, and the caller waits for the stream.
    """
    typed = out.view(local.tensor.dtype)
    if is_in_order(local.piece):
        typed.copy_(region(local.tensor, local.piece.base + start, (count,), (1,)), non_blocking=non_blocking)
        return
    done = 0
    for box in replace(local.piece, start=start, count=count).boxes():
        part = region(local.tensor, box.base, box.lengths, box.strides)
        typed[done : done + box.count].view(box.lengths).copy_(part, non_blocking=non_blocking)
        done += box.count


def byte_blob(name: str, tensor: torch.Tensor) -> LocalTensor:
    """Describe a 1-D uint8 tensor of encoded bytes as a local tensor of dtype U8: a large value is saved like a tensor."""
    size = (tensor.numel(),)
    return LocalTensor(TensorSpec(name, "U8", size, (box_piece((0,), size, 0, (1,)),)), tensor)


@contextmanager
def public_call() -> Iterator[None]:
    """Prepare a ``with`` block of a public call: pause Python's garbage collector, and leave torch's inference mode if it is on.

    In a block that has left the inference mode, autograd still records nothing.
    """
    # A call makes tens of objects for each tensor, and frees them at its end. Meanwhile the collector would take them for
    # garbage to come, and look through all objects of the program: 0.2 s for each second load of 2,700 tensors that takes 0.3 s.
    collects = gc.isenabled()
    if collects:
        PAUSING.append(None)
    gc.disable()
    try:
        if not torch.is_inference_mode_enabled():
            yield
            return
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        if collects:
            del PAUSING[-1:]
            gc.enable()


PACK_BYTES = 4 << 20
"""The most bytes that are packed on a device before they are copied to or from the host: enough for the link's full rate."""

SMALL_BYTES = 256 << 10
"""Tensors of fewer bytes are packed together on the device, as are non-contiguous ones: each copy over the link has a fixed cost.
"""

_WITHOUT_STREAMS = {"cpu", "meta", "mps"}


def on_device(device: torch.device | None) -> AbstractContextManager[object]:
    """Make a device the current one of this thread inside a ``with`` block; None changes nothing."""
    if device is None:
        return nullcontext()
    # The guard of the device's own module comes first: not every backend supports the newer one of torch.accelerator.
    guard: Any = getattr(torch.get_device_module(device), "device", None) or torch.accelerator.device_index
    made: AbstractContextManager[object] = guard(device.index)
    return made


_SPARE_EVENTS: defaultdict[torch.device, list[torch.Event]] = defaultdict(list)


class Mark:
    """A point in the queue of a device stream: it is reached once all work that was queued before it is done."""

    __slots__ = ("_event", "_spare")

    def __init__(self, stream: torch.Stream) -> None:
        self._spare = _SPARE_EVENTS[stream.device]
        with on_device(stream.device):
            try:
                self._event = stream.record_event(self._spare.pop())
            except IndexError:
                self._event = stream.record_event()

    def __del__(self) -> None:
        if hasattr(self, "_event"):
            self._spare.append(self._event)

    def hold(self, stream: torch.Stream) -> None:
        """Make all later work on a stream wait for this mark."""
        with on_device(stream.device):
            stream.wait_event(self._event)

    def synchronize(self) -> None:
        """Wait on the host until the device is past this mark."""
        self._event.synchronize()


class DeviceStreams(NamedTuple):
    """The two copy streams of one device: `pack` gathers elements on the device, `link` copies between device and host."""

    device: torch.device
    pack: torch.Stream
    link: torch.Stream


_KEPT: dict[torch.device, DeviceStreams] = {}
_MAKING = threading.Lock()


def streams_of(device: torch.device) -> DeviceStreams:
    """Return the copy streams of a device, which are the same for every save and load."""
    with _MAKING:
        if device not in _KEPT:
            _KEPT[device] = DeviceStreams(device, torch.Stream(device=device), torch.Stream(device=device))
        return _KEPT[device]


def has_streams(device: torch.device) -> bool:
    """Whether torch queues the work of a device on streams, as on CUDA devices, but not on the CPU or MPS."""
    if device.type in _WITHOUT_STREAMS:
        return False
    accelerator = current_accelerator()
    return accelerator is not None and accelerator.type == device.type


class CopyStreams:
    """The copy streams of all devices that some tensors lie on.

    Work on them comes after the work that this thread's current streams had queued when the object was made.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        devices = sorted({tensor.device for tensor in tensors}, key=lambda device: (device.type, device.index or 0))
        self.by_device = {device: streams_of(device) for device in devices if has_streams(device)}
        for streams in self:
            # Here and not in a thread of ours, which has other current streams.
            now = Mark(torch.accelerator.current_stream(streams.device))
            now.hold(streams.pack)
            now.hold(streams.link)

    def __iter__(self) -> Iterator[DeviceStreams]:
        return iter(self.by_device.values())

    def __bool__(self) -> bool:
        return bool(self.by_device)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make each device's stream for copies between device and host (`link`) the current one in a ``with`` block.

        If the block fails, wait for all queued copies, because nobody else will.
        """
        with ExitStack() as before:
            try:
                for streams in self:
                    before.enter_context(on_device(streams.device))
                    before.callback(torch.accelerator.set_stream, torch.accelerator.current_stream(streams.device))
                    torch.accelerator.set_stream(streams.link)
                yield
            except BaseException:
                self.synchronize()
                raise

    def record(self) -> list[Mark]:
        """Return a mark (a point in the queue) of each `link` stream, after all copies queued so far and their packing."""
        return [Mark(streams.link) for streams in self]

    def follow(self, marks: Sequence[Mark]) -> None:
        """Make later work on this thread's current streams wait for `marks`, one for each device. The host does not wait."""
        for streams, mark in zip(self, marks, strict=True):
            mark.hold(torch.accelerator.current_stream(streams.device))

    def synchronize(self) -> None:
        """Wait on the host for all copies that were queued on these streams."""
        for streams in self:
            streams.pack.synchronize()
            streams.link.synchronize()


class Scratch:
    """Two scratch buffers on a device, used in turn: while one is copied over the link, the other one is packed."""

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams
        self._buffers = [empty_bytes(PACK_BYTES, streams.device) for _ in range(2)]
        self._free: list[Mark | None] = [None, None]
        self._turn = 0

    def begin(self) -> torch.Tensor:
        """Return the next scratch buffer to pack into, and make the packing stream current until `send`."""
        self._turn = 1 - self._turn
        if (sent := self._free[self._turn]) is not None:
            sent.hold(self._streams.pack)
        torch.accelerator.set_stream(self._streams.pack)
        return self._buffers[self._turn]

    def send(self, part: slice, target: torch.Tensor) -> None:
        """Queue the copy of a part of the scratch buffer into pinned host memory."""
        Mark(self._streams.pack).hold(self._streams.link)
        torch.accelerator.set_stream(self._streams.link)
        target.copy_(self._buffers[self._turn][part], non_blocking=True)
        self._free[self._turn] = Mark(self._streams.link)


def _forked() -> None:
    """In a forked child, forget the parent's streams, and make a new lock: a thread of the parent may hold the old one."""
    global _MAKING
    _MAKING = threading.Lock()
    _KEPT.clear()


os.register_at_fork(after_in_child=_forked)
