"""Opening a checkpoint: read its catalog, check that all ranks read the same one, check file sizes, and read block digests.

Requests for sizes and digests are sent at the same time, up to `MAX_REQUESTS`: the answers are small, but a store may take long
for each. Fewer threads read the files themselves (`num_threads`, `in_threads`). Messages about damage name the tensors and values
that lie in the damaged range (`FileContents`).
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgpack
import numpy as np

from ...core.catalog.model import Catalog, FileEntry
from ...core.report import few, plural
from ...errors import CheckpointNotFound, CorruptError, StorageError
from ...format.catalog import MAX_CATALOG_BYTES, decode_catalog
from ...format.files import CATALOG_KEY, SAVE_ID, Digests, decode_digests, digest128, digests_file_bytes
from ...storage import open_storage, resolved_path
from ...storage.posix import broken_link
from ...storage.protocol import DISK, Hints, MissingKey, Storage, map_at_once
from .reader_notes import REMOVED_KEY
from .step_folders import describe_run, find_steps, name_steps

if TYPE_CHECKING:
    from ...comm.protocol import Comm  # the catalog is read without torch

T = TypeVar("T")

MAX_REQUESTS = 16
"""The most requests for sizes and digests that are under way to a disk at once."""

SHORT_FOR_LONG = 2
"""A store serves ``Hints.requests`` large reads well at once. It is sent this many times as many small ones (sizes, digests)."""

REQUESTS_OF_THREAD = 16
"""Number of requests to a disk for each further thread that is started: fewer requests take less time than a thread's start."""

MAX_THREADS = 8
"""Most threads that read files at once on one rank."""

DIGESTS_BYTES = 32 << 20
"""The most bytes of block digests that `FileDigests` keeps in memory. It drops those of the file that was used least recently.

This is enough for half a terabyte of files.
"""

_NONE_LEFT: Any = object()


class Found(NamedTuple):
    """The bytes of a catalog as they were read, and the path of the checkpoint."""

    path: str
    data: bytes | memoryview

    def lend(self, stack: ExitStack) -> bytes:
        """Copy the catalog's bytes into shared memory, and return a message with which other ranks of this machine `borrow` them.

        The memory exists until `stack` is closed. The message is empty if this machine has no shared memory.
        """
        from ...comm.shared_memory import Segment  # imports torch

        try:
            segment = Segment(len(self.data))
        except (AttributeError, OSError):  # not Linux, or too little memory
            return b""
        stack.callback(segment.close)
        memory: Any = segment.data.numpy()
        memoryview(memory)[:] = self.data
        message: bytes = msgpack.packb((os.fsencode(resolved_path(self.path)), segment.address))
        return message

    @classmethod
    def borrow(cls, message: bytes) -> Found | None:
        """Open the catalog's bytes in the shared memory of the rank that made `message` by `lend`.

        Return None if the message is empty, or the memory is not accessible from here. Then this rank reads the catalog from
        the store.
        """
        from ...comm.shared_memory import open_segment  # imports torch

        path, address = msgpack.unpackb(message) if message else (b"", b"")
        memory = open_segment(address) if address else None
        if memory is None:
            return None
        data: Any = memory.numpy()
        return cls(os.fsdecode(path), memoryview(data))


@dataclass(frozen=True, slots=True)
class Identified(Generic[T]):
    """An opened value, such as a decoded catalog. Its `identity` is equal on two ranks if both opened the same value."""

    value: T
    identity: bytes
    found: Found | None = None
    """The bytes of the catalog from which `value` was decoded; None if another rank could not make `value` from them."""


def read_catalog_bytes(storage: Storage) -> bytes:
    """Read the bytes of the catalog file of a checkpoint.

    Raise `CheckpointNotFound` if the path holds no catalog; the message describes the files that it holds.
    """
    with suppress(MissingKey):
        return storage.read(CATALOG_KEY, limit=MAX_CATALOG_BYTES)
    raise CheckpointNotFound(f"{storage.url}: no committed checkpoint: {_what_is_there(storage)}")


def _what_is_there(storage: Storage) -> str:
    # A run is looked for first, as listing all files of a run may take long.
    if (run := describe_run(storage)) is not None:
        return run
    keys = [key for key, _ in storage.list()]
    if checkpoints := sorted({key.removesuffix(f"/{CATALOG_KEY}") for key in keys if key.endswith(f"/{CATALOG_KEY}")}):
        return f"it holds the checkpoints {few(checkpoints)}; pass one of them"
    if link := broken_link(storage.url):
        return link
    if not keys:
        return f"nothing is there; {_steps_beside(storage)}check the path"
    if REMOVED_KEY in keys:
        return "it was removed, and its files stay for a while for those who read them; load another one"
    if any(SAVE_ID.fullmatch(key.split("/", 1)[0]) for key in keys):
        return f"a save began there, but never committed ({CATALOG_KEY} is missing); load another one"
    return f"{plural(len(keys), 'file')} ({few(keys, 3)}), but no {CATALOG_KEY}; check the path"


def _steps_beside(storage: Storage) -> str:
    """Describe, for a message, the committed steps in the folder above a store; empty if there are none."""
    above = storage.url.rpartition("/")[0]
    if not above or above.endswith("/"):
        return ""
    with open_storage(above, timeout_s=storage.hints.retry_s) as root:
        committed, _ = find_steps(root)
    return f"its run holds {name_steps(committed)}; " if committed else ""


def open_catalog(storage: Storage) -> Catalog:
    """Read, decode and check the catalog of a checkpoint, in one process."""
    return identified_catalog(storage).value


def identified_catalog(storage: Storage, found: Found | None = None) -> Identified[Catalog]:
    """Return the decoded catalog of a checkpoint, identified by the digest of its bytes.

    Its bytes are those in `found`, which another rank has checked and lent, or else are read from the store and checked.
    """
    data = read_catalog_bytes(storage) if found is None else found.data
    try:
        return Identified(decode_catalog(data, is_checked=found is not None), digest128(data), Found(storage.url, data))
    except CorruptError as error:
        raise CorruptError(f"{storage.url}: {error}") from error


def open_same(comm: Comm, where: str, read: Callable[[Found | None], Identified[T]], stack: ExitStack) -> T:
    """Open a checkpoint on every rank, and check that all opened the same one.

    Collective: rank 0 broadcasts the checkpoint's identity, and with it lends the catalog to its own machine; then a broadcast
    among the ranks of each other machine that has several. Rank 0 opens the checkpoint first. If that fails, its error is raised
    on all ranks, and no other rank reads. Raise `CheckpointNotFound` or `CorruptError` if `read` raised it, or this rank opened
    another checkpoint than rank 0.

    Parameters
    ----------
    where
        Name of the checkpoint in messages.
    read
        Opens the checkpoint on this rank and identifies it. It decodes the catalog from the bytes in its argument; if that is
        None, it reads them from the store.
    stack
        Keeps the memory that other ranks read; close it once all ranks have opened the checkpoint.
    """
    if comm.size == 1:
        return read(None).value
    first, *others = comm.neighbours()
    wanted = lent = b""
    if comm.rank:
        wanted, lent = msgpack.unpackb(comm.broadcast(None))
    if comm.rank == first:  # of each machine, one rank reads the catalog, and lends it to the others
        opened = read(None)
        lent = opened.found.lend(stack) if others and opened.found else b""
    else:
        opened = read(Found.borrow(comm.broadcast_near(None) if first else lent))
    if comm.rank == 0:
        comm.broadcast(msgpack.packb((opened.identity, lent)))
    elif opened.identity != wanted:
        raise CorruptError(
            f"{where}: rank {comm.rank} reads another catalog than rank 0; load from a path that all ranks share, "
            "and not while a save replaces it; on a network file system, wait until the caches of its machines are up to date"
        )
    elif comm.rank == first and others:
        comm.broadcast_near(lent)
    return opened.value


def open_files(storage: Storage, catalog: Catalog, files: Sequence[int], digests_of: Sequence[int] = ()) -> dict[int, Digests]:
    """Check the sizes of the files `files`, read the block digests of the files `digests_of`, and return the digests by file.

    Files are given by their index in the catalog. Files of other formats have no digests. The digests of files in other
    checkpoints are always read: such a file may have any path, and without digests a hostile catalog could have any file read as
    a tensor. Raise `CorruptError` if a file is missing or has another size than the catalog says, or a digests file is missing or
    damaged.
    """
    wanted = dict.fromkeys([*digests_of, *(index for index in files if catalog.files[index].checkpoint)])
    with_digests = [index for index in wanted if catalog.files[index].digests_key]
    sizes = [partial(_check_size, storage, catalog, index) for index in files]
    digests = [partial(_read_digests, storage, catalog, index) for index in with_digests]
    requests: list[Callable[[], Digests | None]] = [*sizes, *digests]
    at_once = storage.hints.requests
    on_disk = min(MAX_REQUESTS, len(requests) // REQUESTS_OF_THREAD)
    threads = min(SHORT_FOR_LONG * at_once if at_once > DISK.requests else on_disk, len(requests))
    if threads <= 1:
        answers = [request() for request in requests]
    else:  # if several requests fail, the error of the first in order is raised
        with ThreadPoolExecutor(threads, thread_name_prefix="reshard-ckpt-ask") as pool:
            answers = list(pool.map(lambda request: request(), requests))
    found = zip(with_digests, answers[len(sizes) :], strict=True)
    return {index: of_file for index, of_file in found if of_file is not None}


class FileDigests:
    """Reads the block digests of a checkpoint's files when they are first needed, and keeps the recently used ones.

    The size of each file is checked once. Without `verify`, only digests of files in other checkpoints are read (see
    `open_files`). Several threads may use it at once.
    """

    def __init__(self, storage: Storage, catalog: Catalog, *, verify: bool) -> None:
        self._storage, self._catalog, self.verify = storage, catalog, verify
        self._lock = threading.Lock()
        self._checked: set[int] = set()
        self._stamps: dict[str, object] = {}
        self._kept: OrderedDict[int, Digests | None] = OrderedDict()
        self._kept_bytes = 0

    def of(self, files: Sequence[int]) -> dict[int, Digests]:
        """Return the block digests of some files, by file index. Files whose digests are absent or not read are left out.

        The first call for a file also checks its size. Errors are those of `open_files`.
        """
        with self._lock:
            unchecked = [file for file in files if file not in self._checked]
            wanted = [file for file in files if self.verify or self._catalog.files[file].checkpoint]
            lacking = [file for file in wanted if file not in self._kept]
            opened = open_files(self._storage, self._catalog, unchecked, lacking)
            self._checked.update(files)
            # The first stamp of a file is from when it was first read, for values or headers, which may be before this object.
            keys = [self._catalog.files[file].key for file in unchecked if not self._catalog.files[file].digests_key]
            self._stamps |= zip(keys, map_at_once(self._storage, self._storage.first_stamp, keys), strict=True)
            for file in lacking:
                self._kept[file] = opened.get(file)
                self._kept_bytes += _num_bytes(opened.get(file))
            for file in wanted:
                self._kept.move_to_end(file)  # the least recently used are dropped first
            found = {file: digests for file in wanted if (digests := self._kept[file]) is not None}
            while self._kept_bytes > DIGESTS_BYTES and len(self._kept) > len(files):
                self._kept_bytes -= _num_bytes(self._kept.popitem(last=False)[1])
            return found

    def refuse_changed(self) -> None:
        """Raise a `StorageError` if a file without digests was changed since it was first read, or first asked for with `of`.

        Without digests, a changed stamp (time of change or ETag) is the only sign of that. A file that was removed meanwhile
        raises nothing: its bytes stay readable as long as it is open.
        """
        with self._lock:
            before = dict(self._stamps)
        for key, stamp in zip(before, map_at_once(self._storage, self._storage.stamp, before), strict=True):
            if stamp not in (None, before[key]):
                raise StorageError(
                    f"{self._storage.url}: {key} was changed while it was read, so the bytes may be of two saves; read it again "
                    "when nobody writes there"
                )


def _num_bytes(digests: Digests | None) -> int:
    return 0 if digests is None else digests.values.nbytes


def _check_size(storage: Storage, catalog: Catalog, index: int) -> None:
    entry = catalog.files[index]
    size = storage.size(entry.key)
    if size == entry.size:
        return
    found = "is missing" if size is None else f"has {size} bytes"
    begin = size if size is not None and size < entry.size else 0  # a file that is too long is another file: none of it is good
    raise CorruptError(
        f"{storage.url}: {entry.key} {found}, the catalog says {entry.size} bytes; bytes {begin}:{entry.size} hold "
        f"{contents_from(catalog, index, begin)}; {_advice(entry)}"
    )


def _advice(entry: FileEntry) -> str:
    if not entry.checkpoint:
        return "use another checkpoint"
    return f"it is of the checkpoint {entry.checkpoint}: put that back in its place from here, or use another checkpoint"


def _read_digests(storage: Storage, catalog: Catalog, index: int) -> Digests:
    entry = catalog.files[index]
    try:
        data = storage.read(entry.digests_key, limit=digests_file_bytes(entry.size, 64 << 10))
        wrong = "" if digest128(data) == entry.digest else "is damaged: its own digest differs"
    except MissingKey:
        wrong = "is missing"
    except CorruptError:
        wrong = "is damaged: it is too large"
    if wrong:
        raise CorruptError(
            f"{storage.url}: {entry.digests_key} {wrong}; without it, nothing verifies bytes 0:{entry.size} of {entry.key}, "
            f"which hold {contents_from(catalog, index)}; {_advice(entry)}"
            + ("" if entry.checkpoint else "; load, reshard and convert take verify=False, which reads them unverified")
        )
    return decode_digests(data, entry.size, name=f"{storage.url}: {entry.digests_key}")


class FileContents:
    """Names the tensors and values that lie in a byte range of a file, for messages about damage."""

    def __init__(self, catalog: Catalog) -> None:
        rows, owner, sizes = catalog.rows, catalog.row_tensors, catalog.row_bytes
        # The columns kept below are sorted by file and offset; file f begins at first[f].
        order = np.lexsort((rows.offset, rows.file))
        order = order[sizes[order] > 0]
        self._catalog, self._owner = catalog, owner[order]
        self._begin, self._end = rows.offset[order], (rows.offset + sizes)[order]
        self._first = np.searchsorted(rows.file[order], np.arange(len(catalog.files) + 1))
        self._values = {index: value.name for value in catalog.values_table for index in value.blobs}

    def text(self, file: int, begin: int, end: int) -> str:
        """Name the tensors and values that overlap bytes ``[begin, end)`` of a file, in the order in which they lie there."""
        part = slice(self._first[file], self._first[file + 1])
        last = int(np.searchsorted(self._begin[part], end))
        hit = np.flatnonzero(self._end[part][:last] > begin)
        names = self._catalog.tensors_table.names
        owners = self._owner[part][hit].tolist()
        found = list(dict.fromkeys(self._values.get(i, names[i]) for i in owners))
        return few(found) if found else "its header alone"


def contents_from(catalog: Catalog, file: int, begin: int = 0) -> str:
    """Name the tensors and values that lie in a file from byte `begin` to its end, for a message."""
    return FileContents(catalog).text(file, begin, catalog.files[file].size)


def num_threads(tasks: int, hints: Hints = DISK) -> int:
    """Return how many threads read `tasks` windows.

    One thread for each core that this rank has, but at most `MAX_THREADS`: more would push each other's buffers out of the
    caches. From a store with slow round trips, as many threads read as it serves well.
    """
    if hints.requests > DISK.requests:
        return max(min(hints.requests, tasks), 1)
    cores = (os.cpu_count() or 1) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(min(MAX_THREADS, tasks, round(cores)), 1)


def in_threads(task: Callable[[T], object], items: Iterable[T], threads: int) -> None:
    """Call `task` with each item, in several threads; calls begin in order. After an error no more calls begin, and it is raised.

    No call runs any more when this returns or raises. One thread at a time takes the next item.
    """
    if threads <= 1:
        for item in items:
            task(item)
        return
    left, taking, stopped = iter(items), threading.Lock(), threading.Event()

    def work() -> None:
        try:
            while not stopped.is_set():
                with taking:
                    item = next(left, _NONE_LEFT)
                if item is _NONE_LEFT:
                    return
                task(item)
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(threads, thread_name_prefix="reshard-ckpt-read") as pool:
        futures = [pool.submit(work) for _ in range(threads)]
        try:
            for future in futures:
                future.result()
        finally:
            stopped.set()
