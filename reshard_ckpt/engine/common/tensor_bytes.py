"""The bytes of local tensors and their pieces: views if the memory is in order, else copies.

A piece has a base and strides in memory (see `core.catalog.specs.Piece`), so `torch.as_strided` gives a view of it. If the
strides are the row-major strides of its box, the piece is one slice of the storage.

Public calls leave torch's inference mode (`outside_inference_mode`), because tensors that are made in it stay read-only outside.
Otherwise one save in a validation function would leave a staging buffer that no later save can fill, and optimizer state that a
load creates could never be stepped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ...core.catalog.specs import Ints, Piece, Replication, TensorSpec, box_piece, is_row_major
from ...core.geometry.runs import decompose


class LocalTensor(NamedTuple):
    """A tensor of this rank: its description, and the local memory of its pieces (any device, any strides)."""

    spec: TensorSpec
    memory: torch.Tensor


@dataclass(frozen=True, slots=True)
class LocalPiece:
    """A piece, and the local tensor whose memory holds it."""

    tensor: torch.Tensor
    piece: Piece


class LocalRun(NamedTuple):
    """Consecutive elements of a piece's box, from `start` on, within the piece's own run."""

    local: LocalPiece
    start: int
    num_elements: int

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.local.tensor.element_size()


def storage_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a CPU tensor's whole storage."""
    raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
    return raw.numpy().data


def element_bytes(tensor: torch.Tensor, first: int, count: int) -> memoryview:
    """Return the bytes of `count` elements of a CPU tensor's storage; `first` counts from the tensor's first element."""
    begin = (tensor.storage_offset() + first) * tensor.element_size()
    return storage_bytes(tensor)[begin : begin + count * tensor.element_size()]


def region(tensor: torch.Tensor, base: int, lengths: Ints, strides: Ints) -> torch.Tensor:
    """Return the strided region of a tensor's storage that begins `base` elements after the tensor's first element."""
    first = tensor.storage_offset() + base
    if tensor.is_inference():  # outside inference mode its views are read-only, its storage is not
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage(), first, lengths, strides)
    return torch.as_strided(tensor, lengths, strides, first)


def count_up(tensor: torch.Tensor) -> None:
    """Count up the version of a tensor that was written without torch, so that a backward pass notices the change."""
    if not tensor.is_inference():  # inference tensors keep no version
        torch.autograd.graph.increment_version(tensor)


RAW = {size: np.dtype(name) for size, name in ((1, "u1"), (2, "i2"), (4, "i4"), (8, "i8"), (16, "c16"))}
"""A numpy dtype for each element size, to copy elements of any dtype as raw bytes."""


def is_in_order(piece: Piece) -> bool:
    """Whether consecutive elements of the piece are consecutive in memory."""
    return is_row_major(piece.lengths, piece.strides)


def bytes_in_place(local: LocalPiece, start: int, count: int) -> memoryview | None:
    """Return a view of the bytes of a run of the piece's box; None if they lie on a device or are not in order."""
    if local.tensor.device.type != "cpu" or not is_in_order(local.piece):
        return None
    return element_bytes(local.tensor, local.piece.base + start, count)


def slices(data: memoryview, size: int) -> Iterator[memoryview]:
    """Yield the bytes in parts of `size`; the last one may be shorter."""
    return (data[at : at + size] for at in range(0, len(data), size))


def chunks(local: LocalPiece, start: int, count: int, scratch: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a run of the piece's box, in order, in chunks of at most the size of `scratch`.

    CPU memory that is in order is not copied. Other memory is copied into `scratch`, which the next chunk overwrites.

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
    """Copy a run of the piece's box, in order, into host memory or into memory of the same device.

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
    else:
        _gather(local, start, count, typed, non_blocking)


def _gather(local: LocalPiece, start: int, count: int, out: torch.Tensor, non_blocking: bool) -> None:
    """Copy a run of a piece whose memory is not in order, box by box."""
    piece = local.piece
    cut = decompose(np.array([piece.lengths], np.int64), np.array([start]), np.array([count]))
    done = 0
    for offsets, lengths in zip(cut.offsets.tolist(), cut.lengths.tolist(), strict=True):
        base = piece.base + sum(o * s for o, s in zip(offsets, piece.strides, strict=True))
        box = region(local.tensor, base, tuple(lengths), piece.strides)
        out[done : done + box.numel()].view(lengths).copy_(box, non_blocking=non_blocking)
        done += box.numel()


@dataclass(frozen=True, slots=True)
class Blob:
    """The encoded bytes of a value, as a tensor of dtype U8 that is saved and loaded like any other."""

    spec: TensorSpec
    tensor: torch.Tensor
    own: str | None = None
    """The name of the value if every rank has a value of its own, else None."""


def byte_blob(name: str, tensor: torch.Tensor, own: str | None = None) -> Blob:
    """Make a blob over a 1-D uint8 tensor."""
    size = (tensor.numel(),)
    piece = box_piece((0,), size, 0, (1,))
    return Blob(TensorSpec(name, "U8", size, (piece,), Replication.PLAIN), tensor, own)


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leave the inference mode for a ``with`` block, if this thread is in it; what runs there is still not recorded."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
