"""Writing one rank's part of a checkpoint: lay out its files, write them front to back, and report them in a receipt.

1. Write items come sorted by element size, so the members of a file are aligned without holes.
2. A new file begins when the header of the current one would grow too large.
3. Bytes are copied from a tensor's memory into one small buffer, hashed there, and written from there. So the digest fits the
   written bytes even if another thread changes the tensor meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.catalog.model import TensorKind
from ...core.catalog.packed import PackedRows
from ...core.catalog.specs import ITEM_BYTES
from ...core.geometry.columns import columns_of, concatenated
from ...core.geometry.runs import I64
from ...core.planning.local_metadata import Memo
from ...errors import StorageError, UsageError
from ...format.files import BLOCK_BYTES, BlockHasher, digest128, digests_key, file_key
from ...format.shard_file import ALIGNMENT, Member, header, header_cost, make_member
from ...storage.protocol import Storage, at_once, write_file
from ..common.packed_files import Packer
from ..common.progress import Recorder, Tally
from ..common.tensor_bytes import LocalRun, bytes_in_place, empty_bytes, slices
from ..common.tensor_bytes import chunks as chunks_of_run
from .local_shards import LocalShards
from .messages import Assignment, Receipt, StoredRuns, WrittenFile
from .unchanged import Unchanged

WRITE_BYTES = 1 << 20
"""Number of bytes hashed and written at once: few enough to be still in the processor's cache when they are written."""

HEADER_METADATA = {"format": "pt", "writer": "reshard_ckpt"}
"""The metadata in each file's header. Loaders of Hugging Face models read ``format``: the framework of the tensors."""

HEADER_BYTES = 48 << 20
"""The size that the header of a file stays below; safetensors refuses a header above 100 MB."""


class FileLayout(NamedTuple):
    """The layout of one file to be written: its key, its members (tensors in the file), its header, and the items that it holds.

    `items` is a range of the assignment's items. `num_bytes` is the size of the file; if rows are packed, that of the plain file.
    """

    key: str
    items: slice
    members: tuple[Member, ...]
    header: bytes
    num_bytes: int
    packed: tuple[PackedRows, ...] = ()


def lay_out(local_shards: LocalShards, assignment: Assignment, rank: int) -> list[FileLayout]:
    """Divide the assigned write items into files, and return the layouts. Those of the last two states are cached."""
    items = assignment.items
    pieces = [(index, local.piece) for index, local in local_shards.rows]
    key = (
        local_shards.specs,
        pieces,
        local_shards.local_metadata.tensors.kind.tobytes(),
        [column.tobytes() for column in columns_of(items)],
        assignment.aligned,
        dict(assignment.bits),
    )
    alignment = BLOCK_BYTES if assignment.aligned else ALIGNMENT

    def divide() -> list[FileLayout]:
        files = lay_out_members([_member(local_shards, *item) for item in items.rows()], "", rank, alignment)
        if not assignment.bits:
            return files
        bits = [assignment.bits.get(row, 0) for row in items.local.tolist()]
        return [file._replace(packed=_packed(file, bits[file.items])) for file in files]

    files = _FILES.get(key, divide)
    return [
        file._replace(key=file_key(assignment.save_id, rank, part, is_packed=bool(file.packed)))
        for part, file in enumerate(files)
    ]


_FILES: Memo[Any, list[FileLayout]] = Memo(2)
"""Cache of the file layouts of the last two states. The keys of files lack the save's id, which `lay_out` adds."""


def lay_out_members(members: Sequence[Member], save_id: str, rank: int, alignment: int = ALIGNMENT) -> list[FileLayout]:
    """Divide members (tensors in a file), in their order, into files whose headers stay below `HEADER_BYTES`.

    The data of each file begin at a multiple of `alignment`.
    """
    # begins: the first member of each file
    begins: list[int] = []
    used = 0
    for i, member in enumerate(members):
        cost = header_cost(member)
        if not begins or used + cost > HEADER_BYTES:
            begins.append(i)
            used = 0
        used += cost
    files: list[FileLayout] = []
    for part, (begin, end) in enumerate(pairwise([*begins, len(members)])):
        chosen = tuple(members[begin:end])
        head = header(chosen, HEADER_METADATA, alignment)
        num_bytes = len(head) + sum(member.num_bytes for member in chosen)
        files.append(FileLayout(file_key(save_id, rank, part), slice(begin, end), chosen, head, num_bytes))
    return files


def _packed(file: FileLayout, bits: Sequence[int]) -> tuple[PackedRows, ...]:
    """List the packed rows of a file: the members that are stored in fewer bits. ``bits[i]`` is 0 if member i is not."""
    each = zip(file.members, member_offsets(file).tolist(), bits, strict=True)
    return tuple(
        PackedRows(begin, member.shape[0], prod(member.shape[1:]), member.dtype, of_member)
        for member, begin, of_member in each
        if of_member
    )


def _member(local_shards: LocalShards, row: int, start: int, count: int) -> Member:
    """Return the member of a shard file that holds a run of one row. A blob, or a pack of rows, is one member as a whole."""
    index, local = local_shards.rows[row]
    spec, piece = local_shards.specs[index], local.piece
    if local_shards.local_metadata.tensors.kind[index] == TensorKind.BLOB:
        return Member(spec.name, spec.dtype, spec.shape, count * ITEM_BYTES[spec.dtype])
    return make_member(spec.name, spec.dtype, spec.shape, piece.offsets, piece.lengths, start, count)


class Chunks(NamedTuple):
    """The bytes of all files that one rank writes in a save, wherever they come from.

    Attributes
    ----------
    layouts
        The files.
    of_file
        Returns the bytes of one file in chunks, front to back. A chunk is valid until the next one is asked for.
    fingerprints
        Of the assignment's checks, for the receipt; complete after `wait`.
    wait
        Returns once all bytes have been made; raises the error of the thread that makes them.
    unchanged
        In an incremental save, the parts of the agreed items that the base has, and the parts that are written.
    """

    layouts: Sequence[FileLayout]
    of_file: Callable[[FileLayout], Iterator[memoryview]]
    fingerprints: NDArray[np.uint64]
    wait: Callable[[], None] = lambda: None
    unchanged: Unchanged | None = None


def chunks_in_place(
    local_shards: LocalShards,
    assignment: Assignment,
    rank: int,
    fingerprints: NDArray[np.uint64],
    unchanged: Unchanged | None = None,
) -> Chunks:
    """Return the assigned files as chunks, which are copied from the tensors' own memory when they are written."""
    layouts = lay_out(local_shards, assignment, rank)
    of_file = partial(_file_chunks, local_shards.runs(assignment.items))
    return Chunks(layouts, of_file, fingerprints, unchanged=unchanged)


def write_files(storage: Storage, chunks: Chunks, recorder: Recorder, *, sha256: bool = False) -> Receipt:
    """Write a rank's files, hash them on the way, and make their bytes durable; on an error delete them. Return the receipt.

    The names of the files are not durable yet: rank 0 syncs the folders of all ranks at once, before it publishes the catalog.
    Raise `StorageError` if the store refused a write; the files of this rank are removed.

    Parameters
    ----------
    sha256
        Also take the SHA-256 of the files, for a manifest.
    """
    written: list[WrittenFile] = []
    try:
        tally = Tally("save", sum(layout.num_bytes for layout in chunks.layouts), recorder.report)
        for layout in chunks.layouts:
            with ShardFileWriter(storage, layout, sha256=sha256) as file:
                with recorder.step("write", layout.num_bytes):
                    for chunk in chunks.of_file(layout):
                        file.write(chunk)
                        tally.add(len(chunk))
                with recorder.step("sync"):
                    written.append(file.finish())
        chunks.wait()  # a rank without a file has drained nothing, so its fingerprints may be missing until now
    except BaseException:
        remove(storage, (key for layout in chunks.layouts for key in (layout.key, digests_key(layout.key))))
        raise
    receipt = receipt_of(chunks.layouts, written, chunks.fingerprints)
    if (unchanged := chunks.unchanged) is None:
        return receipt
    # In an incremental save, the written parts and the parts that lie in files of the base take the place of the items.
    parts, member, none = unchanged.written, unchanged.member, np.zeros(0, np.int64)
    offset = receipt.offset[member] + unchanged.ahead
    stored = StoredRuns(parts.local, parts.start, parts.count, receipt.file[member], offset)
    referred = replace(unchanged.stored, file=unchanged.stored.file + len(receipt.files))
    return replace(receipt, file=none, offset=none, parts=concatenated([stored, referred]))


def receipt_of(layouts: Sequence[FileLayout], written: Iterable[WrittenFile], fingerprints: NDArray[np.uint64]) -> Receipt:
    """Return a receipt for written files: their sizes and digests, and the file and byte offset of each write item."""
    # file[i], offset[i]: index of the file that holds write item i, and the byte in it at which the item begins
    num_items = sum(len(layout.members) for layout in layouts)
    file, offset = np.zeros(num_items, np.int64), np.zeros(num_items, np.int64)
    for part, layout in enumerate(layouts):
        file[layout.items], offset[layout.items] = part, member_offsets(layout)
    return Receipt(tuple(written), file, offset, fingerprints)


def remove(storage: Storage, keys: Iterable[str]) -> None:
    """Delete files of a failed save, and ignore errors: the next save deletes the rest, and the caller raises its own error."""
    with suppress(StorageError):
        storage.delete(keys)


def keys_of(files: Iterable[WrittenFile]) -> list[str]:
    """Return the keys of the shard files and of their digests files."""
    return [key for file in files for key in (file.key, file.digests_key)]


def member_offsets(layout: FileLayout) -> I64:
    """Return the byte offset in the file at which each member begins."""
    sizes = np.array([member.num_bytes for member in layout.members], np.int64)
    return len(layout.header) + np.cumsum(sizes) - sizes


class ShardFileWriter:
    """Writes one shard file, front to back, and hashes it on the way; `finish` writes its digests file.

    If an error leaves its ``with`` block, the file is removed, unless it is durable already. With `sha256`, the SHA-256 of both
    files is taken as well.
    """

    def __init__(self, storage: Storage, layout: FileLayout, *, sha256: bool = False) -> None:
        self._storage, self.layout = storage, layout
        self._hasher, self._sha256 = BlockHasher(), hashlib.sha256() if sha256 else None
        self._packer = Packer(layout.num_bytes, layout.packed) if layout.packed else None
        self._writer = storage.create(layout.key)

    def write(self, chunk: memoryview) -> None:
        """Append bytes to the file. Pass all rows as they are; rows stored in 8 or 4 bits an element are packed here."""
        for stored, plain in [(chunk, chunk)] if self._packer is None else self._packer.add(chunk):
            self._hasher.update(memoryview(plain))
            if self._sha256 is not None:
                self._sha256.update(stored)
            self._writer.write(memoryview(stored))

    def finish(self) -> WrittenFile:
        """Make the file durable, write its digests file, and return the entry for the receipt.

        Raises
        ------
        UsageError
            Another number of bytes was written than the layout says: a tensor was resized while it was saved.
        """
        size, digests = self._hasher.num_bytes, self._hasher.finish()
        if size != self.layout.num_bytes:
            raise UsageError(
                f"{self.layout.key}: {size} bytes were written of {self.layout.num_bytes}: the memory of a tensor was made "
                "smaller, or freed, while it was saved; this save is given up: resize no tensor meanwhile, or use async_save"
            )
        at_once(self._storage, self._writer.finish, lambda: write_file(self._storage, digests_key(self.layout.key), digests))
        hashes = (b"", b"") if self._sha256 is None else (self._sha256.digest(), hashlib.sha256(digests).digest())
        packed = self.layout.packed
        return WrittenFile(self.layout.key, size, digest128(digests), *hashes, packed)

    def __enter__(self) -> ShardFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self._writer.abort()  # removes the file, unless it is already durable


def _file_chunks(runs: Sequence[LocalRun], layout: FileLayout) -> Iterator[memoryview]:
    """Yield the bytes of a file, front to back. Each chunk is a copy, which the next one overwrites; small runs share a chunk.

    A chunk must not be the tensor's own memory. If another thread or process changed that between hashing and writing (a replay
    buffer, a counter in shared memory), the checkpoint would be committed, and every load would refuse it as damaged.
    """
    yield memoryview(layout.header)
    scratch = empty_bytes(WRITE_BYTES)
    own = scratch.numpy().data
    # All views are made before the first write: writing empties the processor's caches, so that a view takes ten times as long.
    used = 0
    for run, data in [(run, bytes_in_place(*run)) for run in runs[layout.items]]:
        for part in [] if data is None else slices(data, WRITE_BYTES):
            size = len(part)
            if used + size > WRITE_BYTES:
                yield own[:used]
                used = 0
            own[used : used + size] = part
            used += size
        if data is None:
            yield own[:used]
            used = 0
            yield from chunks_of_run(*run, scratch)
    yield own[:used]
