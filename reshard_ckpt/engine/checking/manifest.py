"""Manifests (lists of a checkpoint's files with their SHA-256): make one, or check the files against one.

1. A save hashes each file as it writes it; the digests travel with the receipts. Rank 0 adds the digest of the new catalog,
   writes the manifest into the save's own folder, and only then publishes the catalog. So wherever a save is cut off, the catalog
   in place and the manifest in the folder that it names are of one save.
2. A check reads every file that the catalog refers to, in several threads, a file each, and compares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ...core.catalog.model import Catalog
from ...errors import CheckpointError, CorruptError
from ...format.files import CATALOG_KEY, MAX_MANIFEST_BYTES, decode_manifest, encode_manifest, manifest_key
from ...storage.protocol import Storage, read_parts
from ..common.files import num_threads
from ..common.packed_files import as_stored
from ..common.progress import OnProgress, Tally
from ..loading.read import REQUEST_BYTES


def make_manifest(storage: Storage, catalog: Catalog, *, workers: int | None, report: OnProgress) -> str:
    """Hash all files of a checkpoint as they are now, and publish their manifest in place of an earlier one. Return its key."""
    digests: dict[str, bytes] = {}
    for name, found in _hashes(storage, _keys(catalog), workers, report):
        if isinstance(found, CheckpointError):
            raise found
        digests[name] = found
    key = manifest_key(catalog.save_id)
    storage.publish(key, encode_manifest(digests))
    return key


def check_manifest(storage: Storage, catalog: Catalog, *, workers: int | None, report: OnProgress) -> Iterator[str]:
    """Check all files of a checkpoint against its manifest, and yield one line of text for each problem.

    Problems are a file that the manifest does not list, a listed file that is missing or that the catalog does not refer to, and
    a file whose SHA-256 differs from the listed one. Raise `CorruptError` if the manifest is missing, or damaged.
    """
    key = manifest_key(catalog.save_id)
    where = f"{storage.url}: {key}"
    if storage.size(key) is None:
        raise CorruptError(
            f"{where}: no such file: this was saved without sha256=True, or somebody removed it; checkpoint.write_manifest makes "
            "one, of the files as they are now"
        )
    listed = decode_manifest(storage.read(key, MAX_MANIFEST_BYTES), where=where)
    expected = _keys(catalog)
    yield from (f"{where}: does not list {name}, which the catalog refers to" for name in expected if name not in listed)
    yield from (f"{where}: lists {name!r}, which the catalog does not refer to" for name in sorted({*listed} - {*expected}))
    yield from check_listed(storage, {name: listed[name] for name in expected if name in listed}, workers=workers, report=report)


def check_listed(storage: Storage, listed: Mapping[str, bytes], *, workers: int | None, report: OnProgress) -> Iterator[str]:
    """Hash the files in `listed` (key to expected SHA-256), and yield one line of text for each that is missing or differs."""
    for name, found in _hashes(storage, list(listed), workers, report):
        if isinstance(found, CheckpointError):
            yield str(found)
        elif found != listed[name]:
            yield f"{storage.url}: {name} has SHA-256 {found.hex()}, the manifest lists {listed[name].hex()}: it was changed"


def _keys(catalog: Catalog) -> list[str]:
    """List the keys of all files of a checkpoint: its catalog, its shard files and their digests files."""
    return [CATALOG_KEY, *(key for file in catalog.files for key in file.keys if key)]


def _hashes(
    storage: Storage, keys: Sequence[str], workers: int | None, report: OnProgress
) -> Iterator[tuple[str, bytes | CheckpointError]]:
    """Hash files in several threads. Yield pairs in order: the key, and the SHA-256 or the error of reading the file."""
    storage = as_stored(storage)
    sizes = [size or 0 for size in storage.stat(keys)]
    tally = Tally("sha256", sum(sizes), report)

    def hash_file(key: str, size: int) -> bytes | CheckpointError:
        hasher = hashlib.sha256()
        try:
            for _, window in read_parts(storage, key, size, REQUEST_BYTES):
                hasher.update(window)
                tally.add(len(window))
        except CheckpointError as error:
            return error
        return hasher.digest()

    count = num_threads(len(keys), storage.hints) if workers is None else workers
    with ThreadPoolExecutor(count, thread_name_prefix="reshard-ckpt-sha256") as pool:
        yield from zip(keys, pool.map(hash_file, keys, sizes), strict=True)
