"""The catalog: all tensors and values of a checkpoint and where their bytes lie, as columns; and the selection of a part of it.

Everything that grows with the number of shards is a numpy column, so that a million shards cost milliseconds:

1. *tensors*: one entry for each tensor, sorted by name; its rows are ``row_start[t] : row_start[t + 1]``.
2. *rows*: one entry for each contiguous run of bytes in a file. It holds the run ``[start, start + count)`` of a box.
3. *boxes*: the distinct boxes that rows refer to; equal layers share them.

Boxes and shapes of fewer dims than the widest tensor are padded on the left with offset 0 and length 1, which does not change
the row-major order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError
from ..geometry.columns import ColumnTable, is_new
from ..geometry.runs import I64, ranges
from .names import divided
from .packed import PackedRows, packed_size
from .specs import CODES, ITEM_BYTES, Ints, Mesh, Placement, StateLink, ValueKind, item_bytes_of


class TensorKind:
    """The kind of an entry of the tensor table: a tensor, the bytes of a value, or a tensor that loads skip."""

    TENSOR = 0
    BLOB = 1
    """The encoded bytes of a value that is large or differs by rank, kept like a tensor of dtype U8."""
    IGNORED = 2
    """A tensor without bytes in any file, which loads skip."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One shard file; `key` and `digests_key` are paths relative to the checkpoint's folder.

    ``checkpoint`` is "" if the file belongs to this checkpoint. Otherwise it is the folder of the checkpoint that the file
    belongs to, such as ``"../step_90"``, and both keys begin with it.
    """

    key: str
    size: int
    digests_key: str
    digest: bytes
    """XXH3-128 digest of the file at `digests_key`."""
    save_id: str
    rank: int
    checkpoint: str = ""
    packed: tuple[PackedRows, ...] = ()
    """Rows of the file that are stored in 8 or 4 bits an element; `size`, and offsets of rows, count their bytes before that."""

    @property
    def stored_bytes(self) -> int:
        """The size of the file as stored, in bytes: less than `size` if it has packed rows."""
        return packed_size(self.size, self.packed)

    @property
    def keys(self) -> tuple[str, str]:
        """The paths of the shard file and of its digests file, relative to the checkpoint's folder."""
        return self.key, self.digests_key

    @property
    def folder(self) -> str:
        """The folder of the other checkpoint that the file belongs to, with a slash at its end; "" for a file of this one."""
        return f"{self.checkpoint.rstrip('/')}/" if self.checkpoint else ""


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """A value: a part of the state that is not a tensor. Its encoded bytes are `data`, or lie in the tensors that `blobs` lists.

    ``blobs`` are indices into the tensor table: one, or one for each rank if the value differs by rank.
    """

    name: str
    path: bytes
    kind: ValueKind
    data: bytes | None
    blobs: Ints = ()
    link: StateLink | None = None


@dataclass(frozen=True, slots=True)
class TensorDescriptions:
    """Columns with one entry for each tensor: name, dtype, shape, alias, and the parameter whose optimizer state it is.

    `shape` is (T, D), padded on the left. `alias` is the index of the tensor that holds the bytes, or -1. The name of optimizer
    state is ``<optimizer>.state.<FQN>.<key>``: `optimizer` and `key` are the numbers of dotted parts in the first and the last of
    these, and `parameter` is the index of the parameter's tensor, or -1. For any other tensor, `key` is 0.
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

    def shape_of(self, index: int) -> Ints:
        """Return the global shape of a tensor, without padding."""
        width, ndim = self.shape.shape[1], int(self.ndim[index])
        return tuple(self.shape[index, width - ndim :].tolist())


@dataclass(frozen=True, slots=True)
class TensorTable(TensorDescriptions):
    """The tensors of a catalog.

    `placement` has the index of each tensor's placement, or -1; `row_start` the index of its first row.
    """

    placement: I64
    row_start: I64


@dataclass(frozen=True, slots=True)
class BoxTable(ColumnTable):
    """The distinct boxes (parts of tensors) that rows refer to: offsets and lengths, each (B, D), padded on the left."""

    offsets: I64
    lengths: I64


@dataclass(frozen=True, slots=True)
class RowTable(ColumnTable):
    """Columns of the rows, which are runs of a box that are contiguous in a file.

    Row i is elements ``start[i] : start[i] + count[i]`` of box ``box[i]``, at byte ``offset[i]`` of file ``file[i]``.
    """

    box: I64
    start: I64
    count: I64
    file: I64
    offset: I64


@dataclass(frozen=True, slots=True)
class ShardView:
    """One contiguous part of a tensor in a file: a run of elements of a box, and the file and bytes that hold it.

    Attributes
    ----------
    offsets, lengths
        The box in the global tensor.
    start, count
        The run, in elements of the box in row-major order. For a plain shard it is the whole box, and `start` is 0.
    file, offset, num_bytes
        The file, and the bytes in it.
    """

    offsets: Ints
    lengths: Ints
    start: int
    count: int
    file: FileEntry
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TensorView:
    """One tensor of a catalog as plain Python values, with its parts in files; `Catalog.tensor` makes it.

    Attributes
    ----------
    name, shape
        The name and the global shape.
    dtype
        The code of the safetensors format: ``F32``, ``BF16``, …
    placement
        An `AxisPlacement` for each mesh axis, in order; None if it is not known.
    alias_of
        The name of the tensor whose bytes this one shares; None if it has bytes of its own.
    shards
        A `ShardView` for each contiguous part in a file.
    """

    name: str
    dtype: str
    shape: Ints
    placement: Placement | None
    alias_of: str | None
    shards: tuple[ShardView, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Catalog:
    """The metadata of one checkpoint: its tensors, values and files.

    Immutable, without tensor data; ``name in catalog`` finds a tensor.

    Attributes
    ----------
    save_id, created_s
        The id of the save that wrote the checkpoint, and its time in seconds since 1970.
    mesh
        The job's mesh, with ``axes`` and ``sizes``; None if it is not known.
    metadata
        The ``metadata=`` of the save.
    files
        The shard files, each with ``key``, ``size`` and ``rank``.
    unreadable
        Names of tensors and values of a foreign checkpoint that cannot be read, each with the error that says why. They are in
        no table.
    lossy
        By name, a text for each tensor that is not saved exactly: parts of it are older than the save, or rounded to fewer bits.
    compacted_from
        The `save_id` that the checkpoint had before it was first compacted; empty if it never was.
    folder
        The name of the folder that the checkpoint was saved to; empty if it is not known.
    tensors_table, rows, boxes, placements, values_table
        The columns behind the views; docs/format.md describes them.
    """

    save_id: str
    created_s: float
    mesh: Mesh | None
    metadata: Any
    tensors_table: TensorTable
    placements: tuple[Placement, ...]
    boxes: BoxTable
    rows: RowTable
    files: tuple[FileEntry, ...]
    values_table: tuple[ValueEntry, ...]
    unreadable: Mapping[str, CheckpointError] = field(default_factory=dict, compare=False)
    lossy: Mapping[str, str] = field(default_factory=dict)
    compacted_from: str = ""
    folder: str = ""
    _index: dict[str, int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        table = self.tensors_table
        index = {name: i for i, name in enumerate(table.names) if table.kind[i] == TensorKind.TENSOR}
        object.__setattr__(self, "_index", index)

    def __repr__(self) -> str:
        mesh = "" if self.mesh is None else f", mesh {self.mesh.by_axis}"
        return f"<Catalog {self.save_id!r}: {len(self._index)} tensors, {len(self.values_table)} values{mesh}>"

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def index(self, name: str) -> int:
        """Return the index of a tensor in the table; raise KeyError if no tensor has this name."""
        return self._index[name]

    @property
    def indices(self) -> Mapping[str, int]:
        """Map the name of each tensor to its index in the tensor table."""
        return self._index

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors."""
        return tuple(self._index)

    @property
    def lineage_id(self) -> str:
        """The id of this checkpoint that `compact` does not change; exports and later checkpoints of the run refer to it."""
        return self.compacted_from or self.save_id

    @property
    def value_names(self) -> tuple[str, ...]:
        """The names of all values, which are the parts of the state that are not tensors."""
        return tuple(v.name for v in self.values_table)

    def dtype(self, index: int) -> str:
        """Return the dtype of a tensor, as a code of the safetensors format."""
        return CODES[int(self.tensors_table.dtype[index])]

    def shape(self, index: int) -> Ints:
        """Return the global shape of a tensor."""
        return self.tensors_table.shape_of(index)

    def found(self, names: Sequence[str]) -> list[tuple[int, str, Ints] | None]:
        """Return the index, dtype and global shape of the tensor of each name; None for a name that no tensor has."""
        table, index_of = self.tensors_table, self._index
        if not index_of:
            return [None] * len(names)
        indices = [index_of.get(name, -1) for name in names]
        at = np.array(indices, np.int64)
        width = table.shape.shape[1]
        # For a name that no tensor has, the columns hold the last tensor's, which are not used.
        columns = (column[at].tolist() for column in (table.dtype, table.ndim, table.shape))
        return [
            None if index < 0 else (index, CODES[dtype], tuple(shape[width - ndim :]))
            for index, dtype, ndim, shape in zip(indices, *columns, strict=True)
        ]

    def sources(self, indices: I64) -> I64:
        """Return, for each tensor index, the index of the tensor that holds the bytes: the same one, unless it is an alias."""
        alias = self.tensors_table.alias[indices]
        return np.where(alias < 0, indices, alias)

    def source(self, index: int) -> int:
        """Return the index of the tensor that holds the bytes of this tensor: the same index, unless it is an alias."""
        alias = int(self.tensors_table.alias[index])
        return index if alias < 0 else alias

    def placement(self, index: int) -> Placement | None:
        """Return the placement of a tensor by its index; None if the placement is not known."""
        number = int(self.tensors_table.placement[index])
        return None if number < 0 else self.placements[number]

    def links(self) -> dict[str, StateLink]:
        """Map the name of each tensor and value of optimizer state to its `StateLink` (optimizer, parameter and key)."""
        table = self.tensors_table
        names, state = table.names, np.flatnonzero((table.key > 0) & (table.kind == TensorKind.TENSOR))
        columns = (column[state].tolist() for column in (table.optimizer, table.key, table.parameter))
        of_tensors = {
            (name := names[i]): divided(name, optimizer, key, None if parameter < 0 else names[parameter])
            for i, optimizer, key, parameter in zip(state.tolist(), *columns, strict=True)
        }
        return of_tensors | {value.name: value.link for value in self.values_table if value.link is not None}

    @property
    def file_bytes(self) -> int:
        """Size of all files together, in bytes."""
        return sum(file.size for file in self.files)

    @property
    def row_tensors(self) -> I64:
        """For each row, the index of the tensor that it belongs to, (R,)."""
        return np.repeat(np.arange(len(self.tensors_table.names)), np.diff(self.tensors_table.row_start))

    @property
    def row_bytes(self) -> I64:
        """The size of each row in bytes, (R,)."""
        return self.rows.count * item_bytes_of(self.tensors_table.dtype)[self.row_tensors]

    def rows_of(self, index: int) -> slice:
        """Return the slice of the row table that belongs to a tensor; the tensor must not be an alias."""
        return slice(*self.tensors_table.row_start[index : index + 2].tolist())

    def tensor(self, name: str) -> TensorView:
        """Return one tensor and its rows as plain Python values."""
        i = self._index[name]
        source, ndim = self.source(i), int(self.tensors_table.ndim[i])
        rows = self.rows_of(source)
        return TensorView(
            name=name,
            dtype=self.dtype(i),
            shape=self.shape(i),
            placement=self.placement(i),
            alias_of=None if source == i else self.tensors_table.names[source],
            shards=tuple(self._shard(row, ndim, ITEM_BYTES[self.dtype(i)]) for row in range(rows.start, rows.stop)),
        )

    def _shard(self, row: int, ndim: int, item_bytes: int) -> ShardView:
        """Return one row of a tensor as plain Python values."""
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
        """Yield every tensor, in order of name."""
        return (self.tensor(name) for name in self._index)

    def summary(self) -> dict[str, Any]:
        """Return counts for a first look: tensors, values, rows, files, bytes and aliases; also the save's id and the mesh."""
        table = self.tensors_table
        return {
            "save_id": self.save_id,
            "tensors": len(self._index),
            "values": len(self.values_table),
            "rows": len(self.rows.box),
            "files": len(self.files),
            "bytes": self.file_bytes,
            "mesh": None if self.mesh is None else self.mesh.by_axis,
            "aliases": int((table.alias >= 0).sum()),
        }


_UNCHANGED = ("dtype", "kind", "ndim", "shape", "placement", "optimizer", "key")
"""The columns of the tensor table that can be selected row by row: their entries do not refer to other tensors or rows."""


def select_entries(catalog: Catalog, tensors: Sequence[str], values: Sequence[str]) -> Catalog:
    """Return the catalog with only the tensors and values of these names.

    The result is sorted by name, also if `catalog` is not, because its names were changed. If a selected tensor is an alias of
    one that is not selected, it takes over the rows, and other selected aliases of the same bytes become its aliases.
    """
    table, chosen = catalog.tensors_table, frozenset(values)
    kept = [value for value in catalog.values_table if value.name in chosen]
    wanted = {*map(catalog.index, tensors), *(blob for value in kept for blob in value.blobs)}
    # taken: the old index of each new entry; source: the old index of the tensor that has its bytes.
    taken = np.array(sorted(wanted, key=table.names.__getitem__), np.int64)
    source = catalog.sources(taken)
    # Entries by their source. First of each group comes the source itself if it was selected, else the first of its aliases.
    order = np.lexsort((taken, taken != source, source))
    first = is_new(source[order])
    # leader[i]: the new index of the first entry that shares the bytes of entry i; alias: the same, -1 for the leader itself.
    leader = np.empty(len(taken), np.int64)
    leader[order] = order[np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))]
    alias = np.where(leader == np.arange(len(taken)), -1, leader)
    # counts[i]: rows of entry i; an alias has none of its own. row: the old index of each new row.
    counts = np.where(alias < 0, np.diff(table.row_start)[source], 0)
    owner, step = ranges(counts)
    row = table.row_start[source[owner]] + step
    place = {int(old): new for new, old in enumerate(taken.tolist())}
    return replace(
        catalog,
        tensors_table=replace(
            table,
            names=tuple(table.names[i] for i in taken.tolist()),
            **{column: getattr(table, column)[taken] for column in _UNCHANGED},
            alias=alias,
            row_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            parameter=np.array([place.get(old, -1) for old in table.parameter[taken].tolist()], np.int64),
        ),
        rows=catalog.rows.take(row),
        values_table=tuple(replace(value, blobs=tuple(place[blob] for blob in value.blobs)) for value in kept),
        unreadable={},
    )


def retyped(catalog: Catalog, dtypes: Mapping[str, str]) -> Catalog:
    """Return the catalog with other dtypes for some tensors, as it will be once they are converted; `dtypes` is by name.

    Tensors that now differ in dtype share no bytes. The rows still describe the old bytes, so the result cannot be read from.
    """
    table = catalog.tensors_table
    dtype = table.dtype.copy()
    for name, code in dtypes.items():
        dtype[catalog.index(name)] = CODES.index(code)
    # shares[t]: tensor t is an alias, and still has the dtype of the tensor that holds its bytes.
    shares = (table.alias >= 0) & (dtype == dtype[np.maximum(table.alias, 0)])
    return replace(catalog, tensors_table=replace(table, dtype=dtype, alias=np.where(shares, table.alias, -1)))
