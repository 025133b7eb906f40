"""Random layouts of one tensor over some ranks, and naive oracles for them.

A layout is, for each rank, the pieces that it holds and the size of the memory in which they lie. Everything is built from index
lists by the plainest means, so that it can judge the package's geometry.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np
import torch
from hypothesis import strategies as st

from reshard_ckpt.core.catalog.specs import Ints, Piece, Replication, TensorSpec, row_major_strides
from reshard_ckpt.format.dtypes import TORCH_DTYPES


@dataclass(frozen=True)
class Layout:
    """What each rank holds of a tensor: its pieces, and how many elements its memory has."""

    shape: Ints
    pieces: tuple[tuple[Piece, ...], ...]
    memory: tuple[int, ...]
    replication: Replication = Replication.DECLARED


_AT_ONCE = 1 << 15
"""Elements that stay in the processor's cache."""


def values_of(shape: Ints, dtype: str, salt: int) -> torch.Tensor:
    """A tensor whose every byte depends on the global position (and on the salt), so that no wrong byte goes unseen."""
    num = prod(shape) * TORCH_DTYPES[dtype].itemsize
    if num == 0:
        return torch.zeros(shape, dtype=TORCH_DTYPES[dtype])
    data, divisor = np.empty(num, np.uint8), 2 if dtype == "BOOL" else 251
    for low in range(0, num, _AT_ONCE):
        at = np.arange(low, min(low + _AT_ONCE, num), dtype=np.uint64)
        raw = (at * 2654435761 + salt * 40503 + 12345) >> 7
        data[low : low + _AT_ONCE] = raw - raw // divisor * divisor  # numpy takes remainders one by one
    return torch.from_numpy(data).view(TORCH_DTYPES[dtype]).reshape(shape)


@lru_cache(maxsize=256)
def cells(piece: Piece) -> tuple[np.ndarray, np.ndarray]:
    """The elements of a piece, in order: the place of each in memory, and the global coordinates of all along each dim."""
    inner = np.indices(piece.lengths).reshape(len(piece.lengths), prod(piece.lengths))
    inner = inner[:, piece.start : piece.start + piece.count]
    places = piece.base + (np.array(piece.strides, np.int64)[:, None] * inner).sum(axis=0)
    return places, np.array(piece.offsets, np.int64)[:, None] + inner


@lru_cache(maxsize=256)
def addresses(piece: Piece) -> tuple[tuple[int, Ints], ...]:
    """For each element of a piece, in order: its place in memory, and its global coordinates."""
    places, coordinates = cells(piece)
    return tuple(zip(places.tolist(), map(tuple, coordinates.T.tolist()), strict=True))


def filled(layout: Layout, rank: int, whole: torch.Tensor) -> torch.Tensor:
    """The memory of one rank, with the values of the whole tensor in its pieces and zeros elsewhere."""
    size = whole.dtype.itemsize
    memory = np.zeros((layout.memory[rank], size), np.uint8)
    source = whole.contiguous().reshape(-1).view(torch.uint8).numpy().reshape(*whole.shape, size)
    for piece in layout.pieces[rank]:
        places, coordinates = cells(piece)
        memory[places] = source[tuple(coordinates)]
    return torch.from_numpy(memory.reshape(-1)).view(whole.dtype)


def spec_of(layout: Layout, rank: int, name: str, dtype: str) -> TensorSpec:
    return TensorSpec(name, dtype, layout.shape, layout.pieces[rank], layout.replication)


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Begin and length of a part as `torch.chunk` cuts it."""
    each = -(-size // parts)
    return min(index * each, size), max(0, min(size, (index + 1) * each) - min(index * each, size))


def whole_piece(shape: Ints) -> Piece:
    return Piece((0,) * len(shape), shape, 0, prod(shape), 0, row_major_strides(shape))


def pack_boxes(boxes: list[tuple[Ints, Ints]]) -> tuple[tuple[Piece, ...], int]:
    """Boxes one after the other in memory, each in row-major order."""
    pieces, at = [], 0
    for offsets, lengths in boxes:
        if prod(lengths):
            pieces.append(Piece(offsets, lengths, 0, prod(lengths), at, row_major_strides(lengths)))
            at += prod(lengths)
    return tuple(pieces), at


@st.composite
def shapes(draw: st.DrawFn, max_size: int = 13) -> Ints:
    ndim = draw(st.integers(0, 4))
    limit = (max_size, max_size, max_size, 6, 4)[ndim]
    return tuple(draw(st.lists(st.integers(0, limit), min_size=ndim, max_size=ndim)))


@st.composite
def layouts(draw: st.DrawFn, shape: Ints, ranks: int) -> Layout:
    """Any kind of layout of a tensor over some ranks."""
    kinds = ["replicated", "one", "grid", "transposed"]
    kinds += ["fused", "flat", "flat_local"] if shape else []
    kind = draw(st.sampled_from(kinds))
    if kind == "replicated":
        return Layout(shape, ((whole_piece(shape),),) * ranks, (prod(shape),) * ranks)
    if kind == "one":
        owner = draw(st.integers(0, ranks - 1))
        pieces = tuple((whole_piece(shape),) if r == owner else () for r in range(ranks))
        return Layout(shape, pieces, (prod(shape),) * ranks, Replication.PLAIN)
    if kind == "transposed":
        # Memory in reverse order of dims, with gaps: not contiguous.
        strides = tuple(2 * s for s in reversed(row_major_strides(tuple(reversed(shape)))))
        piece = Piece((0,) * len(shape), shape, 0, prod(shape), 1, strides)
        return Layout(shape, ((piece,),) * ranks, (2 * prod(shape) + 2,) * ranks)
    if kind == "flat":
        return draw(flat_layouts(shape, ranks))
    mesh = draw(st.sampled_from([m for m in product(range(1, ranks + 1), repeat=2) if prod(m) == ranks]))
    boxes = [_grid_box(draw, shape, mesh)]
    if kind == "grid":
        return _boxes_layout(shape, [[boxes[0][r]] for r in range(ranks)])
    if kind == "fused":
        return _boxes_layout(shape, _fused(draw, shape, ranks))
    # Flat ranges of tp-local shards: axis 0 cuts the flat order, axis 1 the tensor.
    dim = draw(st.integers(0, len(shape) - 1))
    local = []
    for i in range(mesh[1]):
        begin, length = chunk(shape[dim], mesh[1], i)
        local.append([_along(shape, dim, begin, length)])
    return _flat(draw, shape, ranks, local)


@st.composite
def flat_layouts(draw: st.DrawFn, shape: Ints, ranks: int) -> Layout:
    """Flat ranges of the whole tensor, cut anywhere."""
    return _flat(draw, shape, ranks, [[((0,) * len(shape), shape)]])


def _along(shape: Ints, dim: int, begin: int, length: int) -> tuple[Ints, Ints]:
    offsets = tuple(begin if d == dim else 0 for d in range(len(shape)))
    return offsets, tuple(length if d == dim else n for d, n in enumerate(shape))


def _grid_box(draw: st.DrawFn, shape: Ints, mesh: Ints) -> list[tuple[Ints, Ints]]:
    """A box a rank: each axis shards a dim or replicates; inner axes may cut first, as FSDP over TP does."""
    dims = [draw(st.sampled_from([None, *range(len(shape))])) for _ in mesh]
    order = draw(st.permutations(range(len(mesh))))
    boxes = []
    for coordinates in product(*(range(n) for n in mesh)):
        begin, size = [0] * len(shape), list(shape)
        for axis in order:
            dim = dims[axis]
            if dim is not None:
                offset, length = chunk(size[dim], mesh[axis], coordinates[axis])
                begin[dim] += offset
                size[dim] = length
        boxes.append((tuple(begin), tuple(size)))
    return boxes


def _fused(draw: st.DrawFn, shape: Ints, ranks: int) -> list[list[tuple[Ints, Ints]]]:
    """A dim made of sections, each cut over all ranks: a rank holds one part of every section."""
    dim = draw(st.integers(0, len(shape) - 1))
    cuts = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=2)))
    bounds = list(zip([0, *cuts], [*cuts, shape[dim]], strict=True))
    out = []
    for rank in range(ranks):
        parts = [(low + chunk(high - low, ranks, rank)[0], chunk(high - low, ranks, rank)[1]) for low, high in bounds]
        out.append([_along(shape, dim, begin, length) for begin, length in parts])
    return out


def _boxes_layout(shape: Ints, boxes: list[list[tuple[Ints, Ints]]]) -> Layout:
    packed = [pack_boxes(b) for b in boxes]
    return Layout(shape, tuple(p for p, _ in packed), tuple(size for _, size in packed))


def _flat(draw: st.DrawFn, shape: Ints, ranks: int, local: list[list[tuple[Ints, Ints]]]) -> Layout:
    """Each group of boxes is laid end to end and cut into runs for the ranks of one column."""
    rows = ranks // len(local)
    pieces: list[tuple[Piece, ...]] = []
    memory: list[int] = []
    cuts_of = []
    for boxes in local:
        total = sum(prod(lengths) for _, lengths in boxes)
        cuts = sorted(draw(st.lists(st.integers(0, total), min_size=rows - 1, max_size=rows - 1)))
        cuts_of.append([0, *cuts, total])
    for rank in range(ranks):
        row, column = divmod(rank, len(local))
        low, high = cuts_of[column][row : row + 2]
        mine, at = [], 0
        for offsets, lengths in local[column]:
            size = prod(lengths)
            start, stop = max(low - at, 0), min(high - at, size)
            if stop > start:
                mine.append(Piece(offsets, lengths, start, stop - start, max(at - low, 0) - start, row_major_strides(lengths)))
            at += size
        pieces.append(tuple(mine))
        memory.append(max(high - low, 0))
    return Layout(shape, tuple(pieces), tuple(memory))
