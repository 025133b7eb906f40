"""Opening a path that DeepSpeed wrote: the folder of a checkpoint, or a universal one."""

from __future__ import annotations

from ...storage import Storage
from ..protocol import Foreign, open_located
from .folder import tag_files
from .read import FORMAT, open_tag


def open_path(path: str) -> Foreign | None:
    """Open a path for reading; return None if it is no folder of DeepSpeed; see `ForeignFormat`."""
    return open_located(path, _look)


def _look(storage: Storage, key: str | None) -> Foreign | None:
    files = None if key is not None else tag_files(storage)
    return None if files is None else Foreign(storage, open_tag(storage, files), FORMAT)
