"""Slots: files on tmpfs, allocated once and mapped, each of which holds the images of one rank's files of one save.

::

    header   64 KiB   magic, digest, length, then a table of the files: key, offset and size of each, of its digests too
    images            the shard files as on disk, each aligned to 64 bytes; staging copies straight into this
    digests           the digests files

A header is written last, and made void first: a slot with a header is whole. tmpfs has no power cut, and a process that is killed
has made all stores before that one, in their order, so nothing is to be flushed. Memory is reserved by `posix_fallocate`, which
fails by an error; a hole in a mapped file that finds no memory would end the process by SIGBUS.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgpack
import torch

from ..engine.common.pinning import PinnableMap, pin
from ..errors import CorruptError, StorageError
from ..format.checksums import digest128
from ..storage.locks import lock_file
from .node import NoRoom

MAGIC = b"RSHSLOT1"
HEADER_BYTES = 64 << 10
_FIXED = len(MAGIC) + 16 + 4
_VOID = bytes(len(MAGIC))
ALIGN_BYTES = 4 << 20
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Where a file lies in a slot, in bytes."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class SlotTable:
    """What a slot holds: which save, whose files, and where each of them lies."""

    save_id: str
    rank: int
    files: Mapping[str, SlotRange]

    def encoded(self) -> bytes:
        """Encode as the header of a slot.

        Raises
        ------
        NoRoom
            There are too many files for it.
        """
        table = {key: (extent.offset, extent.size) for key, extent in self.files.items()}
        body: bytes = msgpack.packb({"save_id": self.save_id, "rank": self.rank, "files": table})
        if _FIXED + len(body) > HEADER_BYTES:
            raise NoRoom(f"rank {self.rank} writes {len(self.files)} files, too many for the header of a slot in memory")
        return MAGIC + digest128(body) + len(body).to_bytes(4, "little") + body


def decode_table(data: bytes | memoryview, size: int, *, where: str) -> SlotTable | None:
    """Decode the header of a slot of `size` bytes; None where it holds nothing whole.

    Raises
    ------
    CorruptError
        It is damaged, or speaks of bytes outside of the slot.
    """
    data = bytes(data[:HEADER_BYTES])
    if data[: len(MAGIC)] != MAGIC:
        return None
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
    """Return how large a slot is that holds so many bytes of images and digests."""
    return HEADER_BYTES + max(-(-num_bytes // ALIGN_BYTES), 1) * ALIGN_BYTES


class Slot:
    """One slot file, locked against other processes until it is closed; once it is reserved, mapped.

    Parameters
    ----------
    path
        The file, which is made where there is none, for its owner alone.
    num_bytes
        How many bytes of images and digests it is to hold; None for a file that is there, as it is.

    Raises
    ------
    StorageError
        Another process uses the slot.
    """

    def __init__(self, path: str, num_bytes: int | None = None) -> None:
        self.path = path
        create = 0 if num_bytes is None else os.O_CREAT
        lock = lock_file(os.open(path, _OPEN | create, 0o600), path, shared=False)
        if lock is None:
            raise StorageError(f"{path}: another process uses this slot; is a second job of this run alive?")
        self._lock = lock
        try:
            wanted = 0 if num_bytes is None else slot_bytes(num_bytes)
            if os.fstat(lock.fd).st_size < wanted:
                os.ftruncate(lock.fd, wanted)  # a promise, which others see by the size of the file
            self.size = os.fstat(lock.fd).st_size
        except BaseException:
            lock.release()
            raise
        self._mapped: PinnableMap | None = None

    def reserve(self) -> Slot:
        """Reserve the memory of the slot, and map it.

        Raises
        ------
        NoRoom
            The file system has no memory for it; the slot is removed.
        """
        try:
            if os.fstat(self._fd).st_blocks * 512 < self.size:
                os.posix_fallocate(self._fd, 0, self.size)
            # Opened anew: a map has a copy of its descriptor, which lasts longer, and which a forked child would keep.
            fd = os.open(self.path, _OPEN)
            try:
                self._mapped = PinnableMap(fd, self.size)
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
    def _map(self) -> PinnableMap:
        assert self._mapped is not None, "reserve() first"
        return self._mapped

    def pin(self) -> None:
        """Pin the slot, so that a device copies into it at full speed; elsewhere it stays as it is."""
        pin(self._map)

    @property
    def num_bytes(self) -> int:
        """How many bytes of images and digests it can hold."""
        return self.size - HEADER_BYTES

    @property
    def is_removed(self) -> bool:
        """Whether somebody has removed the file: nobody else will find what is in it."""
        return os.fstat(self._fd).st_nlink == 0

    @property
    def table(self) -> SlotTable | None:
        """What the slot holds; None while it is empty or being filled."""
        return decode_table(os.pread(self._fd, HEADER_BYTES, 0), self.size, where=self.path)

    def void(self) -> None:
        """Make the header void: from now on nobody takes what is in the slot for whole."""
        self._map[: len(MAGIC)] = _VOID

    def seal(self, table: SlotTable) -> None:
        """Write the header: the slot is whole. The magic comes last."""
        data = table.encoded()
        self._map[len(MAGIC) : len(data)] = data[len(MAGIC) :]
        self._map[: len(MAGIC)] = MAGIC

    def region(self) -> torch.Tensor:
        """View the images' part of the slot as a 1-D uint8 tensor that shares its memory."""
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=HEADER_BYTES)

    def view(self, extent: SlotRange) -> memoryview:
        """View the bytes of a file."""
        return memoryview(self._map)[extent.offset : extent.offset + extent.size]

    def put(self, offset: int, data: bytes | memoryview) -> SlotRange:
        """Copy bytes into the slot, counted from its beginning."""
        self._map[offset : offset + len(data)] = data
        return SlotRange(offset, len(data))

    def close(self, *, remove: bool = False) -> None:
        """Let go of the file, or remove it. The map itself, if it is pinned too, lasts as long as somebody has a view of it."""
        self._mapped = None
        if self._fd >= 0:
            try:
                if remove:
                    with suppress(FileNotFoundError):  # somebody was faster
                        os.unlink(self.path)
                    with suppress(OSError):  # somebody may have it open for reading
                        os.pwrite(self._fd, _VOID, 0)
            finally:
                self._lock.release()


class ReadSlot:
    """A slot of any process of this user, open for reading; a header that is void by the time of a read is seen."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._size = os.fstat(self._fd).st_size
        try:
            head = os.pread(self._fd, HEADER_BYTES, 0)
            self.table, self._begins = decode_table(head, self._size, where=path), head[:_FIXED]
        except BaseException:
            self.close()
            raise

    def read_into(self, extent: SlotRange, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers from a byte of a file on; their bytes count only where the header is still the same afterwards.

        Raises
        ------
        CorruptError
            The slot was refilled meanwhile, or the file ends before the buffers are full.
        """
        at = extent.offset + offset
        if offset < 0 or offset + sum(len(buffer) for buffer in buffers) > extent.size:
            raise CorruptError(f"{self.path}: a read beyond the end of a file of {extent.size} bytes; this copy is not used")
        for buffer in buffers:
            done = 0
            while done < len(buffer):
                got = os.preadv(self._fd, [buffer[done:]], at)
                if got == 0:
                    raise CorruptError(f"{self.path}: the slot ends too early; this copy is not used")
                done, at = done + got, at + got
        if os.pread(self._fd, _FIXED, 0) != self._begins:  # a magic, and the digest of all the rest
            raise CorruptError(f"{self.path}: the slot was filled anew while it was read; this copy is not used")

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
