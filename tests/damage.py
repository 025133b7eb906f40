"""A file with a wrong bit."""

from __future__ import annotations

from pathlib import Path


def flip(path: Path, at: int | None = -1) -> None:
    """Flip a bit of the byte at a place of a file; of the one in its middle with None."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)
