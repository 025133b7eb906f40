"""Making a checkpoint self-contained: files of other checkpoints that its catalog refers to are copied into its own folder.

1. Each is copied into a folder of a new save id, and every block verified on the way. Nothing refers to the copies yet.
2. What speaks of the checkpoint as a whole, its manifest and its timeline, is made anew beside them.
3. A catalog that refers to the copies replaces the old one: the one step after which the checkpoint stands alone. It has the new
   id, as a save has, and the same tensors and rows; a file keeps the id of the save that wrote it.
4. Only then what the old catalog alone needed is deleted. Killed before 3, the checkpoint is what it was, and the copies are
   leftovers, which the next save, manager or compacting removes.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

from ...core.catalog.model import Catalog, FileEntry
from ...errors import CheckpointError, CorruptError, StorageError
from ...format.catalog import encode_catalog
from ...format.checksums import digests_file_bytes, wrong_blocks
from ...format.keys import CATALOG_KEY, digests_key, file_key, manifest_key, new_save_id, timeline_key
from ...format.manifest import MAX_MANIFEST_BYTES, decode_manifest, encode_manifest
from ...format.timeline import MAX_TIMELINE_BYTES
from ...storage.protocol import Storage, read_parts, write_file
from ..common.progress import OnProgress, Tally, silent
from ..loading.files import open_files
from ..loading.read import REQUEST_BYTES, num_threads
from ..saving.commit import clean_up, look


@dataclass(frozen=True, slots=True)
class CompactReport:
    """The result of `checkpoint.compact`.

    Attributes
    ----------
    save_id
        The id that the checkpoint has now.
    num_files, num_bytes
        The files of other checkpoints that were copied, and their bytes; 0 where the checkpoint was self-contained already.
    checkpoints
        The folders that they were in, as the catalog named them.
    """

    save_id: str
    num_files: int
    num_bytes: int
    checkpoints: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Copied:
    """A file and its digests file, with the SHA-256 of both where there is a manifest."""

    entry: FileEntry
    sha256: tuple[bytes, bytes] | None


def compact(
    storage: Storage, catalog: Catalog, encoded: bytes, *, workers: int | None = None, report: OnProgress = silent
) -> CompactReport:
    """Make a checkpoint self-contained.

    Parameters
    ----------
    storage
        Where its files are, also those of other checkpoints.
    encoded
        The bytes of its catalog, which must be in place still when it is replaced.

    Raises
    ------
    CorruptError
        A file that it refers to is missing or damaged; nothing has changed.
    StorageError
        There is no room, or somebody saved there meanwhile; nothing has changed.
    """
    borrowed = [index for index, file in enumerate(catalog.files) if file.checkpoint]
    if not borrowed:
        return CompactReport(catalog.save_id, 0, 0, ())
    open_files(storage, catalog, borrowed)
    _check_room(storage, [catalog.files[index] for index in borrowed])
    before, save_id = look(storage), new_save_id()
    listed = _listed(storage, catalog)
    keys = _new_keys(catalog, borrowed, save_id)
    made = [*keys.values(), *map(digests_key, keys.values()), manifest_key(save_id), timeline_key(save_id)]
    num_bytes = sum(catalog.files[index].size for index in borrowed)
    tally = Tally("compact", num_bytes, report)
    try:
        count = num_threads(len(borrowed)) if workers is None else workers
        with ThreadPoolExecutor(count, thread_name_prefix="reshard-ckpt-compact") as pool:
            copied = dict(
                zip(borrowed, pool.map(lambda i: _copy(storage, catalog, i, keys[i], tally, listed), borrowed), strict=True)
            )
        files = tuple(copied[i].entry if i in copied else file for i, file in enumerate(catalog.files))
        replacement = encode_catalog(replace(catalog, files=files, save_id=save_id))
        if listed is not None:
            write_file(storage, manifest_key(save_id), _manifest(catalog, listed, copied, replacement))
        if storage.size(old := timeline_key(catalog.save_id)) is not None:
            write_file(storage, timeline_key(save_id), storage.read(old, MAX_TIMELINE_BYTES))
        # The order is the promise: all of it is durable, then the catalog appears, then what it replaced may go.
        storage.sync(key for key in made if storage.size(key) is not None)
        open_files(storage, replace(catalog, files=files), borrowed)
        storage.publish(CATALOG_KEY, replacement, expected=encoded)
    except BaseException:
        with suppress(CheckpointError):  # the reason why this ends here says more
            if look(storage).catalog == encoded:
                storage.delete(made)
        raise
    try:
        clean_up(storage, replace(catalog, files=files, save_id=save_id), before.folders)
    except StorageError as error:  # it is self-contained: this is no reason to say that nothing was changed
        warnings.warn(
            f"compacted, but what was replaced is not all deleted: {error}; the next save there tries again", stacklevel=2
        )
    places = dict.fromkeys(catalog.files[index].checkpoint for index in borrowed)
    return CompactReport(save_id, len(borrowed), num_bytes, tuple(places))


def _check_room(storage: Storage, files: list[FileEntry]) -> None:
    free, wanted = storage.free_bytes(), sum(file.size + digests_file_bytes(file.size) for file in files)
    if free is not None and wanted > free:
        raise StorageError(
            f"{storage.url}: to copy what it refers to takes {wanted:,} bytes, but {free:,} are free there; nothing was written: "
            "free space there, or reshard it to another path"
        )


def _new_keys(catalog: Catalog, borrowed: list[int], save_id: str) -> dict[int, str]:
    """Name the copies by the ranks that wrote them; a rank may have written several, in several saves."""
    parts: Counter[int] = Counter()
    keys = {}
    for index in borrowed:
        rank = catalog.files[index].rank
        keys[index] = file_key(save_id, rank, parts[rank])
        parts[rank] += 1
    return keys


def _listed(storage: Storage, catalog: Catalog) -> dict[str, bytes] | None:
    """Read the manifest, if there is one."""
    key = manifest_key(catalog.save_id)
    if storage.size(key) is None:
        return None
    return decode_manifest(storage.read(key, MAX_MANIFEST_BYTES), where=f"{storage.url}: {key}")


def _copy(storage: Storage, catalog: Catalog, index: int, key: str, tally: Tally, listed: dict[str, bytes] | None) -> _Copied:
    """Copy one file and its digests, verifying each block."""
    file = catalog.files[index]
    digests = open_files(storage, catalog, [], [index])[index]
    hasher = hashlib.sha256() if listed is not None else None
    with storage.create(key) as writer:
        for low, window in read_parts(storage, file.key, file.size, REQUEST_BYTES):
            for wrong in wrong_blocks([window], low, digests.values, digests.block_bytes):
                raise CorruptError(
                    f"{storage.url}: {file.key} is damaged in the block from byte {wrong} on; nothing was changed: "
                    "checkpoint.verify names the tensors, and another checkpoint may have them"
                )
            writer.write(window)
            if hasher:
                hasher.update(window)
            tally.add(len(window))
    proof = storage.read(file.digests_key, digests_file_bytes(file.size, 64 << 10))
    write_file(storage, digests_key(key), proof)
    entry = replace(file, key=key, digests_key=digests_key(key), checkpoint="")
    if hasher is None or listed is None:
        return _Copied(entry, None)
    found = hasher.digest(), hashlib.sha256(proof).digest()
    for name, sha256 in zip((file.key, file.digests_key), found, strict=True):
        if name in listed and listed[name] != sha256:
            raise CorruptError(f"{storage.url}: {name} is not the file that the manifest lists: it was changed; nothing was done")
    return _Copied(entry, found)


def _manifest(catalog: Catalog, listed: dict[str, bytes], copied: dict[int, _Copied], encoded: bytes) -> bytes:
    """List the copies by what they are, and the own files by what the manifest of before says of them."""
    digests = {CATALOG_KEY: hashlib.sha256(encoded).digest()}
    for index, file in enumerate(catalog.files):
        if index in copied:
            new = copied[index]
            assert new.sha256 is not None
            digests[new.entry.key], digests[new.entry.digests_key] = new.sha256
        else:
            digests.update((key, listed[key]) for key in (file.key, file.digests_key) if key in listed)
    return encode_manifest(digests)
