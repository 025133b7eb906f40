"""The bytes of local tensors and their pieces, as views, without copies where the memory is in order.

The memory of a piece is affine (see `core.catalog.specs.Piece`). So a view is `torch.as_strided`, and a piece whose strides are
its box's own row-major ones is one slice of the storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ...core.catalog.specs import Ints, Piece, TensorSpec, is_row_major
from ...core.geometry.runs import decompose


class LocalTensor(NamedTuple):
    """A tensor of this rank: its description, and the local memory that its pieces lie in (any device, any strides)."""

    spec: TensorSpec
    memory: torch.Tensor


@dataclass(frozen=True, slots=True)
class LocalPiece:
    """A piece, and the local memory that it lies in."""

    tensor: torch.Tensor
    piece: Piece


class LocalRun(NamedTuple):
    """Consecutive elements of the box of a piece, from `start` on, inside the piece's own run; and their memory."""

    local: LocalPiece
    start: int
    num_elements: int

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.local.tensor.element_size()


def storage_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor's whole storage."""
    raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
    return raw.numpy().data


def element_bytes(tensor: torch.Tensor, first: int, count: int) -> memoryview:
    """The bytes of `count` consecutive elements of a CPU tensor's storage, counted from the tensor's own first one."""
    begin = (tensor.storage_offset() + first) * tensor.element_size()
    return storage_bytes(tensor)[begin : begin + count * tensor.element_size()]


def region(tensor: torch.Tensor, base: int, lengths: Ints, strides: Ints) -> torch.Tensor:
    """The strided region of a tensor's storage whose first element is `base` elements after the tensor's own."""
    first = tensor.storage_offset() + base
    if tensor.is_inference():  # outside of the inference mode no view of it can be written to, but its storage can
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage(), first, lengths, strides)
    return torch.as_strided(tensor, lengths, strides, first)


def count_up(tensor: torch.Tensor) -> None:
    """Count up the version of a tensor that was written past torch: no backward pass may take it for what was there before."""
    if not tensor.is_inference():  # those keep no version
        torch.autograd.graph.increment_version(tensor)


RAW = {size: np.dtype(name) for size, name in ((1, "u1"), (2, "i2"), (4, "i4"), (8, "i8"), (16, "c16"))}
"""For each size of an element, a numpy dtype that copies its bytes as they are."""


def is_in_order(piece: Piece) -> bool:
    """Whether consecutive elements of the run are consecutive in memory."""
    return is_row_major(piece.lengths, piece.strides)


def bytes_in_place(local: LocalPiece, start: int, count: int) -> memoryview | None:
    """The bytes of a run of the piece's box where they lie; None where they lie on a device, or in another order."""
    if local.tensor.device.type != "cpu" or not is_in_order(local.piece):
        return None
    return element_bytes(local.tensor, local.piece.base + start, count)


def slices(data: memoryview, size: int) -> Iterator[memoryview]:
    """The bytes in parts of this size; the last one may be shorter."""
    return (data[at : at + size] for at in range(0, len(data), size))


def chunks(local: LocalPiece, start: int, count: int, scratch: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a run of the piece's box, in order, in chunks no larger than the scratch buffer.

    CPU memory that is in order is not copied; other memory goes through `scratch`, which the next chunk overwrites.

    Parameters
    ----------
    start, count
        Elements of the box, inside the piece's own run.
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
    """Copy a run of the piece's box, in order, into memory of the host, or of its own device.

    Parameters
    ----------
    start, count
        Elements of the box, inside the piece's own run.
    out
        1-D uint8, as long as the run, aligned for its dtype.
    non_blocking
        From a device: only queue it, on the current stream. For pinned memory alone, and the caller has to wait for the stream.
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
