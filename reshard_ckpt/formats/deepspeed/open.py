"""Opening a path that DeepSpeed wrote: the folder of a checkpoint, or a universal one."""

from __future__ import annotations

from contextlib import ExitStack

from ..protocol import Foreign, locate
from .folder import tag_files
from .read import FORMAT, open_tag


def open_path(path: str) -> Foreign | None:
    """Open a path for reading; return None if it is no folder of DeepSpeed; see `ForeignFormat`."""
    with ExitStack() as stack:
        storage, key = locate(path)
        stack.enter_context(storage)
        files = None if key is not None else tag_files(storage)
        if files is None:
            return None
        catalog = open_tag(storage, files)
        stack.pop_all()
        return Foreign(storage, catalog, FORMAT)
