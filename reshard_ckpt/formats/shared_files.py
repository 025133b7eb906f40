"""Writing files of other formats, on one process or on several that share the work by bytes.

1. A writer lays out its files before any byte is read: parts of literal bytes, runs of tensors, and bytes that need checksums of
   the runs (`NewFile`). Every process makes the same layout.
2. Files that an earlier attempt finished are kept; the processes verify an even share of them each.
3. The processes divide the parts of all other files by their bytes (`engine.common.sections`), and write them as a stream.
4. Rank 0 joins files that several processes wrote.

Collectives, in order, for files with notes: a gather and a broadcast of the kept files; then for all: a gather of the written
sections, and a broadcast.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import numpy as np

from ..comm.protocol import Comm, merge_of_all
from ..core.catalog.model import Catalog
from ..engine.common.resuming import finished_digests
from ..engine.common.sections import Section, SectionWriter, join, share
from ..engine.loading.stream import Run
from ..format.files import BLOCK_BYTES, encode_digests
from ..storage import Storage
from .source import BytesOf

_NUMBER = re.compile(r"(\d+)")

GATHERED_BYTES = 1 << 20
"""Small parts are gathered up to this size and written in one call: a tensor in ``torch.save``'s format has some thirty."""


def in_natural_order(catalog: Catalog) -> list[int]:
    """Return the indices of all tensors, sorted by name with numbers in numeric order: layer 2 before layer 10."""
    return sorted(map(catalog.index, catalog.names), key=lambda index: natural(catalog.tensors_table.names[index]))


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a key to sort names by, with numbers in numeric order.

    >>> sorted(["h.10.w", "h.2.w", "emb"], key=natural)
    ['emb', 'h.2.w', 'h.10.w']
    """
    return tuple((1, int(part), part) if part.isdecimal() else (2, 0, part) for part in _NUMBER.split(name) if part)


class ByteStream:
    """A stream of bytes. Callers take as many bytes as they need."""

    def __init__(self, stream: Iterator[memoryview]) -> None:
        self._stream = stream
        self._rest = memoryview(b"")

    def take(self, num_bytes: int) -> Iterator[memoryview]:
        """Yield the next `num_bytes` bytes in parts, which must be used up before the next call."""
        while num_bytes:
            if not len(self._rest):
                self._rest = next(self._stream)
            part, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
            num_bytes -= len(part)
            yield part


@dataclass(frozen=True, slots=True)
class NewPart:
    """A part of a file that one process writes: a run of `num_bytes`, and the literal bytes around it.

    Attributes
    ----------
    run
        None if the part is literal bytes alone; `num_bytes` is 0 then.
    after
        Returns the bytes behind the run, given the CRC-32 of the run; any CRC-32 gives the same number of bytes.
    """

    run: Run | None
    num_bytes: int
    before: bytes = b""
    after: Callable[[int], bytes] | None = None

    @property
    def size(self) -> int:
        """The size of this part in the file, in bytes: its run, and the bytes before and after the run."""
        return len(self.before) + self.num_bytes + (len(self.after(0)) if self.after else 0)


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to write: one part or more, and the bytes behind the last part.

    Attributes
    ----------
    end
        Returns the last bytes of the file, given the CRC-32 of each part's run; any CRC-32s give the same number of bytes.
    """

    key: str
    parts: tuple[NewPart, ...]
    end: Callable[[Sequence[int]], bytes] | None = None

    @property
    def size(self) -> int:
        """The size of the whole file in bytes."""
        return self.offsets[-1] + (len(self.end([0] * len(self.parts))) if self.end else 0)

    @property
    def offsets(self) -> list[int]:
        """The byte at which each part begins, and last the byte at which the last part ends."""
        return list(accumulate((part.size for part in self.parts), initial=0))


def write_files(
    comm: Comm, storage: Storage, files: Sequence[NewFile], bytes_of: BytesOf, *, notes: Storage | None = None
) -> int:
    """Write files, each process its share, and make them durable; return the bytes of the files that were kept. Collective.

    Raise `StorageError` if the store failed.

    Parameters
    ----------
    bytes_of
        Streams the bytes of runs.
    notes
        A store that keeps the digests of each finished file for the next attempt, if this one is killed. Files in `storage` that
        an earlier attempt has not finished are deleted then. Without it, `storage` must have none of the files.
    """
    sizes = {file.key: file.size for file in files}
    kept = frozenset[str]() if notes is None else _keep_finished(comm, storage, files, sizes, notes)
    missing = [file for file in files if file.key not in kept]
    own = list(_share(missing, comm, by_file=not storage.hints.shares_files))
    runs = [part.run for file, parts in own for part in (file.parts[i] for i in parts) if part.run is not None and part.num_bytes]
    stream = ByteStream(bytes_of(runs))
    sections: list[tuple[Section, dict[int, int]]] = []
    for file, parts in own:
        done = _write_section(storage, file, parts, sizes[file.key], stream, notes)
        if done is not None:
            sections.append(done)
    if own:
        storage.sync([file.key for file, _ in own])

    # On rank 0. The end of a file needs the checksums of all of its parts, whichever process wrote them.
    def joined(of_ranks: list[Any]) -> None:
        found: dict[str, list[tuple[Section, dict[int, int]]]] = {}
        for data, crcs in (section for of_rank in of_ranks for section in of_rank):
            section = Section(*data)
            found.setdefault(section.key, []).append((section, crcs))
        for file in (file for file in missing if file.key in found):
            crc_of = {number: crc for _, crcs in found[file.key] for number, crc in crcs.items()}
            end = file.end([crc_of[number] for number in range(len(file.parts))]) if file.end else b""
            digests, _ = join(storage, file.key, sizes[file.key], [section for section, _ in found[file.key]], end)
            storage.sync([file.key])
            if notes is not None:
                notes.publish(_digests_key(file), digests)

    merge_of_all(comm, sections, joined)
    return sum(sizes[key] for key in kept)


def _share(files: Sequence[NewFile], comm: Comm, *, by_file: bool) -> Iterator[tuple[NewFile, range]]:
    """Yield the files that this process writes, or writes a section of, each with the range of its part numbers.

    With `by_file`, each process writes whole files.
    """
    units = [(file, number) for file in files for number in range(1 if by_file else len(file.parts))]
    sizes = (file.offsets[-1] if by_file else file.parts[number].size for file, number in units)
    own = [units[i] for i in share(sizes, comm.rank, comm.size)]
    for _, group in groupby(own, key=lambda unit: id(unit[0])):
        (file, first), *rest = group
        last = len(file.parts) if by_file else (rest[-1][1] if rest else first) + 1
        yield file, range(first, last)


def _write_section(
    storage: Storage, file: NewFile, parts: range, size: int, stream: ByteStream, notes: Storage | None
) -> tuple[Section, dict[int, int]] | None:
    """Write some consecutive parts of a file.

    If they are all parts, finish the file, put its digests into the store `notes`, and return None. Else return the `Section`,
    which rank 0 joins with others, and a dict from part numbers to the CRC-32 of the part's run (empty if the file has no `end`).
    """
    offsets = file.offsets
    is_whole = (parts.start, parts.stop) == (0, len(file.parts))
    writer = SectionWriter(storage, file.key, offsets[parts.start], size if is_whole else offsets[parts.stop], size)
    gathered = bytearray()

    def write(data: bytes | memoryview) -> None:
        nonlocal gathered
        if len(gathered) + len(data) > GATHERED_BYTES:
            writer.write(gathered)
            gathered = bytearray()
        if len(data) > GATHERED_BYTES:
            writer.write(data)
        else:
            gathered += data

    crcs: dict[int, int] = {}
    try:
        for number in parts:
            part, crc = file.parts[number], 0
            write(part.before)
            for data in stream.take(part.num_bytes):
                if part.after or file.end:
                    crc = zlib.crc32(data, crc)
                write(data)
            write(part.after(crc) if part.after else b"")
            crcs[number] = crc
        if is_whole and file.end:
            write(file.end([crcs[number] for number in parts]))
        writer.write(gathered)
        if not is_whole:
            return writer.finish(), crcs if file.end else {}
        writer.sync()
        # Publish the digests after the file is durable. Otherwise a power cut could lose bytes that the digests vouch for.
        if notes is not None:
            notes.publish(_digests_key(file), encode_digests(np.array(writer.digests, np.uint64), BLOCK_BYTES, size))
    except BaseException:
        writer.abort()
        raise
    return None


def _keep_finished(
    comm: Comm, storage: Storage, files: Sequence[NewFile], sizes: dict[str, int], notes: Storage
) -> frozenset[str]:
    """Return the keys of files that an earlier attempt finished, and have rank 0 delete all other files. Collective."""
    size_of = dict(storage.list())
    whole = [file for file in files if size_of.get(file.key) == sizes[file.key]]
    own = [whole[i] for i in share((sizes[file.key] for file in whole), comm.rank, comm.size)]
    finished = [
        file.key
        for file in own
        if finished_digests(storage, file.key, sizes[file.key], file.parts[0].before, notes, _digests_key(file)) is not None
    ]

    def without_others(of_ranks: list[Any]) -> list[str]:
        kept = [key for of_rank in of_ranks for key in of_rank]
        storage.delete(size_of.keys() - set(kept))
        return kept

    return frozenset(merge_of_all(comm, finished, without_others))


def _digests_key(file: NewFile) -> str:
    return f"{file.key}.digests"
