"""Writing a rank's part of a checkpoint: lay out its files, write them front to back, and report what was written.

1. Items come sorted by element size, so members are aligned without holes.
2. A new file begins where the header would grow too large.
3. Bytes go from the tensors' own memory through one small buffer to the file, and are hashed in that buffer: what is written is
   what was hashed, even where somebody changes a tensor meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.catalog.model import TensorKind
from ...core.geometry.runs import I64
from ...errors import StorageError, UsageError
from ...format.checksums import BlockHasher, digest128
from ...format.keys import digests_key, file_key
from ...format.shard_file import Member, header, header_cost, make_member
from ...storage.protocol import Storage, write_file
from ..common.memo import Memo
from ..common.progress import Tally
from ..common.recorder import Recorder
from ..common.tensor_bytes import LocalRun, bytes_in_place, chunks, slices
from .local_shards import LocalShards
from .messages import Assignment, Receipt, WrittenFile
from .replicas import all_fingerprints

WRITE_BYTES = 1 << 20
"""Bytes hashed and written at once: few enough to be in the processor's cache for the second of the two."""

HEADER_METADATA = {"format": "pt", "writer": "reshard_ckpt"}
"""``format`` is what loaders of Hugging Face models look for: which framework's tensors these are."""

HEADER_BYTES = 48 << 20
"""A file's header is kept below this; safetensors refuses 100 MB."""


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One file to be: the items in it, as a range of the assignment's, and its members."""

    key: str
    items: slice
    members: tuple[Member, ...]
    header: bytes

    @property
    def num_bytes(self) -> int:
        """The size that the file will have."""
        return len(self.header) + sum(member.num_bytes for member in self.members)


def lay_out(local_shards: LocalShards, assignment: Assignment, rank: int, header_bytes: int = HEADER_BYTES) -> list[FileLayout]:
    """Divide the assigned items into files."""
    items = assignment.items
    pieces = [(index, local.piece) for index, local in local_shards.rows]
    key = (
        local_shards.specs,
        pieces,
        local_shards.local_metadata.tensors.kind.tobytes(),
        [column.tobytes() for column in (items.local, items.start, items.count)],
        header_bytes,
    )

    def divide() -> list[FileLayout]:
        return lay_out_members([_member(local_shards, *item) for item in items], "", rank, header_bytes)

    files = _FILES.get(key, divide)
    return [replace(file, key=file_key(assignment.save_id, rank, part)) for part, file in enumerate(files)]


_FILES: Memo[Any, list[FileLayout]] = Memo(2)
"""Their keys here are of no save: a real one has the id of its save in it."""


def lay_out_members(members: Sequence[Member], save_id: str, rank: int, header_bytes: int = HEADER_BYTES) -> list[FileLayout]:
    """Divide members, in their order, into files."""
    files: list[FileLayout] = []
    begin = used = 0
    for i, member in enumerate(members):
        cost = header_cost(member)
        if used + cost > header_bytes and i > begin:
            files.append(_file_layout(file_key(save_id, rank, len(files)), members, begin, i))
            begin, used = i, 0
        used += cost
    if members:
        key = file_key(save_id, rank, len(files))
        files.append(_file_layout(key, members, begin, len(members)))
    return files


def _file_layout(key: str, members: Sequence[Member], begin: int, end: int) -> FileLayout:
    chosen = tuple(members[begin:end])
    return FileLayout(key, slice(begin, end), chosen, header(chosen, HEADER_METADATA))


def _member(local_shards: LocalShards, row: int, start: int, count: int) -> Member:
    """Describe a run as a member of a shard file; a blob's member is the blob."""
    index, local = local_shards.rows[row]
    spec, piece = local_shards.specs[index], local.piece
    if local_shards.local_metadata.tensors.kind[index] == TensorKind.BLOB:
        return Member(spec.name, spec.dtype, spec.shape, count)
    return make_member(spec.name, spec.dtype, spec.shape, piece.offsets, piece.lengths, start, count)


def write_assignment(
    storage: Storage,
    local_shards: LocalShards,
    assignment: Assignment,
    rank: int,
    header_bytes: int = HEADER_BYTES,
    *,
    recorder: Recorder | None = None,
    sha256: bool = False,
    fingerprints: NDArray[np.uint64] | None = None,
    shift: int | None = None,
) -> Receipt:
    """Write and make durable all that this rank was assigned, from the tensors' own memory.

    Parameters
    ----------
    sha256
        Hash the files for a manifest as well.
    fingerprints
        The fingerprints of the assignment's checks, where they are known.
    shift
        As for `replicas.looked_at`.

    Raises
    ------
    StorageError
        The store refused; what this rank had written is removed.
    """
    recorder = recorder or Recorder()
    if fingerprints is None:
        with recorder.step("compare"):
            fingerprints = all_fingerprints(local_shards, assignment.checks, shift)
    layouts = lay_out(local_shards, assignment, rank, header_bytes)
    chunks_of = partial(_file_chunks, local_shards.runs(assignment.items))
    return write_files(storage, layouts, chunks_of, fingerprints, recorder, sha256=sha256)


def write_files(
    storage: Storage,
    layouts: Sequence[FileLayout],
    chunks_of: Callable[[FileLayout], Iterator[memoryview]],
    fingerprints: NDArray[np.uint64],
    recorder: Recorder,
    *,
    sha256: bool = False,
) -> Receipt:
    """Write files from chunks of their bytes, hashed on the way, and make them durable."""
    written: list[WrittenFile] = []
    try:
        tally = Tally("save", sum(layout.num_bytes for layout in layouts), recorder.report)
        for layout in layouts:
            written.append(_write_file(storage, layout, chunks_of(layout), tally, recorder, sha256))
        if written:
            with recorder.step("sync"):
                storage.sync(keys_of(written))
    except BaseException:
        remove(storage, (key for layout in layouts for key in (layout.key, digests_key(layout.key))))
        raise
    return receipt_of(layouts, written, fingerprints)


def receipt_of(layouts: Sequence[FileLayout], written: Iterable[WrittenFile], fingerprints: NDArray[np.uint64]) -> Receipt:
    """Report the files of these layouts, and where in them each item lies."""
    num_items = sum(len(layout.members) for layout in layouts)
    file, offset = np.zeros(num_items, np.int64), np.zeros(num_items, np.int64)
    for part, layout in enumerate(layouts):
        file[layout.items], offset[layout.items] = part, member_offsets(layout)
    return Receipt(tuple(written), file, offset, fingerprints)


def remove(storage: Storage, keys: Iterable[str]) -> None:
    """Delete what can be deleted of a save that failed; the next save deletes the rest, and the user must hear why it failed."""
    for key in keys:
        with suppress(StorageError):
            storage.delete([key])


def keys_of(files: Iterable[WrittenFile]) -> list[str]:
    """The keys of shard files and of their digests."""
    return [key for file in files for key in (file.key, file.digests_key)]


def member_offsets(layout: FileLayout) -> I64:
    """Return where the bytes of each member begin in the file."""
    sizes = np.array([member.num_bytes for member in layout.members], np.int64)
    return len(layout.header) + np.cumsum(sizes) - sizes


class ShardFileWriter:
    """One shard file, written front to back and hashed on the way; its digests file follows.

    Leaving its ``with`` block by an error removes the file. With `sha256`, its SHA-256 and that of its digests are taken as well.
    """

    def __init__(self, storage: Storage, layout: FileLayout, *, sha256: bool = False) -> None:
        self._storage, self.layout = storage, layout
        self._hasher, self._sha256 = BlockHasher(), hashlib.sha256() if sha256 else None
        self._writer = storage.create(layout.key)

    @property
    def num_bytes(self) -> int:
        """Bytes written so far."""
        return self._hasher.num_bytes

    @property
    def digests(self) -> Sequence[int]:
        """The digests of all blocks that are full."""
        return self._hasher.values

    def write(self, chunk: memoryview) -> None:
        """Append bytes."""
        self._hasher.update(chunk)
        if self._sha256 is not None:
            self._sha256.update(chunk)
        self._writer.write(chunk)

    def sync(self) -> None:
        """Make the bytes durable; there are no more."""
        self._writer.finish()

    def finish(self) -> WrittenFile:
        """Make all durable, the digests too."""
        self.sync()
        size, digests = self._hasher.num_bytes, self._hasher.finish()
        if size != self.layout.num_bytes:
            raise UsageError(
                f"{self.layout.key}: {size} bytes were written of {self.layout.num_bytes}: the memory of a tensor was made "
                "smaller, or freed, while it was saved; this save is given up: resize no tensor meanwhile, or use async_save"
            )
        write_file(self._storage, digests_key(self.layout.key), digests)
        hashes = (b"", b"") if self._sha256 is None else (self._sha256.digest(), hashlib.sha256(digests).digest())
        return WrittenFile(self.layout.key, size, digest128(digests), *hashes)

    def abort(self) -> None:
        """Remove the file, unless it is durable."""
        self._writer.abort()

    def __enter__(self) -> ShardFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.abort()


def _write_file(
    storage: Storage,
    layout: FileLayout,
    chunks_of_file: Iterator[memoryview],
    tally: Tally,
    recorder: Recorder,
    sha256: bool,
) -> WrittenFile:
    with ShardFileWriter(storage, layout, sha256=sha256) as file:
        with recorder.step("write", layout.num_bytes):
            for chunk in chunks_of_file:
                file.write(chunk)
                tally.add(len(chunk))
        with recorder.step("sync"):
            file.sync()
        return file.finish()


def _file_chunks(runs: Sequence[LocalRun], layout: FileLayout) -> Iterator[memoryview]:
    """The bytes of a file, front to back; each chunk is a copy, which the next one overwrites.

    Were a chunk the tensor's own memory, and another thread or process changed that between hashing and writing (a replay
    buffer, a counter in shared memory), the checkpoint would be committed, and refused as damaged by every load.
    """
    yield memoryview(layout.header)
    scratch = torch.empty(WRITE_BYTES, dtype=torch.uint8, device="cpu")
    own = scratch.numpy().data
    # Views before any writing, which empties the processor's caches: between writes they would take ten times as long.
    for run, data in [(run, bytes_in_place(*run)) for run in runs[layout.items]]:
        if data is None:
            yield from chunks(*run, scratch)
            continue
        for part in slices(data, WRITE_BYTES):
            own[: len(part)] = part
            yield own[: len(part)]
