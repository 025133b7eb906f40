"""Memory that the ranks of one machine share: each writes in its own, and the others read it there.

1. `Segment`: memory without a name in any folder, which ends with its last user. Another process of the same machine opens it
   through ``/proc``; a random token says that it is the right one, and not that of another container with the same numbers.
2. `share`: all ranks try each other's segments, and every rank learns who reads its own. Where that is not possible, as between
   machines, bytes travel through the process group.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack
import torch

from .exchange import Exchange

_NAME = "reshard_ckpt"

_TOKEN_BYTES = 64
"""A token, and what is left of a cache line."""


class Segment:
    """Memory of this process that others can open; `data` is 1-D uint8."""

    def __init__(self, num_bytes: int) -> None:
        size = _TOKEN_BYTES + num_bytes
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._fd, 0, size)  # or a write would be killed where there is no memory
            memory = _map(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise
        token = secrets.token_bytes(16)
        memory[: len(token)] = token
        self.data = torch.frombuffer(memory, dtype=torch.uint8)[_TOKEN_BYTES:]
        self.address: bytes = msgpack.packb((os.getpid(), self._fd, size, token))

    def close(self) -> None:
        """Let no more processes open it; who has it keeps it."""
        os.close(self._fd)


def open_segment(address: bytes) -> torch.Tensor | None:
    """Open the memory of another process; None where it is not on this machine, or may not be opened."""
    process, number, size, token = msgpack.unpackb(address)
    path = f"/proc/{process}/fd/{number}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None  # anything at all, in another container
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_size != size:
            return None
        memory = _map(fd, size)
    except OSError:
        return None
    finally:
        os.close(fd)
    if not secrets.compare_digest(memory[: len(token)], token):
        return None
    return torch.frombuffer(memory, dtype=torch.uint8)[_TOKEN_BYTES:]


def _map(fd: int, size: int) -> mmap.mmap:
    return mmap.mmap(fd, size)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """What this rank shares with others.

    Attributes
    ----------
    own
        Its own segment, in which it writes; empty where nobody reads it.
    read
        By rank the segment that this rank reads, if it does.
    readers
        By rank whether that one reads this rank's.
    """

    own: torch.Tensor
    read: Sequence[torch.Tensor | None]
    readers: Sequence[bool]


def share(exchange: Exchange, num_bytes: int) -> SharedMemory:
    """Share that many bytes of this rank with all that can open them. Collective.

    Raises
    ------
    PeerError
        The process group failed.
    """
    try:
        segment = Segment(num_bytes) if num_bytes else None
    except (AttributeError, OSError):  # not Linux, or too little memory
        segment = None
    address = b"" if segment is None else segment.address
    addresses = exchange.swap([address] * exchange.size)
    read = [open_segment(data) if data and rank != exchange.rank else None for rank, data in enumerate(addresses)]
    readers = [bool(data) for data in exchange.swap([b"" if memory is None else b"1" for memory in read])]
    if segment is not None:
        segment.close()
    own = segment.data if segment is not None and any(readers) else torch.empty(0, dtype=torch.uint8, device="cpu")
    return SharedMemory(own, read, readers)
