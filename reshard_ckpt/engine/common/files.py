"""Opening the files of a checkpoint before they are read: check their sizes, and read and verify their digests.

The requests are sent at the same time, up to `MAX_REQUESTS`: the answers are small, but a store may take long for each. Messages
about damage name the tensors and values that lie in the damaged range (`FileContents`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from ...core.catalog.model import Catalog, FileEntry
from ...core.report import few
from ...errors import CorruptError
from ...format.files import Digests, decode_digests, digest128, digests_file_bytes
from ...storage.protocol import DISK, MissingKey, Storage

MAX_REQUESTS = 16
"""Most requests under way at once to a disk."""

SMALL = 2
"""How many requests with short answers take the place of one that reads `Hints.read_bytes`."""

REQUESTS_OF_THREAD = 16
"""Requests to a disk for which one more thread pays: they take less time than its start."""

DIGESTS_BYTES = 32 << 20
"""Most bytes of digests that `FileDigests` keeps, of the files used last; enough for half a terabyte of files."""


def open_files(storage: Storage, catalog: Catalog, files: Sequence[int], digests_of: Sequence[int] = ()) -> dict[int, Digests]:
    """Check the size of each file of `files`, read and verify the digests of each file of `digests_of`, and return them by file.

    Files are indices in the catalog. Foreign files have no digests. The digests of files in other checkpoints are always read:
    such a file may have any path, and without digests a hostile catalog could have any file read as a tensor.

    Raises
    ------
    CorruptError
        A file is missing or has another size than the catalog says, or a digests file is missing or damaged.
    """
    wanted = dict.fromkeys([*digests_of, *(index for index in files if catalog.files[index].checkpoint)])
    with_digests = [index for index in wanted if catalog.files[index].digests_key]
    sizes = [partial(_check_size, storage, catalog, index) for index in files]
    digests = [partial(_read_digests, storage, catalog, index) for index in with_digests]
    at_once = storage.hints.requests
    threads = SMALL * at_once if at_once > DISK.requests else min(MAX_REQUESTS, (len(sizes) + len(digests)) // REQUESTS_OF_THREAD)
    answers = _request_all([*sizes, *digests], threads)[len(sizes) :]
    return {index: found for index, found in zip(with_digests, answers, strict=True) if found is not None}


class FileDigests:
    """Reads the block digests of a checkpoint's files when they are first needed, and keeps those used last.

    Each file's size is checked once. Without `verify`, only digests of files in other checkpoints are read (see `open_files`).
    Several threads may use it at once.
    """

    def __init__(self, storage: Storage, catalog: Catalog, *, verify: bool) -> None:
        self._storage, self._catalog, self.verify = storage, catalog, verify
        self._lock = threading.Lock()
        self._checked: set[int] = set()
        self._kept: OrderedDict[int, Digests | None] = OrderedDict()
        self._kept_bytes = 0

    def of(self, files: Sequence[int]) -> dict[int, Digests]:
        """Check the files that were not checked before, and return the digests of all these files that have some, by file."""
        with self._lock:
            return self._of(files)

    def _of(self, files: Sequence[int]) -> dict[int, Digests]:
        unchecked = [file for file in files if file not in self._checked]
        wanted = [file for file in files if self.verify or self._catalog.files[file].checkpoint]
        lacking = [file for file in wanted if file not in self._kept]
        opened = open_files(self._storage, self._catalog, unchecked, lacking)
        self._checked.update(files)
        for file in lacking:
            self._kept[file] = opened.get(file)
            self._kept_bytes += _num_bytes(opened.get(file))
        found = {}
        for file in wanted:
            self._kept.move_to_end(file)  # the least recently used are dropped first
            digests = self._kept[file]
            if digests is not None:
                found[file] = digests
        while self._kept_bytes > DIGESTS_BYTES and len(self._kept) > len(files):
            self._kept_bytes -= _num_bytes(self._kept.popitem(last=False)[1])
        return found


def _num_bytes(digests: Digests | None) -> int:
    return 0 if digests is None else digests.values.nbytes


def _request_all(requests: Sequence[Callable[[], Digests | None]], threads: int) -> list[Digests | None]:
    """Send all requests and return their answers, in order. If several fail, raise the error of the first in order."""
    if min(threads, len(requests)) <= 1:
        return [request() for request in requests]
    with ThreadPoolExecutor(min(threads, len(requests)), thread_name_prefix="reshard-ckpt-ask") as pool:
        return list(pool.map(lambda request: request(), requests))


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
    """An index of the rows of all files by their bytes. It is made once damage was found, and then serves any range."""

    def __init__(self, catalog: Catalog) -> None:
        rows, owner, sizes = catalog.rows, catalog.row_tensors, catalog.row_bytes
        # The columns kept below are sorted by file and offset; file f begins at first[f].
        order = np.lexsort((rows.offset, rows.file))
        order = order[sizes[order] > 0]
        self._catalog, self._owner = catalog, owner[order]
        self._begin, self._end = rows.offset[order], (rows.offset + sizes)[order]
        self._first = np.searchsorted(rows.file[order], np.arange(len(catalog.files) + 1))
        self._values = {index: value.name for value in catalog.values_table for index in value.blobs}

    def names(self, file: int, begin: int, end: int) -> list[str]:
        """List the tensors and values in these bytes of a file, in order of place."""
        part = slice(self._first[file], self._first[file + 1])
        last = int(np.searchsorted(self._begin[part], end))
        hit = np.flatnonzero(self._end[part][:last] > begin)
        names = self._catalog.tensors_table.names
        owners = self._owner[part][hit].tolist()
        return list(dict.fromkeys(self._values.get(i, names[i]) for i in owners))

    def text(self, file: int, begin: int, end: int) -> str:
        """Name the tensors and values in these bytes of a file, for a message."""
        names = self.names(file, begin, end)
        return few(names) if names else "its header alone"


def contents_from(catalog: Catalog, file: int, begin: int = 0) -> str:
    """Name the tensors and values of a file from byte `begin` on, for a message."""
    return FileContents(catalog).text(file, begin, catalog.files[file].size)
