"""A file with a wrong bit, and an object whose pickle runs code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def flip(path: Path, at: int | None = -1) -> None:
    """Flip a bit of the byte at a place of a file; of the one in its middle with None."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


class Calls:
    """An object that calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call
