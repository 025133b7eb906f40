"""How a folder of ByteCheckpoint is recognized among all formats. This module imports none of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..protocol import Foreign


@dataclass(frozen=True, slots=True)
class ByteCheckpointFormat:
    """Folders of ByteCheckpoint, as one of `FORMATS`."""

    name: str = "bytecheckpoint"
    looks_for: str = "a folder of ByteCheckpoint, which has model/.metadata of its own classes"

    def open(self, path: str) -> Foreign | None:
        """Open a path; see `ForeignFormat`."""
        from .read import open_path  # it needs the formats' common parts, which are in the room that lists this one

        return open_path(path)
