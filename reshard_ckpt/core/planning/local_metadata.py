"""Local metadata: descriptions of the tensors, pieces and values of one rank, as columns that can be sent and merged.

A training loop saves the same layout again and again, so `Memo` keeps the values that were made for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...errors import LayoutError
from ..catalog.model import TensorDescriptions, TensorKind
from ..catalog.names import link_columns
from ..catalog.specs import CODES, Mesh, PieceColumns, Placement, TensorSpec, ValueSpec, piece_columns, width_of
from ..geometry.columns import group_ids
from ..geometry.runs import I64, pad_rows, volumes

U8 = NDArray[np.uint8]

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class TensorColumns(TensorDescriptions):
    """Descriptions of the tensors of one rank, without its pieces of them, so that many ranks have equal tables.

    ``alias`` is the index of an earlier tensor, or -1. ``placement`` is an index into the distinct ``placements``. ``own`` marks
    the bytes of a value that each rank has for itself: its name stands for a different tensor on each rank, whose shape is the
    box of its row.
    """

    own: U8
    replication: U8
    placements: tuple[Placement, ...]
    placement: I64
    mesh: Mesh | None


@dataclass(frozen=True, slots=True)
class RowColumns:
    """The pieces that one rank holds, as runs of its distinct boxes. This part of the metadata differs from rank to rank."""

    box_offsets: I64
    box_lengths: I64
    tensor: I64
    box: I64
    start: I64
    count: I64


@dataclass(frozen=True, slots=True)
class LocalMetadata:
    """The description of everything that one rank holds: its tensors, its pieces of them, and its values."""

    tensors: TensorColumns
    rows: RowColumns
    values: tuple[ValueSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class JobMetadata:
    """The local metadata of all ranks: the distinct tables of tensors, and the pieces of all ranks end to end, in order of rank.

    ``table[r]`` is the index of rank r's table in `tables`. The columns from `rank` on have one row for each piece: ``tensor`` is
    an index into its rank's table, ``local`` the index among its rank's rows, and ``box`` an index into `box_offsets` and
    `box_lengths`. Equal boxes may occur there many times.
    """

    tables: tuple[TensorColumns, ...]
    table: I64
    box_offsets: I64
    box_lengths: I64
    rank: I64
    local: I64
    tensor: I64
    box: I64
    start: I64
    count: I64

    @property
    def num_ranks(self) -> int:
        return len(self.table)


def build_local_metadata(
    specs: Sequence[TensorSpec], num_blobs: int, mesh: Mesh | None, own: Mapping[int, str] | None = None
) -> LocalMetadata:
    """Describe a rank's tensors and pieces as columns; the result has no values yet. The last `num_blobs` specs are blobs.

    Raise `LayoutError` if a piece reaches outside its tensor.

    Parameters
    ----------
    own
        The blobs of values that each rank has for itself: the index of the spec, and the name of the value (the same on all
        ranks).
    """
    own = own or {}
    pieces, tensors = piece_columns(specs), tensor_columns(specs, num_blobs, mesh)
    # Pieces are checked before the shapes of own blobs are set to 0.
    _check_inside(specs, pieces, tensors.shape)
    tensors.shape[list(own)], tensors.own[list(own)] = 0, 1
    tensors = replace(tensors, names=tuple(own.get(i, spec.name) for i, spec in enumerate(specs)))
    # box[i]: the distinct box of piece i; first: one piece of each distinct box.
    box, first = group_ids(np.hstack([pieces.offsets, pieces.lengths]))
    rows = RowColumns(pieces.offsets[first], pieces.lengths[first], pieces.tensor, box, pieces.start, pieces.count)
    return LocalMetadata(tensors, rows)


def tensor_columns(specs: Sequence[TensorSpec], num_blobs: int, mesh: Mesh | None) -> TensorColumns:
    """Put specs into columns, without their pieces. The last `num_blobs` are blobs (bytes of values).

    An alias must follow its tensor.
    """
    kind = np.full(len(specs), TensorKind.TENSOR, np.uint8)
    kind[len(specs) - num_blobs :] = TensorKind.BLOB
    placements = {placement: i for i, placement in enumerate(dict.fromkeys(spec.placement for spec in specs))}
    names = tuple(spec.name for spec in specs)
    first = {name: i for i, name in reversed(list(enumerate(names)))}  # two specs may have one name
    return TensorColumns(
        names=names,
        dtype=np.array([CODES.index(spec.dtype) for spec in specs], np.uint8),
        kind=kind,
        own=np.zeros(len(specs), np.uint8),
        replication=np.array([spec.replication for spec in specs], np.uint8),
        ndim=np.array([len(spec.shape) for spec in specs], np.int64),
        shape=pad_rows([spec.shape for spec in specs], width_of(specs), 1),
        alias=np.array([-1 if spec.alias_of is None else first[spec.alias_of] for spec in specs], np.int64),
        placements=tuple(placements),
        placement=np.array([placements[spec.placement] for spec in specs], np.int64),
        mesh=mesh,
        **link_columns(names, [spec.link for spec in specs], first),
    )


def _check_inside(specs: Sequence[TensorSpec], pieces: PieceColumns, shape: I64) -> None:
    """Raise LayoutError if the box of a piece reaches outside its tensor, or the run of a piece outside its box."""
    # within[i]: each dim of piece i's box lies inside its tensor; run[i]: its run lies inside its box.
    within = (pieces.offsets >= 0) & (pieces.lengths >= 0) & (pieces.offsets + pieces.lengths <= shape[pieces.tensor])
    run = (pieces.start >= 0) & (pieces.count >= 0) & (pieces.start + pieces.count <= volumes(pieces.lengths))
    bad = np.flatnonzero(~(within.all(axis=1) & run))
    if len(bad):
        spec, piece = [(spec, piece) for spec in specs for piece in spec.pieces][int(bad[0])]
        where = f"offsets {piece.offsets}, lengths {piece.lengths}"
        if within[bad[0]].all():
            where = f"elements {piece.start}:{piece.start + piece.count} of the box with lengths {piece.lengths}"
        raise LayoutError(f"{spec.name}: {where} reach outside global shape {spec.shape}; correct the declared offsets")


class Memo(Generic[Key, Value]):
    """A cache of the last `limit` keys and their values. Thread-safe.

    >>> memo = Memo(2)
    >>> [memo.get(key, lambda: key * 10) for key in (1, 2, 1)]
    [10, 20, 10]
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: tuple[tuple[Key, Value], ...] = ()

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the cached value of a key; if there is none, make it and keep it."""
        found = self.find(key)
        if found is None:
            found = make()
            self.keep(key, found)
        return found

    def find(self, key: Key) -> Value | None:
        """Return the cached value of a key, or None if the key has no value. So None itself cannot be cached."""
        # Without a lock: another thread sees the old tuple or the new one. If two write at once, an entry is lost and made again.
        items = self._items
        for i, (known, value) in enumerate(items):
            if known == key:
                if i:
                    self._items = (items[i], *items[:i], *items[i + 1 :])
                return value
        return None

    def forget(self) -> None:
        """Drop all keys and values."""
        self._items = ()

    def keep(self, key: Key, value: Value) -> None:
        """Keep a value. It replaces the value of the same key, or else the least recently used value."""
        others = [item for item in self._items if item[0] != key]
        self._items = ((key, value), *others[: self._limit - 1])
