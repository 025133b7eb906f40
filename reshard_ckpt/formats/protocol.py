"""What a format finds at a path: a store and a catalog over it; a foreign format returns it, or None."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import unquote

from ..core.catalog.model import Catalog
from ..engine.loading.stream import Run
from ..errors import CheckpointError
from ..storage import Storage, open_storage
from ..storage.protocol import read_range

NATIVE = "reshard_ckpt"
"""The name of this library's own format."""


@dataclass(frozen=True, slots=True)
class RawValue:
    """A value whose bytes only the library that wrote it can decode; `path` is its keys in the state that was saved."""

    path: tuple[str | int, ...]
    file: str
    offset: int
    length: int

    def read(self, storage: Storage) -> memoryview:
        """Read its bytes."""
        return read_range(storage, self.file, self.offset, self.length)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint to read from, of this library's format or a foreign one.

    Attributes
    ----------
    storage
        Serves the keys of the catalog's files; whoever holds this closes it.
    catalog
        A catalog over them. Files of a foreign format have no checksums: ``digests_key`` is empty.
    format
        The name of the format.
    advice
        What to do where a load does not fit for reasons that lie in this format, by the name below which it holds. It is added to
        the problems of such a load.
    raw
        Values as they lie in the files, by the names that they were saved under; also those that the catalog cannot have.
    sha256
        The SHA-256 of files by their keys, where the format lists them.
    """

    storage: Storage
    catalog: Catalog
    format: str = NATIVE
    advice: Mapping[str, str] = field(default_factory=dict)
    raw: Mapping[str, RawValue] = field(default_factory=dict)
    sha256: Mapping[str, bytes] = field(default_factory=dict)

    def hints(self, prefixes: Sequence[str]) -> tuple[str, ...]:
        """Return the advice that concerns what lies below these names."""
        return tuple(text for name, text in self.advice.items() if any(f"{name}.".startswith(f"{p}.") for p in prefixes))


BytesOf = Callable[[Sequence[Run]], Iterator[memoryview]]
"""Streams the bytes of runs, one after the other, in parts of any size. A part is valid until the next one is asked for."""


class WriteFolder(Protocol):
    """Writes tensors and values as the files of a folder that holds nothing yet."""

    def __call__(self, storage: Storage, catalog: Catalog, values: Mapping[str, Any], bytes_of: BytesOf, /) -> None:
        """Write all tensors of `catalog`, whose bytes `bytes_of` streams, and all values by name."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of another library.

    Attributes
    ----------
    name
        What it is called, in messages and by ``convert``.
    marks
        The files that it is recognized by, for the message where no format recognizes a path.
    open
        Opens a path for reading, as a catalog over its files; returns None if it is not of this format. It raises `CorruptError`
        if the path is of this format, but damaged, incomplete or hostile.
    order
        Formats are tried from the lowest order to the highest. One that recognizes less is tried first.
    takes
        The names of the options of `open`: ``as_saved`` keeps the names that the other library gave, ``named`` names tensors that
        lie in nameless buckets.
    options
        The options that `open` is called with.
    latest
        Returns the folder of the latest checkpoint below the root of a run, or None if the storage holds no such root.
    root_marks
        The files that the root of a run has, beside the folders of its checkpoints. A root is never replaced by a result.
    write
        Writes a checkpoint as a folder of this format, for ``convert``.
    forms
        The values of ``optimizer=`` that ``convert`` takes for this format, each with the options that its source is opened with.
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
    """Return the store that a path lies in, and the key of the one file that it names; None where it names a folder.

    >>> from reshard_ckpt.storage import open_storage
    >>> open_storage("memory://hub").publish("w.safetensors", b"")
    >>> storage, key = locate("memory://hub/w.safetensors")
    >>> storage.url, key
    ('memory://hub', 'w.safetensors')
    """
    above, name = posixpath.split(path.rstrip("/"))
    name = unquote(name) if path.startswith("file:") else name
    # A parent that is no folder ("memory:/"), or a name that no key can have, names no file of a store.
    with suppress(CheckpointError):
        storage = open_storage(above or ("/" if path.startswith("/") else "."))
        if storage.size(name) is not None:
            return storage, name
    return open_storage(path), None


def open_located(path: str, look: Callable[[Storage, str | None], Source | None]) -> Source | None:
    """Return what `look` finds in the store, and at the key, of a path; the store is closed, unless the result serves from it."""
    storage, key = locate(path)
    with ExitStack() as stack:
        stack.enter_context(storage)
        found = look(storage, key)
        if found is not None and found.storage is storage:
            stack.pop_all()
        return found
