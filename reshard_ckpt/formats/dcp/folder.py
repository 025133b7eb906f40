"""Reading the metadata of a DCP folder: ``.metadata``, or the merged files of ranks that saved without collectives.

``save(use_collectives=False)`` writes ``__N.metadata`` on each rank, about its own files alone. Together they are one checkpoint:

1. The chunks of a tensor are those of all ranks. If several ranks have the same box, these are replicas, and the lowest rank's
   is read.
2. The ranks did not compare their replicas, so this module does: up to 1 MiB whole, larger ones at both ends. A tensor that
   differs, or whose chunks overlap otherwise (as with leftover files of a save with more ranks), becomes unreadable; a load that
   wants it raises the error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TypeVar

from ...errors import CheckpointError, CorruptError, UnsupportedError
from ...storage.protocol import Storage
from ..parts import are_alike
from .chunks import FileSizes
from .metadata import MAX_METADATA_BYTES, METADATA_KEY, Chunk, Extent, Metadata, SavedTensor, read_metadata

Found = TypeVar("Found")

_OF_RANK = re.compile(r"__(\d{1,9})\.metadata")


def is_folder(storage: Storage) -> bool:
    """Return whether ``torch.distributed.checkpoint`` wrote this folder.

    Raises
    ------
    CorruptError
        It did, but the save did not finish.
    """
    if storage.size(METADATA_KEY) is not None:
        return True
    keys = [key for key, _ in storage.list() if "/" not in key]
    if any(map(_OF_RANK.fullmatch, keys)):
        return True
    chunks = [key for key in keys if key.endswith(".distcp")]
    if chunks:
        raise CorruptError(
            f"{storage.url}: has {len(chunks)} .distcp files ({chunks[0]}, …), but no {METADATA_KEY}, which "
            "torch.distributed.checkpoint writes last: the save did not end, so use another checkpoint"
        )
    return False


def read_folder(storage: Storage) -> Metadata:
    """Read the metadata of a folder; if there is no ``.metadata``, merge the files of all ranks.

    Raises
    ------
    CorruptError
        Two saves wrote files of the same names there, so the files may be of another save than the metadata.
    """
    found = {int(match[1]): key for key, _ in storage.list() if (match := _OF_RANK.fullmatch(key))}
    for key in (METADATA_KEY, *found.values()):
        refuse_begun(storage, key)
    if storage.size(METADATA_KEY) is not None:
        if found:
            raise CorruptError(
                f"{storage.url}: has {METADATA_KEY} of a save with collectives and {min(found.values())} of one without, whose "
                "files have the same names; use another checkpoint, or delete the metadata of the older save if you know which"
            )
        return _read(storage, METADATA_KEY)
    absent = next((rank for rank in range(len(found)) if rank not in found), None)
    if absent is not None:
        raise CorruptError(
            f"{storage.url}: has {found[max(found)]}, but no __{absent}.metadata: rank {absent} did not end its save, or its "
            "files were not copied; use another checkpoint"
        )
    return Merger(storage).merge([_read(storage, found[rank]) for rank in range(len(found))])


def refuse_begun(storage: Storage, key: str = METADATA_KEY) -> None:
    """Raise a `CorruptError` if a save was killed between replacing the tensors of the folder and replacing this metadata."""
    if storage.size(key) is not None and storage.size(f"{key}.tmp") is not None:
        raise CorruptError(
            f"{storage.url}: has {key}.tmp, so a later save there replaced files and did not end; use another checkpoint"
        )


def _read(storage: Storage, key: str) -> Metadata:
    return read_metadata(storage.read(key, limit=MAX_METADATA_BYTES), name=f"{storage.url}: {key}")


class Merger:
    """Merges the metadata that several ranks, or several folders, have of their parts of one checkpoint."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self._sizes = storage, FileSizes(storage)
        self._unreadable: dict[str, CheckpointError] = {}

    def merge(self, ranks: Sequence[Metadata]) -> Metadata:
        """Merge the metadata of all ranks into one; a name with different content on two of them becomes unreadable."""
        paths = {name: path for saved in reversed(ranks) for name, path in saved.paths.items()}
        tensors = {name: self._tensor(name, found) for name, found in _by_name([saved.tensors for saved in ranks])}
        values = {name: self._value(name, found) for name, found in _by_name([saved.values for saved in ranks])}
        for name in tensors.keys() & values.keys():
            self._mark_unreadable(name, "is a tensor on one rank and a value on another")
            del values[name]
        return Metadata(tensors, values, paths, unreadable=self._unreadable)

    def _mark_unreadable(self, name: str, what: str) -> None:
        self._unreadable[name] = UnsupportedError(
            f"{self._storage.url}: {name} {what}, as ranks saved without collectives, or files of several saves are in the "
            "folder; load it with torch.distributed.checkpoint on as many ranks as saved it"
        )

    def _tensor(self, name: str, found: Sequence[SavedTensor]) -> SavedTensor:
        first = found[0]
        if any((tensor.dtype, tensor.shape) != (first.dtype, first.shape) for tensor in found):
            self._mark_unreadable(name, "has another shape or dtype on another rank")
            return first
        boxes: dict[str, list[Chunk]] = {}  # by text, whose hash is salted: hostile files could choose numbers that collide
        for chunk in (chunk for tensor in found for chunk in tensor.chunks):
            boxes.setdefault(f"{chunk.offsets}{chunk.lengths}{chunk.run}", []).append(chunk)
        if sum(chunks[0].num_elements for chunks in boxes.values()) > prod(first.shape):
            self._mark_unreadable(name, "has chunks that overlap")
        elif not all(self._are_identical(name, [chunk.extent for chunk in chunks]) for chunks in boxes.values()):
            self._mark_unreadable(name, "differs between ranks")
        return replace(first, chunks=tuple(chunks[0] for chunks in boxes.values()))

    def _value(self, name: str, found: Sequence[Extent]) -> Extent:
        if not self._are_identical(name, found):
            self._mark_unreadable(name, "differs between ranks")
        return found[0]

    def _are_identical(self, name: str, extents: Sequence[Extent]) -> bool:
        """Return whether the bytes of several extents are equal. An unreadable extent counts as equal: its reader reports it."""
        if len(extents) == 1:
            return True
        if any(self._sizes.problem(name, extent) is not None for extent in extents):
            return True
        if len({extent.length for extent in extents}) > 1:
            return False
        return are_alike(self._storage, [(extent.file, extent.offset) for extent in extents], extents[0].length)


def _by_name(ranks: Sequence[Mapping[str, Found]]) -> Iterator[tuple[str, list[Found]]]:
    """Yield each name in the metadata of several ranks, with the entries of the ranks that have it, in order of rank."""
    for name in dict.fromkeys(name for of_rank in ranks for name in of_rank):
        yield name, [of_rank[name] for of_rank in ranks if name in of_rank]
