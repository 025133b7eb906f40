"""Writing a checkpoint (generation) from memory to the store: the same files and catalog that a save to the store would write.

1. Rank 0 tells all ranks whether the store has the generation already (a broadcast). If so, this is all.
2. Each rank copies its files in parts, and verifies every block on the way. Damage in memory never reaches the store.
3. Each rank makes the bytes of its files durable, and then sends an empty message to rank 0 (a gather).
4. Rank 0 looks up all files by name and size, syncs their folders, and publishes the catalog. That is the commit.
5. Rank 0 tells all ranks (a broadcast).

If the store refuses a file, all ranks delete the files that they have written. A generation whose job was killed in between is
written from the beginning the next time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import cast

from ..comm.protocol import Comm, value_of_first
from ..core.catalog.model import Catalog
from ..engine.common.files import open_files
from ..engine.common.reader_notes import GRACE_S
from ..engine.common.step_folders import StepNames, clean_up
from ..engine.saving.commit import check_files_again, is_uncommitted, read_previous
from ..engine.saving.write import remove
from ..errors import CorruptError, StorageError
from ..format.catalog import decode_catalog
from ..format.files import CATALOG_KEY, digests_file_bytes, wrong_blocks
from ..storage.protocol import MissingKey, Storage, read_parts, write_file
from .generations import Generation, NodeImages

COPY_BYTES = 4 << 20
"""Number of bytes that are read from memory, verified and written at once."""


def verified_parts(storage: Storage, catalog: Catalog, key: str) -> Iterator[memoryview]:
    """Read a shard file, and yield its bytes in parts, each valid until the next.

    Raise `CorruptError` if the file is missing, or a block differs from its digest.
    """
    index = [file.key for file in catalog.files].index(key)
    digests = open_files(storage, catalog, [index], [index])[index]
    for at, part in read_parts(storage, key, catalog.files[index].size, COPY_BYTES):
        if wrong_blocks([part], at, digests.values, digests.block_bytes):
            raise CorruptError(f"{storage.url}: {key} is damaged; this copy is not used")
        yield part


def write_files(images: NodeImages, catalog: Catalog, keys: Collection[str], storage: Storage) -> int:
    """Copy shard files of a checkpoint in memory, and their digests files, to the store, and make their bytes durable.

    The names of the files in their folders become durable later, in `publish`. Raise `CorruptError` if a block in memory is
    damaged. The file with it is not left in the store. Raise `StorageError` if the store refused.

    Returns
    -------
    int
        Bytes of the shard files.
    """
    num_bytes = 0
    for entry in [file for file in catalog.files if file.key in keys]:
        storage.delete(entry.keys)  # leftovers of an attempt that was killed
        with storage.create(entry.key, entry.size) as writer:
            for part in verified_parts(cast(Storage, images), catalog, entry.key):
                writer.write(part)
        write_file(storage, entry.digests_key, images.read(entry.digests_key, 1 << 30))
        num_bytes += entry.size
    return num_bytes


def publish(storage: Storage, generation: Generation, *, grace_s: float = GRACE_S) -> None:
    """Commit a checkpoint whose files are all in the store: publish its catalog, and delete the files that it replaces.

    Raise `StorageError` if this process does not see one of the files.
    """
    catalog = generation.decoded_catalog()
    # By sizes alone: whoever calls this knows that the files are whole, but another process of a shared store may not see them.
    wanted = [
        size for file in catalog.files for size in ((file.key, file.size), (file.digests_key, digests_file_bytes(file.size)))
    ]
    folders = sorted({key.partition("/")[0] for key, _ in wanted})

    def see() -> None:
        seen = dict(found for folder in folders for found in storage.list(folder))
        absent = [key for key, size in wanted if seen.get(key) != size]
        if absent:
            raise MissingKey(f"{storage.url}: {len(absent)} files of the save are not seen, such as {absent[0]}; not published")

    before = read_previous(storage)
    # For all processes that wrote files there: only their bytes are durable so far.
    storage.sync(f"{folder}/{CATALOG_KEY}" for folder in folders)
    see()  # last, as in a save: somebody may remove the folder
    if before.catalog == generation.catalog:
        return
    version = storage.publish(CATALOG_KEY, generation.catalog, expected=before.version)
    check_files_again(storage, see, before, version)  # `Storage.publish` makes a folder anew that was removed meanwhile
    try:
        clean_up(storage, catalog, before.folders, grace_s)
    except StorageError as error:  # the checkpoint is in the store, so this call has succeeded
        warnings.warn(f"stored, but what it replaced is not all deleted: {error}; the next save there tries again", stacklevel=2)


def persist(
    comm: Comm, images: NodeImages, generation: Generation, own_keys: Sequence[str], storage: Storage, *, grace_s: float
) -> bool:
    """Write a generation (a checkpoint in the memory of nodes) to the store, each rank its own files.

    Return False if the store had the checkpoint already.

    Collective: the module's docstring lists the messages.

    Parameters
    ----------
    own_keys
        Keys of the files that this rank writes. Each file belongs to one rank.
    """
    if value_of_first(comm, lambda: is_persisted(storage, generation)):
        return False
    catalog = generation.decoded_catalog()
    # Without this, a store that is full would stay full of files of failed attempts.
    undo = partial(remove, storage, _with_digests(catalog, own_keys))
    try:
        write_files(images, catalog, own_keys, storage)
    except BaseException:
        undo()
        raise
    # As in a save: if this gather does not take place, nothing is published, and every rank deletes its files. After it, only
    # rank 0 knows whether the catalog was published, so only rank 0 deletes.
    comm.undo_unless_gathered(undo)
    gathered: list[bytes] | None = None
    try:  # before the gather: an interrupt may come right after it
        gathered = comm.gather(b"")
        if gathered is not None:
            publish(storage, generation, grace_s=grace_s)
    except BaseException as error:
        if gathered is not None:
            with suppress(StorageError):
                if is_uncommitted(storage, generation.save_id, error):
                    remove(storage, _with_digests(catalog, [file.key for file in catalog.files]))
        raise
    comm.broadcast(b"" if comm.rank == 0 else None)
    return True


def _with_digests(catalog: Catalog, keys: Collection[str]) -> list[str]:
    return [key for file in catalog.files if file.key in keys for key in file.keys]


def stored_save_id(storage: Storage, names: StepNames, step: int) -> str:
    """Return the id, for the run's lineage, of the save in the folder of a step in the store.

    Empty if there is no save, if its catalog is damaged, or if the folder is a copy of another step's folder.
    """
    return id_in(read_previous(storage).catalog, partial(names.is_copy, step))


def id_in(encoded: bytes | None, is_copy: Callable[[str], bool] = lambda folder: False) -> str:
    """Return the id, for the run's lineage, of the save with this encoded catalog.

    Empty for no catalog, for a damaged one, and if `is_copy` is true of the name of the folder that it was saved to.
    """
    with suppress(CorruptError):
        catalog = decode_catalog(encoded) if encoded else None
        if catalog is not None and not is_copy(catalog.folder):
            return catalog.lineage_id
    return ""


def is_older(save_id: str, older: Collection[str], stored: str) -> bool:
    """Whether a save in memory is older than the save of the same step in the store, whose id is `stored`.

    `older` are the ids of the saves of the step that were there when the save in memory was made (`Generation.older`).
    """
    return stored not in ("", save_id, *older)


def is_persisted(storage: Storage, generation: Generation) -> bool:
    """Return whether the store has the checkpoint that this generation is a copy of."""
    return id_in(read_previous(storage).catalog) == generation.save_id
