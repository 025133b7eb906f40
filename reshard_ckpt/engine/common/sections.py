"""Files that several processes write together: each process writes a section of a file, and rank 0 joins the sections.

1. Processes divide the parts of all files by their bytes (`share`). A section ends where a part ends, at any byte.
2. A process writes and hashes the whole blocks of its section, and makes them durable. It keeps the bytes of blocks that it
   shares with others: two machines that write into one page of a network file system could lose each other's bytes.
3. These bytes travel to rank 0, with the digests (`Section`). Rank 0 writes the shared blocks (`join`), and has the digests of
   all blocks then. The digests file comes last, so a file that has one is whole.

In a store where a file has one writer (`Hints.shares_files`), each process gets whole files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ...format.files import BLOCK_BYTES, BlockHasher, encode_digests, num_blocks
from ...storage.protocol import Storage


class Section(NamedTuple):
    """A range of a file that one process has written. It is sent to rank 0 as a list.

    Attributes
    ----------
    key, low, high
        The key of the file, and the range ``[low, high)`` of its bytes.
    digests
        The XXH3-64 of each whole block in the range, as little-endian uint64.
    edges
        Offset and bytes of each part of the range that lies in a block shared with another section; rank 0 writes them.
    """

    key: str
    low: int
    high: int
    digests: bytes
    edges: tuple[tuple[int, bytes], ...]

    @property
    def first_block(self) -> int:
        """The index in the file of the first block in `digests`."""
        return -(-self.low // BLOCK_BYTES)


def share(sizes: Iterable[int], rank: int, num: int) -> range:
    """Divide parts, in order, over `num` ranks so that each gets about as many bytes, and return the indices of one rank's parts.

    A part belongs to the rank in whose even share of all bytes its middle lies.

    >>> [list(share([5, 5, 1, 1, 8], rank, 2)) for rank in range(2)]
    [[0, 1], [2, 3, 4]]
    """
    column = np.fromiter(sizes, np.int64)
    middles = 2 * np.cumsum(column) - column
    owner = np.minimum(middles * num // max(2 * int(column.sum()), 1), num - 1)
    return range(*np.searchsorted(owner, [rank, rank + 1]).tolist())


def share_cut(sizes: Iterable[int], units: Iterable[int], rank: int, num: int) -> list[tuple[int, range]]:
    """Divide the bytes of all parts evenly over `num` ranks, and return one rank's byte ranges.

    The result has pairs: the index of a part, and the range of its bytes. ``units[i]`` is the unit of part i in bytes. Parts are
    cut only at multiples of it. An empty part belongs to rank 0.

    >>> [share_cut([5, 0, 7], [2, 2, 2], rank, 2) for rank in range(2)]
    [[(0, range(0, 5)), (1, range(0, 0)), (2, range(0, 2))], [(2, range(2, 7))]]
    """
    column = list(sizes)
    low, high = (at * sum(column) // num for at in (rank, rank + 1))
    found, begin = [], 0
    for index, (size, unit) in enumerate(zip(column, units, strict=False)):
        # The units that begin between `low` and `high`, counted over all parts end to end.
        first, last = (min(max(-(-(at - begin) // unit) * unit, 0), size) for at in (low, high))
        if first < last or (not size and rank == 0):
            found.append((index, range(first, last)))
        begin += size
    return found


class SectionWriter:
    """Writes bytes `low` to `high` of a file of `size` bytes, front to back, and hashes them on the way.

    Blocks that lie only partly in this range are not written, but kept for rank 0 (`Section.edges`).
    """

    def __init__(self, storage: Storage, key: str, low: int, high: int, size: int) -> None:
        self.key, self.low, self.high, self.size = key, low, high, size
        # body: the whole blocks of the section, which this process writes; the last block of the file may be shorter
        begin = -(-low // BLOCK_BYTES) * BLOCK_BYTES
        end = size if high == size else high // BLOCK_BYTES * BLOCK_BYTES
        self._body = (begin, end) if begin < end or self.is_whole else (high, high)
        self._hasher, self._at = BlockHasher(), low
        self._edges: list[tuple[int, bytes]] = []
        self._writer = None
        if self.is_whole:
            self._writer = storage.create(key, size)
        elif self._body[0] < self._body[1]:
            self._writer = storage.write_at(key, begin)

    @property
    def is_whole(self) -> bool:
        """Whether the section that is written is the whole file."""
        return (self.low, self.high) == (0, self.size)

    @property
    def is_full(self) -> bool:
        """Whether all bytes of the section have been written."""
        return self._at == self.high

    @property
    def digests(self) -> Sequence[int]:
        """The digests of the blocks hashed so far. The first of these blocks begins at byte ``hashed[0]`` of the file."""
        return self._hasher.values

    @property
    def hashed(self) -> tuple[int, int]:
        """The range of bytes of the file that `digests` covers so far."""
        begin = self._body[0]
        return begin, min(begin + len(self.digests) * BLOCK_BYTES, self._body[1])

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append the next bytes of the section."""
        view = memoryview(data)
        while len(view):
            begin, end = self._body
            inside = begin <= self._at < end
            part = view[: (end if inside else begin if self._at < begin else self.high) - self._at]
            if inside:
                assert self._writer is not None
                self._hasher.update(part)
                self._writer.write(part)
            else:
                self._edges.append((self._at, bytes(part)))
            self._at += len(part)
            view = view[len(part) :]
            if self._at == end:
                self._hasher.close()

    def sync(self) -> None:
        """Make the written blocks durable, and close the file. Call it once the section is full."""
        if self._writer is not None:
            self._writer.finish()

    def finish(self) -> Section:
        """Make the written blocks durable, and return the `Section` to be sent to rank 0."""
        assert self.is_full, f"{self.key}: bytes from {self._at} to {self.high} are missing"
        self.sync()
        return Section(self.key, self.low, self.high, np.array(self.digests, "<u8").tobytes(), tuple(self._edges))

    def abort(self) -> None:
        """Close the file. Remove it if this section is the whole file; otherwise other processes write there too."""
        if self._writer is not None:
            self._writer.abort()


def join(
    storage: Storage, key: str, size: int, sections: Sequence[Section], rest: bytes = b""
) -> tuple[bytes, list[tuple[int, int]]]:
    """Write, durably, the blocks of a file that lie in several sections. Rank 0 calls it once all sections are written.

    Parameters
    ----------
    rest
        The bytes behind the last section, up to the end of the file.

    Returns
    -------
    tuple
        The bytes of the digests file for the whole file, and the ranges of bytes that this call has written, each of whole
        blocks.
    """
    ordered = sorted(sections, key=lambda section: section.low)
    ends = [0, *(section.high for section in ordered)]
    assert [section.low for section in ordered] == ends[:-1], f"{key}: a section is missing"
    assert ends[-1] + len(rest) == size, f"{key}: has {size} bytes, and its sections {ends[-1]}"
    values = np.zeros(num_blocks(size, BLOCK_BYTES), np.uint64)
    edges = [edge for section in ordered for edge in section.edges] + ([(ends[-1], rest)] if rest else [])
    for section in ordered:
        found = np.frombuffer(section.digests, "<u8")
        values[section.first_block : section.first_block + len(found)] = found
    runs: list[tuple[int, bytearray]] = []  # edges that lie end to end
    for at, data in edges:
        if not runs or runs[-1][0] + len(runs[-1][1]) != at:
            runs.append((at, bytearray()))
        runs[-1][1].extend(data)
    for at, joined in runs:
        hasher = BlockHasher()
        hasher.update(joined)
        with storage.write_at(key, at) as writer:
            writer.write(joined)
        hashed = hasher.close()
        values[at // BLOCK_BYTES : at // BLOCK_BYTES + len(hashed)] = hashed
    return encode_digests(values, BLOCK_BYTES, size), [(at, at + len(data)) for at, data in runs]
