"""Opening a path as a checkpoint of this library's format or a foreign one, on one rank or, after a comparison, on all."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from urllib.parse import unquote

from ..comm.protocol import Comm
from ..core.catalog.model import Catalog
from ..engine.common.step_folders import describe_run
from ..engine.loading.load import Found, Identified, identified_catalog, open_same
from ..errors import CheckpointError, CheckpointNotFound
from ..format.catalog import encode_catalog
from ..format.files import CATALOG_KEY, digest128
from ..storage import LocksUnsupported, MissingKey, Storage, open_beside, open_storage, path_text
from ..storage.followed import FollowedStorage
from ..storage.listed import ListedStorage
from ..storage.posix import MOMENTS_S, tries
from ..storage.protocol import DISK
from .protocol import NATIVE, Source
from .registry import Formats, known_formats, latest_below, open_foreign

__all__ = ["NATIVE", "Path", "Source", "open_shared_source", "open_source"]

Path = str | os.PathLike[str]


@contextmanager
def open_source(path: Path, formats: Formats = known_formats) -> Iterator[Source]:
    """Open the checkpoint at a path for reading, in one process.

    Parameters
    ----------
    formats
        The foreign formats to try if the path holds no checkpoint of this library.

    Raises
    ------
    CheckpointNotFound
        The path holds no checkpoint that can be read; the message lists the formats that were tried.
    CorruptError
        The checkpoint is damaged.
    """
    with ExitStack() as stack:
        yield _open(path, stack, formats, MOMENTS_S).value


@contextmanager
def open_shared_source(
    comm: Comm, path: Path, formats: Formats = known_formats, *, timeout_s: float = MOMENTS_S
) -> Iterator[Source]:
    """Open a path on every rank, and check that all see the same checkpoint; rank 0 protects it from removal. Collective."""
    with ExitStack() as stack:
        lock_s = timeout_s if comm.rank == 0 else None
        yield open_same(comm, str(path), lambda found: _open(path, stack, formats, lock_s, found), stack)


def _open(path: Path, stack: ExitStack, formats: Formats, lock_s: float | None, found: Found | None = None) -> Identified[Source]:
    """Open a path in this library's own format, else in the first foreign format that recognizes it.

    `lock_s` are the seconds to wait for the lock of a checkpoint (`reading`); with None it is not locked. With `found`, the
    catalog that another rank has found is decoded, and none is read.
    """
    storage = stack.enter_context(open_storage(found.path if found else path))
    if lock_s is not None:
        stack.enter_context(reading(storage, lock_s))
    listed = ListedStorage(storage) if storage.hints.requests > DISK.requests else storage
    try:
        opened = identified_catalog(listed, found)
    except CheckpointNotFound as error:
        # The root of a run stands for its latest checkpoint, which may be one of this library.
        tag = latest_below(listed, formats)
        if tag is not None:
            return _open(f"{path_text(path).rstrip('/')}/{tag}", stack, formats, lock_s)
        return _open_foreign(path_text(path), listed, stack, formats, error)
    source = Source(_followed(storage, opened.value, stack, lock_s), opened.value)
    return Identified(source, opened.identity, replace(opened.found, path=path_text(path)) if opened.found else None)


def _followed(storage: Storage, catalog: Catalog, stack: ExitStack, lock_s: float | None) -> Storage:
    """Also open the other checkpoints that hold files of this one: the ones in its own catalog, not theirs in turn."""
    first = {file.folder: file for file in reversed(catalog.files) if file.checkpoint}
    if not first:
        return storage
    others: dict[str, Storage] = {}
    for folder, file in first.items():
        other = stack.enter_context(open_beside(storage, file.checkpoint, file.key.removeprefix(folder)))
        if lock_s is not None:
            stack.enter_context(reading(other, lock_s))
        others[folder] = other
    return FollowedStorage(storage, others)


def _unknown_file(url: str) -> str:
    step = "pass the folder that it is in" if os.path.basename(url) == CATALOG_KEY else "check the path"
    return f"{url}: no committed checkpoint: a file of no format that is known; {step}"


def _open_foreign(
    path: str, storage: Storage, stack: ExitStack, formats: Formats, not_native: CheckpointNotFound
) -> Identified[Source]:
    url, is_listed = storage.url, isinstance(storage, ListedStorage)
    folder, key = (storage, None) if is_listed and storage.list() else locate(path)
    if key is None:
        folder = storage
    elif is_listed:
        folder = ListedStorage(folder, [key])
    found = open_foreign(folder, key, formats)
    if found is None:
        if describe_run(storage) is not None:
            raise not_native
        tried = [f"{CATALOG_KEY} ({NATIVE})", *(f"{one.marks} ({one.name})" for one in formats())]
        why = _unknown_file(url) if os.path.exists(url) and not os.path.isdir(url) else str(not_native)
        raise CheckpointNotFound(why, tried) from None
    stack.enter_context(found.storage)
    # A foreign format has no digest of its metadata, so compare the catalogs. They do not depend on the rank that built them.
    return Identified(found, digest128(encode_catalog(replace(found.catalog, created_s=0.0))))


def locate(path: str) -> tuple[Storage, str | None]:
    """Return the store of a path, and the key of the file that the path names; the key is None if the path is a folder.

    >>> _ = open_storage("memory://hub").publish("w.safetensors", b"")
    >>> storage, key = locate("memory://hub/w.safetensors")
    >>> storage.url, key
    ('memory://hub', 'w.safetensors')
    """
    above, name = posixpath.split(path.rstrip("/"))
    name = unquote(name) if path.startswith("file:") else name
    # open_storage raises if the parent is not a folder ("memory:/"), and `size` if a key cannot have the name: not a file.
    with suppress(CheckpointError):
        storage = open_storage(above or ("/" if path.startswith("/") else "."))
        if storage.size(name) is not None:
            return storage, name
    return open_storage(path), None


def reading(storage: Storage, timeout_s: float = MOMENTS_S) -> AbstractContextManager[object]:
    """Lock a checkpoint, so that nobody removes it while the ``with`` block reads it, if the store has locks.

    A process that removes the checkpoint, or cleans up there, is waited for: a reader that went on without the lock might find
    the catalog, and then not its files.
    """
    for _ in tries(f"{storage.url}/{CATALOG_KEY}", timeout_s):
        try:
            if lock := storage.lock(CATALOG_KEY, shared=True):
                return lock
        except LocksUnsupported:
            break
        except MissingKey:  # the reader raises that it is missing; if a save has replaced it meanwhile, lock the new one
            if storage.size(CATALOG_KEY) is None:
                break
    return nullcontext()
