"""Specs: descriptions of one rank's tensors, as pieces of global boxes, and of its values. Plain data, also as columns.

One description serves every kind of shard. A *piece* is a run of a box: the elements ``[start, start + count)`` of the row-major
order of the box ``offsets, lengths`` of the global tensor. A plain shard is one piece that is its whole box. A fused QKV shard is
several pieces. A flat range is one piece, or one for each box that it crosses, and may begin and end inside a box.

The position of a piece in memory is affine: the element at global coordinates ``x`` is element ``base + sum((x - offsets) *
strides)`` of the local storage. This holds for a flat range too, with the strides of its whole box.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..geometry.runs import I64, decompose, pad_rows, ranges

Ints = tuple[int, ...]

_ESCAPED = re.compile(r"[%@\x00-\x1f\x7f]")


class Replication(IntEnum):
    """How ranks treat a piece that several of them hold: which of them write it, and how to treat a difference."""

    PLAIN = 0
    """The state declares nothing: one rank writes the whole piece, and a difference between ranks is an error."""
    DECLARED = 1
    """The pieces are declared replicas (DTensor, DDP, `LocalShard`, `FlatShard`): ranks share the writing of them."""
    BUFFER = 2
    """A buffer of a module under DDP or FSDP: the lowest rank writes its values, and a difference between ranks is a warning."""


class ValueKind(IntEnum):
    """How the values of all ranks under one name relate. A value is a part of the state that is not a tensor."""

    PLAIN = 0
    """All ranks that have the value have the same one."""
    PER_RANK = 1
    """Each rank has a value of its own."""
    PARAM_GROUPS = 2
    """An optimizer's parameter groups ``[{hyperparameter: value, ..., "params": [FQN, ...]}, ...]``; those of all ranks are
    merged by FQN."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of elements of a box of the global tensor, and its place in local memory. All counts are elements.

    Elements ``start : start + count`` of the box ``offsets, lengths``, in row-major order; the box's first element is element
    `base` of the memory, whose strides are `strides`.
    """

    offsets: Ints
    lengths: Ints
    start: int
    count: int
    base: int
    strides: Ints

    def boxes(self) -> list[Piece]:
        """Cut the piece into pieces that are whole boxes, in row-major order."""
        cut = decompose(np.array([self.lengths], np.int64), np.array([self.start]), np.array([self.count]))
        boxes = zip(cut.offsets.tolist(), cut.lengths.tolist(), strict=True)
        return [self.inner(inner, tuple(lengths)) for inner, lengths in boxes]

    def inner(self, inner: Sequence[int], lengths: Ints) -> Piece:
        """Return a box inside this piece's box as a piece; `inner` is where it begins within the piece's box."""
        offsets = tuple(a + b for a, b in zip(self.offsets, inner, strict=True))
        return box_piece(offsets, lengths, self.base + sum(a * b for a, b in zip(inner, self.strides, strict=True)), self.strides)


@dataclass(frozen=True, slots=True)
class AxisPlacement:
    """How a tensor is laid out along one mesh axis.

    ``kind`` is ``"shard"`` (along ``dim``), ``"replicate"``, ``"flat"`` (ranges of the flattened shard), ``"ragged"`` (such
    ranges in proportion to ``coords``), ``"resident"`` (only the coordinates ``coords`` hold it) or one that another package
    registered; `core.catalog.placements` describes each kind.
    """

    axis: str
    kind: str
    dim: int | None = None
    """The dim that is cut. For ``"ragged"``, the last of the leading dims that are cut into units; None if the whole tensor is
    one unit."""
    coords: Ints = ()
    """For ``"resident"``, the coordinates that hold the tensor; for ``"ragged"``, the number of units of each coordinate."""
    turn: int | None = None
    """The number of axes that cut the same dim before this one; None if that was not recorded."""
    sections: Ints = ()
    """Sizes of the sections of the dim that this axis cuts each on its own (as in fused QKV). If empty, the dim is cut as a
    whole."""


Placement = tuple[AxisPlacement, ...]
"""A tensor's placement: one entry for each axis of the mesh."""


class StateLink(NamedTuple):
    """A link from a tensor or value of optimizer state to its optimizer, its parameter, and its key in the parameter's state."""

    optimizer: str
    """The name of the optimizer in the state, such as ``"optimizer"``; "" if the optimizer's state dict is the whole state."""
    fqn: str
    """The parameter's FQN, as in the optimizer's groups."""
    key: str
    """The key in the parameter's state, such as ``"exp_avg"``; keys of nested dicts are joined by dots."""
    parameter: str | None = None
    """The name of the parameter's own tensor in the same checkpoint; None if the parameter was not saved."""

    @property
    def name(self) -> str:
        """The name under which this optimizer state is saved: ``<optimizer>.state.<FQN>.<key>``."""
        return f"{self.optimizer}.state.{self.fqn}.{self.key}" if self.optimizer else f"state.{self.fqn}.{self.key}"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The description of one tensor on one rank; ``pieces`` are the parts that the rank holds (saving) or wants (loading).

    ``pieces`` may be empty. ``dtype`` is a code of the safetensors format (``"F32"``, ``"BF16"``, …). ``placement`` has the mesh
    axes whose placement the state declares; the planner derives those of the other axes from the pieces of all ranks.
    """

    name: str
    dtype: str
    shape: Ints
    pieces: tuple[Piece, ...]
    replication: Replication = Replication.PLAIN
    placement: tuple[AxisPlacement, ...] = ()
    alias_of: str | None = None
    """The name of an earlier tensor on the same rank with exactly the same memory (tied weights), or None."""
    link: StateLink | None = None

    @property
    def first_name(self) -> str:
        """The name of the first tensor on this rank with the same memory: `alias_of`, or the tensor's own name."""
        return self.name if self.alias_of is None else self.alias_of


@dataclass(frozen=True, slots=True)
class PieceColumns:
    """The pieces of several tensors as columns, one row for each piece, with the meaning of the fields of `Piece`."""

    tensor: I64
    offsets: I64
    lengths: I64
    start: I64
    count: I64
    base: I64
    strides: I64


def width_of(specs: Sequence[TensorSpec]) -> int:
    """Return the largest number of dims of any of these tensors, at least 1."""
    return max([len(shape) for shape in {spec.shape for spec in specs}], default=1) or 1


def piece_columns(specs: Sequence[TensorSpec]) -> PieceColumns:
    """Put the pieces of all specs into columns.

    ``tensor`` is the index of the spec; shapes are padded on the left to the most dims.
    """
    width = width_of(specs)
    # Equal tensors share one tuple of pieces, as the layers of a model do: `distinct` has each tuple once, by its id.
    ids = [id(spec.pieces) for spec in specs]
    distinct = {key: spec.pieces for key, spec in zip(ids, specs, strict=True)}
    number = {key: i for i, key in enumerate(distinct)}
    pieces = [piece for of_one in distinct.values() for piece in of_one]
    # owner[i]: the spec of piece i of all; row[i]: its place in `pieces`
    count = np.array([len(of_one) for of_one in distinct.values()], np.int64)
    tuple_of = np.array([number[key] for key in ids], np.int64)
    owner, step = ranges(count[tuple_of])
    row = (np.cumsum(count) - count)[tuple_of][owner] + step
    return PieceColumns(
        tensor=owner,
        offsets=pad_rows([p.offsets for p in pieces], width, 0)[row],
        lengths=pad_rows([p.lengths for p in pieces], width, 1)[row],
        start=np.array([p.start for p in pieces], np.int64)[row],
        count=np.array([p.count for p in pieces], np.int64)[row],
        base=np.array([p.base for p in pieces], np.int64)[row],
        strides=pad_rows([p.strides for p in pieces], width, 0)[row],
    )


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """The description of one encoded value, a part of the state that is not a tensor; ``path`` has its encoded keys in the state.

    ``data`` is None if the bytes are kept as a blob (a tensor of bytes). If ``is_opaque``, another program made the bytes: they
    become a blob that no value of the catalog refers to.
    """

    name: str
    path: bytes
    kind: ValueKind
    data: bytes | None
    link: StateLink | None = None
    is_opaque: bool = False


def escape(name: str) -> str:
    """Percent-encode ``%``, ``@`` and control characters of a name, for use in a longer name; `urllib.parse.unquote` undoes it.

    >>> escape("a@b%")
    'a%40b%25'
    """
    return _ESCAPED.sub(lambda match: f"%{ord(match[0]):02X}", name)


def blob_name(value_name: str, rank: int | None) -> str:
    """Return the name of the tensor that holds the encoded bytes of a value; pass `rank` if each rank has its own value.

    >>> blob_name("extra.rng", 3)
    'extra.rng@[value,3]'
    """
    return f"{escape(value_name)}@[value]" if rank is None else f"{escape(value_name)}@[value,{rank}]"


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh of ranks with named axes, outermost first, in row-major order: rank = Σ coordinate · stride."""

    axes: tuple[str, ...]
    sizes: Ints

    def __str__(self) -> str:
        return ", ".join(f"{axis}={size}" for axis, size in self.by_axis.items())

    @property
    def size(self) -> int:
        return prod(self.sizes)

    @property
    def by_axis(self) -> dict[str, int]:
        """The size of each axis, by name."""
        return dict(zip(self.axes, self.sizes, strict=True))

    def coordinates(self, rank: int) -> Ints:
        """Return the coordinate of a rank on each axis.

        >>> Mesh(("pp", "tp"), (2, 4)).coordinates(6)
        (1, 2)
        """
        return unravel(rank, self.sizes)


def unravel(index: int, lengths: Ints) -> Ints:
    """Return the coordinates of element `index`, counted in row-major order, of a box with these lengths.

    >>> unravel(5, (2, 3))
    (1, 2)
    """
    coordinates: list[int] = []
    for length in reversed(lengths):
        index, coordinate = divmod(index, length)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))


@lru_cache(maxsize=1 << 12)
def row_major_strides(lengths: Ints) -> Ints:
    """Return the row-major strides of a box with these lengths, in elements.

    >>> row_major_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for length in reversed(lengths):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


@lru_cache(maxsize=1 << 12)
def is_row_major(lengths: Ints, strides: Ints) -> bool:
    """Tell whether strides are row-major and without gaps; the stride of a dim of length 1 does not matter.

    >>> is_row_major((2, 1, 3), (3, 99, 1)), is_row_major((2, 3), (1, 2))
    (True, False)
    """
    wanted = row_major_strides(lengths)
    return strides == wanted or all(n <= 1 or own == other for n, own, other in zip(lengths, strides, wanted, strict=True))


def box_piece(offsets: Ints, lengths: Ints, base: int, strides: Ints) -> Piece:
    """Return the piece that holds all elements of a box."""
    return Piece(offsets, lengths, 0, prod(lengths), base, strides)


ITEM_BYTES: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

CODES: tuple[str, ...] = tuple(sorted(ITEM_BYTES))


def item_bytes_of(dtype: NDArray[np.integer[Any]]) -> I64:
    """Return the bytes of one element of each dtype in an array; dtypes are given as indices into `CODES`."""
    sizes: I64 = np.array([ITEM_BYTES[code] for code in CODES], np.int64)[dtype]
    return sizes
