"""The copy of a run's lineage (the note about the saves that count) on a node, kept while the store refuses the lineage.

Without it, a job that is killed before the store has taken the lineage would not find its own checkpoints in memory.

A root with a lock and without a lineage may be of such a job, or of a run that was begun anew and has saved nothing. The first is
assumed, because the other way its checkpoints would be lost. docs/memory.md says what to do about the second.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path

from ..engine.common.lineage import LINEAGE, Lineage
from ..errors import CorruptError, StorageError
from .node import passing_over_gone, write_atomically

_NAME = "lineage"


def keep_copy(folder: Path, lineage: Lineage) -> None:
    """Write a copy of the lineage into the run's folder on this node; do nothing if the tmpfs refuses.

    A tmpfs that refuses so small a file takes no checkpoint either.
    """
    with suppress(StorageError):
        write_atomically(folder / _NAME, LINEAGE.encoded(astuple(lineage)))


def read_copy(folder: Path) -> Lineage | None:
    """Return the copy of the lineage on this node; None if there is none, or if it is damaged.

    Raise `StorageError` if the copy cannot be read. It may be whole all the same.
    """
    path = folder / _NAME
    with passing_over_gone(path), suppress(CorruptError), open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return LINEAGE.decoded(file.read(LINEAGE.max_bytes + 1), where=str(path))
    return None


def drop_copy(folder: Path) -> None:
    """Delete the copy of the lineage on this node, if there is one."""
    (folder / _NAME).unlink(missing_ok=True)
