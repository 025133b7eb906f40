"""The protocol of stores: a store keeps files (bytes) under keys, and can replace one file atomically.

A key is a relative posix path. Shard files are written once, front to back, and then only read, by ranges; small documents (the
catalog) are read whole and replaced whole with `publish`, the only operation that must be atomic.

Durable means that it survives a power cut. A file's bytes are durable after `Writer.finish`, its name after `Storage.sync`.

Stores differ: a round trip to a disk takes microseconds, to an object store 30 ms, and an object store has no locks (`Hints`).
Methods that take several keys or ranges ask for one after the other; where round trips are slow, they ask for all at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from ..errors import CorruptError, StorageError

Buffer: TypeAlias = bytes | bytearray | memoryview
"""The type of bytes to write. A memoryview must be C-contiguous; its items may have any size."""

Self = TypeVar("Self")
Item = TypeVar("Item")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hints:
    """Facts about a store that decide how it is used; the defaults are those of a disk.

    Attributes
    ----------
    requests
        Requests that the store serves well at once.
    read_bytes, part_bytes
        Bytes of one read, and of one part of a file that is being written. Reads from a disk are small enough to be hashed and
        copied while they are in the processor's cache. A multiple of all block sizes.
    near_bytes
        Two ranges of a file that lie nearer than this are read as one: about latency times bandwidth, divided by `requests`.
    has_locks
        Whether `Storage.lock` works. If not, only `Storage.lease` does.
    shows_unfinished
        Whether a file is there from `Storage.create` on, and `create` refuses a key that exists.
    checks_uploads
        Whether the store compares the bytes of each upload with a checksum that this process sends, so that a reshard need not
        read them back.
    shares_files
        Whether several processes can write parts of one file (`Storage.write_at`).
    retry_s
        Seconds for which a request that keeps failing is repeated, also in stores that are opened beside or below this one.
    """

    requests: int = 8
    read_bytes: int = 2 << 20
    part_bytes: int = 8 << 20
    near_bytes: int = 4 << 10
    has_locks: bool = True
    shows_unfinished: bool = True
    checks_uploads: bool = False
    shares_files: bool = True
    retry_s: float = 120.0


DISK = Hints()


@dataclass(frozen=True, slots=True)
class Version:
    """The version of a file, to tell whether it was replaced. Only the store that made it knows the meaning of `tag`."""

    tag: str


ABSENT = Version("absent")
"""The version of a file that does not exist, for `Storage.publish`: the file must be new."""

PROBE = "probe"
"""The name of an object that exists for a moment, to see whether the store honours conditions. Its folder is named like the
folder of a save."""

ANY = Version("any")
"""Any version of a file, for `Storage.publish`: replace the file whatever it holds."""


@dataclass(frozen=True, slots=True)
class Document:
    """The contents of a small file that was read whole, with its version."""

    data: bytes
    version: Version


class MissingKey(StorageError):
    """Raised if the store has no file under a key."""


class PublishConflict(StorageError):
    """Raised if a file to be replaced has another version than expected: somebody else has published meanwhile."""


class PublishUnknown(StorageError):
    """Raised if the store has not said whether it replaced a file, and does not answer the question: it may still do so."""


class Writer(Protocol):
    """Writes one new file, front to back. Leaving its ``with`` block finishes the file, or aborts it if the block raised.

    Each store's writer implements `_write`, `_finish` and `_abort`, which are only called while the file is open. `_where` names
    the file in messages.
    """

    _where: str
    _is_open: bool = True

    def write(self, data: Buffer) -> None:
        """Append all of `data` to the file."""
        if not self._is_open:
            raise ValueError(f"{self._where}: written after it was closed")
        self._write(flat_bytes(data))

    def finish(self) -> None:
        """Make the file's bytes durable and close it; once finished or aborted, do nothing."""
        if self._is_open:
            self._finish()
            self._is_open = False

    def abort(self) -> None:
        """Close and remove the unfinished file; after `finish` or `abort`, do nothing."""
        if self._is_open:
            self._is_open = False
            self._abort()

    def _write(self, view: memoryview) -> None:
        """Append a view of single bytes to the open file; each store's writer implements it."""

    def _finish(self) -> None:
        """Make the file's bytes durable and close it. If this raises, it is called again, or `_abort` is."""

    def _abort(self) -> None:
        """Close and remove the unfinished file. Raise no error: it would hide the one that the caller raises."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.finish()
        except BaseException:
            self.abort()
            raise


class Lock(Protocol):
    """A lock on a file, or a lease of it. It ends with `release`, at the end of its ``with`` block, or when the process dies.

    Attributes
    ----------
    had_file
        Whether the file of a lease was there before it was taken. None for locks: ask `Storage.size` before.
    """

    had_file: bool | None = None

    def check(self) -> None:
        """Raise a `StorageError` if another process may have the locked or leased file by now. Call it before each deletion."""
        return

    def release(self) -> None:
        """Release the lock; a second call does nothing."""

    def note(self, text: bytes) -> None:
        """Replace the contents of the locked file by a text for anyone who finds it locked; only for files made to be locked."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class _LockOfOneJob(Lock):
    """A lock whose file belongs to one job: it is deleted when the lock is released."""

    def __init__(self, storage: Storage, key: str, lock: Lock) -> None:
        self._storage, self._key, self._lock, self._is_held = storage, key, lock, True

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            try:
                self._storage.delete([self._key])
            finally:
                self._lock.release()

    def check(self) -> None:
        self._lock.check()

    def note(self, text: bytes) -> None:
        self._lock.note(text)


class Storage(Protocol):
    """A store: files (bytes) under keys. Every method may be called by many threads at once; each `Writer` belongs to one.

    Each method raises `StorageError` if the store refuses, and `CorruptError` if a key is not a relative posix path: keys come
    from catalogs, which may be damaged or hostile.
    """

    @property
    def url(self) -> str:
        """The URL or the path of the store, also for messages."""

    @property
    def hints(self) -> Hints:
        """The properties of this store that decide how it is used."""
        return DISK

    def create(self, key: str, size: int | None = None, *, replace: bool = False) -> Writer:
        """Begin a new file, and return its writer. If there is a file already, raise an error; see `Hints.shows_unfinished`.

        Parameters
        ----------
        size
            Bytes of the whole file, if known: a store chooses the size of its parts by it.
        replace
            Replace a file that is there, such as one that a killed process has left.
        """

    def write_at(self, key: str, offset: int) -> Writer:
        """Return a writer for a part of a file, from byte `offset` on, while other processes write other parts.

        The first process makes the file. `Writer.abort` leaves the file, as it holds the bytes of other processes too. Only for
        stores with `Hints.shares_files`.
        """
        raise StorageError(f"{self.url}: {key}: a file in this store has one writer; see Hints.shares_files")

    def copy(self, source: Storage, key: str, to: str) -> bool:
        """Copy a file of another store to the key `to` of this one, if both can do it without reading the file here.

        Return whether they did.
        """
        return False

    def sync(self, keys: Iterable[str]) -> None:
        """Make durable that these files exist, or that they are deleted, and that the folders above them exist.

        It counts for all files in these folders that any process has made or deleted before this call. By default only check the
        keys, for stores where nothing is durable later than it is visible.
        """
        folders_above(keys)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`, one after the other, with the bytes of a file from byte `offset` on.

        Raises
        ------
        MissingKey
            There is no such file.
        CorruptError
            The file ends before the buffers are full.
        """

    def read_ranges(self, ranges: Sequence[tuple[str, int, Sequence[memoryview]]]) -> None:
        """Call `read_into` for several ranges: each a key, an offset, and buffers to fill."""
        map_at_once(self, lambda asked: self.read_into(*asked), ranges)

    def document(self, key: str, limit: int) -> Document:
        """Read a small file whole, and return its bytes with its version.

        Raises
        ------
        MissingKey
            There is no such file.
        CorruptError
            It is larger than `limit` bytes.
        """

    def read(self, key: str, limit: int) -> bytes:
        """Read a small file whole, as `document` does, and return its bytes."""
        return self.document(key, limit).data

    def read_many(self, keys: Sequence[str], limit: int) -> list[Document | None]:
        """Read several small files whole, as `document` does; None for each file that is missing."""

        def read(key: str) -> Document | None:
            with suppress(MissingKey):
                return self.document(key, limit)
            return None

        return map_at_once(self, read, keys)

    def size(self, key: str) -> int | None:
        """Return the size of a file in bytes, or None if there is no such file."""

    def stamp(self, key: str) -> object:
        """Return an object that differs once a file was changed, such as its time or ETag.

        None if there is no file or the store cannot tell.
        """
        return None

    def first_stamp(self, key: str) -> object:
        """Return the `stamp` that a file had when this store first read it; the stamp of now if it has not read it."""
        return self.stamp(key)

    def stat(self, keys: Sequence[str]) -> list[int | None]:
        """Return the size of each file in bytes, or None if there is no such file."""
        return map_at_once(self, self.size, keys)

    def list(self, prefix: str = "") -> list[tuple[str, int]]:
        """List the keys and sizes of all files in the folder `prefix` and below it, sorted by key."""

    def free_bytes(self) -> int | None:
        """Return the number of bytes that this user can still write here, or None if the store cannot tell."""
        return None

    def folders(self, prefix: str = "", *, linked: bool = False) -> tuple[str, ...]:
        """List the names of the folders directly below the folder `prefix`, sorted.

        With `linked`, also list symbolic links: a user may have moved a checkpoint to another disk.
        """
        depth = len(folder_parts(prefix))
        names = [key.split("/") for key, _ in self.list(prefix)]
        return tuple(sorted({parts[depth] for parts in names if len(parts) > depth + 1}))

    def lock(self, key: str, *, shared: bool = False, make: bool = False) -> Lock | None:
        """Lock a file, without waiting. A lock excludes all other locks; a `shared` one excludes only locks that are not shared.

        Parameters
        ----------
        make
            Make an empty file if there is none.

        Returns
        -------
        Lock or None
            None if another lock excludes this one.

        Raises
        ------
        MissingKey
            There is no such file, or it was deleted meanwhile.
        LocksUnsupported
            The store does not support locks.
        """

    def lease(self, key: str, note: bytes, *, ttl_s: float = 60.0, once: bool = False) -> Lock | None:
        """Take a lease on a file: exclusive use by its holder. Return None if it is taken.

        A store with locks does not wait. One without locks watches a lease until its holder renews it, or until its time is over.

        Parameters
        ----------
        note
            The text to put into the file, for anyone who finds it taken.
        ttl_s
            Seconds after which a store without locks gives the file to another process, unless this one renewed its lease.
        once
            The file belongs to one job: it is deleted when the lease is released.

        Raises
        ------
        LocksUnsupported
            The store supports neither locks nor leases.
        """
        lock = self.lock(key, make=True)
        if lock is not None:
            with suppress(OSError):  # the note is optional: a job must be able to load from a full disk
                lock.note(note)
        return _LockOfOneJob(self, key, lock) if once and lock is not None else lock

    def publish(self, key: str, data: bytes, *, expected: Version = ANY) -> Version:
        """Make or replace a small file, atomically and durably: a reader finds the old bytes or the new ones.

        Parameters
        ----------
        expected
            The version that the file must have at this moment, from `read_many` or `publish`; or `ABSENT`, or `ANY`.

        Returns
        -------
        Version
            The version of the new file.

        Raises
        ------
        PublishConflict
            The file has another version than `expected`.
        """

    def prove_conditions(self) -> None:
        """Prove that the store honours the condition `expected` of `publish`. By default there is no doubt, and nothing is done.

        Other stores are tested once for each process and place.

        Raises
        ------
        StorageError
            The store ignores it.
        """
        return

    def delete(self, keys: Iterable[str]) -> None:
        """Delete files, and then the folders that this has emptied, except the root. Missing files are passed over.

        Pass many keys at once: a store removes them in few requests. If some cannot be removed, the others are, and then an error
        is raised.
        """

    def close(self) -> None:
        """Close open files; a later call opens them again. By default a store has no open files."""
        return

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_NO_KEY = re.compile(r"[\0\\\ud800-\udfff]")
"""Matches the characters that no key has: NUL, a backslash, and halves of a surrogate pair, which are not UTF-8."""


def key_parts(key: str) -> tuple[str, ...]:
    """Split a key into the names of its folders and its file; refuse a key that would leave the root.

    >>> key_parts("0a1b/rank00003-0.safetensors")
    ('0a1b', 'rank00003-0.safetensors')
    """
    parts = tuple(key.split("/"))
    if any(part in ("", ".", "..") for part in parts) or _NO_KEY.search(key):
        raise CorruptError(
            f"{key!r} is not the key of a checkpoint file, which is a relative path without '..': do not trust its source"
        )
    return parts


def folder_parts(prefix: str) -> tuple[str, ...]:
    """Split the path of a folder into names, as `key_parts` does; the root "" has none."""
    return key_parts(prefix) if prefix else ()


def folders_above(keys: Iterable[str]) -> list[tuple[str, ...]]:
    """List all folders above these keys, as tuples of names, the deepest first; the root is ``()``.

    >>> folders_above(["a/b/1", "a/b/2", "c"])
    [('a', 'b'), ('a',), ()]
    """
    if isinstance(keys, str):  # a str would pass for keys of one letter each
        raise TypeError(f"{keys!r}: pass the keys of the files, not the folder")
    above = {parts[:n] for parts in map(key_parts, keys) for n in range(len(parts))}
    return sorted(above, key=len, reverse=True)


def flat_bytes(data: Buffer) -> memoryview:
    """View a buffer of any shape and format as 1-D single bytes, without a copy."""
    view = memoryview(data)
    if view.nbytes == 0:
        return memoryview(bytearray())  # an empty view of several dims cannot be cast
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def fill(views: Iterable[memoryview], data: Buffer) -> None:
    """Copy bytes into the views, one after the other; the views are of single bytes."""
    left = memoryview(data)
    for view in views:
        view[:] = left[: len(view)]
        left = left[len(view) :]


def read_range(storage: Storage, key: str, offset: int, num_bytes: int) -> memoryview:
    """Read `num_bytes` bytes of a file, from `offset` on, into new memory, and return it; see `Storage.read_into`."""
    data = memoryview(bytearray(num_bytes))
    storage.read_into(key, offset, [data])
    return data


def read_parts(storage: Storage, key: str, num_bytes: int, part_bytes: int) -> Iterator[tuple[int, memoryview]]:
    """Read the first `num_bytes` bytes of a file in parts. Yield the offset and the bytes of each, valid until the next."""
    buffer = memoryview(bytearray(min(part_bytes, num_bytes)))
    for begin in range(0, max(num_bytes, 1), part_bytes):  # an empty file is read as one part, so that a missing file is an error
        part = buffer[: num_bytes - begin]
        storage.read_into(key, begin, [part])
        yield begin, part


def begin(storage: Storage, call: Callable[[], T]) -> Callable[[], T]:
    """Return a function that returns the result of `call`. If the store is slow, `call` begins now in a thread."""
    if storage.hints.requests <= DISK.requests:
        return call
    pool = ThreadPoolExecutor(1, thread_name_prefix="reshard-ckpt-ask")
    under_way = pool.submit(call)
    pool.shutdown(wait=False)
    return under_way.result


def at_once(storage: Storage, *calls: Callable[[], T]) -> list[T]:
    """Make several calls and return their results in order. If the store's round trips are slow, make them at the same time."""
    return map_at_once(storage, lambda call: call(), calls)


def map_at_once(storage: Storage, function: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
    """Call a function with each item; return the results in order. If round trips are slow, make the calls at the same time."""
    items = list(items)
    if storage.hints.requests <= DISK.requests or len(items) <= 1:
        return list(map(function, items))
    with ThreadPoolExecutor(min(len(items), storage.hints.requests), thread_name_prefix="reshard-ckpt-ask") as pool:
        return list(pool.map(function, items))


def write_file(storage: Storage, key: str, data: Buffer) -> None:
    """Write a new file with these bytes, durably; see `Storage.create`."""
    with storage.create(key, memoryview(data).nbytes) as writer:
        writer.write(data)


def copy_file(source: Storage, key: str, target: Storage) -> None:
    """Copy a file to the same key of another store, durably. A file that is there already is replaced."""
    if not target.copy(source, key, key):
        size = source.size(key)
        if size is None:
            raise missing(f"{source.url}/{key}")
        with target.create(key, size, replace=True) as writer:
            for _, part in read_parts(source, key, size, target.hints.part_bytes):
                writer.write(part)


def short_file(where: str, offset: int, wanted: int, got: int) -> CorruptError:
    """Return the error for a file that ends too early."""
    return CorruptError(
        f"{where}: wanted {wanted} bytes from byte {offset} on, but the file ends after {got} of them; "
        "it was truncated, so use another checkpoint"
    )


def too_large(where: str, limit: int) -> CorruptError:
    """Return the error for a document above its hard limit of bytes."""
    return CorruptError(
        f"{where}: larger than {limit} bytes, the limit for such a file; it is damaged, so use another checkpoint"
    )


def missing(where: str) -> MissingKey:
    """Return the error for a file that does not exist."""
    return MissingKey(f"{where}: no such file")


def exists(where: str) -> StorageError:
    """Return the error for a new file that already exists."""
    return StorageError(f"{where}: already exists; shard files are never overwritten, so remove it or save to another path")


def conflict(where: str, expected: Version, current: Version) -> PublishConflict:
    """Return the error for a publish that found another version of the file than it expected."""
    if current == ABSENT:
        return PublishConflict(f"{where}: disappeared during this save; somebody deletes here: save to a path that is left alone")
    found = "appeared" if expected == ABSENT else "changed"
    return PublishConflict(f"{where}: {found} during this save; two jobs write to one path: give each job its own")
