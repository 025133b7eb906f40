"""The messages between the ranks of a save: columns as bytes, never pickles.

A rank's *metadata* goes to rank 0, an *assignment* comes back, a *receipt* goes to rank 0 again. The metadata has three parts:
the tensors, the rows (this rank's pieces of them), and the values. A part that many ranks have alike is sent and decoded once
(`agreement`). The rows of all ranks are joined as bytes and decoded as one array, and so is each column of their receipts;
assignments are encoded as one array and cut.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from ...core.catalog.model import ValueEntry
from ...core.catalog.packed import PackedRows, packed_size
from ...core.catalog.specs import AxisPlacement, Mesh, StateLink, ValueKind, ValueSpec
from ...core.geometry.columns import ColumnTable, columns_of, lex_order
from ...core.geometry.runs import I64, pad_left, ranges
from ...core.planning.local_metadata import JobMetadata, LocalMetadata, RowColumns, TensorColumns
from ...core.planning.save_plan import SavePlan
from ...format.files import digests_key

_ARRAY = 1
"""Code of the msgpack extension type of arrays."""

_ROWS_HEAD = struct.Struct("<BBxxII")
"""Head of the rows part: bytes of an item (4 or 8), dims of a box, two bytes of padding, number of boxes, number of rows."""

_FORMAT_BYTES = 2
"""The first bytes of the head, item size and dims. Parts that agree in them can be joined."""

_WIDE = ("ndim", "shape", "alias", "placement", "optimizer", "key", "parameter")
"""The columns of tensors that are int64 again after decoding; encoding narrows them."""

_ASSIGNMENT_HEAD = struct.Struct("<BxxxI")
"""Head of an assignment: bytes of an item (4 or 8), three bytes of padding, number of write items."""

_COUNT_OF = np.array([0, 0, 1, 2, 2, 2, 2, 2])
"""For each column of a receipt, which of its ``counts`` is the column's: of write items (file, offset), of checks (fingerprints),
of parts (the columns of `StoredRuns`)."""

_RECEIPT_HEAD = np.dtype(
    [
        ("num_files", "<u4"),
        ("has_parts", "?"),
        ("bytes", "<u4", (2,)),
        ("counts", "<u4", (3,)),
        ("widths", "u1", (len(_COUNT_OF),)),
    ]
)
"""Head of a receipt: its number of files; ``bytes`` of its files as msgpack, and of its record; bytes of a number of each column.
The files, the record and the columns follow."""


class EncodedMetadata(NamedTuple):
    """A rank's metadata as bytes, in parts."""

    tensors: bytes
    rows: bytes
    values: bytes


@dataclass(frozen=True, slots=True)
class RunColumns:
    """Runs of a rank's own rows: elements ``[start, start + count)`` of the box of row `local`."""

    local: I64
    start: I64
    count: I64

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.local.tolist(), self.start.tolist(), self.count.tolist(), strict=True)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Work of one rank in a save: write the runs `items` in this order, and fingerprint the runs `checks`.

    With `aligned`, the data of each file begin at a block, so that a later save finds each block of a run by itself. `bits` has,
    for each of this rank's rows that is packed, the bits of an element.
    """

    save_id: str
    items: RunColumns
    checks: RunColumns
    aligned: bool = False
    bits: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredRuns(ColumnTable):
    """Parts of write items, and where they lie: ``count`` elements of the box of `item`, from `start` on, at a byte of a file."""

    item: I64
    start: I64
    count: I64
    file: I64
    offset: I64


@dataclass(frozen=True, slots=True)
class WrittenFile:
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
        The rows of the file that are packed. `size` is that of the plain file, which the digests and the catalog mean.
    """

    key: str
    size: int
    digest: bytes
    sha256: bytes = b""
    digests_sha256: bytes = b""
    packed: tuple[PackedRows, ...] = ()

    @property
    def stored_bytes(self) -> int:
        """The bytes of the file in the store."""
        return packed_size(self.size, self.packed) if self.packed else self.size

    @property
    def digests_key(self) -> str:
        return digests_key(self.key)


@dataclass(frozen=True, slots=True)
class Receipt:
    """Result of one rank's part of a save: its files, and the fingerprints of its checks.

    ``file[i]`` and ``offset[i]`` are the index of the file that holds write item i, and the byte at which the item begins there.
    An incremental save has `parts` in their place, which refer to files of its base by the index there plus ``len(files)``.
    """

    files: tuple[WrittenFile, ...]
    file: I64
    offset: I64
    fingerprints: NDArray[np.uint64]
    record: bytes = b""
    """Durations of this rank's steps, as `Recorder.sealed` encodes them; empty if no timeline is kept."""
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
        """The folders of the files, which are named by ids of saves; sorted."""
        return sorted({file.key.partition("/")[0] for file in self.files})


def _default(value: Any) -> msgpack.ExtType:
    """Encode an array for msgpack: dtype, shape and little-endian bytes; non-negative int64 in the narrowest unsigned dtype."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"cannot send {type(value).__name__} to another rank")
    if value.dtype == np.int64 and value.size and int(value.min()) >= 0:
        value = value.astype(np.min_scalar_type(int(value.max())))
    little = value.astype(value.dtype.newbyteorder("<"), copy=False)
    return msgpack.ExtType(_ARRAY, msgpack.packb([little.dtype.str, list(value.shape), little.tobytes()]))


def _ext_hook(code: int, data: bytes) -> Any:
    if code != _ARRAY:
        raise ValueError(f"unknown message part {code}")
    dtype, shape, raw = msgpack.unpackb(data)
    array = np.frombuffer(raw, dtype)
    return array if len(shape) == 1 else array.reshape(shape)


def _wide(array: NDArray[Any]) -> I64:
    return array.astype(np.int64)


def encode_metadata(local_metadata: LocalMetadata) -> EncodedMetadata:
    """Encode the metadata of a rank as its three parts."""
    return EncodedMetadata(
        _encode_tensors(local_metadata.tensors), _encode_rows(local_metadata.rows), encode_values(local_metadata.values)
    )


def _encode_tensors(tensors: TensorColumns) -> bytes:
    message = {field.name: getattr(tensors, field.name) for field in fields(tensors)}
    message["placements"] = [[astuple(p) for p in placement] for placement in tensors.placements]
    message["mesh"] = None if tensors.mesh is None else [tensors.mesh.axes, tensors.mesh.sizes]
    packed: bytes = msgpack.packb(message, default=_default)
    return packed


def _decode_tensors(data: bytes) -> TensorColumns:
    m = msgpack.unpackb(data, ext_hook=_ext_hook, use_list=False, strict_map_key=False)
    placements = tuple(tuple(AxisPlacement(*p) for p in placement) for placement in m["placements"])
    wide = {name: _wide(m[name]) for name in _WIDE}
    return TensorColumns(**{**m, **wide, "placements": placements, "mesh": None if m["mesh"] is None else Mesh(*m["mesh"])})


def encode_values(values: Sequence[ValueSpec | ValueEntry]) -> bytes:
    """Encode values for `decode_values`, without the indices of their blobs."""
    links = ((None if v.link is None else [v.link.optimizer, v.link.fqn, v.link.key, v.link.parameter]) for v in values)
    packed: bytes = msgpack.packb([[v.name, v.path, int(v.kind), v.data, link] for v, link in zip(values, links, strict=True)])
    return packed


def decode_values(data: bytes) -> tuple[ValueSpec, ...]:
    """Decode the bytes of `encode_values`."""
    return tuple(
        ValueSpec(name, path, ValueKind(kind), raw, None if link is None else StateLink(*link))
        for name, path, kind, raw, link in msgpack.unpackb(data)
    )


def _encode_rows(rows: RowColumns, least_item: int = 4) -> bytes:
    boxes = np.hstack([rows.box_offsets, rows.box_lengths])
    columns = np.stack([rows.tensor, rows.box, rows.start, rows.count], axis=1)
    item = max(_narrowest(boxes, columns), least_item)
    head = _ROWS_HEAD.pack(item, rows.box_offsets.shape[1], len(boxes), len(columns))
    return b"".join((head, boxes.astype(f"<u{item}").tobytes(), columns.astype(f"<u{item}").tobytes()))


def _decode_rows(data: bytes) -> RowColumns:
    """Decode the rows part of one rank."""
    # boxes[i]: offsets, then lengths of box i. columns[i]: tensor, box, start and count of row i
    item, width, num_boxes, num_rows = _ROWS_HEAD.unpack_from(data)
    boxes = np.frombuffer(data, f"<u{item}", 2 * num_boxes * width, _ROWS_HEAD.size).reshape(num_boxes, 2 * width)
    columns = np.frombuffer(data, f"<u{item}", 4 * num_rows, _ROWS_HEAD.size + boxes.nbytes).reshape(num_rows, 4)
    return _row_columns(boxes, columns)


def _row_columns(boxes: NDArray[Any], columns: NDArray[Any]) -> RowColumns:
    width = boxes.shape[1] // 2
    return RowColumns(_wide(boxes[:, :width]), _wide(boxes[:, width:]), *(_wide(column) for column in columns.T))


def _widened(data: bytes, item: int, width: int) -> bytes:
    """Encode rows again with wider items and boxes of more dims, so that they can be joined with those of other ranks."""
    rows = _decode_rows(data)
    offsets, lengths = pad_left(rows.box_offsets, width, 0), pad_left(rows.box_lengths, width, 1)
    return _encode_rows(replace(rows, box_offsets=offsets, box_lengths=lengths), item)


def decode_metadata(tensors: Sequence[bytes], rows: Sequence[bytes]) -> JobMetadata:
    """Decode the tensors and rows of all ranks, by rank. Equal tensor tables are decoded once, all rows as one array."""
    # number: index of each distinct tensors part. table[rank]: index of the rank's part
    number: dict[bytes, int] = {}
    table = np.array([number.setdefault(data, len(number)) for data in tensors], np.int64)
    parts = rows
    formats = [part[:_FORMAT_BYTES] for part in parts]
    if len(set(formats)) > 1:  # encode all rows with the widest item and the most dims of any rank
        item, width = (max(column) for column in zip(*formats, strict=True))
        parts = [part if part[:_FORMAT_BYTES] == bytes((item, width)) else _widened(part, item, width) for part in parts]
    item, width = parts[0][0], parts[0][1]
    heads = [_ROWS_HEAD.unpack_from(part) for part in parts]
    # cuts[rank]: byte at which the boxes of a part end and its columns begin
    cuts = [_ROWS_HEAD.size + 2 * width * num_boxes * item for _, _, num_boxes, _ in heads]
    boxes = _joined([part[_ROWS_HEAD.size : cut] for part, cut in zip(parts, cuts, strict=True)], item, 2 * width)
    columns = _joined([part[cut:] for part, cut in zip(parts, cuts, strict=True)], item, 4)
    joined = _row_columns(boxes, columns)
    num_boxes, num_rows = (np.array([head[i] for head in heads], np.int64) for i in (2, 3))
    rank, local = ranges(num_rows)
    # first_box[rank]: the place of a rank's first box among the boxes of all ranks; in its message, it counts from 0
    first_box = np.cumsum(num_boxes) - num_boxes
    return JobMetadata(
        tables=tuple(map(_decode_tensors, number)),
        table=table,
        box_offsets=joined.box_offsets,
        box_lengths=joined.box_lengths,
        rank=rank,
        local=local,
        tensor=joined.tensor,
        box=joined.box + first_box[rank],
        start=joined.start,
        count=joined.count,
    )


def _joined(parts: Sequence[bytes], item: int, width: int) -> NDArray[Any]:
    return np.frombuffer(b"".join(parts), f"<u{item}").reshape(-1, width)


def _narrowest(*arrays: I64) -> int:
    """Return the item size in bytes, 4 or 8, that holds every number of these arrays."""
    return 8 if any(array.size and int(array.max()) >> 32 for array in arrays) else 4


def encode_assignments(plan: SavePlan) -> list[bytes]:
    """Encode the assignment of each rank, by rank: the columns of all ranks are encoded at once, and cut at each rank's range."""
    # columns[i]: local row, start and count of write item i, sorted by rank. checked_columns: likewise for checks
    columns = np.stack([plan.local, plan.part_start, plan.part_count], axis=1)
    by_rank = lex_order(plan.checks.rank)
    checked_columns = np.stack([plan.checks.local, plan.checks.start, plan.checks.count], axis=1)[by_rank]
    item = _narrowest(columns, checked_columns)
    rows = columns.astype(f"<u{item}").tobytes()
    checks = checked_columns.astype(f"<u{item}").tobytes()
    ranks = np.arange(plan.num_ranks + 1)
    # Rank r's write items are [first[r], first[r + 1]), its checks [checked[r], checked[r + 1]); each is 3 numbers.
    first = np.searchsorted(plan.rank, ranks).tolist()
    checked = np.searchsorted(plan.checks.rank[by_rank], ranks).tolist()
    return [
        b"".join((_ASSIGNMENT_HEAD.pack(item, b - a), rows[3 * a * item : 3 * b * item], checks[3 * c * item : 3 * d * item]))
        for a, b, c, d in zip(first, first[1:], checked, checked[1:], strict=False)
    ]


def decode_assignment(data: bytes, save_id: str) -> Assignment:
    """Decode one rank's assignment, as `encode_assignments` encoded it."""
    item, num_items = _ASSIGNMENT_HEAD.unpack_from(data)
    columns = np.frombuffer(data, f"<u{item}", 3 * num_items, _ASSIGNMENT_HEAD.size)
    checks = np.frombuffer(data, f"<u{item}", offset=_ASSIGNMENT_HEAD.size + columns.nbytes)
    items, checked = (RunColumns(*_wide(part.reshape(-1, 3)).T) for part in (columns, checks))
    return Assignment(save_id, items, checked)


def encode_receipt(receipt: Receipt) -> bytes:
    """Encode a receipt."""
    parts = columns_of(receipt.parts) if receipt.parts is not None else [np.zeros(0, np.int64)] * 5
    # Each column in the narrowest unsigned dtype that holds its numbers, which are not negative; little-endian
    columns = [
        column.astype(np.min_scalar_type(int(column.max(initial=0))).newbyteorder("<"))
        for column in (receipt.file, receipt.offset, receipt.fingerprints, *parts)
    ]
    files = b"".join([msgpack.packb(astuple(file)) for file in receipt.files])
    head = np.zeros((), _RECEIPT_HEAD)
    head["num_files"], head["has_parts"] = len(receipt.files), receipt.parts is not None
    head["bytes"] = len(files), len(receipt.record)
    head["counts"] = len(receipt.file), len(receipt.fingerprints), len(parts[0])
    head["widths"] = [column.itemsize for column in columns]
    return b"".join((head.tobytes(), files, receipt.record, *(column.tobytes() for column in columns)))


def decode_receipts(messages: Sequence[bytes]) -> Receipts:
    """Decode the receipts of all ranks, by rank, as `encode_receipt` encoded them: one column of all ranks at a time."""
    heads = np.frombuffer(b"".join([data[: _RECEIPT_HEAD.itemsize] for data in messages]), _RECEIPT_HEAD)
    # counts[r, i], widths[r, i]: numbers in column i of rank r, and the bytes of each
    counts, widths = heads["counts"].astype(np.int64)[:, _COUNT_OF], heads["widths"].astype(np.int64)
    # ends[i][r]: byte at which section i of rank r ends: its head, its files, its record, and its columns
    head = np.full((len(heads), 1), _RECEIPT_HEAD.itemsize)
    ends = np.cumsum(np.hstack([head, heads["bytes"].astype(np.int64), counts * widths]), axis=1).T.tolist()
    packed_files, records, *sections = (
        [data[begin:end] for data, begin, end in zip(messages, begins, until, strict=True)] for begins, until in pairwise(ends)
    )
    file, offset, fingerprints, *parts = map(_joined_numbers, sections, counts.T, widths.T)
    unpacker = msgpack.Unpacker(use_list=False, max_buffer_size=0)
    unpacker.feed(b"".join(packed_files))
    files = tuple(
        WrittenFile(key, size, digest, sha256, digests_sha256, packed and tuple(PackedRows(*rows) for rows in packed))
        for key, size, digest, sha256, digests_sha256, packed in unpacker
    )
    num_files = heads["num_files"].astype(np.int64)
    # first[r]: index of the first file of rank r; a receipt numbers its own files from 0
    first = np.cumsum(num_files) - num_files
    ranks = np.arange(len(heads))
    part_rank = np.repeat(ranks, counts[:, -1])
    stored = StoredRuns(*(column.astype(np.int64) for column in parts)) if heads["has_parts"].any() else None
    if stored is not None:
        # A part lies in a file of its rank, or in the base: that number counts on from the rank's files, and now from all files.
        beyond = np.where(stored.file < num_files[part_rank], first[part_rank], len(files) - num_files[part_rank])
        stored = replace(stored, file=stored.file + beyond)
    return Receipts(
        files=files,
        rank=np.repeat(ranks, num_files),
        file=_wide(file) + np.repeat(first, counts[:, 0]),
        offset=_wide(offset),
        fingerprints=fingerprints,
        records=records,
        parts=stored,
        part_rank=part_rank,
    )


def _joined_numbers(parts: Sequence[bytes], counts: I64, widths: I64) -> NDArray[np.uint64]:
    """Join the columns of all ranks: ``counts[r]`` numbers of ``widths[r]`` bytes in the part of rank r."""
    joined = np.empty(int(counts.sum()), np.uint64)
    if len(joined):
        width_of = np.repeat(widths, counts)
        for width in np.unique(widths).tolist():
            data = b"".join([part for part, own in zip(parts, widths.tolist(), strict=True) if own == width])
            joined[width_of == width] = np.frombuffer(data, f"<u{width}")
    return joined
