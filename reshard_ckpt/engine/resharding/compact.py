"""Making a checkpoint self-contained: files of other checkpoints that its catalog refers to are copied into its own folder.

1. Each file is copied into a folder of a new save id, and every block is verified on the way. Nothing refers to the copies yet.
2. A new manifest is written beside the copies, and the timeline is copied there, if the checkpoint has them.
3. A catalog that refers to the copies replaces the old one. From this step on the checkpoint needs no other. The new catalog has
   the new save id, and the same tensors and rows. Each file entry keeps the id of the save that wrote the file.
4. Only then are the files deleted that the old catalog alone referred to. If the process is killed before step 3, the checkpoint
   is unchanged, and the copies are leftovers, which the next save, manager or call of `compact` removes.
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
from ...format.files import (
    CATALOG_KEY,
    MAX_MANIFEST_BYTES,
    decode_manifest,
    digests_file_bytes,
    digests_key,
    encode_manifest,
    file_key,
    manifest_key,
    new_save_id,
    timeline_key,
    wrong_blocks,
)
from ...format.timeline import MAX_TIMELINE_BYTES
from ...storage.protocol import ANY, PublishUnknown, Storage, conflict, read_parts, write_file
from ..common.files import open_files
from ..common.progress import OnProgress, Tally, silent
from ..common.step_folders import clean_up
from ..loading.read import REQUEST_BYTES, num_threads
from ..saving.commit import look


@dataclass(frozen=True, slots=True)
class CompactReport:
    """The result of `checkpoint.compact`.

    Attributes
    ----------
    save_id
        The checkpoint's save id after the call.
    num_files, num_bytes
        The number of files of other checkpoints that were copied, and their bytes. Both are 0 if the checkpoint was
        self-contained already.
    checkpoints
        The folders from which files were copied, as the old catalog named them.
    """

    save_id: str
    num_files: int
    num_bytes: int
    checkpoints: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Copied:
    """The catalog entry of a copied file, and the SHA-256 of the file and of its digests file; None without a manifest."""

    entry: FileEntry
    sha256: tuple[bytes, bytes] | None


def compact(
    storage: Storage, catalog: Catalog, encoded: bytes, *, workers: int | None = None, report: OnProgress = silent
) -> CompactReport:
    """Make a checkpoint self-contained.

    Parameters
    ----------
    storage
        The folder of the checkpoint. It also reads the files of other checkpoints, by the keys in the catalog.
    encoded
        The bytes of the catalog file. They must be unchanged in the store when the new catalog replaces them.
    workers
        The number of threads that copy; by default chosen from the number of files.
    report
        Called with the progress.

    Raises
    ------
    CorruptError
        A file that the catalog refers to is missing or damaged. The checkpoint is unchanged.
    StorageError
        The disk lacks room, or another process saved there meanwhile. The checkpoint is unchanged.
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
        count = num_threads(len(borrowed), storage.hints) if workers is None else workers
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
        # The order matters: first all new files are durable, then the catalog is replaced, then old files may be deleted.
        storage.sync(key for key, size in zip(made, storage.stat(made), strict=True) if size is not None)
        open_files(storage, replace(catalog, files=files), borrowed)
        if before.catalog != encoded:
            raise conflict(f"{storage.url}/{CATALOG_KEY}", ANY, before.version)
        storage.publish(CATALOG_KEY, replacement, expected=before.version)
    except BaseException as error:
        with suppress(CheckpointError):  # an error of the clean-up must not hide the first one
            # The new catalog is not in place and will not come there, so nothing refers to the copies.
            if not isinstance(error, PublishUnknown) and look(storage).catalog == encoded:
                storage.delete(made)
        raise
    try:
        clean_up(storage, replace(catalog, files=files, save_id=save_id), before.folders)
    except StorageError as error:  # the checkpoint is self-contained by now, so this is a warning and not an error
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
    """Choose the key of the copy of each borrowed file.

    `borrowed` has indices into ``catalog.files``, and so has the result. Copies of files that the same rank wrote are named as
    parts 0, 1, … of that rank's file of save `save_id`.
    """
    parts: Counter[int] = Counter()
    keys = {}
    for index in borrowed:
        rank = catalog.files[index].rank
        keys[index] = file_key(save_id, rank, parts[rank])
        parts[rank] += 1
    return keys


def _listed(storage: Storage, catalog: Catalog) -> dict[str, bytes] | None:
    """Read the SHA-256 of each file from the manifest; return None if the checkpoint has no manifest."""
    key = manifest_key(catalog.save_id)
    if storage.size(key) is None:
        return None
    return decode_manifest(storage.read(key, MAX_MANIFEST_BYTES), where=f"{storage.url}: {key}")


def _copy(storage: Storage, catalog: Catalog, index: int, key: str, tally: Tally, listed: dict[str, bytes] | None) -> _Copied:
    """Copy one file and its digests file to `key`, and verify each block on the way.

    Raises
    ------
    CorruptError
        A block differs from its digest, or a file differs from its SHA-256 in the manifest (`listed`).
    """
    file = catalog.files[index]
    digests = open_files(storage, catalog, [], [index])[index]
    hasher = hashlib.sha256() if listed is not None else None
    with storage.create(key, file.size) as writer:
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
    for name, sha256 in zip(file.keys, found, strict=True):
        if name in listed and listed[name] != sha256:
            raise CorruptError(f"{storage.url}: {name} is not the file that the manifest lists: it was changed; nothing was done")
    return _Copied(entry, found)


def _manifest(catalog: Catalog, listed: dict[str, bytes], copied: dict[int, _Copied], encoded: bytes) -> bytes:
    """Encode the new manifest: copies with the SHA-256 of their bytes, other files as the old manifest (`listed`) has them."""
    digests = {CATALOG_KEY: hashlib.sha256(encoded).digest()}
    for index, file in enumerate(catalog.files):
        if index in copied:
            new = copied[index]
            assert new.sha256 is not None
            digests[new.entry.key], digests[new.entry.digests_key] = new.sha256
        else:
            digests.update((key, listed[key]) for key in file.keys if key in listed)
    return encode_manifest(digests)
