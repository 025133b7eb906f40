"""How does a file or folder appear whole, or not at all? Written beside its place, and renamed when it is done and durable.

A conversion that is cut off leaves a folder ``.NAME.….partial`` beside the destination, which nothing takes for a checkpoint, and
which may be deleted. Where something is replaced, it is moved aside first and deleted last: a cut between the two leaves it there
under ``.NAME.….replaced``.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import CheckpointError, CheckpointNotFound, UsageError
from ..storage import LocalStorage, open_storage
from ..storage.posix import explained, sync_folder
from .source import open_source


@contextmanager
def new_folder(dst: str, src: str, *, overwrite: bool) -> Iterator[str]:
    """An empty folder, which is at `dst` once the block is done; `src` is what is read meanwhile."""
    path = _checked(dst, src, overwrite=overwrite)
    with _beside_it(path) as partial:
        yield partial
        _put(partial, path)


@contextmanager
def new_file(dst: str, src: str, *, overwrite: bool) -> Iterator[str]:
    """The path of a file to be made, which is at `dst` once the block is done."""
    path = _checked(dst, src, overwrite=overwrite)
    if os.path.isdir(path) and not os.listdir(path):
        raise UsageError(f"{path}: is a folder, and the result is one file; pass the path of a file in it")
    with _beside_it(path) as partial:
        made = os.path.join(partial, os.path.basename(path))
        yield made
        _put(made, path)


@contextmanager
def _beside_it(path: str) -> Iterator[str]:
    partial = _beside(path, "partial")
    with explained("write", path):
        _make_durable(os.path.dirname(path))
        os.mkdir(partial)
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _make_durable(folder: str) -> None:
    """Make a folder and those above it that are missing, so that their names survive a power cut."""
    if os.path.isdir(folder):
        return
    above = os.path.dirname(folder)
    _make_durable(above)
    with suppress(FileExistsError):
        os.mkdir(folder)
    sync_folder(above)


def _beside(path: str, what: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{uuid.uuid4().hex[:12]}.{what}")


def _checked(dst: str, src: str, *, overwrite: bool) -> str:
    """The absolute path of a destination that may be written to."""
    storage = open_storage(dst)
    if not isinstance(storage, LocalStorage):
        raise UsageError(f"{dst}: conversions are written to local files; pass a path without a scheme, and copy the result")
    path = storage.url
    if not os.path.lexists(path) or (os.path.isdir(path) and not os.path.islink(path) and not os.listdir(path)):
        return path
    if not overwrite:
        raise UsageError(f"{path}: already exists; pass another path, or overwrite=True to replace a checkpoint that is there")
    real_src, real_dst = os.path.realpath(src), os.path.realpath(path)
    if os.path.commonpath([real_src, real_dst]) == real_dst:
        raise UsageError(f"{path}: is, or holds, the checkpoint to be read; write to another path")
    try:
        with open_source(path):
            pass
    except CheckpointNotFound as error:
        raise UsageError(f"{path}: holds no checkpoint, and nothing else is replaced; remove it, or pass another path") from error
    except CheckpointError:
        pass  # a damaged one may be replaced
    return path


def _put(made: str, path: str) -> None:
    """Move what was made to its place, and what is there away."""
    replaced = None
    if os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path)):
        replaced = _beside(path, "replaced")
        os.rename(path, replaced)
    os.rename(made, path)
    sync_folder(os.path.dirname(path))
    if replaced is not None:
        shutil.rmtree(replaced) if os.path.isdir(replaced) and not os.path.islink(replaced) else os.unlink(replaced)
