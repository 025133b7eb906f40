"""The limits of the machine: the same bytes, moved by nothing but the system's own calls."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

READ_BYTES = 8 << 20
WRITE_BYTES = 1 << 20
"""In one call, as the library does."""


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous tensor's memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def write_durably(path: Path, memory: Iterable[memoryview], num_bytes: int) -> None:
    """Write that many bytes of this memory into a new file, and fsync it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        for view in memory:
            part = view[:num_bytes]
            num_bytes -= len(part)
            while len(part):
                part = part[os.write(fd, part[:WRITE_BYTES]) :]
        if num_bytes:
            raise ValueError(f"{num_bytes} bytes more than this memory has")
        os.fsync(fd)
    finally:
        os.close(fd)


def read(
    paths: Sequence[Path],
    memory: Iterable[memoryview],
    step: int = READ_BYTES,
    use: Callable[[memoryview], object] = lambda part: None,
) -> None:
    """Fill this memory from files, one after the other, and call `use` with the bytes of each read."""
    files = iter(paths)
    fd, at = -1, 0
    try:
        for view in memory:
            while len(view):
                got = os.preadv(fd, [view[:step]], at) if fd >= 0 else 0
                use(view[:got])
                view, at = view[got:], at + got
                if not got:
                    if fd >= 0:
                        os.close(fd)
                    fd, at = os.open(next(files), os.O_RDONLY), 0
    finally:
        if fd >= 0:
            os.close(fd)


def copy(sources: Iterable[torch.Tensor], out: torch.Tensor) -> None:
    """Copy tensors into one buffer, end to end."""
    at = 0
    for source in sources:
        out[at : at + source.nbytes].view(source.dtype).view(source.shape).copy_(source)
        at += source.nbytes


def untouched(num_bytes: int) -> torch.Tensor:
    """Allocate memory of which the kernel has not yet made a single page."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
