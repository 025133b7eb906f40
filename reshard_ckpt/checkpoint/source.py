"""What does a path hold? A store, and the catalog over it: the pair that all that reads starts from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..core.catalog import Catalog
from ..engine.load import open_catalog
from ..engine.steps import reading
from ..storage import Storage, open_storage

Path = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint to read from: where its bytes are, what they mean, and the name of the format that they have."""

    storage: Storage
    catalog: Catalog
    format: str = "reshard_ckpt"


@contextmanager
def open_source(path: Path) -> Iterator[Source]:
    """Open what a path holds, for reading, in one process.

    Raises
    ------
    CheckpointNotFound
        Nothing there can be read; the message says what was looked for.
    CorruptError
        It is damaged.
    """
    with open_storage(path) as storage, reading(storage):
        yield Source(storage, open_catalog(storage))
