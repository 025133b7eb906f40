"""The places of a foreign tensor's elements in files. A box with any strides is divided into parts in row-major order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ..core.catalog.specs import Ints, row_major_strides
from ..core.geometry.runs import I64
from ..errors import UnsupportedError
from ..storage.protocol import Storage, read_range

MAX_PARTS = 1 << 20
"""The most parts that one box of a foreign tensor may have."""

COMPARED_BYTES = 1 << 20
"""Up to this many bytes, replicas are compared whole. Of larger ones, this many bytes are compared, at both ends together."""


@dataclass(frozen=True, slots=True)
class Part:
    """Where a part of a tensor lies: elements ``[start, start + count)`` of a box, in row-major order, in one file.

    `file` is the number of the file, and `offset` the part's first byte in it. By default, the part is the whole box.
    """

    offsets: Ints
    lengths: Ints
    file: int
    offset: int
    start: int = 0
    count: int | None = None

    @property
    def num_elements(self) -> int:
        return prod(self.lengths) if self.count is None else self.count


def parts_of_box(offsets: Ints, lengths: Ints, strides: Ints, file: int, offset: int, itemsize: int, name: str) -> list[Part]:
    """Return the parts of a box whose elements lie in a file from byte `offset` on, with these strides in elements.

    Raises
    ------
    UnsupportedError
        The box needs more than `MAX_PARTS` parts; `name` is for the message.
    """
    each = run_lengths(lengths, strides)
    if each == lengths:
        return [Part(offsets, lengths, file, offset)]
    num = prod(lengths) // prod(each)
    if num > MAX_PARTS:
        raise UnsupportedError(
            f"{name}: a box of size {lengths} has strides {strides}, which are {num} runs of bytes; load it with the program "
            "that wrote it, and save it contiguous"
        )
    inner, corners, starts = runs_of(lengths, strides)
    corners = corners + np.array(offsets)
    return [
        Part(tuple(corner), inner, file, offset + start * itemsize)
        for corner, start in zip(corners.tolist(), starts.tolist(), strict=True)
    ]


def run_lengths(shape: Ints, strides: Ints) -> Ints:
    """Return the lengths of the largest box in a strided box whose elements lie in row-major order and without gaps in memory."""
    inside: set[int] = set()
    # Take dims from the innermost in memory outward, as long as they are also the innermost of the shape.
    step, outermost = 1, len(shape)
    for dim in sorted((d for d, n in enumerate(shape) if n > 1), key=lambda d: (strides[d], -d)):
        # The next dim outward in memory must also be further out in the shape, and its stride must be the size of the box so far.
        if strides[dim] != step or dim > outermost:
            break
        inside.add(dim)
        step, outermost = step * shape[dim], dim
    return tuple(n if d in inside else 1 for d, n in enumerate(shape))


def runs_of(shape: Ints, strides: Ints) -> tuple[Ints, I64, I64]:
    """Cut a strided box into boxes of equal lengths whose elements lie in row-major order and without gaps in memory.

    Returns
    -------
    lengths
        The lengths of each of these boxes.
    corners : (N, D)
        The offsets of each box in the strided box.
    starts : (N,)
        The first element of each box in memory.

    Examples
    --------
    A 2 × 3 matrix in column-major order is three columns:

    >>> lengths, corners, starts = runs_of((2, 3), (1, 2))
    >>> lengths, corners.tolist(), starts.tolist()
    ((2, 1), [[0, 0], [0, 1], [0, 2]], [0, 2, 4])
    """
    lengths = run_lengths(shape, strides)
    # outer: how many of these boxes there are along each dim; corners[i]: coordinates of box i on that grid, where boxes have
    # length 1 along each dim that is cut, so they are its offsets
    outer = tuple(1 if inner > 1 else n for n, inner in zip(shape, lengths, strict=True))
    number = np.arange(prod(outer))
    corners = np.stack([number // s % n for s, n in zip(row_major_strides(outer), outer, strict=True)], axis=1)
    return lengths, corners, (corners * np.array(strides)).sum(axis=1)


def are_alike(storage: Storage, places: Sequence[tuple[str, int]], num_bytes: int) -> bool:
    """Tell whether several places in files hold the same bytes, by comparing up to `COMPARED_BYTES` of each.

    Parameters
    ----------
    places
        For each place, the key of a file, and the first byte in it.
    num_bytes
        The number of bytes at each place.
    """
    part = num_bytes if num_bytes <= COMPARED_BYTES else COMPARED_BYTES // 2
    ends = dict.fromkeys((0, num_bytes - part))  # a small one is read whole, once
    return len({b"".join(read_range(storage, key, at + end, part) for end in ends) for key, at in places}) == 1
