"""Output files and folders that appear whole or not at all: each is made in a folder beside its place, then moved there.

1. The folder is ``.NAME.….partial``, which no reader takes for a checkpoint. The process that works in it holds a lock there. The
   system releases the lock when the process dies. So a second conversion to the same place is refused while the first one lives,
   and the folder of a dead one is recognized.
2. The next conversion to the same place removes the folder of a killed one, or continues it. To continue, the caller passes an
   `identity` of the result, which is part of the folder's name.
3. The result and the old content of its place are swapped in one step of the file system. A file system without such a step (NFS)
   first moves the old content to ``.NAME.….replaced``. If the process is cut off between the two moves, the place stays empty
   until the next conversion moves the old content back.

An object store has no folder to move. There a result is written in place, into a prefix that was empty. A lease under a key of
its own marks it as unfinished: no reader takes it for a checkpoint, and the next conversion deletes the files of a killed one.
This library's own format has a catalog, which is written last. With it the checkpoint is whole, beside the lease of a killed
conversion too, and the same conversion goes on there. To replace a checkpoint, the result is made below ``.NAME.partial``; then
the old files are deleted, and the store copies the new ones. If the process is killed in between, the prefix holds no checkpoint,
and the conversion has to run again, with the request to replace: the old checkpoint may still be whole.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import NamedTuple

from ..core.report import few
from ..engine.common.step_folders import referred_by_others
from ..errors import CheckpointError, CheckpointNotFound, CorruptError, StorageError, UsageError
from ..format.catalog import MAX_CATALOG_BYTES
from ..format.files import CATALOG_KEY, CONVERT_LOCK
from ..storage import (
    LocalStorage,
    Lock,
    LocksUnsupported,
    MissingKey,
    Storage,
    holder_text,
    is_object_path,
    open_storage,
    resolved_path,
)
from ..storage.local import make_durable_folder
from ..storage.posix import Explained, sync_folder
from ..storage.protocol import PROBE, Document, at_once, copy_file
from ..storage.swap import swap
from .source import known_formats, open_source

_LOCK, _RESULT, _NOTES, _WHOLE = "lock", "result", "notes", "whole"
_TRIES = 10
_MAX_LOCK_BYTES = 1 << 16
_REPLACEMENT = "replacement"
"""The content of a lease that marks a conversion which replaces an old checkpoint."""


class OutputFolder(NamedTuple):
    """The folder in which a conversion writes its result.

    Attributes
    ----------
    result
        The path to write the file or folder to. A folder may hold files of an earlier attempt that was killed.
    resume_info
        A folder for notes to the next attempt, such as digests of finished files; deleted once the result is in its place.
    """

    result: str
    resume_info: str


@contextmanager
def new_folder(
    dst: str, src: Sequence[str], held: list[Lock], *, identity: str | None = None, overwrite: bool
) -> Iterator[OutputFolder]:
    """Yield a folder to write to; when the block ends, it is moved to `dst`, durably.

    If the block raises, nothing is left. If the process is killed, the next call with the same `identity` finds its files. Raise
    `UsageError` if `dst` holds something that may not be replaced, and `StorageError` if another conversion to `dst` is under
    way.

    Parameters
    ----------
    src
        The real paths of the checkpoint that is read meanwhile, and of its files; `dst` may hold none of them.
    held
        Gets the lease of the result's prefix in an object store. Check it before each write: once it is lost, another conversion
        may write files of the same names there.
    identity
        The hexadecimal digits of the result's identity (see `engine.common.resuming`); None starts anew each time.
    """
    if is_object_path(dst):
        with _new_prefix(dst, src, held, identity, overwrite=overwrite) as storage, tempfile.TemporaryDirectory() as notes:
            yield OutputFolder(storage.url, notes)
        return
    with _partial_folder(dst, src, identity, overwrite=overwrite) as (path, partial):
        output = OutputFolder(os.path.join(partial, _RESULT), os.path.join(partial, _NOTES))
        os.makedirs(output.result, exist_ok=True)
        yield output
        whole = os.path.join(partial, _WHOLE)  # a cut in the next step must not leave old content under the name of a result
        os.rename(output.result, whole)
        _move_into_place(whole, path)


@contextmanager
def new_file(dst: str, src: Sequence[str], *, overwrite: bool) -> Iterator[str]:
    """Yield the path of a file to write; when the block ends, the file is moved to `dst`, durably."""
    if is_object_path(dst):
        above, _, name = resolved_path(dst).rpartition("/")
        with open_storage(above) as storage, open_storage(dst) as place, tempfile.TemporaryDirectory() as spool:
            if place.list():
                raise UsageError(f"{dst}: is a folder, and the result is one file; pass the path of a file in it")
            if storage.size(name) is not None:
                if not overwrite:
                    raise _exists(dst)
                _check_replaceable(place, src)
            yield os.path.join(spool, name)
            with LocalStorage(spool) as local:
                copy_file(local, name, storage)
        return
    with _partial_folder(dst, src, None, overwrite=overwrite) as (path, partial):
        if os.path.isdir(path) and not os.listdir(path):
            raise UsageError(f"{path}: is a folder, and the result is one file; pass the path of a file in it")
        made = os.path.join(partial, os.path.basename(path))
        yield made
        _move_into_place(made, path)


@contextmanager
def _new_prefix(dst: str, src: Sequence[str], held: list[Lock], identity: str | None, *, overwrite: bool) -> Iterator[Storage]:
    """Yield the store of an empty prefix that only this process writes to. If the block raises, nothing is left there.

    If the same conversion was killed after it published its catalog, its files are still there. If `dst` holds another
    checkpoint, the prefix is another one beside it, and its files take the place of the old ones at the end.
    """
    with open_storage(dst) as storage:
        above, _, name = storage.url.rpartition("/")
        beside, note = f"{above}/.{name}.partial", f"conversion {identity or uuid.uuid4().hex}"
        found, left = _keys(storage), ""
        if CONVERT_LOCK in found:
            with suppress(MissingKey):
                left = holder_text(storage.read(CONVERT_LOCK, _MAX_LOCK_BYTES))
        # With a catalog the checkpoint is whole, so it stays: it was to be replaced, or its conversion lacks only the last step.
        is_dead = CONVERT_LOCK in found and (CATALOG_KEY not in found or left == note)
        if _is_empty(found) or (is_dead and (overwrite or left != _REPLACEMENT)):
            with _filled(storage, found, note, held, goes_on=CATALOG_KEY in found):
                if CONVERT_LOCK in found:  # it may have been replacing a checkpoint
                    with open_storage(beside) as made:
                        made.delete(_keys(made))
                yield storage
            return
        if not overwrite:
            raise _exists(dst)
        _check_replaceable(storage, src)
        with open_storage(beside) as made, _filled(made, _keys(made), note, held):
            yield made
            _refuse_referred(storage.url)  # again, because it may have taken hours to make the result
            keys = _keys(made) - {CONVERT_LOCK}
            with _leased(storage, _REPLACEMENT) as lease:
                _retire(storage)
                storage.delete(_keys(storage) - {CONVERT_LOCK})

                def copy(key: str) -> None:
                    lease.check()
                    copy_file(made, key, storage)

                at_once(storage, *(partial(copy, key) for key in sorted(keys - {CATALOG_KEY})))
                for key in keys & {CATALOG_KEY}:  # last: with it, the checkpoint is there
                    copy(key)
            made.delete(keys)


@contextmanager
def _filled(storage: Storage, found: Set[str], note: str, held: list[Lock], *, goes_on: bool = False) -> Iterator[None]:
    """Hold the lease of a prefix while the block fills it, and add the lease to `held`. If the block raises, delete the files.

    A killed conversion left the keys `found`, if there are any. They are deleted first. With `goes_on` they are those of a whole
    checkpoint and stay, also if the block raises. Raise `StorageError` if another conversion is under way, or has begun or ended
    since the keys were found.
    """
    with _leased(storage, note) as lease:
        now = _keys(storage)
        if bool(lease.had_file) != (CONVERT_LOCK in found) or not _is_empty(now - found - {CONVERT_LOCK}):
            raise _busy_error(storage.url)
        if not goes_on:
            storage.delete(now - {CONVERT_LOCK})
        held.append(lease)
        try:
            yield
            lease.check()
        except BaseException:
            with suppress(StorageError):
                lease.check()  # of another process by now: these are its files
                storage.delete(() if goes_on else _keys(storage) - {CONVERT_LOCK})
            raise


def _keys(storage: Storage) -> set[str]:
    return {key for key, _ in storage.list()}


def _is_empty(keys: Set[str]) -> bool:
    """Whether all these keys are of probes, with which a store was tested."""
    return all(posixpath.basename(key) == PROBE for key in keys)


def _retire(storage: Storage) -> None:
    """Delete the catalog of a checkpoint that will be replaced, unless another checkpoint needs its files by then.

    A save with this checkpoint as its base looks for the catalog after its own commit. So either that save sees that the catalog
    is gone, or this function sees that save.
    """
    found: Document | None = None
    with suppress(CorruptError):  # larger than any catalog
        [found] = storage.read_many([CATALOG_KEY], MAX_CATALOG_BYTES)
    storage.delete([CATALOG_KEY])
    try:
        _refuse_referred(storage.url)
    except CheckpointError:
        if found is not None:
            storage.publish(CATALOG_KEY, found.data)
        raise


@contextmanager
def _leased(storage: Storage, note: str) -> Iterator[Lock]:
    lease = storage.lease(CONVERT_LOCK, note.encode(), once=True)
    if lease is None:
        raise _busy_error(storage.url)
    with lease:
        yield lease


@contextmanager
def _partial_folder(dst: str, src: Sequence[str], identity: str | None, *, overwrite: bool) -> Iterator[tuple[str, str]]:
    """Yield the absolute path of the destination, and a folder beside it in which only this process works."""
    path = _check_destination(dst, src, overwrite=overwrite)
    with Explained("write", path):
        make_durable_folder(os.path.dirname(path))
        partial, lock = _lock_partial_folder(path, identity)
        with _removed_at_end(partial, lock):
            if lock is not None:
                _remove_leftovers(path, partial)
            _check_destination(dst, src, overwrite=overwrite)  # again: another process may have written there
            yield path, partial


@contextmanager
def _removed_at_end(partial: str, lock: Lock | None) -> Iterator[None]:
    """Remove a folder beside a destination after the ``with`` block, and release its lock."""
    try:
        with lock or nullcontext():
            try:
                yield
            finally:
                shutil.rmtree(partial, ignore_errors=True)  # while locked: later, it may be another's
    finally:
        # NFS keeps a deleted file, such as the lock's, under another name in the folder until it is closed.
        with suppress(OSError):  # it is gone, or another process works in it by now
            os.rmdir(partial)


def _lock_partial_folder(path: str, identity: str | None) -> tuple[str, Lock | None]:
    """Make a folder beside the destination `path`, for the result to be written in, and lock the folder.

    Return the folder, and the lock: None if the file system has no locks.
    """
    for _ in range(_TRIES):
        partial = _sibling(path, identity, "partial")
        try:
            lock = _make_and_lock(partial)
        except LocksUnsupported:
            # Without locks, nobody can tell a dead process's folder from a live one's. So each process makes its own folder, and
            # removes no other.
            shutil.rmtree(partial, ignore_errors=True)
            os.mkdir(partial := _sibling(path, None, "partial"))
            return partial, None
        except MissingKey:
            continue  # between mkdir and the lock, another process took the folder for that of a dead one, and removed it
        if lock is None:
            raise _busy_error(path)
        return partial, lock
    raise _busy_error(path)


def _make_and_lock(partial: str) -> Lock | None:
    """Make a folder, if it is missing, and lock it; return None if another process holds the lock."""
    with suppress(FileExistsError):
        os.mkdir(partial)
    try:
        with LocalStorage(partial) as storage:
            return storage.lock(_LOCK, make=True)
    except StorageError:
        with suppress(OSError):
            os.rmdir(partial)  # fails if the folder holds files, which then stay
        raise


def _busy_error(path: str) -> StorageError:
    return StorageError(f"{path}: another conversion writes there now; wait for its end, or pass another path")


def _remove_leftovers(path: str, own: str) -> None:
    """Remove the folders of killed attempts, and unfinished moves in `own`, the folder of this one.

    Move old content back to its place if an attempt was cut off between its two moves. Raise `StorageError` if another attempt is
    alive.
    """
    folder, name = os.path.split(path)
    ours = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{32}}\.(partial|replaced)")
    left = {os.path.join(folder, entry): found[1] for entry in os.listdir(folder) if (found := ours.fullmatch(entry))}
    # A folder whose lock is free belongs to a dead attempt.
    for entry in (entry for entry, kind in left.items() if kind == "partial" and entry != own):
        with suppress(MissingKey):
            lock = _make_and_lock(entry)
            if lock is None:
                raise _busy_error(path)
            with _removed_at_end(entry, lock):
                pass
    # Old content: remove it if the new one is in place, else put it back, also if somebody has made an empty folder there since.
    for entry in (entry for entry, kind in left.items() if kind == "replaced"):
        if _is_occupied(path):
            _remove(entry)
        else:
            os.rename(entry, path)
    shutil.rmtree(os.path.join(own, _WHOLE), ignore_errors=True)


def _sibling(path: str, identity: str | None, kind: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{(identity or uuid.uuid4().hex)}.{kind}")


def _check_destination(dst: str, src: Sequence[str], *, overwrite: bool) -> str:
    """Check that a destination is empty, or with `overwrite` that it may be replaced; return its absolute path."""
    storage = open_storage(dst)
    if not isinstance(storage, LocalStorage):
        raise UsageError(f"{dst}: conversions are written to files or objects; pass a folder, or s3://bucket/prefix")
    path = storage.url
    if not _is_occupied(path):
        return path
    if not overwrite:
        raise _exists(path)
    _check_replaceable(storage, src)
    return path


def _exists(path: str) -> UsageError:
    return UsageError(f"{path}: already exists; pass another path, or overwrite=True to replace a checkpoint that is there")


def real_path(path: str) -> str:
    """Return the absolute path of a file, folder or prefix, with symbolic links resolved."""
    return resolved_path(path) if is_object_path(path) else os.path.realpath(path)


def _check_replaceable(storage: Storage, src: Sequence[str]) -> None:
    """Raise a `UsageError` unless the destination holds one checkpoint that may be replaced; it may be damaged.

    The root of a run is never replaced, nor a checkpoint that has others inside. The destination must not be a path of the source
    `src` or hold one, and no other step of its run may refer to its files.
    """
    path = storage.url
    is_local = isinstance(storage, LocalStorage)
    inside = f"{real_path(path)}/"
    if any(f"{one}/".startswith(inside) for one in src):
        raise UsageError(f"{path}: is, or holds, the checkpoint to be read; write to another path")
    _refuse_referred(path)
    marks = [key for candidate in known_formats() for key in candidate.root_marks]
    has = [os.path.isfile(os.path.join(path, key)) for key in marks] if is_local else [s is not None for s in storage.stat(marks)]
    if any(has):
        raise UsageError(
            f"{path}: has the file {marks[has.index(True)]}, so it is the root of a run, which is never replaced; pass the path "
            "of one checkpoint in it"
        )
    try:
        with open_source(path):
            pass
    except CheckpointNotFound as error:
        raise UsageError(f"{path}: holds no checkpoint, and nothing else is replaced; remove it, or pass another path") from error
    except UsageError as error:  # such as a part of a checkpoint
        raise UsageError(f"{path}: is not replaced; remove it, or pass another path: {error}") from error
    except CheckpointError:
        pass  # a damaged checkpoint may be replaced
    folders = () if os.path.islink(path) else storage.folders()  # only the link would be replaced
    sizes = storage.stat([f"{folder}/{CATALOG_KEY}" for folder in folders])
    held = [folder for folder, size in zip(folders, sizes, strict=True) if size is not None]
    if held:
        raise UsageError(
            f"{path}: holds other checkpoints ({few(held)}), which are never replaced; pass the path of one, or a new path"
        )


def _refuse_referred(path: str, old: str | None = None) -> None:
    """Refuse to replace a checkpoint whose files another one needs.

    Raise `UsageError` if another step of its run refers to them, and `CorruptError` if the catalog of another step is damaged, so
    it is unknown which files that step refers to.

    Parameters
    ----------
    old
        The path of the checkpoint's files now. None means that they are at `path`.
    """
    if os.path.islink(old or path):
        return  # only the link will be replaced, not the checkpoint that it points to
    with open_storage(path) as storage, open_storage(old or path) as files:
        try:
            steps = sorted({step for key, step in referred_by_others(storage).items() if files.size(key) is not None})
        except CorruptError as error:
            raise CorruptError(
                f"{path}: is not replaced, as a step beside it may refer to its files, so pass another path: {error}"
            ) from error
    if steps:
        raise UsageError(
            f"{path}: is not replaced: {', '.join(steps)} of the same run refer to its files; make them self-contained first "
            f"(reshard-ckpt compact {os.path.dirname(path)}/{steps[0]}), or pass another path"
        )


def _is_occupied(path: str) -> bool:
    """Return whether there is anything at a path, except for an empty folder."""
    return os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path) or bool(os.listdir(path)))


def _move_into_place(made: str, path: str) -> None:
    """Move the finished result `made` to its place `path`, and delete the old content.

    The old content is deleted, at the latest, with the folder that `made` lies in.
    """
    is_occupied = _is_occupied(path)
    if is_occupied:
        _refuse_referred(path)  # again, because it may have taken hours to make the result
    both_files = os.path.isfile(made) and not os.path.isdir(path)
    replaced = None
    if not is_occupied or both_files:
        os.rename(made, path)
    else:
        if not swap(made, path):
            replaced = _sibling(path, None, "replaced")
            try:
                os.rename(path, replaced)
                os.rename(made, path)
            except BaseException:
                if not os.path.lexists(path):
                    os.rename(replaced, path)
                raise
        old = replaced or made
        try:
            # Again: a save with the old checkpoint as its base looks for its base after its commit. So that save finds no base,
            # or this check finds the save.
            _refuse_referred(path, old)
        except CheckpointError:
            if replaced is None:
                swap(made, path)
            else:
                os.rename(path, made)
                os.rename(replaced, path)
            raise
    sync_folder(os.path.dirname(path))
    if replaced is not None:
        _remove(replaced)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
