"""The errors that formats and calls raise; each names the tensor, the rank or the file, the values, and the next step."""

from __future__ import annotations

from ..core.report import few, summarize
from ..errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptError,
    LayoutError,
    MismatchError,
    NameCollisionError,
    StorageError,
    UnsupportedError,
    UsageError,
    rebuilt,
)

__all__ = [
    "CheckpointError",
    "CheckpointNotFound",
    "CorruptError",
    "LayoutError",
    "MismatchError",
    "NameCollisionError",
    "StorageError",
    "UnsupportedError",
    "UsageError",
    "few",
    "rebuilt",
    "summarize",
]
