"""Layouts: the places of a local tensor's elements in the global tensor, whatever strides its memory has.

A `Layout` is geometry only, so optimizer state can share the layout of its parameter even if its strides differ. Together with a
tensor it gives the pieces of `core.catalog.specs`:

1. A layout of boxes: each box of the local tensor is one whole-box piece with the tensor's own strides.
2. A flat layout: the local tensor is a run of the concatenated boxes. Each box that the run touches gives one piece with the
   strides of the whole box, so its base may lie before the first element.
3. A flat layout of a cut tensor: the local tensor is a run of a flattened tensor, in which the boxes lie. The elements that a run
   and a box share are one run of the box too, because both go through the elements in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from ..core.catalog.specs import AxisPlacement, Ints, Piece, Replication, row_major_strides


@dataclass(frozen=True, slots=True)
class LocalBox:
    """A box of the global tensor (`offsets`, `lengths`) that begins at `local_offsets` in the local one."""

    local_offsets: Ints
    offsets: Ints
    lengths: Ints


@dataclass(frozen=True, slots=True)
class Layout:
    """The part of a global tensor of shape `shape` that a local tensor of shape `local_shape` holds.

    With `flat_start` the local tensor is flat: its element ``k`` is element ``flat_start + k`` of the row-major concatenation of
    `boxes`, and their `local_offsets` have no meaning. With `flat_shape` too, it is that element of a flattened tensor of this
    shape, in which the boxes begin at their `local_offsets`.
    """

    shape: Ints
    local_shape: Ints
    boxes: tuple[LocalBox, ...]
    replication: Replication
    placement: tuple[AxisPlacement, ...] = ()
    flat_start: int | None = None
    flat_shape: Ints | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the local tensor is the whole global tensor."""
        if self.flat_start is not None or self.local_shape != self.shape:
            return False
        return prod(self.shape) == 0 or (len(self.boxes) == 1 and self.boxes[0].lengths == self.shape)

    def pieces(self, memory: torch.Tensor) -> tuple[Piece, ...]:
        """Return the pieces that `memory`, a tensor of shape `local_shape`, holds. Empty pieces are left out."""
        assert tuple(memory.shape) == self.local_shape, (memory.shape, self.local_shape)
        if self.flat_start is None:
            strides = tuple(memory.stride())
            return tuple(_box(box, strides) for box in self.boxes if prod(box.lengths))
        # A flat tensor of several dims is contiguous (checked where it is declared), so its flat stride is 1.
        step = memory.stride(0) if memory.ndim == 1 else 1
        if self.flat_shape is not None:
            runs = (_cut_run(box, self.flat_shape, self.flat_start, memory.numel(), step) for box in self.boxes)
            return tuple(piece for piece in runs if piece.count)
        return tuple(_runs(self.boxes, self.flat_start, memory.numel(), step))


class LocalMemory(NamedTuple):
    """The memory of a local tensor, and its layout: the part of the global tensor that it holds."""

    memory: torch.Tensor
    layout: Layout


@lru_cache(maxsize=1 << 16)
def whole(shape: Ints, replication: Replication = Replication.PLAIN) -> Layout:
    """Return the layout of a tensor that is whole on this rank."""
    zeros = (0,) * len(shape)
    return Layout(shape, shape, (LocalBox(zeros, zeros, shape),), replication)


def _box(box: LocalBox, strides: Ints) -> Piece:
    base = sum(offset * stride for offset, stride in zip(box.local_offsets, strides, strict=True))
    return Piece(box.offsets, box.lengths, 0, prod(box.lengths), base, strides)


def _runs(boxes: tuple[LocalBox, ...], first: int, count: int, step: int) -> Iterator[Piece]:
    """Yield the pieces of the run ``[first, first + count)`` of the concatenated boxes, elements `step` apart in memory."""
    box_first = 0
    for box in boxes:
        size = prod(box.lengths)
        start, stop = max(first, box_first) - box_first, min(first + count, box_first + size) - box_first
        if start < stop:
            strides = tuple(stride * step for stride in row_major_strides(box.lengths))
            yield Piece(box.offsets, box.lengths, start, stop - start, (box_first - first) * step, strides)
        box_first += size


def _cut_run(box: LocalBox, shape: Ints, first: int, count: int, step: int) -> Piece:
    """Return the piece of a box, possibly empty, in the run ``[first, first + count)`` of a flattened tensor of this shape."""
    strides = row_major_strides(shape)
    start = _num_before(box, strides, shape, first)
    stop = _num_before(box, strides, shape, first + count)
    at = sum(offset * stride for offset, stride in zip(box.local_offsets, strides, strict=True))
    return Piece(box.offsets, box.lengths, start, stop - start, (at - first) * step, tuple(stride * step for stride in strides))


def _num_before(box: LocalBox, strides: Ints, shape: Ints, index: int) -> int:
    """Count the elements of a box before a flat index of the tensor around it, whose shape is `shape`."""
    if index >= prod(shape):
        return prod(box.lengths)
    before = 0
    for dim, (low, length, stride) in enumerate(zip(box.local_offsets, box.lengths, strides, strict=True)):
        at, index = divmod(index, stride)
        before += min(max(at - low, 0), length) * prod(box.lengths[dim + 1 :])
        if not low <= at < low + length:
            break
    return before
