"""The messages between the ranks of a save, and their encoding: columns of numbers as bytes, never pickles.

A rank's *metadata* goes to rank 0, an *assignment* comes back, a *receipt* goes to rank 0 again. The metadata has three parts:
the tensors, the rows (this rank's pieces of them), and the values. A part that many ranks have alike is sent and decoded once
(`agreement`). Rows, assignments and receipts are columns (`encode_columns`): rank 0 decodes those of all ranks at once, one
column at a time, and encodes all assignments at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from ...core.catalog.model import ValueEntry
from ...core.catalog.packed import PackedRows, packed_size
from ...core.catalog.specs import AxisPlacement, Mesh, StateLink, ValueKind, ValueSpec
from ...core.geometry.columns import ColumnTable, columns_of
from ...core.geometry.runs import I64, pad_left, ranges
from ...core.planning.local_metadata import JobMetadata, LocalMetadata, Memo, RowColumns, TensorColumns
from ...core.planning.save_plan import SavePlan
from ...format.files import digests_key

_NARROW = ("dtype", "kind", "own", "replication")
"""The columns of the tensors' table that are uint8; the others are wider."""

_TENSOR_COLUMNS = (*_NARROW, "ndim", "shape", "alias", "placement", "optimizer", "key", "parameter")

_COLUMN = np.dtype([("count", "<u4"), ("width", "u1")])
"""Head of a column in a message: how many numbers it has, and the bytes of each."""


@dataclass(frozen=True, slots=True)
class RunColumns(ColumnTable):
    """Runs of elements in a rank's own rows (pieces): ``[start, start + count)`` of the row-major order of row `local`'s box."""

    local: I64
    start: I64
    count: I64


@dataclass(frozen=True, slots=True)
class Assignment:
    """The work of one rank in a save: the runs to write (`items`), in order, and the replicated runs to fingerprint (`checks`).

    With `aligned`, the data of each file begin at a block, so that a later save can find each block of a run by itself. `bits`
    has, for each row of this rank that is stored in fewer bits, the bits of one element.
    """

    save_id: str
    items: RunColumns
    checks: RunColumns
    aligned: bool = False
    bits: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredRuns(ColumnTable):
    """Parts of write items, with their places in files: ``count`` elements from `start` on of the box of `item`.

    `file` is an index of a file, and `offset` the byte at which the part begins there.
    """

    item: I64
    start: I64
    count: I64
    file: I64
    offset: I64


class WrittenFile(NamedTuple):
    """A file that a rank wrote and made durable together with its digests file.

    Attributes
    ----------
    size
        Size of the shard file in bytes.
    digest
        The 128-bit digest of the digests file.
    sha256, digests_sha256
        The SHA-256 of the shard file and of the digests file; empty unless the save writes a manifest.
    packed
        The rows of the file that are stored in fewer bits. `size` and the digests are of the plain file, without this packing.
    """

    key: str
    size: int
    digest: bytes
    sha256: bytes = b""
    digests_sha256: bytes = b""
    packed: tuple[PackedRows, ...] = ()

    @property
    def stored_bytes(self) -> int:
        """Size in bytes of the file as it is stored, with packed rows."""
        return packed_size(self.size, self.packed) if self.packed else self.size

    @property
    def digests_key(self) -> str:
        return digests_key(self.key)


@dataclass(frozen=True, slots=True)
class Receipt:
    """One rank's message after writing: the files that it wrote, and the fingerprints of its replicated runs.

    ``file[i]`` and ``offset[i]`` are the index of the file that holds write item i, and the byte at which the item begins there.
    An incremental save has `parts` instead; file i of its base has the number ``len(files) + i`` there.
    """

    files: tuple[WrittenFile, ...]
    file: I64
    offset: I64
    fingerprints: NDArray[np.uint64]
    record: bytes = b""
    """The times of this rank's steps, as `Recorder.encoded` encodes them; empty if no timeline is kept."""
    parts: StoredRuns | None = None

    @property
    def num_bytes(self) -> int:
        return sum(file.stored_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class Receipts:
    """The receipts of all ranks, joined in order of rank.

    Attributes
    ----------
    files
        The files of all ranks.
    rank
        ``rank[i]``: the rank that wrote file i; ascending.
    file, offset
        For each write item of the save, the index of its file in `files`, and the byte at which it begins there.
    fingerprints
        Of the checks of all ranks.
    records
        The `Receipt.record` of each rank.
    parts, part_rank
        In an incremental save, the `Receipt.parts` of all ranks, and the rank of each. ``parts.file`` is an index in `files`, or
        an index in the files of the base plus ``len(files)``.
    """

    files: tuple[WrittenFile, ...]
    rank: I64
    file: I64
    offset: I64
    fingerprints: NDArray[np.uint64]
    records: Sequence[bytes]
    parts: StoredRuns | None
    part_rank: I64

    @property
    def folders(self) -> list[str]:
        """The sorted names of the folders that the files lie in. Each folder is named by the id of a save."""
        return sorted({file.key.partition("/")[0] for file in self.files})


def encode_columns(columns: Sequence[NDArray[Any]], cuts: Sequence[I64] | None = None) -> list[bytes]:
    """Encode columns of numbers that are not negative as one message, or cut them into several.

    A message has the head of each column, and then the columns, each with the fewest bytes for a number.

    Parameters
    ----------
    cuts : (columns, messages + 1)
        Message i has the numbers ``[cuts[c][i], cuts[c][i + 1])`` of column c. By default one message has all.
    """
    cut = np.array([[0, len(column)] for column in columns] if cuts is None else cuts, np.int64)
    narrow = [column.astype(np.min_scalar_type(int(column.max(initial=0))).newbyteorder("<")) for column in columns]
    widths = np.array([column.itemsize for column in narrow])
    heads = np.empty((cut.shape[1] - 1, len(columns)), _COLUMN)
    heads["count"], heads["width"] = np.diff(cut).T, widths
    data = [column.tobytes() for column in narrow]
    at = (cut * widths[:, None]).T.tolist()  # at[i][c]: byte of column c at which message i begins
    return [
        b"".join((head.tobytes(), *(column[low:high] for column, low, high in zip(data, begin, end, strict=True))))
        for head, begin, end in zip(heads, at, at[1:], strict=False)
    ]


def decode_columns(messages: Sequence[bytes], num: int) -> tuple[list[I64], I64]:
    """Decode messages of `num` columns, as `encode_columns` encoded them: one column of all messages at a time.

    Returns
    -------
    tuple
        Each column, of all messages end to end. And counts (messages, columns): how many numbers of a column each message has.
    """
    heads = np.frombuffer(b"".join([data[: num * _COLUMN.itemsize] for data in messages]), _COLUMN).reshape(-1, num)
    counts, widths = (heads[field].astype(np.int64) for field in ("count", "width"))
    # ends[c][i]: byte of message i at which its column c begins, and column c - 1, or the heads, end
    head = np.full((len(heads), 1), num * _COLUMN.itemsize)
    ends = np.cumsum(np.hstack([head, counts * widths]), axis=1).T.tolist()
    columns = []
    for count, width, begin, end in zip(counts.T, widths.T, ends, ends[1:], strict=False):
        column = np.empty(int(count.sum()), np.int64)
        width_of = np.repeat(width, count)
        parts = [message[low:high] for message, low, high in zip(messages, begin, end, strict=True)]
        of_messages = width.tolist()
        for one in set(of_messages):  # messages with numbers of as many bytes are decoded together
            data = b"".join([part for part, its in zip(parts, of_messages, strict=True) if its == one])
            column[width_of == one] = np.frombuffer(data, f"<u{one}").astype(np.int64)
        columns.append(column)
    return columns, counts


def encode_metadata(local_metadata: LocalMetadata) -> tuple[bytes, bytes, bytes]:
    """Encode the metadata of a rank in three parts: tensors, rows, values. Tensors and rows are cached for two states."""
    tensors, rows = local_metadata.tensors, local_metadata.rows
    # By identity, and with the tables themselves, so that no others get their ids.
    *_, parts = _ENCODED.get((id(tensors), id(rows)), lambda: (tensors, rows, (_encode_tensors(tensors), _encode_rows(rows))))
    return *parts, encode_values(local_metadata.values)


_ENCODED: Memo[tuple[int, int], tuple[TensorColumns, RowColumns, tuple[bytes, bytes]]] = Memo(2)


def _encode_tensors(tensors: TensorColumns) -> bytes:
    placements = [[astuple(p) for p in placement] for placement in tensors.placements]
    mesh = None if tensors.mesh is None else [tensors.mesh.axes, tensors.mesh.sizes]
    # Plus 1: some columns have a -1 for nothing, and only numbers that are not negative can be encoded.
    [columns] = encode_columns([getattr(tensors, name).ravel().astype(np.int64) + 1 for name in _TENSOR_COLUMNS])
    packed: bytes = msgpack.packb([tensors.names, placements, mesh, tensors.shape.shape[1], columns])
    return packed


def _decode_tensors(data: bytes) -> TensorColumns:
    names, placements, mesh, width, encoded = msgpack.unpackb(data, use_list=False)
    numbers, _ = decode_columns([encoded], len(_TENSOR_COLUMNS))
    columns: dict[str, Any] = {name: column - 1 for name, column in zip(_TENSOR_COLUMNS, numbers, strict=True)}
    columns |= {name: columns[name].astype(np.uint8) for name in _NARROW}
    columns["shape"] = columns["shape"].reshape(len(names), width)
    return TensorColumns(
        names=names,
        placements=tuple(tuple(AxisPlacement(*p) for p in placement) for placement in placements),
        mesh=None if mesh is None else Mesh(*mesh),
        **columns,
    )


def encode_values(values: Sequence[ValueSpec | ValueEntry]) -> bytes:
    """Encode values for `decode_values`. The indices of their blobs are left out."""
    links = ((None if v.link is None else [v.link.optimizer, v.link.fqn, v.link.key, v.link.parameter]) for v in values)
    packed: bytes = msgpack.packb([[v.name, v.path, int(v.kind), v.data, link] for v, link in zip(values, links, strict=True)])
    return packed


def decode_values(data: bytes) -> tuple[ValueSpec, ...]:
    """Decode values of a state that `encode_values` encoded."""
    return tuple(
        ValueSpec(name, path, ValueKind(kind), raw, None if link is None else StateLink(*link))
        for name, path, kind, raw, link in msgpack.unpackb(data)
    )


def _encode_rows(rows: RowColumns) -> bytes:
    boxes = [np.array(rows.box_offsets.shape), rows.box_offsets.ravel(), rows.box_lengths.ravel()]
    return encode_columns([*boxes, rows.tensor, rows.box, rows.start, rows.count])[0]


def _joined_boxes(column: I64, num_boxes: I64, num_dims: I64, fill: int) -> I64:
    """Join offsets (or lengths) of the boxes of all ranks into one array (boxes, D). Ranks with fewer dims get leading dims."""
    width = int(num_dims.max())
    if (num_dims == width).all():
        return column.reshape(int(num_boxes.sum()), width)
    parts = zip(np.split(column, np.cumsum(num_boxes * num_dims)[:-1]), num_boxes.tolist(), num_dims.tolist(), strict=True)
    return np.concatenate([pad_left(part.reshape(num, dims), width, fill) for part, num, dims in parts])


def decode_metadata(tensors: Sequence[bytes], rows: Sequence[bytes]) -> JobMetadata:
    """Decode the tensors and rows of all ranks, by rank. Equal tensor tables are decoded once, and all rows as one array."""
    # number: index of each distinct tensors part. table[rank]: index of the rank's part
    number: dict[bytes, int] = {}
    table = np.array([number.setdefault(data, len(number)) for data in tensors], np.int64)
    (shapes, offsets, lengths, *columns), counts = decode_columns(rows, 7)
    num_boxes, num_dims = shapes.reshape(-1, 2).T
    tensor, box, start, count = columns
    rank, local = ranges(counts[:, -1])
    # first_box[rank]: the place of a rank's first box among the boxes of all ranks; in its message, it counts from 0
    first_box = np.cumsum(num_boxes) - num_boxes
    return JobMetadata(
        tables=tuple(map(_decode_tensors, number)),
        table=table,
        box_offsets=_joined_boxes(offsets, num_boxes, num_dims, 0),
        box_lengths=_joined_boxes(lengths, num_boxes, num_dims, 1),
        rank=rank,
        local=local,
        tensor=tensor,
        box=box + first_box[rank],
        start=start,
        count=count,
    )


def encode_assignments(plan: SavePlan) -> list[bytes]:
    """Encode the assignment of each rank, by rank. The columns of all ranks are encoded at once, and then cut."""
    checks, ranks = plan.checks, np.arange(plan.num_ranks + 1)
    # Rank r's write items are [first[r], first[r + 1]), its checks [checked[r], checked[r + 1]).
    first, checked = np.searchsorted(plan.rank, ranks), np.searchsorted(checks.rank, ranks)
    columns = [plan.local, plan.part_start, plan.part_count, checks.local, checks.start, checks.count]
    return encode_columns(columns, [first] * 3 + [checked] * 3)


def decode_assignment(data: bytes, save_id: str) -> Assignment:
    """Decode one rank's assignment, as `encode_assignments` encoded it."""
    columns, _ = decode_columns([data], 6)
    return Assignment(save_id, RunColumns(*columns[:3]), RunColumns(*columns[3:]))


def encode_receipt(receipt: Receipt) -> bytes:
    """Encode a receipt as one message."""
    parts = StoredRuns.empty() if receipt.parts is None else receipt.parts
    [columns] = encode_columns([receipt.file, receipt.offset, receipt.fingerprints, *columns_of(parts)])
    packed: bytes = msgpack.packb([receipt.files, receipt.record, receipt.parts is not None, columns])
    return packed


def decode_receipts(messages: Sequence[bytes]) -> Receipts:
    """Decode and join the receipts of all ranks, given by rank, as `encode_receipt` encoded them."""
    unpacked = [msgpack.unpackb(message, use_list=False) for message in messages]
    files_of, records, has_parts, columns = zip(*unpacked, strict=True)
    (file, offset, fingerprints, *parts), counts = decode_columns(columns, 8)
    files = tuple(
        WrittenFile(key, size, digest, sha256, digests_sha256, packed and tuple(PackedRows(*rows) for rows in packed))
        for of_rank in files_of
        for key, size, digest, sha256, digests_sha256, packed in of_rank
    )
    num_files = np.array([len(of_rank) for of_rank in files_of], np.int64)
    # first[r]: index of the first file of rank r; a receipt numbers its own files from 0
    first = np.cumsum(num_files) - num_files
    ranks = np.arange(len(messages))
    part_rank = np.repeat(ranks, counts[:, -1])
    stored = StoredRuns(*parts) if any(has_parts) else None
    if stored is not None:
        # A part lies in a file of its rank, or in the base: that number counts on from the rank's files, and now from all files.
        beyond = np.where(stored.file < num_files[part_rank], first[part_rank], len(files) - num_files[part_rank])
        stored = replace(stored, file=stored.file + beyond)
    return Receipts(
        files=files,
        rank=np.repeat(ranks, num_files),
        file=file + np.repeat(first, counts[:, 0]),
        offset=offset,
        fingerprints=fingerprints.view(np.uint64),
        records=records,
        parts=stored,
        part_rank=part_rank,
    )
