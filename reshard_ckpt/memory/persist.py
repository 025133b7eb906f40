"""Writing a generation from memory to the store: the same files and the same catalog, so the same checkpoint.

1. Each file is copied block by block, and every block is verified on the way: damage in memory never reaches the store.
2. Once all files are durable and seen, rank 0 publishes the catalog. A generation that was begun and killed is written again;
   where the store refuses, what was written is removed.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import cast

from ..comm.protocol import Comm
from ..core.catalog.model import Catalog
from ..engine.loading.files import open_files
from ..engine.saving.commit import clean_up, look
from ..engine.saving.write import remove
from ..errors import CorruptError, StorageError
from ..format.catalog import decode_catalog
from ..format.checksums import digests_file_bytes, wrong_blocks
from ..format.keys import CATALOG_KEY
from ..storage.protocol import Storage, read_parts, write_file
from .generations import Generation, NodeImages

COPY_BYTES = 4 << 20


def write_files(images: NodeImages, catalog: Catalog, keys: Sequence[str], storage: Storage) -> int:
    """Copy files of a generation to the store, verified, and make them durable; returns their bytes.

    Raises
    ------
    CorruptError
        A block in memory is damaged; the file is removed again.
    StorageError
        The store refused.
    """
    source, index_of = cast(Storage, images), {file.key: index for index, file in enumerate(catalog.files)}
    num_bytes = 0
    for key in keys:
        entry = catalog.files[index_of[key]]
        storage.delete([entry.key, entry.digests_key])  # what a killed attempt may have left
        digests = open_files(source, catalog, [index_of[key]], [index_of[key]])[index_of[key]]
        with storage.create(entry.key) as writer:
            for at, part in read_parts(source, entry.key, entry.size, COPY_BYTES):
                if wrong_blocks([part], at, digests.values, digests.block_bytes):
                    raise CorruptError(f"{images.url}: {entry.key} is damaged, so it is not written to {storage.url}")
                writer.write(part)
        write_file(storage, entry.digests_key, images.read(entry.digests_key, 1 << 30))
        num_bytes += entry.size
    storage.sync([k for key in keys for k in (key, catalog.files[index_of[key]].digests_key)])
    return num_bytes


def absent_files(storage: Storage, catalog: Catalog, of: Collection[str] | None = None) -> list[str]:
    """List the keys of the files of a catalog, or of some of them, that the store lacks, or has in another size."""
    files = [file for file in catalog.files if of is None or file.key in of]
    wanted = ((file.key, file.size, file.digests_key, digests_file_bytes(file.size)) for file in files)
    return [key for key, size, digests, num in wanted if storage.size(key) != size or storage.size(digests) != num]


def publish(storage: Storage, generation: Generation) -> None:
    """Publish the catalog of a generation whose files are all in the store.

    Raises
    ------
    StorageError
        A file is not seen from here.
    """
    catalog = generation.decoded_catalog()
    absent = absent_files(storage, catalog)
    if absent:
        raise StorageError(f"{storage.url}: {len(absent)} files of the save are not seen, such as {absent[0]}; not published")
    before = look(storage)
    if before.catalog == generation.catalog:
        return
    # Somebody may have been killed after the last byte, and before the names were durable.
    storage.sync(key for file in catalog.files for key in (file.key, file.digests_key))
    storage.publish(CATALOG_KEY, generation.catalog, expected=before.catalog)
    try:
        clean_up(storage, catalog, before.folders)
    except StorageError as error:  # the checkpoint is in the store: this is no reason to say that it is not
        warnings.warn(f"stored, but what it replaced is not all deleted: {error}; the next save there tries again", stacklevel=2)


def persist(comm: Comm, images: NodeImages, generation: Generation, mine: Sequence[str], storage: Storage) -> None:
    """Write a generation to the store from all ranks together. Collective.

    Parameters
    ----------
    mine
        The keys of the files that this rank writes: each file is of one rank.
    """
    catalog = generation.decoded_catalog()
    # A store that is full would never have room again if what was written stayed there.
    undo = partial(remove, storage, _with_digests(catalog, mine))
    try:
        write_files(images, catalog, mine, storage)
    except BaseException:
        undo()
        raise
    # As in a save: unless this gather takes place nothing is published, so every rank may undo. After it, rank 0 alone knows.
    if comm.gather(b"", undo=undo) is not None:
        try:
            publish(storage, generation)
        except BaseException:
            with suppress(StorageError):
                if not is_persisted(storage, generation):
                    remove(storage, _with_digests(catalog, [file.key for file in catalog.files]))
            raise
    comm.broadcast(b"" if comm.rank == 0 else None)


def _with_digests(catalog: Catalog, keys: Collection[str]) -> list[str]:
    return [key for file in catalog.files if file.key in keys for key in (file.key, file.digests_key)]


def stored_save_id(storage: Storage) -> str:
    """Return the id of the save that the store has; empty where there is none, or its catalog is damaged."""
    try:
        found = look(storage).catalog
        return decode_catalog(found).save_id if found else ""
    except CorruptError:
        return ""


def is_persisted(storage: Storage, generation: Generation) -> bool:
    """Whether the store has the checkpoint of this save."""
    return stored_save_id(storage) == generation.save_id
