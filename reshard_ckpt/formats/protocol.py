"""The interface of a format: a class `Format`, whose `open` returns a `Source` (a store and a catalog over it), or None."""

from __future__ import annotations

import gc
import posixpath
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import unquote

from ..core.catalog.model import Catalog
from ..engine.loading.stream import Run
from ..errors import CheckpointError
from ..storage import Storage, open_storage
from ..storage.listed import ListedStorage
from ..storage.protocol import DISK, read_range

NATIVE = "reshard_ckpt"
"""The name of this library's own format."""


@dataclass(frozen=True, slots=True)
class RawValue:
    """A value that only the library that wrote it can decode: its keys in the saved state, and the place of its bytes."""

    path: tuple[str | int, ...]
    file: str
    offset: int
    length: int

    def read(self, storage: Storage) -> memoryview:
        """Read the bytes of the value."""
        return read_range(storage, self.file, self.offset, self.length)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint to read from, of this library's format or a foreign one.

    Attributes
    ----------
    storage
        The store with the files of the catalog. The caller that opened the source closes it.
    catalog
        A catalog over these files. Files of a foreign format have no checksums: ``digests_key`` is empty.
    format
        The name of the format.
    advice
        Advice by the name that it concerns. It is added to the errors of a load that fails below that name, for reasons that lie
        in the format.
    raw
        Values as they lie in the files, by the names that they were saved under, even if the catalog cannot hold them.
    sha256
        The SHA-256 of files by their keys, where the format lists them.
    on_peers
        The keys of files that lie in the memory of other nodes.
    """

    storage: Storage
    catalog: Catalog
    format: str = NATIVE
    advice: Mapping[str, str] = field(default_factory=dict)
    raw: Mapping[str, RawValue] = field(default_factory=dict)
    sha256: Mapping[str, bytes] = field(default_factory=dict)
    on_peers: Collection[str] = ()

    def hints(self, prefixes: Sequence[str]) -> tuple[str, ...]:
        """Return the advice about names that are equal to one of `prefixes`, or that lie below one."""
        return tuple(text for name, text in self.advice.items() if any(f"{name}.".startswith(f"{p}.") for p in prefixes))


BytesOf = Callable[[Sequence[Run]], Iterator[memoryview]]
"""Streams the bytes of runs, one after the other, in parts of any size. A part is valid until the next one is requested."""


class WriteFolder(Protocol):
    """Writes tensors and values as the files of a folder that holds nothing yet."""

    def __call__(self, storage: Storage, catalog: Catalog, values: Mapping[str, Any], bytes_of: BytesOf, /) -> None:
        """Write all tensors of `catalog` with the bytes that `bytes_of` streams, and all values by name."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of another library.

    Attributes
    ----------
    name
        The name of the format, in messages and for ``convert``.
    marks
        The files by which it is recognized, for the error that no format recognizes a path.
    open
        Opens a path for reading, as a catalog over its files; returns None if the path has another format. It raises
        `CorruptError` if the path has this format, but is damaged, incomplete or hostile.
    order
        Formats are tried from the lowest order to the highest. Formats that recognize fewer paths come first.
    takes
        The names of the options of `open`: ``as_saved`` keeps the names of the other library, ``named`` gives names to tensors
        that lie in nameless buckets.
    options
        The options with which `open` is called.
    latest
        Returns the folder of the latest checkpoint below the root of a run; None if the storage is not such a root.
    root_marks
        Files that the root of a run has beside the folders of its checkpoints. A conversion never replaces a root.
    write
        Writes a checkpoint as a folder of this format, for ``convert``.
    forms
        The values of ``optimizer=`` of ``convert`` for this format, each with the options with which the source is opened.
    """

    name: str
    marks: str
    open: Callable[..., Source | None]
    order: int = 0
    takes: tuple[str, ...] = ()
    options: Mapping[str, bool] = field(default_factory=dict)
    latest: Callable[[Storage], str | None] | None = None
    root_marks: tuple[str, ...] = ()
    write: WriteFolder | None = None
    forms: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)


def locate(path: str) -> tuple[Storage, str | None]:
    """Return the store of a path, and the key of the file that the path names; the key is None if the path is a folder.

    >>> from reshard_ckpt.storage import open_storage
    >>> _ = open_storage("memory://hub").publish("w.safetensors", b"")
    >>> storage, key = locate("memory://hub/w.safetensors")
    >>> storage.url, key
    ('memory://hub', 'w.safetensors')
    """
    looked_at = _LOOKED_AT.get()
    if looked_at is not None and looked_at[0] == path:
        return looked_at[1]
    above, name = posixpath.split(path.rstrip("/"))
    name = unquote(name) if path.startswith("file:") else name
    # open_storage raises if the parent is not a folder ("memory:/"), and `size` if a key cannot have the name: not a file.
    with suppress(CheckpointError):
        storage = open_storage(above or ("/" if path.startswith("/") else "."))
        if storage.size(name) is not None:
            return storage, name
    return open_storage(path), None


_LOOKED_AT: ContextVar[tuple[str, tuple[Storage, str | None]] | None] = ContextVar("looked at", default=None)


@contextmanager
def looking_once(path: str, storage: Storage) -> Iterator[None]:
    """Let all formats that `locate` a path within the block share one `ListedStorage`, if the store's round trips are slow."""
    if storage.hints.requests <= DISK.requests:
        yield
        return
    folder = storage if isinstance(storage, ListedStorage) else ListedStorage(storage)
    found: tuple[Storage, str | None] = folder, None
    if not folder.list():  # nothing below it: it may be a file
        own, key = locate(path)
        found = (own, None) if key is None else (ListedStorage(own, [key]), key)
    token = _LOOKED_AT.set((path, found))
    try:
        yield
    finally:
        _LOOKED_AT.reset(token)


def open_located(path: str, look: Callable[[Storage, str | None], Source | None]) -> Source | None:
    """Call `look` with the store of a path, and the key if it is a file; close the store, unless the result uses it."""
    storage, key = locate(path)
    with ExitStack() as stack, _garbage_collection_paused():
        stack.enter_context(storage)
        found = look(storage, key)
        if found is not None and found.storage is storage:
            stack.pop_all()
        return found


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Pause Python's cycle collector: over a million new objects it takes longer than making them, and finds no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
