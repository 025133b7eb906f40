"""Making a checkpoint self-contained: copy the files of other checkpoints that its catalog refers to into its own folder.

1. Each file is copied into a folder of a new save id, by the store itself if it can, and every block is verified. Nothing refers
   to the copies yet. Several processes divide the files by their bytes.
2. Rank 0 does the rest. A new manifest is written beside the copies, and the timeline is copied there, if there are such files.
3. A catalog that refers to the copies replaces the old one. From this step on the checkpoint needs no other. The new catalog has
   the new save id, and the same tensors and rows. It also has the first save id, by which the lineage of its run knows it. Each
   file entry keeps the id of the save that wrote the file.
4. Only then are the files deleted that the old catalog alone referred to. If the process is killed before step 3, the checkpoint
   is unchanged, and the copies are leftovers, which the next save, manager or call of `compact` removes.

Collectives, in order: a broadcast of the new save id, and a gather of the copied files with a broadcast of the end.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

from ...comm.protocol import Comm, merge_of_all, value_of_first
from ...core.catalog.model import Catalog
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
from ..common.files import num_threads, open_files
from ..common.progress import OnProgress, SharedTally, Tally, silent
from ..common.sections import share
from ..common.step_folders import clean_up
from ..loading.read import REQUEST_BYTES
from ..saving.commit import read_previous
from ..saving.options import PreviousCheckpoint


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


def compact(
    comm: Comm, storage: Storage, catalog: Catalog, encoded: bytes, *, workers: int | None = None, report: OnProgress = silent
) -> CompactReport:
    """Make a checkpoint self-contained. Collective.

    Parameters
    ----------
    storage
        The folder of the checkpoint. It also reads the files of other checkpoints, by the keys in the catalog.
    encoded
        The bytes of the catalog file. They must be unchanged in the store when the new catalog replaces them.
    workers
        The number of threads that copy; by default chosen from the number of files.
    report
        Called with the progress, on rank 0.

    Raises
    ------
    CorruptError
        A file that the catalog refers to is missing or damaged. The checkpoint is unchanged.
    StorageError
        The disk lacks room, or another process saved there meanwhile. The checkpoint is unchanged.
    """
    # The store shows a file with packed rows as the plain file that it stands for, so that one is copied.
    catalog = replace(catalog, files=tuple(replace(file, packed=()) if file.checkpoint else file for file in catalog.files))
    borrowed = [index for index, file in enumerate(catalog.files) if file.checkpoint]
    if not borrowed:
        return CompactReport(catalog.save_id, 0, 0, ())
    sizes = {index: catalog.files[index].size for index in borrowed}
    own = [borrowed[i] for i in share(sizes.values(), comm.rank, comm.size)]
    open_files(storage, catalog, own)
    before = read_previous(storage) if comm.rank == 0 else None

    def begun() -> str:
        free, wanted = storage.free_bytes(), sum(size + digests_file_bytes(size) for size in sizes.values())
        if free is not None and wanted > free:
            raise StorageError(
                f"{storage.url}: copying the files that it refers to takes {wanted:,} bytes, but {free:,} are free there; "
                "nothing was written: free space there, or reshard it to another path"
            )
        return new_save_id()

    save_id = value_of_first(comm, begun)
    listed = _listed(storage, catalog)
    # Copies of files that the same rank wrote are named as parts 0, 1, … of that rank's file of the new save.
    parts: Counter[int] = Counter()
    keys = {}
    for index in borrowed:
        rank = catalog.files[index].rank
        keys[index] = file_key(save_id, rank, parts[rank])
        parts[rank] += 1
    made = [*keys.values(), *map(digests_key, keys.values()), manifest_key(save_id), timeline_key(save_id)]
    num_bytes = sum(sizes.values())
    tally = SharedTally(comm, "compact", num_bytes, report)

    def published(of_ranks: list[Any]) -> None:
        assert before is not None
        hashes = {index: sha256 for of_rank in of_ranks for index, sha256 in of_rank}
        storage.sync([*keys.values(), *map(digests_key, keys.values())])
        _publish(storage, catalog, encoded, before, save_id, keys, hashes, listed)

    try:
        count = num_threads(len(own), storage.hints) if workers is None else workers
        with ThreadPoolExecutor(max(count, 1), thread_name_prefix="reshard-ckpt-compact") as pool:
            copies = list(pool.map(lambda i: _copy(storage, catalog, i, keys[i], tally, listed), own))
        merge_of_all(comm, list(zip(own, copies, strict=True)), published)
    except BaseException as error:
        with suppress(CheckpointError):  # an error of the clean-up must not hide the first one
            # The new catalog is not in place and will not come there, so nothing refers to the copies.
            if comm.rank == 0 and not isinstance(error, PublishUnknown) and read_previous(storage).catalog == encoded:
                storage.delete(made)
        raise
    tally.finish()
    places = dict.fromkeys(catalog.files[index].checkpoint for index in borrowed)
    return CompactReport(save_id, len(borrowed), num_bytes, tuple(places))


def _publish(
    storage: Storage,
    catalog: Catalog,
    encoded: bytes,
    before: PreviousCheckpoint,
    save_id: str,
    keys: Mapping[int, str],
    hashes: Mapping[int, Sequence[bytes]],
    listed: dict[str, bytes] | None,
) -> None:
    """Commit the copies: write manifest and timeline beside them, replace the catalog, and delete files no longer referred to.

    Parameters
    ----------
    keys
        The key of the copy of each file that was copied, by the file's index in the catalog.
    hashes
        For each of these files, the SHA-256 of the copy and of its digests file; used only if there is a manifest (`listed`).
    """
    copies = {i: replace(catalog.files[i], key=key, digests_key=digests_key(key), checkpoint="") for i, key in keys.items()}
    files = tuple(copies.get(i, file) for i, file in enumerate(catalog.files))
    new = replace(catalog, files=files, save_id=save_id, compacted_from=catalog.lineage_id)
    replacement = encode_catalog(new)
    beside = {}
    if listed is not None:
        # Other files are listed as the old manifest has them.
        digests = {CATALOG_KEY: hashlib.sha256(replacement).digest()}
        for i, file in enumerate(files):
            known = zip(file.keys, hashes[i], strict=True) if i in hashes else ((key, listed.get(key)) for key in file.keys)
            digests.update((key, sha256) for key, sha256 in known if sha256 is not None)
        beside[manifest_key(save_id)] = encode_manifest(digests)
    if storage.size(old := timeline_key(catalog.save_id)) is not None:
        beside[timeline_key(save_id)] = storage.read(old, MAX_TIMELINE_BYTES)
    for key, data in beside.items():
        write_file(storage, key, data)
    # The order matters: first all new files are durable, then the catalog is replaced, then old files may be deleted.
    storage.sync(beside)
    open_files(storage, new, list(copies))
    if before.catalog != encoded:
        raise conflict(f"{storage.url}/{CATALOG_KEY}", ANY, before.version)
    storage.publish(CATALOG_KEY, replacement, expected=before.version)
    try:
        clean_up(storage, new, before.folders)
    except StorageError as error:  # the checkpoint is self-contained by now, so this is a warning and not an error
        warnings.warn(
            f"compacted, but what was replaced is not all deleted: {error}; the next save there tries again", stacklevel=2
        )


def _listed(storage: Storage, catalog: Catalog) -> dict[str, bytes] | None:
    """Read the SHA-256 of each file from the manifest; return None if the checkpoint has no manifest."""
    key = manifest_key(catalog.save_id)
    if storage.size(key) is None:
        return None
    listed = decode_manifest(storage.read(key, MAX_MANIFEST_BYTES), where=f"{storage.url}: {key}")
    # The plain copy of a file with packed rows has another SHA-256 than that file.
    return {key: sha256 for key, sha256 in listed.items() if not (key.startswith("../") and key.endswith(".packed"))}


def _copy(
    storage: Storage, catalog: Catalog, index: int, key: str, tally: Tally, listed: dict[str, bytes] | None
) -> Sequence[bytes]:
    """Copy one file and its digests file to `key`, and verify each block on the way. Return the SHA-256 of both.

    Without a manifest (`listed`), nothing is returned.

    Raise `CorruptError` if a block differs from its digest, or a file differs from its SHA-256 in the manifest (`listed`).
    """
    file = catalog.files[index]
    digests = open_files(storage, catalog, [], [index])[index]
    hasher = hashlib.sha256() if listed is not None else None
    is_copied = storage.copy(storage, file.key, key)  # then the copy is verified
    with nullcontext() if is_copied else storage.create(key, file.size) as writer:
        for low, window in read_parts(storage, key if is_copied else file.key, file.size, REQUEST_BYTES):
            for wrong in wrong_blocks([window], low, digests.values, digests.block_bytes):
                raise CorruptError(
                    f"{storage.url}: {file.key} is damaged in the block from byte {wrong} on; nothing was changed: "
                    "checkpoint.verify names the tensors, and another checkpoint may have them"
                )
            if writer:
                writer.write(window)
            if hasher:
                hasher.update(window)
            tally.add(len(window))
    proof = storage.read(file.digests_key, digests_file_bytes(file.size, 64 << 10))
    write_file(storage, digests_key(key), proof)
    if hasher is None or listed is None:
        return ()
    found = hasher.digest(), hashlib.sha256(proof).digest()
    for name, sha256 in zip(file.keys, found, strict=True):
        if name in listed and listed[name] != sha256:
            raise CorruptError(f"{storage.url}: {name} is not the file that the manifest lists: it was changed; nothing was done")
    return found
