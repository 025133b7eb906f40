"""What does one rank offer to save? Its pieces and values as columns, ready to be sent and merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import LayoutError
from .catalog import TensorKind
from .dtypes import CODES
from .geometry import I64, volumes
from .state import AxisPlacement, Mesh, TensorSpec, ValueKind

U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PieceColumns:
    """Pieces of several tensors as columns: their runs, and where they lie in memory (see `core.state.Piece`)."""

    tensor: I64
    offsets: I64
    lengths: I64
    start: I64
    count: I64
    base: I64
    strides: I64


def piece_columns(specs: Sequence[TensorSpec], width: int) -> PieceColumns:
    """The pieces of all specs, padded to ``width`` dims; ``tensor`` is the spec's index."""
    pieces = [(i, piece) for i, spec in enumerate(specs) for piece in spec.pieces]

    def padded(rows: list[tuple[int, ...]], fill: int) -> I64:
        flat = [(fill,) * (width - len(row)) + row for row in rows]
        return np.array(flat, dtype=np.int64).reshape(len(rows), width)

    return PieceColumns(
        tensor=np.array([i for i, _ in pieces], dtype=np.int64),
        offsets=padded([p.offsets for _, p in pieces], 0),
        lengths=padded([p.lengths for _, p in pieces], 1),
        start=np.array([p.start for _, p in pieces], dtype=np.int64),
        count=np.array([p.count for _, p in pieces], dtype=np.int64),
        base=np.array([p.base for _, p in pieces], dtype=np.int64),
        strides=padded([p.strides for _, p in pieces], 0),
    )


def shape_columns(specs: Sequence[TensorSpec], width: int) -> I64:
    """Global shapes, padded to ``width`` dims."""
    rows = [(1,) * (width - len(spec.shape)) + spec.shape for spec in specs]
    return np.array(rows, dtype=np.int64).reshape(len(specs), width)


def width_of(specs: Sequence[TensorSpec]) -> int:
    """Dims of the widest tensor, at least 1."""
    return max((len(spec.shape) for spec in specs), default=1) or 1


@dataclass(frozen=True, slots=True)
class OfferedValue:
    """A value of one rank: its encoded bytes, or the index of the offered blob that holds them."""

    name: str
    path: bytes
    kind: ValueKind
    data: bytes | None
    blob: int = -1


@dataclass(frozen=True, slots=True)
class Offer:
    """All that one rank holds. Rows are its pieces; `alias` is the index of an earlier tensor of this offer, or -1."""

    names: tuple[str, ...]
    dtype: U8
    kind: U8
    claim: U8
    ndim: I64
    shape: I64
    alias: I64
    placements: tuple[tuple[AxisPlacement, ...], ...]
    row_tensor: I64
    row_offsets: I64
    row_lengths: I64
    row_start: I64
    row_count: I64
    values: tuple[OfferedValue, ...]
    mesh: Mesh | None


def build_offer(specs: Sequence[TensorSpec], num_blobs: int, values: Sequence[OfferedValue], mesh: Mesh | None) -> Offer:
    """Put a rank's specs, the last `num_blobs` of which are blobs, into columns.

    Raises
    ------
    LayoutError
        A piece reaches outside its tensor.
    """
    width = width_of(specs)
    pieces, shape = piece_columns(specs, width), shape_columns(specs, width)
    _check_inside(specs, pieces, shape)
    index: dict[str, int] = {}
    alias = np.full(len(specs), -1, np.int64)
    for i, spec in enumerate(specs):
        if spec.alias_of is not None:
            alias[i] = index[spec.alias_of]
        index.setdefault(spec.name, i)
    kind = np.full(len(specs), TensorKind.TENSOR, np.uint8)
    kind[len(specs) - num_blobs :] = TensorKind.BLOB
    return Offer(
        names=tuple(spec.name for spec in specs),
        dtype=np.array([CODES.index(spec.dtype) for spec in specs], np.uint8),
        kind=kind,
        claim=np.array([spec.claim for spec in specs], np.uint8),
        ndim=np.array([len(spec.shape) for spec in specs], np.int64),
        shape=shape,
        alias=alias,
        placements=tuple(spec.placement for spec in specs),
        row_tensor=pieces.tensor,
        row_offsets=pieces.offsets,
        row_lengths=pieces.lengths,
        row_start=pieces.start,
        row_count=pieces.count,
        values=tuple(values),
        mesh=mesh,
    )


def _check_inside(specs: Sequence[TensorSpec], pieces: PieceColumns, shape: I64) -> None:
    within = (pieces.offsets >= 0) & (pieces.lengths >= 0) & (pieces.offsets + pieces.lengths <= shape[pieces.tensor])
    run = (pieces.start >= 0) & (pieces.count >= 0) & (pieces.start + pieces.count <= volumes(pieces.lengths))
    bad = np.flatnonzero(~(within.all(axis=1) & run))
    if len(bad):
        spec = specs[int(pieces.tensor[bad[0]])]
        which = _bad_pieces(spec)[0]
        raise LayoutError(f"{spec.name}: {which} reach outside global shape {spec.shape}; correct the declared offsets")


def _bad_pieces(spec: TensorSpec) -> list[str]:
    out = []
    for piece in spec.pieces:
        ends = [o + n for o, n in zip(piece.offsets, piece.lengths, strict=True)]
        inside = all(o >= 0 and n >= 0 for o, n in zip(piece.offsets, piece.lengths, strict=True))
        if not inside or any(end > size for end, size in zip(ends, spec.shape, strict=True)):
            out.append(f"offsets {piece.offsets}, lengths {piece.lengths}")
        elif piece.start < 0 or piece.count < 0 or piece.start + piece.count > int(np.prod(piece.lengths)):
            out.append(f"elements {piece.start}:{piece.start + piece.count} of the box with lengths {piece.lengths}")
    return out
