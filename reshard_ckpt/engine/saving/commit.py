"""The commit of a save, and the two checks before it: the checkpoint that the path holds, and the free space there.

1. Rank 0 reads the catalog and the folders that the path holds (`read_previous`), before any rank makes a file.
2. Every rank writes its part and sends a receipt (`write_and_commit`).
3. Rank 0 gathers the receipts (`commit`), syncs the folders that name the files of all ranks, compares the fingerprints of
   replicas, sees every file by name and size, and publishes the catalog. After this one step the checkpoint exists. It is refused
   unless the catalog at the path is still that of step 1.
4. Only then rank 0 deletes files that the new catalog does not refer to, in the folders that step 1 has seen.

Two jobs that save to one path by mistake cannot break the checkpoint there. If job A deletes files of job B, then B looked (step
1) before A published. So B finds another catalog than it expects at step 3, and its save is refused.
"""

from __future__ import annotations

import hashlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ...core.catalog.model import Catalog, FileEntry
from ...core.geometry.runs import I64
from ...core.planning.save_plan import SavePlan, build_catalog
from ...core.report import plural
from ...errors import CheckpointError, CorruptError, StorageError, UsageError
from ...format.catalog import MAX_CATALOG_BYTES, decode_catalog, encode_catalog
from ...format.files import CATALOG_KEY, digests_file_bytes, encode_manifest, manifest_key, timeline_key
from ...storage import unlinked_path
from ...storage.protocol import (
    ABSENT,
    ANY,
    Document,
    Lock,
    MissingKey,
    PublishUnknown,
    Storage,
    Version,
    at_once,
    begin,
    conflict,
    write_file,
)
from ..common.host_memory import POOL
from ..common.progress import Recorder, merged, size_text
from ..common.reader_notes import GRACE_S
from ..common.step_folders import clean_up
from .messages import Receipt, Receipts, decode_receipts, encode_receipt
from .options import PreviousCheckpoint, SaveContents, SaveJob, Written
from .replicas import all_fingerprints, compare_replicas
from .staged_copy import RING_BYTES, StagedCopy, take_ring, without_unchanged
from .unchanged import Base
from .write import Chunks, chunks_in_place, keys_of, lay_out, remove, write_files


def read_previous(storage: Storage) -> PreviousCheckpoint:
    """Return a path's present catalog (bytes and version) and folders. In a save, rank 0 calls it before any file is made."""

    def catalog() -> tuple[bytes | None, Version]:
        try:
            [found] = storage.read_many([CATALOG_KEY], MAX_CATALOG_BYTES)
        except CorruptError:  # larger than any catalog, so no job published it
            return None, ANY
        return (found.data, found.version) if found else (b"", ABSENT)

    asked: list[Any] = at_once(storage, storage.folders, catalog)  # one after the other in this order, on a disk
    folders, (data, version) = asked
    return PreviousCheckpoint(data, frozenset(folders), version)


def check_free_space(storage: Storage, plan: SavePlan) -> None:
    """Raise an error if a save's plan needs more bytes than the store has free, before a byte is written. Called on rank 0.

    Headers, the catalog and writes of other jobs are not counted. If they fill the disk, the save fails later, when it writes.
    Raise `StorageError` if the ranks would write more bytes than the store has free.
    """
    free = storage.free_bytes()
    by_rank = [size + digests_file_bytes(size) for size in plan.bytes_by_rank().tolist() if size]
    if free is None or sum(by_rank) <= free:
        return
    raise StorageError(
        f"{storage.url}: this save writes {sum(by_rank):,} bytes ({plural(len(by_rank), 'rank')}, the largest part has "
        f"{max(by_rank):,}), but {free:,} are free there; nothing was written. The checkpoint there stays until the new one "
        "is complete, so overwriting needs the room as well: free space there, or save to another path"
    )


@contextmanager
def chunks_of(job: SaveJob) -> Iterator[Chunks]:
    """Yield the bytes of a synchronous save in chunks: from the tensors' own memory, or copied from devices into a pinned ring.

    For a state on a device a thread copies into a ring of pinned memory while the caller writes from it. Copying each tensor just
    before it is written would wait for the device each time, and use pageable memory, which is slower. Raise `UsageError` if no
    thread can be started to copy from the device in.
    """
    rank, fingerprints = job.comm.rank, job.fingerprints
    if job.base is not None:
        job = without_unchanged(job)
    if job.local_shards.device_to_pin is None:
        if fingerprints is None:
            with job.recorder.step("compare"):
                fingerprints = all_fingerprints(job.local_shards, job.assignment.checks, job.shift)
        yield chunks_in_place(job.local_shards, job.assignment, rank, fingerprints, unchanged=job.unchanged)
        return
    layouts = lay_out(job.local_shards, job.assignment, rank)
    copy = StagedCopy(job, layouts, take_ring(job.local_shards, layouts, RING_BYTES))
    thread = threading.Thread(target=copy.fill_all, args=(copy.fill,), name="reshard-ckpt-stage")
    try:
        try:
            thread.start()
        except RuntimeError as error:
            raise UsageError(f"no thread to copy from the device in can be started ({error}); end some, or save later") from error
        yield copy.chunks
    except BaseException as error:  # also Ctrl-C while the thread is being started: it may run, and wait for the writer
        copy.staging.fail(error)
        raise
    finally:
        if thread.is_alive():
            thread.join()
        copy.close()
        POOL.give_back(copy.ring)


def write_and_commit(job: SaveJob, source: AbstractContextManager[Chunks]) -> Written:
    """Write this rank's files and commit. After an error before the commit, the files of this save are deleted.

    An error may come at any moment, such as Ctrl-C. Once the gather of receipts has ended, only rank 0 knows whether the catalog
    was published, so no other rank deletes files then. If rank 0 is interrupted in the gather, it may not know whether it has
    ended. So rank 0 deletes the files of all ranks. `source` opens the bytes to write.
    """
    comm, storage = job.comm, job.storage

    def remove_files() -> None:
        with suppress(CheckpointError):  # the next save deletes the rest
            prefix = f"{job.save_id}/rank{comm.rank:05d}-" if comm.rank else f"{job.save_id}/"
            remove(storage, [key for key, _ in storage.list(job.save_id) if key.startswith(prefix)])

    if comm.rank:
        comm.undo_unless_gathered(remove_files)
    try:
        # While data is written: the question takes round trips of its own.
        proved = begin(storage, storage.prove_conditions) if comm.rank == 0 and not storage.hints.has_locks else None
        with source as chunks:
            receipt = write_files(storage, chunks, job.recorder, sha256=job.options.sha256)
        if proved is not None:
            proved()
        return Written(receipt.num_bytes, commit(job, receipt), chunks.unchanged.num_bytes if chunks.unchanged else 0)
    except BaseException as error:
        if comm.rank == 0 and is_uncommitted(storage, job.save_id, error):
            remove_files()
        raise


def commit(job: SaveJob, receipt: Receipt) -> int | None:
    """Gather the receipts, check on rank 0 that all files are there and replicas are alike, and publish the catalog.

    Collective: one gather of receipts to rank 0. `write_and_commit` calls it, and deletes the files if it fails.

    Returns
    -------
    int or None
        On rank 0, the size in bytes of all files that the save wrote; None on other ranks.
    """
    comm, storage, recorder, options = job.comm, job.storage, job.recorder, job.options
    began = recorder.now()
    gathered: list[bytes] | None = None
    replaced: dict[str, tuple[Document | None, Version]] = {}
    try:  # an interrupt may come right after the gather: see `write_and_commit`
        gathered = comm.gather(encode_receipt(replace(receipt, record=recorder.encoded() if options.timeline else b"")))
        recorder.log.info("wrote %s to %s in %.2f s", size_text(receipt.num_bytes), storage.url, began - recorder.began)
        if gathered is None or job.contents is None:  # both are None on the same ranks
            return None
        received_at = recorder.now()
        recorder.add("receipts", began)
        receipts = decode_receipts(gathered)
        # Before the catalog, so that a published catalog always has its files beside it; `_undo` puts the old ones back.
        for key, data in options.beside.items():
            [held] = storage.read_many([key], MAX_CATALOG_BYTES)
            replaced[key] = held, storage.publish(key, data)
        check_base = None if job.base is None else partial(_check_base_unchanged, job.base)
        catalog, seen = publish(
            storage, job.contents, receipts, check_base, recorder=recorder, sha256=options.sha256, grace_s=options.grace_s
        )
        if options.timeline:
            try:
                timeline = merged(recorder, receipts.records, received_at, save_id=job.save_id, mesh=catalog.mesh)
                write_file(storage, timeline_key(job.save_id), timeline)
            except Exception as error:  # the checkpoint exists: the save must not fail because its timeline does
                recorder.log.warning("saved, but its timeline is not: %s: %s", type(error).__name__, error)
        seen()  # last: its requests run while the old files are deleted and the timeline is written
    except BaseException as error:
        if gathered is not None:
            _undo(job, gathered, replaced, error)
        raise
    size, seconds = sum(file.stored_bytes for file in receipts.files), recorder.now() - recorder.began
    recorder.log.info("saved %s by %d ranks to %s in %.2f s", size_text(size), comm.size, storage.url, seconds)
    return size


def _undo(
    job: SaveJob, gathered: Sequence[bytes], replaced: Mapping[str, tuple[Document | None, Version]], error: BaseException
) -> None:
    """After an error on rank 0, delete all files of the save, unless its catalog may be published.

    The files in the receipts are deleted by name, as the store may be unable to list them. Files beside the catalog get their old
    contents back: ``replaced[key]`` is such a file before this save (None if there was none), and its version after this save.
    """
    storage = job.storage
    if not isinstance(error, Exception):
        # An interrupt (Ctrl-C): if the new catalog is in place, the files of the replaced checkpoint are deleted.
        with suppress(CheckpointError):  # the next save deletes those files
            found = read_previous(storage).catalog
            if found and (catalog := decode_catalog(found)).save_id == job.save_id and job.contents and job.contents.before:
                storage.sync([CATALOG_KEY])
                clean_up(storage, catalog, job.contents.before.folders, job.options.grace_s)
    # The error may have come after the rename of the catalog: the save is undone only if it surely did not happen.
    if is_uncommitted(storage, job.save_id, error):
        remove(storage, [*keys_of(decode_receipts(gathered).files), manifest_key(job.save_id)])
        for key, (before_it, version) in replaced.items():
            _put_back(storage, key, before_it, version)


def _put_back(storage: Storage, key: str, before: Document | None, new: Version) -> None:
    """Restore the old bytes of a file after a failed save, or delete it if there were none, unless another save wrote it since.

    Errors of the store are dropped.
    """
    with suppress(CheckpointError):  # the caller raises the error of the save, which says more
        if before is not None:
            storage.publish(key, before.data, expected=new)
        elif (found := storage.read_many([key], MAX_CATALOG_BYTES)[0]) and found.version == new:
            storage.delete([key])


def is_uncommitted(storage: Storage, save_id: str, error: BaseException) -> bool:
    """Tell whether it is certain that a failed save has not published its catalog: there is none, or one of another save.

    False if the catalog is the save's own (its error came after the rename), or cannot be read. Also False if an object store did
    not answer: it may still publish the catalog.
    """
    if isinstance(error, PublishUnknown):
        return False
    try:
        catalog = read_previous(storage).catalog
        return catalog is not None and (not catalog or decode_catalog(catalog).save_id != save_id)
    except CheckpointError:
        return False


def publish(
    storage: Storage,
    contents: SaveContents,
    receipts: Receipts,
    check_base: Callable[[Storage], None] | None = None,
    *,
    recorder: Recorder | None = None,
    sha256: bool = False,
    lease: Lock | None = None,
    grace_s: float = GRACE_S,
) -> tuple[Catalog, Callable[[], None]]:
    """Check the receipts of all ranks, publish the catalog, and delete the replaced files; on rank 0 only.

    Return the catalog, and a function to call last: it raises if another job deleted files of this save (`check_files_again`).

    Parameters
    ----------
    check_base
        Called with the store once the catalog is published; raises `MissingKey` if files that it refers to may be gone.
    sha256
        Whether to write a manifest with the SHA-256 of every file.
    lease
        The lease that keeps sweeps of other jobs from these files, if there is one.
    grace_s
        Seconds that the replaced files stay for their readers, in a store without locks.

    Raises
    ------
    UsageError
        A rank passed another `sha256` than rank 0.
    LayoutError
        Tensors that are declared to be replicas differ.
    StorageError
        Rank 0 does not see a file that a rank wrote.
    PublishConflict
        Another save published at this path since rank 0 looked (`SaveContents.before`).
    """
    recorder, before = recorder or Recorder(), contents.before
    others = np.unique(receipts.rank[[bool(file.sha256) != sha256 for file in receipts.files]])
    if len(others):  # the manifest would lack files
        raise UsageError(f"sha256={sha256} on rank 0, {not sha256} on ranks {others.tolist()}: pass the same on every rank")
    catalog = catalog_of(contents, receipts)
    # A crash between two of these steps must leave a whole checkpoint, so their order is fixed: the bytes of every file are
    # durable, then their names become durable, then they are seen, then the catalog is published, then the replaced files are
    # deleted. They are seen last, because `publish` would make a folder anew that somebody has removed meanwhile.
    encoded = encode_catalog(catalog)
    if sha256:  # before the catalog: a published catalog always has its manifest
        digests = {CATALOG_KEY: hashlib.sha256(encoded).digest()}
        for file in receipts.files:
            digests[file.key], digests[file.digests_key] = file.sha256, file.digests_sha256
        write_file(storage, manifest_key(contents.save_id), encode_manifest(digests))
    with recorder.step("sync"):
        storage.sync([f"{folder}/{CATALOG_KEY}" for folder in receipts.folders])  # any key in them: folders are synced, not files
    with recorder.step("check"):
        compare_replicas(contents.plan.checks, contents.plan.tables.names, receipts.fingerprints)
        _check_files_visible(storage, receipts, before)
    with recorder.step("publish"):
        version = storage.publish(CATALOG_KEY, encoded, expected=before.version if before else ANY)
        if check_base is not None:
            try:
                check_base(storage)
            except MissingKey as error:
                _put_catalog_back(storage, before, version)
                raise StorageError(f"{storage.url}: the save is undone: {error}") from None
    again: Callable[[], None] = lambda: None  # noqa: E731 - a lock is never lost
    if storage.hints.has_locks:
        # `publish` makes the folder anew if somebody has removed it since the files were seen; then their folders are gone.
        if gone := {*receipts.folders} - {*storage.folders()}:
            _put_catalog_back(storage, before, version)
            raise StorageError(f"{storage.url}: somebody deleted {min(gone)} during this save, so it is undone; save again")
    else:
        again = begin(
            storage,
            partial(check_files_again, storage, partial(_check_files_visible, storage, receipts, None), before, version, lease),
        )
    try:
        with recorder.step("clean up"):
            clean_up(storage, catalog, before.folders if before else storage.folders(), grace_s)
    except StorageError as error:  # the checkpoint exists: the save must not fail because old files stay
        warnings.warn(f"saved, but what it replaced is not all deleted: {error}; the next save tries again", stacklevel=2)
    return catalog, again


def catalog_of(contents: SaveContents, receipts: Receipts) -> Catalog:
    """Build the catalog of a save from rank 0's contents and the receipts of all ranks."""
    files = [
        FileEntry(file.key, file.size, file.digests_key, file.digest, file.key.partition("/")[0], rank, packed=file.packed)
        for rank, file in zip(receipts.rank.tolist(), receipts.files, strict=True)
    ]
    plan, file, offset = contents.plan, receipts.file, receipts.offset
    if contents.base_files is not None:
        plan, file, offset, referred = _with_parts(contents, receipts)
        files += referred
    return build_catalog(
        plan,
        file,
        offset,
        files=files,
        values=contents.values,
        save_id=contents.save_id,
        created_s=time.time() if contents.created_s is None else contents.created_s,
        metadata=contents.metadata,
        lossy=contents.lossy,
        folder=contents.folder,
    )


def _with_parts(contents: SaveContents, receipts: Receipts) -> tuple[SavePlan, I64, I64, Sequence[FileEntry]]:
    """Divide the save plan of an incremental save into parts that lie in one file each.

    Returns the plan with the catalog's tables of these parts; for each part, its file and first byte; and the entries of the
    base's files that hold parts. In the numbering of files these come after the files of all ranks.
    """
    parts, num_files = receipts.parts, len(receipts.files)
    assert parts is not None  # all ranks open the base
    # first[i]: index of the first write item of the rank of part i
    first = np.searchsorted(contents.plan.rank, receipts.part_rank)
    plan = replace(contents.plan, catalog=contents.plan.cut(first + parts.item, parts.start, parts.count))
    used = np.unique(parts.file[parts.file >= num_files])
    file = np.where(parts.file < num_files, parts.file, np.searchsorted(used, parts.file) + num_files)
    base_files = contents.base_files or ()
    referred = [entry for index in (used - num_files).tolist() if (entry := base_files[index]) is not None]
    return plan, file, parts.offset, referred


def _check_files_visible(storage: Storage, receipts: Receipts, before: PreviousCheckpoint | None) -> None:
    """Raise an error if rank 0 does not see each file of the receipts in the store, with the size that its rank wrote."""
    sizes: dict[str, int] = {}
    for folder in receipts.folders:
        sizes.update(storage.list(folder))
    # wanted: each key that a rank has written, with its bytes; None for digests, whose bytes are not compared
    wanted = [(key, size) for file in receipts.files for key, size in ((file.key, file.stored_bytes), (file.digests_key, None))]
    for i, (key, size) in enumerate(wanted):
        seen = sizes.get(key)
        if seen is None or (size is not None and seen != size):
            found = read_previous(storage).version if before else ANY
            if before and ANY not in (before.version, found) and found != before.version:
                # Another save has committed meanwhile, and deleted the file as a leftover of an unfinished save.
                raise conflict(f"{storage.url}/{CATALOG_KEY}", before.version, found)
            rank, found_text = receipts.rank[i // 2], "no such file" if seen is None else f"{seen} bytes"
            step = (
                "save to a path that all ranks share, on a file system that shows a synced file to all machines at once"
                if rank
                else "somebody deletes or replaces files there: leave them alone"
            )
            raise MissingKey(
                f"{storage.url}: rank {rank} wrote {key}{'' if size is None else f' with {size} bytes'}, but rank 0 sees "
                f"{found_text}; {step}"
            )


def check_files_again(
    storage: Storage, see: Callable[[], None], before: PreviousCheckpoint | None, version: Version, lease: Lock | None = None
) -> None:
    """Check the files of a save once more after its catalog was published; undo the save if another job has deleted them.

    If this job was paused for longer than its `lease`, another job may take its files for leftovers. That job deletes the files
    and then looks for a catalog that refers to them (`remove_files`); this job publishes its catalog and then looks for the
    files. So at least one of the two jobs sees that files of a catalog are missing. Raise `StorageError` if files are missing, so
    the save is undone.

    Parameters
    ----------
    see
        Looks for all files of the save in the store; raises `MissingKey` if one is missing.
    before, version
        The checkpoint that the path held before, to be put back; and the version of the catalog that was published.
    """
    if lease is not None:
        with suppress(StorageError):
            return lease.check()  # nobody deleted anything, as the lease is held
    try:
        see()
    except MissingKey as error:
        _put_catalog_back(storage, before, version)
        raise StorageError(
            f"{storage.url}: another job deleted files of this save before it was committed, so it is undone ({error}); end one "
            "of the two jobs"
        ) from None
    except StorageError as error:
        warnings.warn(f"saved, but whether another job deleted files of it is unknown: {error}; verify it", stacklevel=2)


def _put_catalog_back(storage: Storage, before: PreviousCheckpoint | None, version: Version) -> None:
    """Restore the catalog that the path held before a save, or delete the save's; a catalog of another save since then stays."""
    _put_back(storage, CATALOG_KEY, Document(before.catalog, before.version) if before and before.catalog else None, version)


def _check_base_unchanged(base: Base, storage: Storage) -> None:
    """Raise `MissingKey` if the base has changed since the save opened it, so that files which the save refers to may be gone.

    A job that replaces the base first publishes its own catalog, and then looks for catalogs that refer to the old files. So
    either it finds the catalog that this save has published, or this save finds the new one.
    """
    if unlinked_path(base.storage.url) == unlinked_path(storage.url):
        return  # this save has replaced it
    [found] = base.storage.read_many([CATALOG_KEY], MAX_CATALOG_BYTES)
    now = None if found is None else decode_catalog(found.data)
    is_there = now is not None and now.lineage_id == base.catalog.lineage_id
    if is_there and now is not None and now.files != base.catalog.files:  # compacted, so the files that it referred to may go
        is_there = None not in base.storage.stat([key for file in base.catalog.files for key in file.keys])
    if not is_there:
        what = "removed" if found is None else "replaced"
        raise MissingKey(f"base={base.storage.url} was {what} meanwhile, with files that the save refers to; save again")
