"""Formats of checkpoints: the class `Format`, the list of known formats, and opening a path in one of them.

1. A `Format` of another library has a function `open`, which returns a `Source`: a store, and a catalog over its files.
2. `known_formats` loads every entry point of the group ``reshard_ckpt.formats``, those of this package and of others. If one
   fails to import, it warns, and goes on with the others. Formats are tried by `Format.order`.
3. `open_source` opens a path on one rank, `open_shared_source` on all ranks, and checks that all see the same checkpoint. The
   path is opened in this library's own format, else in the first foreign format that recognizes the path.

Opening a path converts nothing and reads no tensor data. A format builds a catalog over its own files; the planner and the reader
of this library's own checkpoints do the rest, resharding included.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ..core.catalog.model import Catalog
from ..engine.common.collector import collector_paused
from ..engine.common.entry_points import load_all
from ..engine.common.files import Found, Identified, identified_catalog, open_same
from ..engine.common.packed_files import UnpackedStorage
from ..engine.common.reader_notes import kept_for_reader
from ..engine.common.step_folders import describe_run
from ..errors import CheckpointError, CheckpointNotFound, CorruptError, StorageError, UnsupportedError
from ..format.catalog import encode_catalog
from ..format.files import CATALOG_KEY, CONVERT_LOCK, digest128
from ..storage import LocksUnsupported, MissingKey, Storage, open_beside, open_storage, path_text
from ..storage.followed import FollowedStorage
from ..storage.listed import ListedStorage
from ..storage.posix import MOMENTS_S, lock_attempts
from ..storage.protocol import DISK, read_range

if TYPE_CHECKING:
    from ..comm.protocol import Comm
    from ..engine.loading.stream import Run

Path = str | os.PathLike[str]

NATIVE = "reshard_ckpt"
"""The name of this library's own format."""

SAFETENSORS = "safetensors"
"""The name of the format of Hugging Face's folders."""


@dataclass(frozen=True, slots=True)
class RawValue:
    """A value as bytes in a file, for the library that wrote it to decode; `path` has its keys in the saved state."""

    path: tuple[str | int, ...]
    file: str
    offset: int
    length: int

    def read(self, storage: Storage) -> memoryview:
        """Read the bytes of this value."""
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
        Maps names to advice. The advice is added to the errors of a load that fails at or below the name, for reasons that lie in
        the format.
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
        """Return the advice for errors that concern these names: a prefix stands for itself and all names below it."""
        return tuple(text for name, text in self.advice.items() if any(f"{name}.".startswith(f"{p}.") for p in prefixes))


BytesOf = Callable[[Sequence["Run"]], Iterator[memoryview]]
"""A function that yields the bytes of runs, one after the other, in parts of any size.

A yielded part is valid until the next one is requested."""


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
        Called with a store, and with the key of a file in it, or None for the whole folder. Returns a `Source`, or None if the
        files have another format. Raises `CorruptError` if they have this format, but are damaged, incomplete or hostile.
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
        Writes a checkpoint as a folder of this format, for ``convert``: called with a store that holds nothing yet, the catalog
        of the tensors, all values by name, and a `BytesOf` for the tensors of the catalog.
    shares
        Whether several ranks write together. Each of them calls `write`, with ``comm=`` and ``notes=`` for `write_folder`.
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
    write: Callable[..., int | None] | None = None
    shares: bool = False
    forms: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)


GROUP = "reshard_ckpt.formats"

OWN = {
    "bytecheckpoint": "reshard_ckpt.families.bytecheckpoint.open:FORMAT",
    "vescale": "reshard_ckpt.families.vescale.open:FORMAT",
    "megatron": "reshard_ckpt.families.megatron.open:FORMAT",
    "dcp": "reshard_ckpt.formats.dcp.read:FORMAT",
    "deepspeed": "reshard_ckpt.families.deepspeed.open:FORMAT",
    "safetensors": "reshard_ckpt.formats.safetensors:FORMAT",
    "torch_checkpointing": "reshard_ckpt.formats.torch_checkpointing:FORMAT",
    "rank-files": "reshard_ckpt.formats.rank_files:FORMAT",
    "torch": "reshard_ckpt.formats.torch_file:FORMAT",
}
"""The entry points of this package's own formats, as in pyproject.toml."""

Formats = Callable[[], tuple[Format, ...]]
"""A function that lists the foreign formats to try, in order. It is called only if a path holds no checkpoint of this library."""


@cache
def known_formats() -> tuple[Format, ...]:
    """Load all formats, in the order in which they are tried."""
    return tuple(sorted(load_all(GROUP, OWN, Format), key=lambda format: format.order))


def with_options(options: Mapping[str, bool], only: Collection[str] | None = None) -> Formats:
    """Return a function that lists the known formats, with these options set in all formats that take them.

    With `only`, they are set in the formats of these names alone.

    >>> [form.name for form in with_options({"as_saved": True}, only=["dcp"])() if form.options]
    ['dcp']
    """

    def formats() -> tuple[Format, ...]:
        return tuple(
            replace(form, options={name: value for name, value in options.items() if name in form.takes})
            if only is None or form.name in only
            else form
            for form in known_formats()
        )

    return formats


@contextmanager
def failing(form: Format, place: str, *, writes: bool = False) -> Iterator[None]:
    """Convert any error of a format's own code in the ``with`` block to a `CheckpointError` that says whose code failed."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except OSError as error:
        raise StorageError(f"{place}: {_name_of_code(form)} failed ({error!s:.200}); look at the file system") from error
    except Exception as error:  # a damaged pickle may have anything where the format expects what its library writes
        why = f"{type(error).__name__}: {error}"
        if writes:
            raise UnsupportedError(
                f"{place}: {_name_of_code(form)} could not write it ({why:.200}); convert to another format, or repair or "
                "uninstall the package that brings it"
            ) from error
        if form.name in OWN:
            raise CorruptError(f"{place}: is not as {form.name} writes it ({why:.200}); use another copy") from error
        raise CorruptError(
            f"{place}: {_name_of_code(form)} failed ({why:.200}); if other copies fail too, repair or uninstall the package that "
            "brings it"
        ) from error


def _name_of_code(form: Format) -> str:
    return f"the format {form.name!r} of {getattr(form.open, '__module__', 'another package')}"


def _opened(form: Format, storage: Storage, key: str | None) -> Identified[Source] | None:
    """Open a folder, or the file `key` in it, as a checkpoint of one format; return None if it has another format."""
    with failing(form, storage.url if key is None else f"{storage.url}: {key}"):
        found = form.open(storage, key, **form.options)
        if found is None:
            return None
        if not isinstance(found, Source):
            raise TypeError(f"open returned a {type(found).__name__}, not a Source")
        # A foreign format has no digest of its metadata, so compare the catalogs. They do not depend on the rank that built them.
        identity = digest128(encode_catalog(replace(found.catalog, created_s=0.0)))
        if form.name not in OWN:
            found = replace(found, storage=_StorageOf(form, found.storage))
        return Identified(found, identity)


def _latest(form: Format, storage: Storage) -> str | None:
    """Return the folder of the latest checkpoint below the root of a run in a format; None for anything else."""
    if form.latest is None:
        return None
    with failing(form, storage.url):
        tag = form.latest(storage)
        if tag is not None and {"", ".", ".."} & {*tag.split("/")}:  # the root itself would be opened again without end
            raise ValueError(f"latest returned {tag!r:.200}, which is no folder below the root")
        return tag


def _explained(name: str) -> Any:
    """Make a method of `_StorageOf` that calls the store's method of this name; its first argument is a key."""

    def call(self: _StorageOf, key: str, *args: Any) -> Any:
        with failing(self.form, f"{self.url}: {key}"):
            return getattr(self._own, name)(key, *args)

    return call


class _StorageOf(FollowedStorage):
    """A store whose files belong to a format of another package. If a read fails, the error says so (`failing`)."""

    def __init__(self, form: Format, own: Storage) -> None:
        super().__init__(own, {})
        self.form = form

    read_into = _explained("read_into")
    size = _explained("size")
    document = _explained("document")


@contextmanager
def open_source(path: Path, formats: Formats = known_formats, *, timeout_s: float = MOMENTS_S) -> Iterator[Source]:
    """Open the checkpoint at a path for a ``with`` block that reads it, in one process.

    Raise `CheckpointNotFound` if the path holds no checkpoint that can be read; the message lists the formats that were tried.
    Raise `CorruptError` if the checkpoint is damaged.

    Parameters
    ----------
    formats
        The foreign formats to try if the path holds no checkpoint of this library.
    timeout_s
        Seconds for which requests to an object store are repeated, at most `MOMENTS_S`.
    """
    with ExitStack() as stack:
        yield _open(path, stack, formats, timeout_s).value


@contextmanager
def open_shared_source(
    comm: Comm, path: Path, formats: Formats = known_formats, *, timeout_s: float = MOMENTS_S
) -> Iterator[Source]:
    """Open a path on every rank for a ``with`` block, and check that all see the same checkpoint. Collective.

    Until the block ends, rank 0 protects the checkpoint from removal.
    """
    with ExitStack() as stack:
        is_locking = comm.rank == 0
        yield open_same(comm, str(path), lambda found: _open(path, stack, formats, timeout_s, found, is_locking), stack)


def _open(
    path: Path, stack: ExitStack, formats: Formats, timeout_s: float, found: Found | None = None, is_locking: bool = True
) -> Identified[Source]:
    """Open a path on one rank: in this library's own format, else in the first foreign format that recognizes it.

    `timeout_s` are the seconds for which requests to an object store are repeated, at most `MOMENTS_S`, and those to wait for
    the lock of a checkpoint (`reading`), which is taken if `is_locking`. With `found`, the catalog that another rank has found
    is decoded, and none is read.
    """
    lock_s = timeout_s if is_locking else None
    storage = stack.enter_context(open_storage(found.path if found else path, timeout_s=min(timeout_s, MOMENTS_S)))
    if lock_s is not None:
        stack.enter_context(reading(storage, lock_s))
    hints = storage.hints
    listed = ListedStorage(storage) if hints.requests > DISK.requests else storage
    try:
        opened = identified_catalog(listed, found)
    except CheckpointNotFound as error:
        # The root of a run stands for its latest checkpoint, which may be one of this library.
        tags = (_latest(candidate, listed) for candidate in formats())
        tag = next((tag for tag in tags if tag is not None), None)
        if tag is not None:
            return _open(f"{path_text(path).rstrip('/')}/{tag}", stack, formats, timeout_s, is_locking=is_locking)
        return _open_foreign(path_text(path), listed, stack, formats, error)
    if lock_s is not None and not hints.has_locks:
        stack.enter_context(kept_for_reader(storage, opened.value.save_id))
    source = Source(_followed(storage, opened.value, stack, lock_s), opened.value)
    return Identified(source, opened.identity, opened.found._replace(path=path_text(path)) if opened.found else None)


def _followed(storage: Storage, catalog: Catalog, stack: ExitStack, lock_s: float | None) -> Storage:
    """Return the store of a checkpoint's files. The checkpoints whose files this catalog refers to are opened, too.

    Checkpoints to which these refer in turn are not opened. Files with packed rows (table rows stored in fewer bits) are read as
    if the rows were not packed.
    """
    first = {file.folder: file for file in reversed(catalog.files) if file.checkpoint}
    others: dict[str, Storage] = {}
    for folder, file in first.items():
        other = stack.enter_context(open_beside(storage, file.checkpoint, file.key.removeprefix(folder)))
        if lock_s is not None:
            stack.enter_context(reading(other, lock_s))
        others[folder] = other
    packed = {file.key: file for file in catalog.files if file.packed}
    followed = FollowedStorage(storage, others) if others else storage
    return UnpackedStorage(followed, packed) if packed else followed


def _open_foreign(
    path: str, storage: Storage, stack: ExitStack, formats: Formats, not_native: CheckpointNotFound
) -> Identified[Source]:
    url, is_listed = storage.url, isinstance(storage, ListedStorage)
    folder, key = (storage, None) if is_listed and storage.list() else locate(path, storage.hints.retry_s)
    if key is None and is_listed and storage.size(CONVERT_LOCK) is not None:
        raise CheckpointNotFound(f"{url}: a conversion writes there now, or was killed; wait for its end, or run it again")
    if key is None:
        folder = storage
    elif is_listed:
        folder = ListedStorage(folder, [key])
    with collector_paused():  # over a million new objects, a collection takes longer than making them, and finds no cycles
        found = next((found for candidate in formats() if (found := _opened(candidate, folder, key)) is not None), None)
    if found is None:
        if describe_run(storage) is not None:
            raise not_native
        tried = [f"{CATALOG_KEY} ({NATIVE})", *(f"{candidate.marks} ({candidate.name})" for candidate in formats())]
        why = str(not_native)
        if os.path.exists(url) and not os.path.isdir(url):
            step = "pass the folder that it is in" if os.path.basename(url) == CATALOG_KEY else "check the path"
            why = f"{url}: no committed checkpoint: a file of no format that is known; {step}"
        raise CheckpointNotFound(why, tried) from None
    stack.enter_context(found.value.storage)
    return found


def locate(path: str, timeout_s: float = MOMENTS_S) -> tuple[Storage, str | None]:
    """Return the store of a path, and the key of the file that the path names; the key is None if the path is a folder.

    `timeout_s` is that of `open_storage`.

    >>> _ = open_storage("memory://hub").publish("w.safetensors", b"")
    >>> storage, key = locate("memory://hub/w.safetensors")
    >>> storage.url, key
    ('memory://hub', 'w.safetensors')
    """
    above, name = posixpath.split(path.rstrip("/"))
    name = unquote(name) if path.startswith("file:") else name
    # Where the parent is not a folder ("memory:/"), or no key can have this name, these calls raise: the path is not a file.
    with suppress(CheckpointError):
        storage = open_storage(above or ("/" if path.startswith("/") else "."), timeout_s=timeout_s)
        if storage.size(name) is not None:
            return storage, name
    return open_storage(path, timeout_s=timeout_s), None


def reading(storage: Storage, timeout_s: float = MOMENTS_S) -> AbstractContextManager[object]:
    """Lock a checkpoint, so that nobody removes it while the ``with`` block reads it. Without locks, `kept_for_reader` does so.

    A process that removes the checkpoint, or cleans up there, is waited for: a reader that went on without the lock might find
    the catalog, and then not its files.
    """
    for _ in lock_attempts(f"{storage.url}/{CATALOG_KEY}", timeout_s):
        try:
            if lock := storage.lock(CATALOG_KEY, shared=True):
                return lock
        except LocksUnsupported:
            break
        except MissingKey:  # the reader raises that it is missing; if a save has replaced it meanwhile, lock the new one
            if storage.size(CATALOG_KEY) is None:
                break
    return nullcontext()
