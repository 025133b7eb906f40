"""`compact`: make a checkpoint self-contained by copying the files of other checkpoints that it refers to."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ..comm import ALONE, open_session, value_of_first
from ..engine.common.files import read_catalog_bytes
from ..engine.common.progress import OnProgress, reporter
from ..engine.resharding.compact import CompactReport
from ..engine.resharding.compact import compact as compact_in_place
from ..errors import StorageError
from ..format.catalog import decode_catalog
from ..formats.source import Path, open_shared_source, reading
from .reading import check_workers, refuse_foreign


def compact(
    path: Path,
    *,
    workers: int | None = None,
    progress: bool | OnProgress = False,
    process_group: Any = ALONE,
    timeout_s: float = 3600.0,
) -> CompactReport:
    """Copy the files of other checkpoints that a checkpoint refers to into its own folder, by one process or several.

    Afterwards the other checkpoints may be removed or moved away. The tensors, their rows and the metadata stay as they are.
    Every byte that is copied is verified. Whole files are copied, including bytes that this checkpoint no longer refers to. If
    the process is killed at any instant, the checkpoint is complete: as it was, or self-contained. A manifest is made again, so a
    signature of the old one becomes invalid.

    Parameters
    ----------
    path
        A checkpoint of this library.
    workers
        Threads that copy, one file and 8 MiB of memory each; by default as many as a load uses.
    progress
        As for `load`; the step is called "compact", and rank 0 reports the bytes of all ranks.
    process_group
        The ranks that divide the files among them, by bytes. Each calls with the same path, and gets the same result. None
        stands for all ranks. By default this process is on its own.
    timeout_s
        Seconds to wait for the other ranks in each step.

    Returns
    -------
    CompactReport
        The files that were copied; none if the checkpoint refers to no other one.

    Raises
    ------
    CheckpointNotFound
        The path holds no checkpoint.
    UsageError
        The checkpoint is of another format.
    CorruptError
        A file that the checkpoint refers to is missing or damaged; nothing was changed.
    StorageError
        There is too little space, another process saves there, or one has held the lock of the checkpoint for 120 s; nothing was
        changed.
    """
    check_workers(workers)
    with (
        open_session("compact", str(path), process_group=process_group, timeout_s=timeout_s) as comm,
        open_shared_source(comm, path, timeout_s=timeout_s) as source,
    ):
        refuse_foreign(path, source, "compact is for this library's checkpoints, which may refer to others")
        # Again: a save may have replaced the catalog that `open_shared_source` locked.
        with reading(source.storage) if comm.rank == 0 else nullcontext():
            encoded = value_of_first(comm, lambda: read_catalog_bytes(source.storage))
            if decode_catalog(encoded).save_id != source.catalog.save_id:
                raise StorageError(f"{source.storage.url}: another save has just replaced this checkpoint; call compact again")
            report = reporter(progress if comm.rank == 0 else False)
            return compact_in_place(comm, source.storage, source.catalog, encoded, workers=workers, report=report)
