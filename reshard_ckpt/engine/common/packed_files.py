"""Shard files with packed rows (of 8 or 4 bits an element, `core.catalog.packed`), read and written as if they were not packed.

The *plain* file is the file with its packed rows decoded, so with rounded elements at full size. Offsets in the catalog count its
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...core.catalog.model import FileEntry
from ...core.catalog.packed import PackedRows, pack, unpack
from ...storage.followed import FollowedStorage
from ...storage.protocol import Storage, fill, flat_bytes

Part = tuple[int, int, PackedRows | None]
"""A part of a file: its end in the plain file, its end in the packed file, and its packed rows (None for bytes stored as they
are)."""


def parts_of(size: int, packed: Sequence[PackedRows]) -> list[Part]:
    """Divide a file of `size` plain bytes into parts, alternately stored as they are and packed. Parts may be empty."""
    parts: list[Part] = []
    saved = 0
    for rows in packed:
        parts.append((rows.begin, rows.begin - saved, None))
        saved += rows.saved_bytes
        parts.append((rows.end, rows.end - saved, rows))
    return [*parts, (size, size - saved, None)]


class Packer:
    """Converts the plain bytes of one file, front to back, to the bytes that are stored."""

    def __init__(self, size: int, packed: Sequence[PackedRows]) -> None:
        self._parts, self._at = iter(parts_of(size, packed)), 0
        self._end, _, self._rows = next(self._parts)
        self._waiting = bytearray()  # the first bytes of a row whose end has not come

    def add(self, chunk: memoryview) -> Iterator[tuple[bytes | memoryview, bytes | memoryview]]:
        """Take the next plain bytes of the file.

        Yield pairs: the bytes to store, and the plain bytes that a reader will get for them.
        """
        while len(chunk):
            while self._at == self._end:
                self._end, _, self._rows = next(self._parts)
            part, chunk = chunk[: self._end - self._at], chunk[self._end - self._at :]
            self._at += len(part)
            if self._rows is None:
                yield part, part
                continue
            self._waiting += part
            whole = len(self._waiting) // self._rows.row_bytes * self._rows.row_bytes
            if whole:
                yield pack(self._rows, bytes(self._waiting[:whole]))
                del self._waiting[:whole]


def as_stored(storage: Storage) -> Storage:
    """Return the store below an `UnpackedStorage`, which reads packed rows as they lie in their files; any other store itself."""
    return storage.stored if isinstance(storage, UnpackedStorage) else storage


class UnpackedStorage(FollowedStorage):
    """A store that shows files with packed rows under their keys as plain files, with every element at full size."""

    def __init__(self, stored: Storage, files: Mapping[str, FileEntry]) -> None:
        super().__init__(stored, {})
        self.stored, self._files = stored, files
        self._parts = {key: parts_of(file.size, file.packed) for key, file in files.items()}

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        if key not in self._files:
            self.stored.read_into(key, offset, buffers)
            return
        views = [flat_bytes(buffer) for buffer in buffers]
        fill(views, self._plain(key, offset, offset + sum(map(len, views))))

    def _plain(self, key: str, low: int, high: int) -> bytes:
        """Return bytes ``[low, high)`` of the plain file. One request reads all packed bytes that hold them."""
        # needed: of each part that is met, the bytes to leave out at its front, the bytes to take, its packed bytes, its rows.
        needed = []
        first, last, begin, packed_begin = None, 0, 0, 0
        for end, packed_end, rows in self._parts[key]:
            from_, to = max(low, begin), min(high, end)
            if from_ < to:
                each, packed_each = (rows.row_bytes, rows.packed_row_bytes) if rows else (1, 1)
                row, until = (from_ - begin) // each, -(-(to - begin) // each)
                first = packed_begin + row * packed_each if first is None else first
                last = packed_begin + until * packed_each
                needed.append((from_ - begin - row * each, to - from_, (until - row) * packed_each, rows))
            begin, packed_begin = end, packed_end
        data = memoryview(bytearray(last - (first or 0)))
        self.stored.read_into(key, first or 0, [data])
        found = []
        for skipped, size, packed, rows in needed:
            part, data = data[:packed], data[packed:]
            found.append(part if rows is None else memoryview(unpack(rows, part))[skipped : skipped + size])
        return b"".join(found)

    def copy(self, source: Storage, key: str, to: str) -> bool:
        # The store would copy the packed bytes, and whoever copies from here wants the plain file.
        return key not in self._files and super().copy(source, key, to)

    def size(self, key: str) -> int | None:
        size, file = self.stored.size(key), self._files.get(key)
        # A file of the size that the catalog says has the plain size; each byte more or less shows.
        return size if size is None or file is None else size + file.size - file.stored_bytes
