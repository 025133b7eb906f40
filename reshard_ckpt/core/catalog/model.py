"""The catalog: what a checkpoint holds, and where, as columns.

Everything that grows with the number of shards is a numpy column, so that a million shards cost milliseconds:

1. *tensors*: one entry a tensor, sorted by name; ``row_start[t] : row_start[t + 1]`` are its rows.
2. *rows*: one entry for each contiguous run of bytes in a file: a run ``[start, start + count)`` of a box's row-major order.
3. *boxes*: the distinct boxes that rows refer to; layers alike share them.

Boxes and shapes of fewer dims than the widest tensor are padded on the left with offset 0 and length 1, which changes no
row-major order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError
from ..geometry.dtypes import CODES, ITEM_BYTES
from .links import divided
from .specs import AxisPlacement, Ints, Mesh, StateLink, ValueKind

I64 = NDArray[np.int64]


class TensorKind:
    """What the entry of the tensor table is for."""

    TENSOR = 0
    BLOB = 1
    """The encoded bytes of a large or per-rank value, kept like a tensor of dtype U8."""
    IGNORED = 2
    """A tensor that a load does not look at; in no file."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One shard file; `key` and `digests_key` are paths from the checkpoint's folder.

    ``checkpoint`` is "" where the file is of this checkpoint. Otherwise it is the folder of the checkpoint that the file is of,
    such as ``"../step_90"``, with which both keys begin.
    """

    key: str
    size: int
    digests_key: str
    digest: bytes
    """XXH3-128 of the digests file."""
    save_id: str
    rank: int
    checkpoint: str = ""

    @property
    def folder(self) -> str:
        """With what the keys of a file of another checkpoint begin."""
        return f"{self.checkpoint.rstrip('/')}/" if self.checkpoint else ""


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """A value: its encoded bytes here, or in the blobs (indices into the tensor table, one a rank where it is per rank)."""

    name: str
    path: bytes
    kind: ValueKind
    data: bytes | None
    blobs: Ints = ()
    link: StateLink | None = None


@dataclass(frozen=True, slots=True)
class TensorDescriptions:
    """Columns over tensors; `shape` is (T, D) left-padded, `alias` is the index of the tensor that holds the bytes, or -1.

    `optimizer` and `key` say how many dotted parts of the name are the optimizer and the state key (see `links`); a `key` of 0
    stands for what is no state of an optimizer. `parameter` is the index of the tensor whose state it is, or -1.
    """

    names: tuple[str, ...]
    dtype: NDArray[np.uint8]
    kind: NDArray[np.uint8]
    ndim: I64
    shape: I64
    alias: I64
    optimizer: I64
    key: I64
    parameter: I64


@dataclass(frozen=True, slots=True)
class TensorTable(TensorDescriptions):
    """The tensors of a catalog: also the number of each one's placement, or -1, and of its first row."""

    placement: I64
    row_start: I64


@dataclass(frozen=True, slots=True)
class BoxTable:
    """Distinct boxes, (B, D) left-padded."""

    offsets: I64
    lengths: I64


@dataclass(frozen=True, slots=True)
class RowTable:
    """Columns over rows: `start` and `count` in elements of the box, `offset` in bytes from the beginning of the file."""

    box: I64
    start: I64
    count: I64
    file: I64
    offset: I64


@dataclass(frozen=True, slots=True)
class ShardView:
    """One row, spelled out for people."""

    offsets: Ints
    lengths: Ints
    start: int
    count: int
    file: FileEntry
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TensorView:
    """One tensor, spelled out for people: what `Catalog.tensors` maps names to."""

    name: str
    dtype: str
    shape: Ints
    placement: tuple[AxisPlacement, ...] | None
    alias_of: str | None
    shards: tuple[ShardView, ...]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Catalog:
    """The global metadata of one checkpoint; immutable, and free of tensor data. `metadata` is what the user attached."""

    save_id: str
    created_s: float
    mesh: Mesh | None
    metadata: Any
    tensors_table: TensorTable
    placements: tuple[tuple[AxisPlacement, ...], ...]
    boxes: BoxTable
    rows: RowTable
    files: tuple[FileEntry, ...]
    values_table: tuple[ValueEntry, ...]
    unreadable: Mapping[str, CheckpointError] = field(default_factory=dict, compare=False)
    """Names of a foreign checkpoint that are in no table, as what they hold cannot be read, and why."""
    _index: dict[str, int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        table = self.tensors_table
        index = {name: i for i, name in enumerate(table.names) if table.kind[i] == TensorKind.TENSOR}
        object.__setattr__(self, "_index", index)

    def __repr__(self) -> str:
        mesh = "" if self.mesh is None else f", mesh {dict(zip(self.mesh.axes, self.mesh.sizes, strict=True))}"
        return f"<Catalog {self.save_id!r}: {len(self._index)} tensors, {len(self.values_table)} values{mesh}>"

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def index(self, name: str) -> int:
        """The tensor's index in the table; KeyError where there is none."""
        return self._index[name]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors."""
        return tuple(self._index)

    @property
    def value_names(self) -> tuple[str, ...]:
        """The names of all values that are no tensors."""
        return tuple(v.name for v in self.values_table)

    def dtype(self, index: int) -> str:
        return CODES[int(self.tensors_table.dtype[index])]

    def shape(self, index: int) -> Ints:
        table = self.tensors_table
        width, ndim = table.shape.shape[1], int(table.ndim[index])
        return tuple(table.shape[index, width - ndim :].tolist())

    def source(self, index: int) -> int:
        """The tensor that holds the bytes of this one: itself, unless it is an alias."""
        alias = int(self.tensors_table.alias[index])
        return index if alias < 0 else alias

    def link(self, index: int) -> StateLink | None:
        """Which optimizer, parameter and key a tensor is the state of; None if it is no state."""
        table = self.tensors_table
        optimizer, key, parameter = int(table.optimizer[index]), int(table.key[index]), int(table.parameter[index])
        return divided(table.names[index], optimizer, key, None if parameter < 0 else table.names[parameter]) if key else None

    def links(self) -> dict[str, StateLink]:
        """The links of all tensors and values that are state of an optimizer, by name."""
        table = self.tensors_table
        state = np.flatnonzero((table.key > 0) & (table.kind == TensorKind.TENSOR)).tolist()
        of_tensors = {table.names[i]: link for i in state if (link := self.link(i)) is not None}
        return of_tensors | {value.name: value.link for value in self.values_table if value.link is not None}

    def tensor(self, name: str) -> TensorView:
        """Everything that is known of one tensor."""
        i = self._index[name]
        source, ndim = self.source(i), int(self.tensors_table.ndim[i])
        placement = int(self.tensors_table.placement[i])
        first, last = self.tensors_table.row_start[source : source + 2].tolist()
        return TensorView(
            name=name,
            dtype=self.dtype(i),
            shape=self.shape(i),
            placement=None if placement < 0 else self.placements[placement],
            alias_of=None if source == i else self.tensors_table.names[source],
            shards=tuple(self._shard(row, ndim, ITEM_BYTES[self.dtype(i)]) for row in range(first, last)),
        )

    def _shard(self, row: int, ndim: int, item_bytes: int) -> ShardView:
        box, width = int(self.rows.box[row]), self.boxes.offsets.shape[1]
        count = int(self.rows.count[row])
        return ShardView(
            offsets=tuple(self.boxes.offsets[box, width - ndim :].tolist()),
            lengths=tuple(self.boxes.lengths[box, width - ndim :].tolist()),
            start=int(self.rows.start[row]),
            count=count,
            file=self.files[int(self.rows.file[row])],
            offset=int(self.rows.offset[row]),
            num_bytes=count * item_bytes,
        )

    def tensors(self) -> Iterator[TensorView]:
        """Every tensor, in order of name."""
        return (self.tensor(name) for name in self._index)

    def summary(self) -> dict[str, Any]:
        """Counts for a first look: tensors, rows, files, bytes."""
        table = self.tensors_table
        return {
            "save_id": self.save_id,
            "tensors": len(self._index),
            "values": len(self.values_table),
            "rows": len(self.rows.box),
            "files": len(self.files),
            "bytes": sum(f.size for f in self.files),
            "mesh": None if self.mesh is None else dict(zip(self.mesh.axes, self.mesh.sizes, strict=True)),
            "aliases": int((table.alias >= 0).sum()),
        }
