"""Output files and folders that appear whole or not at all: made in a folder beside their place, and moved there when durable.

1. The folder is ``.NAME.….partial``, which nothing takes for a checkpoint. The process that works in it holds a lock there, which
   the system releases when that process dies. So a second conversion to the same place is refused, and a dead one's folder is
   recognized.
2. The next conversion to the same place removes what a killed one left, or continues it. To continue, the caller passes an
   `identity` of the result, which is part of the folder's name.
3. The result and what it replaces change places in one step of the file system. A file system without such a step (NFS) moves the
   old one aside first, to ``.NAME.….replaced``. A cut between the two moves leaves nothing in its place until the next conversion
   puts the old one back.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

from ..engine.common.step_folders import referred_by_others
from ..errors import CheckpointError, CheckpointNotFound, CorruptError, StorageError, UsageError
from ..storage import LocalStorage, Lock, LocksUnsupported, MissingKey, open_storage
from ..storage.posix import Explained, sync_folder
from ..storage.swap import swap
from .registry import known_formats
from .source import open_source

_LOCK, _RESULT, _NOTES, _WHOLE = "lock", "result", "notes", "whole"
_TRIES = 10


@dataclass(frozen=True, slots=True)
class OutputFolder:
    """The place in which a result is made.

    Attributes
    ----------
    result
        The path of the file or folder to be. A folder may hold what an attempt left that was killed.
    resume_info
        A folder for what the next attempt needs, such as digests of finished files; it is deleted once the result is in place.
    """

    result: str
    resume_info: str


@contextmanager
def new_folder(dst: str, src: str, *, identity: str | None = None, overwrite: bool) -> Iterator[OutputFolder]:
    """Make a folder that is at `dst` once the block is done; `src` is what is read meanwhile.

    Where the block raises, nothing is left. Where the process is killed, who passes the same `identity` finds what was made.

    Parameters
    ----------
    identity
        Its digits (see `engine.common.identity`); None makes the result anew each time.

    Raises
    ------
    UsageError
        There is something at `dst` that is not to be replaced.
    StorageError
        Another conversion to `dst` is under way.
    """
    with _partial_folder(dst, src, identity, overwrite=overwrite) as (path, partial):
        output = OutputFolder(os.path.join(partial, _RESULT), os.path.join(partial, _NOTES))
        os.makedirs(output.result, exist_ok=True)
        yield output
        whole = os.path.join(partial, _WHOLE)  # what is replaced must not be taken for a result, should this be cut off now
        os.rename(output.result, whole)
        _move_into_place(whole, path)


@contextmanager
def new_file(dst: str, src: str, *, overwrite: bool) -> Iterator[str]:
    """Yield the path of a file to be made, which is moved to `dst` once the block is done."""
    with _partial_folder(dst, src, None, overwrite=overwrite) as (path, partial):
        if os.path.isdir(path) and not os.listdir(path):
            raise UsageError(f"{path}: is a folder, and the result is one file; pass the path of a file in it")
        made = os.path.join(partial, os.path.basename(path))
        yield made
        _move_into_place(made, path)


@contextmanager
def _partial_folder(dst: str, src: str, identity: str | None, *, overwrite: bool) -> Iterator[tuple[str, str]]:
    """Yield the absolute path of the destination, and a folder beside it that only this process uses."""
    path = _check_destination(dst, src, overwrite=overwrite)
    with Explained("write", path):
        _make_durable_folder(os.path.dirname(path))
        partial, lock = _lock_partial_folder(path, identity)
        with lock or nullcontext():
            try:
                if lock is not None:
                    _remove_leftovers(path, partial)
                _check_destination(dst, src, overwrite=overwrite)  # another process may have been quicker
                yield path, partial
            finally:
                shutil.rmtree(partial, ignore_errors=True)  # before the lock is let go: then it may be another's


def _lock_partial_folder(path: str, identity: str | None) -> tuple[str, Lock | None]:
    """Make the folder to work in and lock it; the lock is None where the file system has none."""
    for _ in range(_TRIES):
        partial = _sibling(path, identity, "partial")
        try:
            lock = _make_and_lock(partial)
        except LocksUnsupported:
            # Without locks a dead process's folder looks like a live one's: each works in one of its own and removes no other.
            shutil.rmtree(partial, ignore_errors=True)
            os.mkdir(partial := _sibling(path, None, "partial"))
            return partial, None
        except MissingKey:
            continue  # just before it was locked, another process took it for a dead one's and removed it
        if lock is None:
            raise _busy_error(path)
        return partial, lock
    raise _busy_error(path)


def _make_and_lock(partial: str) -> Lock | None:
    """Make a folder, if it is not there, and lock it."""
    with suppress(FileExistsError):
        os.mkdir(partial)
    try:
        with LocalStorage(partial) as storage:
            return storage.lock(_LOCK, make=True)
    except StorageError:
        with suppress(OSError):
            os.rmdir(partial)  # one that holds anything stays
        raise


def _busy_error(path: str) -> StorageError:
    return StorageError(f"{path}: another conversion writes there now; wait for its end, or pass another path")


def _remove_leftovers(path: str, mine: str) -> None:
    """Remove what killed attempts left, and put back what one of them had moved aside for a result that never came.

    Raises
    ------
    StorageError
        Another attempt is alive.
    """
    folder, name = os.path.split(path)
    ours = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{32}}\.(partial|replaced)")
    left = {os.path.join(folder, entry): found[1] for entry in os.listdir(folder) if (found := ours.fullmatch(entry))}
    for entry in (entry for entry, what in left.items() if what == "partial" and entry != mine):
        with suppress(MissingKey):
            lock = _make_and_lock(entry)
            if lock is None:
                raise _busy_error(path)
            with lock:
                shutil.rmtree(entry, ignore_errors=True)
    for entry in (entry for entry, what in left.items() if what == "replaced"):
        if os.path.lexists(path):
            _remove(entry)
        else:
            os.rename(entry, path)
    shutil.rmtree(os.path.join(mine, _WHOLE), ignore_errors=True)


def _make_durable_folder(folder: str) -> None:
    """Make a folder and its missing parents, so that their names survive a power cut."""
    if os.path.isdir(folder):
        return
    above = os.path.dirname(folder)
    _make_durable_folder(above)
    with suppress(FileExistsError):
        os.mkdir(folder)
    sync_folder(above)


def _sibling(path: str, identity: str | None, what: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{(identity or uuid.uuid4().hex)}.{what}")


def _check_destination(dst: str, src: str, *, overwrite: bool) -> str:
    """Return the absolute path of a destination, after checking that it may be written to."""
    storage = open_storage(dst)
    if not isinstance(storage, LocalStorage):
        raise UsageError(f"{dst}: conversions are written to local files; pass a path without a scheme, and copy the result")
    path = storage.url
    if not _is_occupied(path):
        return path
    if not overwrite:
        raise UsageError(f"{path}: already exists; pass another path, or overwrite=True to replace a checkpoint that is there")
    real_src, real_dst = os.path.realpath(src), os.path.realpath(path)
    if os.path.commonpath([real_src, real_dst]) == real_dst:
        raise UsageError(f"{path}: is, or holds, the checkpoint to be read; write to another path")
    _refuse_referred(path)
    root = next((key for one in known_formats() for key in one.root_marks if os.path.isfile(os.path.join(path, key))), None)
    if root is not None:
        raise UsageError(
            f"{path}: has the file {root}, so it is the root of a run, which is never replaced; pass the path of one checkpoint "
            "in it"
        )
    try:
        with open_source(path):
            pass
    except CheckpointNotFound as error:
        raise UsageError(f"{path}: holds no checkpoint, and nothing else is replaced; remove it, or pass another path") from error
    except CheckpointError:
        pass  # a damaged one may be replaced
    return path


def _refuse_referred(path: str) -> None:
    """Refuse to replace a checkpoint whose files another one needs.

    Raises
    ------
    UsageError
        Another step of its run refers to them.
    CorruptError
        The catalog of another step is damaged, so nobody knows to which files it refers.
    """
    if os.path.islink(path):
        return  # the link is replaced, and not what it leads to
    with LocalStorage(path) as storage:
        try:
            steps = sorted({step for key, step in referred_by_others(storage).items() if storage.size(key) is not None})
        except CorruptError as error:
            raise CorruptError(f"{path}: is not replaced, as a step beside it may refer to its files: {error}") from error
    if steps:
        raise UsageError(
            f"{path}: is not replaced: {', '.join(steps)} of the same run refer to its files; make them self-contained first "
            f"(reshard-ckpt compact {os.path.dirname(path)}/{steps[0]}), or pass another path"
        )


def _is_occupied(path: str) -> bool:
    """Return whether there is something at a path other than an empty folder."""
    return os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path) or bool(os.listdir(path)))


def _move_into_place(made: str, path: str) -> None:
    """Move the result to its place; what it replaces is deleted with the folder that the result was made in."""
    _refuse_referred(path)  # once more: to make the result may have taken hours
    both_files = os.path.isfile(made) and not os.path.isdir(path)
    replaced = None
    if not _is_occupied(path) or both_files:
        os.rename(made, path)
    elif not swap(made, path):
        replaced = _sibling(path, None, "replaced")
        os.rename(path, replaced)
        os.rename(made, path)
    sync_folder(os.path.dirname(path))
    if replaced is not None:
        _remove(replaced)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
