"""Files of a checkpoint, opened to be read: their sizes are checked, and their digests are read and verified.

All requests are under way together: a store may take long to answer, and what it answers here is small.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ...core.catalog.model import Catalog, FileEntry
from ...errors import CorruptError
from ...format.checksums import Digests, decode_digests, digest128, digests_file_bytes
from ...storage.protocol import MissingKey, Storage
from ..common.file_contents import contents_from

MAX_REQUESTS = 16
"""Requests under way at once."""

DIGESTS_BYTES = 32 << 20
"""The digests that are kept of the files read last; it takes those of half a terabyte."""


def open_files(storage: Storage, catalog: Catalog, files: Sequence[int], digests_of: Sequence[int] = ()) -> dict[int, Digests]:
    """Check that every file of `files` is there, whole, and read and verify the digests of `digests_of`; return those by file.

    Foreign files have no digests. Those of files of other checkpoints are read in any case: they may lie anywhere, and without
    them a hostile catalog could have files of any kind taken for tensors.

    Raises
    ------
    CorruptError
        A file is missing or has another size than the catalog says, or digests are damaged.
    """
    wanted = dict.fromkeys([*digests_of, *(index for index in files if catalog.files[index].checkpoint)])
    with_digests = [index for index in wanted if catalog.files[index].digests_key]
    sizes = [partial(_check_size, storage, catalog, index) for index in files]
    digests = [partial(_read_digests, storage, catalog, index) for index in with_digests]
    answers = _request_all([*sizes, *digests])[len(sizes) :]
    return {index: found for index, found in zip(with_digests, answers, strict=True) if found is not None}


class FileDigests:
    """The block digests of a checkpoint's files, as they are needed; a file is checked once, and the digests read last are kept.

    Without `verify` there are those alone of files of other checkpoints (see `open_files`).
    """

    def __init__(self, storage: Storage, catalog: Catalog, *, verify: bool) -> None:
        self._storage, self._catalog, self._verify = storage, catalog, verify
        self._checked: set[int] = set()
        self._kept: OrderedDict[int, Digests | None] = OrderedDict()
        self._kept_bytes = 0

    def of(self, files: Sequence[int]) -> dict[int, Digests]:
        """Check files that are new, and return the digests of all."""
        unchecked = [file for file in files if file not in self._checked]
        wanted = [file for file in files if self._verify or self._catalog.files[file].checkpoint]
        lacking = [file for file in wanted if file not in self._kept]
        opened = open_files(self._storage, self._catalog, unchecked, lacking)
        self._checked.update(files)
        for file in lacking:
            self._kept[file] = opened.get(file)
            self._kept_bytes += _num_bytes(opened.get(file))
        found = {}
        for file in wanted:
            self._kept.move_to_end(file)
            digests = self._kept[file]
            if digests is not None:
                found[file] = digests
        while self._kept_bytes > DIGESTS_BYTES and len(self._kept) > len(files):
            self._kept_bytes -= _num_bytes(self._kept.popitem(last=False)[1])
        return found


def _num_bytes(digests: Digests | None) -> int:
    return 0 if digests is None else digests.values.nbytes


def _request_all(requests: Sequence[Callable[[], Digests | None]]) -> list[Digests | None]:
    """Return the answers to all requests; of several errors, raise that of the first in order."""
    if len(requests) <= 1:
        return [request() for request in requests]
    with ThreadPoolExecutor(min(MAX_REQUESTS, len(requests)), thread_name_prefix="reshard-ckpt-ask") as pool:
        return list(pool.map(lambda request: request(), requests))


def _check_size(storage: Storage, catalog: Catalog, index: int) -> None:
    entry = catalog.files[index]
    size = storage.size(entry.key)
    if size == entry.size:
        return
    found = "is missing" if size is None else f"has {size} bytes"
    begin = size if size is not None and size < entry.size else 0  # a longer file is another one, so nothing of it counts
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
