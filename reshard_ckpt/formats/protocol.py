"""The interface of a format: a class `Format`, whose `open` returns a `Source` (a store and a catalog over it), or None."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..core.catalog.model import Catalog
from ..engine.loading.stream import Run
from ..storage.protocol import Storage, read_range

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
        Called with a store, and with the key of a file in it, or None for the whole folder. Returns a catalog over the files, or
        None if they have another format. Raises `CorruptError` if they have this format, but are damaged, incomplete or hostile.
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
