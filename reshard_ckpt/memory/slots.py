"""Slots: memory-mapped files on tmpfs. A slot holds the files that one rank writes in one save; later saves use it again.

::

    header   64 KiB   magic, digest and length of the table; then key, offset and size of each file, digests files too
    images            the shard files as on disk, each aligned to 64 bytes; staging copies straight into this part
    digests           the digests files, each aligned to 64 bytes

1. `Slot.void` erases the magic before any image is overwritten.
2. The images and digests are filled in.
3. `Slot.seal` writes the table, and the magic last. So a slot with a valid header is whole.

Nothing is flushed: a power cut takes the whole tmpfs, and a process that is killed has made its stores in the order above.
`reserve_file` reserves the memory, and raises if there is too little. Writing into a hole of a mapped file would instead end the
process by SIGBUS. Slots are also read by a mapping, so a slot never gets shorter: a process that shortened it would end its
readers in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch

from ..engine.common.host_memory import PinnableMap, pin
from ..errors import CorruptError, StorageError
from ..format.files import digest128
from ..storage.posix import lock_file
from .mapping import map_file, reserve_file
from .node import NoRoom

MAGIC = b"RSHSLOT1"
HEADER_BYTES = 64 << 10
_FIXED = len(MAGIC) + 16 + 4
_VOID = bytes(len(MAGIC))
ALIGN_BYTES = 4 << 20
"""The size of a slot without its header is a multiple of this many bytes, so that it fits later saves that are a little
larger."""
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class SlotRange(NamedTuple):
    """Position of a file in a slot: its offset from the beginning of the slot, and its size, in bytes."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class SlotTable:
    """Table of contents of a slot: id of the save, the rank that wrote the files, and the position of each file by its key."""

    save_id: str
    rank: int
    files: Mapping[str, SlotRange]

    def encoded(self) -> bytes:
        """Encode the table as the header of a slot.

        Raise `NoRoom` if the table has too many files for a header of `HEADER_BYTES`.
        """
        body: bytes = msgpack.packb({"save_id": self.save_id, "rank": self.rank, "files": dict(self.files)})
        if _FIXED + len(body) > HEADER_BYTES:
            raise NoRoom(f"rank {self.rank} writes {len(self.files)} files, too many for the header of a slot in memory")
        return MAGIC + digest128(body) + len(body).to_bytes(4, "little") + body


def decode_table(data: bytes | memoryview, size: int, *, where: str) -> SlotTable | None:
    """Decode the header of a slot of `size` bytes. Return None if the slot is empty or being filled.

    Raise `CorruptError` if the header is damaged, or a file in its table lies outside of the slot.
    """
    data = bytes(data[:HEADER_BYTES])
    if data[: len(MAGIC)] != MAGIC:
        return None
    # Layout of `_FIXED` bytes: magic, 16 bytes of digest of the body, 4 bytes of its length.
    digest, length = data[len(MAGIC) : len(MAGIC) + 16], int.from_bytes(data[_FIXED - 4 : _FIXED], "little")
    body = data[_FIXED : _FIXED + length]
    if len(body) != length or digest128(body) != digest:
        raise CorruptError(f"{where}: the header is damaged; this copy is not used")
    try:
        fields: Any = msgpack.unpackb(body, max_map_len=1 << 16)
        files = {str(key): SlotRange(int(offset), int(num)) for key, (offset, num) in fields["files"].items()}
        table = SlotTable(str(fields["save_id"]), int(fields["rank"]), files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{where}: the header cannot be read ({error}); this copy is not used") from error
    if any(e.offset < HEADER_BYTES or e.size < 0 or e.offset + e.size > size for e in files.values()):
        raise CorruptError(f"{where}: the header speaks of bytes outside of the slot; this copy is not used")
    return table


def slot_bytes(num_bytes: int) -> int:
    """Return the size in bytes of a slot with room for `num_bytes` of images and digests."""
    return HEADER_BYTES + max(-(-num_bytes // ALIGN_BYTES), 1) * ALIGN_BYTES


class Slot:
    """A slot file of this process, to be filled. It is locked against other processes until `close`, and mapped by `reserve`.

    Parameters
    ----------
    path
        The slot file.
    num_bytes
        Bytes of images and digests that it must have room for. The file is made with mode 0600, or made larger, if necessary.
        None opens an existing file without a change of its size.

    Attributes
    ----------
    save_id
        The save that is in the slot or being written to it, as its `SlotPool` notes; empty if the slot is free.

    Raises
    ------
    StorageError
        Another process uses the slot.
    """

    def __init__(self, path: str, num_bytes: int | None = None) -> None:
        self.path, self.save_id = path, ""
        create = 0 if num_bytes is None else os.O_CREAT
        lock = lock_file(os.open(path, _OPEN | create, 0o600), path, shared=False)
        if lock is None:
            raise StorageError(f"{path}: another process uses this slot; end the other job of this run, if there is one")
        self._lock = lock
        try:
            wanted = 0 if num_bytes is None else slot_bytes(num_bytes)
            if os.fstat(lock.fd).st_size < wanted:
                os.ftruncate(lock.fd, wanted)  # no memory yet, but other processes count this size as promised
            self.size = os.fstat(lock.fd).st_size
        except BaseException:
            lock.release()
            raise
        self._mapped: memoryview | None = None

    def reserve(self) -> Slot:
        """Reserve the memory of the slot, map it, and return the slot itself.

        Raise `NoRoom` if the file system has too little memory; the slot file is removed.
        """
        try:
            # Opened a second time: a mapping keeps its file open. If that were the lock's file, the lock would be held as long as
            # the mapping lives, also in a forked child.
            fd = os.open(self.path, _OPEN)
            try:
                if os.fstat(fd).st_blocks * 512 < self.size:
                    reserve_file(fd, self.size)
                self._mapped = map_file(fd, self.size, kind=PinnableMap)
            finally:
                os.close(fd)
        except OSError as error:
            self.close(remove=True)
            raise NoRoom(f"{self.path}: no {self.size:,} bytes of memory for a slot: {error.strerror}") from error
        return self

    @property
    def _fd(self) -> int:
        return self._lock.fd

    @property
    def _map(self) -> memoryview:
        assert self._mapped is not None, "reserve() first"
        return self._mapped

    def pin(self) -> None:
        """Register the slot's memory with the accelerator, which then copies into it at full speed.

        Do nothing if the driver refuses.
        """
        pin(self._map)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of images and digests that fit into the slot."""
        return self.size - HEADER_BYTES

    @property
    def is_removed(self) -> bool:
        """Whether somebody has deleted the slot's file. Then no other process can find its contents."""
        return os.fstat(self._fd).st_nlink == 0

    @property
    def table(self) -> SlotTable | None:
        """The decoded header; None while the slot is empty or being filled."""
        return decode_table(os.pread(self._fd, HEADER_BYTES, 0), self.size, where=self.path)

    def void(self) -> None:
        """Erase the magic of the header: from now on no reader takes the contents of the slot for whole."""
        self._map[: len(MAGIC)] = _VOID

    def seal(self, table: SlotTable) -> None:
        """Write the header, which declares the contents of the slot whole."""
        data = table.encoded()
        # The magic comes last: a process that is killed between the two lines leaves the slot void.
        self._map[len(MAGIC) : len(data)] = data[len(MAGIC) :]
        self._map[: len(MAGIC)] = MAGIC

    def region(self) -> torch.Tensor:
        """Return the slot without its header, as a 1-D uint8 tensor that shares its memory."""
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=HEADER_BYTES)

    def view(self, extent: SlotRange) -> memoryview:
        """Return the bytes at a position as a view of the slot's memory."""
        return self._map[extent.offset : extent.offset + extent.size]

    def put(self, offset: int, data: bytes | memoryview) -> SlotRange:
        """Copy bytes into the slot, at an offset from its beginning, and return their position."""
        self._map[offset : offset + len(data)] = data
        return SlotRange(offset, len(data))

    def close(self, *, remove: bool = False) -> None:
        """Unlock and close the file, and delete it if `remove`. The mapping, pinned or not, lives as long as a view of it."""
        self._mapped = None
        if self._fd >= 0:
            try:
                if remove:
                    with suppress(FileNotFoundError):  # somebody else has deleted it already
                        os.unlink(self.path)
                    with suppress(OSError):  # a reader may still have it open: without a magic its read fails
                        os.pwrite(self._fd, _VOID, 0)
            finally:
                self._lock.release()


class ReadSlot:
    """A slot of any process of this user, open for reading without a lock.

    A read raises if the slot was refilled meanwhile. It copies from a mapping: with large pages that is faster than ``os.read``,
    with small ones as fast.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._size = os.fstat(self._fd).st_size
        self._map: memoryview | None = None
        try:
            head = os.pread(self._fd, HEADER_BYTES, 0)
            # _begins: magic, digest and length, to be compared after each read.
            self.table, self._begins = decode_table(head, self._size, where=path), head[:_FIXED]
        except BaseException:
            self.close()
            raise

    def read_into(self, extent: SlotRange, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers with the bytes of a file of this slot, from `offset` on.

        Raise `CorruptError` if the slot was refilled meanwhile, or the file ends before the buffers are full. The buffers may
        then hold bytes of another save.
        """
        with self._unchanged(extent, offset, sum(map(len, buffers))) as at:
            for buffer in buffers:
                np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(self._mapping(), np.uint8, len(buffer), at))
                at += len(buffer)

    @contextmanager
    def lend(self, extent: SlotRange, offset: int, num_bytes: int) -> Iterator[memoryview]:
        """Yield bytes of a file of this slot as a view of its memory. It raises the errors of `read_into`."""
        with self._unchanged(extent, offset, num_bytes) as at:
            yield self._mapping()[at : at + num_bytes]

    def _mapping(self) -> memoryview:
        if self._map is None:
            # A private mapping that could be written, because torch warns of memory that cannot; nobody writes to it.
            self._map = map_file(self._fd, self._size, is_private=True)
        return self._map

    @contextmanager
    def _unchanged(self, extent: SlotRange, offset: int, num_bytes: int) -> Iterator[int]:
        """Yield the offset in the slot at which some bytes of a file begin, to be read in the ``with`` block.

        At its end, check that the slot was not refilled; see `read_into` for the errors.
        """
        if offset < 0 or offset + num_bytes > extent.size:
            raise CorruptError(f"{self.path}: a read beyond the end of a file of {extent.size} bytes; this copy is not used")
        if os.fstat(self._fd).st_size < self._size:  # the kernel ends a process that reads a mapping beyond the end of its file
            raise CorruptError(f"{self.path}: something has shortened the slot; this copy is not used")
        yield extent.offset + offset
        # The owner erases the magic before it overwrites an image, and a refilled slot has another digest. So an unchanged
        # beginning of the header, read after the bytes, proves that they belong to the save of `table`.
        if os.pread(self._fd, _FIXED, 0) != self._begins:
            raise CorruptError(f"{self.path}: the slot was filled anew while it was read; this copy is not used")

    def close(self) -> None:
        """Close the slot's file. A second call does nothing. A mapping lives as long as a view of it."""
        self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
