"""Memory that the ranks of one machine share: each rank writes into its own segment, and the others read it there.

1. `Segment`: anonymous memory, freed with its last user. Another process of the same machine opens it through ``/proc``. A random
   token proves that it is the right one: another container may have equal process and file numbers.
2. `share_memory`: each rank tries to open the segments of all others, and learns which ranks can read its own segment. Ranks that
   cannot open a segment, for example on another machine, get their bytes through the process group.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import msgpack
import torch

from .exchange import Exchange

_NAME = "reshard_ckpt"

_TOKEN_BYTES = 64
"""Bytes reserved at the start of a segment for its random token, padded to a cache line."""


class Segment:
    """Shared memory made by this process: 1-D uint8 `data`, which other processes on the machine can open by `address`."""

    def __init__(self, num_bytes: int) -> None:
        size = _TOKEN_BYTES + num_bytes
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._fd, 0, size)  # without it, a write would be killed (SIGBUS) when memory runs out
            memory = mmap.mmap(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise
        token = secrets.token_bytes(16)
        memory[: len(token)] = token
        self.data = torch.frombuffer(memory, dtype=torch.uint8)[_TOKEN_BYTES:]
        self.address: bytes = msgpack.packb((os.getpid(), self._fd, size, token))

    def close(self) -> None:
        """Close the file behind the memory, so that no more processes can open it. A process that has opened it keeps it."""
        os.close(self._fd)


def open_segment(address: bytes) -> torch.Tensor | None:
    """Open the `Segment` of another process by its address, as a 1-D uint8 tensor; None if it is not accessible from here."""
    process, number, size, token = msgpack.unpackb(address)
    path = f"/proc/{process}/fd/{number}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None  # another file with the same number, in another container
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_size != size:
            return None
        memory = mmap.mmap(fd, size)
    except OSError:
        return None
    finally:
        os.close(fd)
    if not secrets.compare_digest(memory[: len(token)], token):
        return None
    return torch.frombuffer(memory, dtype=torch.uint8)[_TOKEN_BYTES:]


class SharedMemory(NamedTuple):
    """The shared memory that this rank writes and reads.

    Attributes
    ----------
    own
        This rank's segment, 1-D uint8; empty if no other rank reads it.
    read
        ``read[r]``: the segment of rank r, or None if this rank cannot read it.
    readers
        ``readers[r]``: whether rank r reads this rank's segment.
    """

    own: torch.Tensor
    read: Sequence[torch.Tensor | None]
    readers: Sequence[bool]


def share_memory(exchange: Exchange, num_bytes: int) -> SharedMemory:
    """Make a segment of `num_bytes` on this rank, and open those of all ranks on this machine. Collective.

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
