"""How does a file or folder appear whole, or not at all? Made in a folder beside its place, and moved there when it is durable.

1. The folder is ``.NAME.….partial``, which nothing takes for a checkpoint. Who works in it holds a lock there, which the system
   releases when that process dies; so a second conversion to the same place is refused, and what a killed one left is known.
2. What a killed one left is removed by the next one to the same place, or taken up again: where the caller names what it makes
   (`identity`), the folder is called after that, and found by who makes the same.
3. What is replaced changes places with the new in one step of the file system. Where that has no such step (NFS), it is moved
   aside first, to ``.NAME.….replaced``: a cut between the two moves leaves nothing in its place until the next conversion to it
   puts it back.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

from ..errors import CheckpointError, CheckpointNotFound, StorageError, UsageError
from ..storage import LocalStorage, Lock, LocksUnsupported, MissingKey, open_storage
from ..storage.posix import Explained, sync_folder
from ..storage.swap import swap
from .source import open_source

_LOCK, _RESULT, _NOTES, _WHOLE = "lock", "result", "notes", "whole"
_TRIES = 10


@dataclass(frozen=True, slots=True)
class OutputFolder:
    """Where a result is made.

    Attributes
    ----------
    result
        The path of the file or folder to be. A folder may hold what an attempt left that was killed.
    notes
        A folder for what the next attempt should know; it goes when the result is in its place.
    """

    result: str
    resume_info: str


@contextmanager
def new_folder(dst: str, src: str, *, identity: str | None = None, overwrite: bool) -> Iterator[OutputFolder]:
    """A folder that is at `dst` once the block is done; `src` is what is read meanwhile.

    Where the block raises, nothing is left. Where the process is killed, who passes the same `identity` finds what was made.

    Parameters
    ----------
    identity
        A few hexadecimal digits that say what is made, the same only for the same result; None makes it anew each time.

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
    """The path of a file to be made, which is at `dst` once the block is done."""
    with _partial_folder(dst, src, None, overwrite=overwrite) as (path, partial):
        if os.path.isdir(path) and not os.listdir(path):
            raise UsageError(f"{path}: is a folder, and the result is one file; pass the path of a file in it")
        made = os.path.join(partial, os.path.basename(path))
        yield made
        _move_into_place(made, path)


@contextmanager
def _partial_folder(dst: str, src: str, identity: str | None, *, overwrite: bool) -> Iterator[tuple[str, str]]:
    """The absolute path of the destination, and a folder beside it that is this process's alone."""
    path = _check_destination(dst, src, overwrite=overwrite)
    with Explained("write", path):
        _make_durable_folder(os.path.dirname(path))
        partial, lock = _lock_partial_folder(path, identity)
        with lock or nullcontext():
            try:
                if lock is not None:
                    _remove_leftovers(path, partial)
                _check_destination(dst, src, overwrite=overwrite)  # somebody may have been quicker
                yield path, partial
            finally:
                shutil.rmtree(partial, ignore_errors=True)  # before the lock is let go: then it may be another's


def _lock_partial_folder(path: str, identity: str | None) -> tuple[str, Lock | None]:
    """The folder to work in, and the lock that says so; None where the file system has no locks."""
    for _ in range(_TRIES):
        partial = _sibling(path, identity, "partial")
        try:
            lock = _make_and_lock(partial)
        except LocksUnsupported:
            # Nobody can tell who is alive, so everybody works alone and leaves the others' folders be.
            shutil.rmtree(partial, ignore_errors=True)
            os.mkdir(partial := _sibling(path, None, "partial"))
            return partial, None
        except MissingKey:
            continue  # just before it was locked, somebody took it for a dead one's and removed it
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
    """Remove what attempts left that were killed, and put back what one had moved aside for a result that never came.

    Raises
    ------
    StorageError
        Another attempt is alive.
    """
    folder, name = os.path.split(path)
    ours = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{12}}\.(partial|replaced)")
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
    """Make a folder and those above it that are missing, so that their names survive a power cut."""
    if os.path.isdir(folder):
        return
    above = os.path.dirname(folder)
    _make_durable_folder(above)
    with suppress(FileExistsError):
        os.mkdir(folder)
    sync_folder(above)


def _sibling(path: str, identity: str | None, what: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{(identity or uuid.uuid4().hex)[:12]}.{what}")


def _check_destination(dst: str, src: str, *, overwrite: bool) -> str:
    """The absolute path of a destination that may be written to."""
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
    try:
        with open_source(path):
            pass
    except CheckpointNotFound as error:
        raise UsageError(f"{path}: holds no checkpoint, and nothing else is replaced; remove it, or pass another path") from error
    except CheckpointError:
        pass  # a damaged one may be replaced
    return path


def _is_occupied(path: str) -> bool:
    """Whether there is something at a path, but an empty folder."""
    return os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path) or bool(os.listdir(path)))


def _move_into_place(made: str, path: str) -> None:
    """Move what was made to its place; what is there goes with the folder that it was made in."""
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
