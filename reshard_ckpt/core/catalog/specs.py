"""Specs: the tensors of one rank as pieces of global boxes, and its values, as plain data.

One description serves every kind of shard. A *piece* is a run of a box: the elements ``[start, start + count)`` of the
row-major order of the box ``offsets, lengths`` of the global tensor. A plain shard is one piece that is its whole box; a fused
QKV shard is several; a flat range is one piece (or one for each box that it crosses) that begins and ends in the middle.

Where a piece lies in memory is affine: the element at global coordinates ``x`` is element ``base + sum((x - offsets) *
strides)`` of the local storage, also for a flat range, whose strides are the box's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from math import prod

Ints = tuple[int, ...]

_ESCAPED = re.compile(r"[%@\x00-\x1f\x7f]")


class Replication(IntEnum):
    """What a rank says of a piece that other ranks hold too."""

    PLAIN = 0
    """Nothing is declared: one rank writes it whole, and a difference between ranks is an error."""
    DECLARED = 1
    """A DTensor, DDP, `LocalShard` or `FlatShard` places it: replicas share the writing."""
    BUFFER = 2
    """A module buffer under DDP or FSDP: the lowest rank's value counts, a difference is a warning."""


class ValueKind(IntEnum):
    """How a value that is no tensor is agreed on and kept."""

    PLAIN = 0
    """The same on every rank that has it."""
    PER_RANK = 1
    """Each rank's own."""
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


@dataclass(frozen=True, slots=True)
class AxisPlacement:
    """How a tensor is laid out along one mesh axis.

    ``kind`` is ``"shard"`` (along ``dim``), ``"replicate"``, ``"flat"`` (ranges of the flattened shard), ``"ragged"`` (such
    ranges in proportion to ``coords``), ``"resident"`` (only the coordinates ``coords`` hold it) or one that another package
    registered; `placements` says what each kind means.
    """

    axis: str
    kind: str
    dim: int | None = None
    """The dim that is cut; of ``"ragged"`` the last of the leading dims whose rows make up units, None: all is one unit."""
    coords: Ints = ()
    """The numbers of the kind: coordinates that hold it, or of ``"ragged"`` the units of each coordinate."""
    turn: int | None = None
    """Of the axes that shard one dim, how many cut it before this one; None where nobody recorded it."""
    sections: Ints = ()
    """Sizes of the parts of what this axis is given that it cuts each on its own (fused QKV); none: it cuts all at once."""


@dataclass(frozen=True, slots=True)
class StateLink:
    """What an entry of an optimizer's state belongs to."""

    optimizer: str
    """The name of the optimizer in the state that was saved, such as ``"optimizer"``; "" if it is that state itself."""
    fqn: str
    """The parameter, as the optimizer's groups list it."""
    key: str
    """Of the state, such as ``"exp_avg"``; keys of nested dicts are joined by dots."""
    parameter: str | None = None
    """The name of the parameter's tensor in the same checkpoint; None where that was not saved along."""

    @property
    def name(self) -> str:
        """The name of the entry."""
        return f"{self.optimizer}.state.{self.fqn}.{self.key}" if self.optimizer else f"state.{self.fqn}.{self.key}"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of which a rank holds (saving) or wants (loading) some pieces.

    ``dtype`` is a code of the safetensors format (``"F32"``, ``"BF16"``, …). ``pieces`` may be empty. ``placement`` is what the
    state itself declares, axis by axis; the planner derives the rest from who holds what.
    """

    name: str
    dtype: str
    shape: Ints
    pieces: tuple[Piece, ...]
    replication: Replication = Replication.PLAIN
    placement: tuple[AxisPlacement, ...] = ()
    alias_of: str | None = None
    """On the same rank, an earlier name whose memory this one shares exactly (tied weights)."""
    link: StateLink | None = None

    @property
    def first_name(self) -> str:
        """The name under which its memory was met first: its own, where it is no alias. A name may be empty."""
        return self.name if self.alias_of is None else self.alias_of


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """One value that is no tensor, encoded; ``path`` is its key path in the state, encoded too.

    ``data`` is None where the bytes are a blob among the tensors.
    """

    name: str
    path: bytes
    kind: ValueKind
    data: bytes | None
    link: StateLink | None = None


def escape(name: str) -> str:
    """Escape the characters of a name that mean something where a part is added to it; `urllib.parse.unquote` undoes it.

    >>> escape("a@b%")
    'a%40b%25'
    """
    return _ESCAPED.sub(lambda match: f"%{ord(match[0]):02X}", name)


def blob_name(value_name: str, rank: int | None) -> str:
    """Name the tensor that is the bytes of a value; `rank` where each rank has its own.

    >>> blob_name("extra.rng", 3)
    'extra.rng@[value,3]'
    """
    return f"{escape(value_name)}@[value]" if rank is None else f"{escape(value_name)}@[value,{rank}]"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks arranged on named axes, outermost first, row-major: rank = Σ coordinate · stride."""

    axes: tuple[str, ...]
    sizes: Ints

    @property
    def size(self) -> int:
        return prod(self.sizes)

    def coordinates(self, rank: int) -> Ints:
        """The rank's coordinate on each axis.

        >>> Mesh(("pp", "tp"), (2, 4)).coordinates(6)
        (1, 2)
        """
        return unravel(rank, self.sizes)


def unravel(index: int, lengths: Ints) -> Ints:
    """The coordinates of an element of a box, by its number in row-major order.

    >>> unravel(5, (2, 3))
    (1, 2)
    """
    coordinates: list[int] = []
    for length in reversed(lengths):
        index, coordinate = divmod(index, length)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))


def row_major_strides(lengths: Ints) -> Ints:
    """Element strides of a row-major box.

    >>> row_major_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for length in reversed(lengths):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def is_row_major(lengths: Ints, strides: Ints) -> bool:
    """Tell whether consecutive elements of a box are consecutive in memory; the stride of a dim of length 1 does not matter.

    >>> is_row_major((2, 1, 3), (3, 99, 1)), is_row_major((2, 3), (1, 2))
    (True, False)
    """
    dims = zip(lengths, strides, row_major_strides(lengths), strict=True)
    return all(length <= 1 or stride == wanted for length, stride, wanted in dims)


def box_piece(offsets: Ints, lengths: Ints, base: int, strides: Ints) -> Piece:
    """The piece that is a whole box."""
    return Piece(offsets, lengths, 0, prod(lengths), base, strides)
