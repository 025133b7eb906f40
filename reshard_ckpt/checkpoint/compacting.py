"""`compact`: make a checkpoint self-contained that refers to files of others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..engine.common.progress import OnProgress, reporter
from ..engine.loading.load import read_catalog_bytes
from ..engine.resharding.compact import CompactReport
from ..engine.resharding.compact import compact as compact_in_place
from ..errors import StorageError, UsageError
from ..format.catalog import decode_catalog
from ..format.keys import CATALOG_KEY
from ..formats.source import NATIVE, Path, open_source
from ..storage import LocksUnsupported, Storage
from .reading import check_workers


def compact(path: Path, *, workers: int | None = None, progress: bool | OnProgress = False) -> CompactReport:
    """Copy the files of other checkpoints that a checkpoint refers to into its own folder, in one process.

    Afterwards the others may be removed or moved away. The tensors, their rows and the metadata stay as they are; every byte that
    is copied is verified. Whole files are copied, also what this checkpoint needs no more of them. Killed at any instant, the
    checkpoint is whole: as it was, or self-contained. A manifest is made anew, so sign that again.

    Parameters
    ----------
    path
        A checkpoint of this library.
    workers
        Threads that copy, a file and 8 MiB of memory each; by default as many as a load uses.
    progress
        As for `load`; the step is "compact".

    Returns
    -------
    CompactReport
        What was copied: nothing where the checkpoint refers to no other.

    Raises
    ------
    CheckpointNotFound
        There is no checkpoint.
    UsageError
        It is one of another format.
    CorruptError
        A file that it refers to is missing or damaged; nothing was changed.
    StorageError
        There is too little room, or somebody saves or removes the checkpoint; nothing was changed.
    """
    check_workers(workers)
    with open_source(path) as source:
        if source.format != NATIVE:
            raise UsageError(f"{source.storage.url}: is a {source.format} checkpoint, which refers to no other")
        with _kept(source.storage):
            encoded = read_catalog_bytes(source.storage)
            if decode_catalog(encoded).save_id != source.catalog.save_id:
                raise StorageError(
                    f"{source.storage.url}: somebody saved there just now; look again whether it is to be compacted"
                )
            return compact_in_place(source.storage, source.catalog, encoded, workers=workers, report=reporter(progress))


@contextmanager
def _kept(storage: Storage) -> Iterator[None]:
    """Keep a manager from removing the checkpoint, or the copies that nothing refers to yet."""
    try:
        lock = storage.lock(CATALOG_KEY, shared=True)
    except LocksUnsupported:
        yield
        return
    if lock is None:
        raise StorageError(f"{storage.url}: somebody removes or cleans up there; try again when that is over")
    with lock:
        yield
