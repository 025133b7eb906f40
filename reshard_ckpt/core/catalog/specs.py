"""Specs: plain data that describe one rank's tensors as pieces of global boxes, also as columns, and its values.

One description serves every kind of shard. A *piece* is a run of a box: the elements ``[start, start + count)`` of the
row-major order of the box ``offsets, lengths`` of the global tensor. A plain shard is one piece that is its whole box. A fused
QKV shard is several pieces. A flat range is one piece (or one for each box that it crosses) that begins and ends inside its box.

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
    """A rank's declaration about pieces that other ranks hold too."""

    PLAIN = 0
    """Nothing is declared: one rank writes it whole, and a difference between ranks is an error."""
    DECLARED = 1
    """A DTensor, DDP, `LocalShard` or `FlatShard` places it: replicas share the writing."""
    BUFFER = 2
    """A module buffer under DDP or FSDP: the lowest rank's value counts, a difference is a warning."""


class ValueKind(IntEnum):
    """The way in which ranks agree on a value, a part of the state that is not a tensor."""

    PLAIN = 0
    """The value is the same on every rank that has it."""
    PER_RANK = 1
    """Each rank has its own value."""
    PARAM_GROUPS = 2
    """An optimizer's groups: ``[{hyperparameter: value, ..., "params": [FQN, ...]}, ...]``, merged over ranks by FQN."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a box of the global tensor, and where it lies in local memory; all counts are elements."""

    offsets: Ints
    lengths: Ints
    start: int
    count: int
    base: int
    strides: Ints

    def boxes(self) -> list[Piece]:
        """Cut the piece into pieces that are whole boxes, in the order of its run."""
        cut = decompose(np.array([self.lengths], np.int64), np.array([self.start]), np.array([self.count]))
        boxes = zip(cut.offsets.tolist(), cut.lengths.tolist(), strict=True)
        return [self.inner(inner, tuple(lengths)) for inner, lengths in boxes]

    def inner(self, inner: Sequence[int], lengths: Ints) -> Piece:
        """Return the box that begins at the offsets `inner` within the box of this piece."""
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
    """The dim that is cut. For ``"ragged"``, the last of the leading dims that are cut into units; None if all is one unit."""
    coords: Ints = ()
    """For ``"resident"`` the coordinates that hold the tensor, for ``"ragged"`` the units of each coordinate."""
    turn: int | None = None
    """The number of axes that cut the same dim before this one; None if nobody recorded it."""
    sections: Ints = ()
    """Sizes of the sections that this axis cuts each on its own (fused QKV); if empty, it cuts its range as a whole."""


Placement = tuple[AxisPlacement, ...]
"""A tensor's placement: one entry for each axis of the mesh."""


class StateLink(NamedTuple):
    """The optimizer, parameter and key that an entry of an optimizer's state belongs to."""

    optimizer: str
    """The name of the optimizer in the state that was saved, such as ``"optimizer"``; "" if the optimizer is the whole state."""
    fqn: str
    """The parameter, as the optimizer's groups list it."""
    key: str
    """The key of the state, such as ``"exp_avg"``; keys of nested dicts are joined by dots."""
    parameter: str | None = None
    """The name of the parameter's tensor in the same checkpoint; None if it was not saved too."""

    @property
    def name(self) -> str:
        """The name of the entry of the state."""
        return f"{self.optimizer}.state.{self.fqn}.{self.key}" if self.optimizer else f"state.{self.fqn}.{self.key}"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor; ``pieces`` are the parts of it that a rank holds (saving) or wants (loading), possibly none.

    ``dtype`` is a code of the safetensors format (``"F32"``, ``"BF16"``, …). ``placement`` is the placement that the state itself
    declares, axis by axis; the planner derives the rest from the pieces of all ranks.
    """

    name: str
    dtype: str
    shape: Ints
    pieces: tuple[Piece, ...]
    replication: Replication = Replication.PLAIN
    placement: tuple[AxisPlacement, ...] = ()
    alias_of: str | None = None
    """An earlier name on the same rank that has exactly the same memory (tied weights)."""
    link: StateLink | None = None

    @property
    def first_name(self) -> str:
        """The name under which its memory occurred first: its own, unless it is an alias. A name may be empty."""
        return self.name if self.alias_of is None else self.alias_of


@dataclass(frozen=True, slots=True)
class PieceColumns:
    """Pieces of several tensors as columns: their runs, and where they lie in memory (see `Piece`)."""

    tensor: I64
    offsets: I64
    lengths: I64
    start: I64
    count: I64
    base: I64
    strides: I64


def width_of(specs: Sequence[TensorSpec]) -> int:
    """Return the number of dims of the widest tensor, at least 1."""
    return max([len(shape) for shape in {spec.shape for spec in specs}], default=1) or 1


def piece_columns(specs: Sequence[TensorSpec]) -> PieceColumns:
    """Put the pieces of all specs into columns, padded to the dims of the widest tensor; ``tensor`` is the index of the spec."""
    width = width_of(specs)
    # Equal tensors share one tuple of pieces, as the layers of a model do: `distinct` has each tuple once, by its id.
    distinct = {id(spec.pieces): spec.pieces for spec in specs}
    number = {key: i for i, key in enumerate(distinct)}
    pieces = [piece for of_one in distinct.values() for piece in of_one]
    # owner[i]: the spec of piece i of all; row[i]: its place in `pieces`
    count = np.array([len(of_one) for of_one in distinct.values()], np.int64)
    tuple_of = np.array([number[id(spec.pieces)] for spec in specs], np.int64)
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
    """One encoded value, a part of the state that is not a tensor; ``path`` is its encoded key path in the state.

    ``data`` is None if the bytes are a blob among the tensors. Opaque bytes are made by another program: they become a blob that
    no value of the catalog refers to.
    """

    name: str
    path: bytes
    kind: ValueKind
    data: bytes | None
    link: StateLink | None = None
    is_opaque: bool = False


def escape(name: str) -> str:
    """Escape the characters of a name that have a meaning in names made from it; `urllib.parse.unquote` undoes it.

    >>> escape("a@b%")
    'a%40b%25'
    """
    return _ESCAPED.sub(lambda match: f"%{ord(match[0]):02X}", name)


def blob_name(value_name: str, rank: int | None) -> str:
    """Name the tensor that holds the bytes of a value; `rank` is given if each rank has its own.

    >>> blob_name("extra.rng", 3)
    'extra.rng@[value,3]'
    """
    return f"{escape(value_name)}@[value]" if rank is None else f"{escape(value_name)}@[value,{rank}]"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks arranged on named axes, outermost first, row-major: rank = Σ coordinate · stride."""

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
        """Return the rank's coordinate on each axis.

        >>> Mesh(("pp", "tp"), (2, 4)).coordinates(6)
        (1, 2)
        """
        return unravel(rank, self.sizes)


def unravel(index: int, lengths: Ints) -> Ints:
    """Return the coordinates of an element of a box from its index in row-major order.

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
    """Return the element strides of a row-major box.

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
    """Tell whether consecutive elements of a box are consecutive in memory; the stride of a dim of length 1 does not matter.

    >>> is_row_major((2, 1, 3), (3, 99, 1)), is_row_major((2, 3), (1, 2))
    (True, False)
    """
    wanted = row_major_strides(lengths)
    return strides == wanted or all(n <= 1 or own == other for n, own, other in zip(lengths, strides, wanted, strict=True))


def box_piece(offsets: Ints, lengths: Ints, base: int, strides: Ints) -> Piece:
    """Return the piece that is a whole box."""
    return Piece(offsets, lengths, 0, prod(lengths), base, strides)


ITEM_BYTES: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

CODES: tuple[str, ...] = tuple(sorted(ITEM_BYTES))


def item_bytes_of(dtype: NDArray[np.integer[Any]]) -> I64:
    """Return the bytes of one element for each dtype code, an index into `CODES`."""
    sizes: I64 = np.array([ITEM_BYTES[code] for code in CODES], np.int64)[dtype]
    return sizes
