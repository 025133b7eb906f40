"""Files of a checkpoint, opened to be read: their sizes are checked, and their digests are read and verified.

All requests are under way together: a store may take long to answer, and what it answers here is small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from ...core.catalog.model import Catalog, FileEntry
from ...errors import CorruptError
from ...format.checksums import Digests, decode_digests, digest128, digests_file_bytes
from ...storage.protocol import MissingKey, Storage
from ..common.file_contents import contents_from

MAX_REQUESTS = 16
"""Requests under way at once."""


@dataclass(frozen=True, slots=True)
class BlockDigests:
    """The block digests of files, by index in the catalog; the bytes of other files are not verified."""

    of_file: Mapping[int, Digests]


def open_files(storage: Storage, catalog: Catalog, files: Sequence[int], digests_of: Sequence[int]) -> BlockDigests:
    """Check that every file of `files` is there, whole, and read and verify the digests of `digests_of`.

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
    return BlockDigests({index: found for index, found in zip(with_digests, answers, strict=True) if found is not None})


def check_files(storage: Storage, catalog: Catalog, files: Sequence[int]) -> None:
    """Do as `open_files`, without digests."""
    open_files(storage, catalog, files, [])


def open_blocks(storage: Storage, catalog: Catalog, files: Sequence[int]) -> BlockDigests:
    """Do as `open_files`, for digests alone."""
    return open_files(storage, catalog, [], files)


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
            + ("" if entry.checkpoint else ", or verify=False to load them unverified")
        )
    return decode_digests(data, entry.size, name=f"{storage.url}: {entry.digests_key}")
