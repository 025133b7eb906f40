"""The folder of a run on one node, below ``/dev/shm``: making it, checking its owner, counting the node's free memory.

::

    /dev/shm/reshard-ckpt-<uid>/                           mode 0700; its owner is checked, links are not followed
      node                                                 a symbolic link whose text is the random id of the node
      <digest of the root>/                                one run; every path to the same root gives the same digest
        root                                               a symbolic link to the root, for people
        lineage                                            copy of a note that the store refuses: `lineage_copy`
        alive                                              locked by each process of the job (`enter_run`)
        lock                                               locked while slots are made or removed (`node_lock`)
        <random>.slot                                      images: `slots`
        <run>-<attempt>-<step>-<number>-<save id>.gen      generations: `generations`
        spare                                              memory that is reserved for the next generation

Slots, generations, the copy of the lineage and the spare file take memory. The others take none: they are empty, or links whose
text lies in the inode. So a job finds the checkpoints in memory also if something else has filled the tmpfs.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ..comm.peers import machine_id
from ..errors import StorageError
from ..format.files import digest128
from ..storage import open_storage
from ..storage.posix import FileLock, await_lock, lock_file

FOLDER = "/dev/shm"
SLOT_SUFFIX, GENERATION_SUFFIX, _TEMPORARY_SUFFIX = ".slot", ".gen", ".tmp"
_RUN = re.compile(r"[0-9a-f]{32}")
_ALIVE = "alive"
"""Name of the file in a run's folder that each process of the run keeps locked (shared)."""
RESERVE_SHARE = 0.05
"""Fraction of the free memory of a cgroup that slots do not take, but leave to other processes."""


class NoRoom(StorageError):
    """Raised if this node has too little memory for a save. The save then goes to the store instead."""


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
_NEXT_STEP = "list what is there with reshard-ckpt memory list, free memory, or pass Memory(folder=…)"
"""The next step in errors of the system about a node's folder."""


class RunMemory(NamedTuple):
    """The memory of one run on this node: the run's root, the path of its folder on the tmpfs, and the bytes that it takes."""

    root: str
    path: Path
    num_bytes: int


def user_folder(folder: str) -> Path:
    """Return the absolute path of this user's folder, and make the folder if it is missing.

    Raise `NoRoom` if the tmpfs has too little memory to make it, and `StorageError` if the folder is a link, belongs to another
    user, or gives rights to other users.
    """
    path = _user_path(folder)
    with _explained(path):
        os.makedirs(folder, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        _check_owner(path)
    return path


def _user_path(folder: str) -> Path:
    # Absolute, because the process may change its working directory later.
    return Path(os.path.abspath(folder)) / f"reshard-ckpt-{os.getuid()}"


def _check_owner(path: Path) -> None:
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise StorageError(
            f"{path}: must be a folder of this user (uid {os.getuid()}) with mode 0700, and is of uid {found.st_uid} with mode "
            f"{stat.S_IMODE(found.st_mode):04o}; remove it, or pass Memory(folder=…)"
        )


def real_root(root: str) -> str:
    """Return one name for all paths to a root: its absolute path without links, or its URL if it is not a folder."""
    url = open_storage(root).url
    return url if "://" in url else os.path.realpath(url)


def run_path(folder: str, root: str) -> Path:
    """Return the path of a run's folder on this node, whether it exists or not. Make nothing.

    Raise `StorageError` if this user's folder is a link, belongs to another user, or gives rights to other users.
    """
    path = _user_path(folder)
    with _explained(path), suppress(FileNotFoundError):
        _check_owner(path)
    return path / digest128(os.fsencode(real_root(root))).hex()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an OSError of the ``with`` block into a `NoRoom` if the tmpfs is full, else into a `StorageError`, with advice."""
    try:
        yield
    except OSError as error:
        kind = NoRoom if error.errno in _FULL else StorageError
        raise kind(f"{path}: {error.strerror}; {_NEXT_STEP}") from error


def files_in(folder: Path, suffix: str) -> list[Path]:
    """List the files of a run's folder whose names end with a suffix, sorted by name. Return [] if the folder does not exist.

    Raise `StorageError` if the folder exists and cannot be listed, so it may hold such files.
    """
    with _explained(folder):
        try:
            return [folder / name for name in sorted(os.listdir(folder)) if name.endswith(suffix)]
        except FileNotFoundError:
            return []


@contextmanager
def passing_over_gone(path: Path) -> Iterator[None]:
    """Skip the rest of the ``with`` block if `path` is gone, or is a link. Raise any other OSError as a `StorageError`."""
    with _explained(path):
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise


def run_folder(folder: str, root: str) -> Path:
    """Make the folder of a run on this node if it is missing, and return its path.

    Raise `NoRoom` if the tmpfs has too little memory to make it, and `StorageError` if the folder cannot be made, or is a link.
    """
    path = user_folder(folder) / run_path(folder, root).name
    with _explained(path):
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if path.is_symlink():
                raise StorageError(f"{path}: is a link; remove it") from None
            if not path.is_dir():
                raise
        with suppress(FileExistsError):
            os.symlink(real_root(root), path / "root")
    return path


def enter_run(folder: Path, timeout_s: float) -> FileLock:
    """Lock a run's folder as in use by this process, and return the lock. Other processes of the run may hold such locks too.

    The system releases it when the process ends.
    """
    with _explained(folder):
        fd = os.open(folder / _ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    return await_lock(fd, str(folder / _ALIVE), shared=True, timeout_s=timeout_s)


def is_entered(folder: Path) -> bool:
    """Tell whether a living process of the run is on this node: one that has called `enter_run`."""
    with _explained(folder):
        try:
            fd = os.open(folder / _ALIVE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
    lock = lock_file(fd, str(folder / _ALIVE), shared=False)
    if lock is not None:
        lock.release()
    return lock is None


def node_id(folder: str) -> str:
    """Return the id of this node. The first process makes it at random and keeps it on the tmpfs, so it is lost with the memory.

    If the tmpfs has no room for it, every process of the machine derives the same id from the machine's id and the folder.
    """
    try:
        path = user_folder(folder) / "node"
        with _explained(path):
            with suppress(FileExistsError):  # another process was first: its id is the one
                os.symlink(secrets.token_hex(16), path)
            text = os.readlink(path) if path.is_symlink() else path.read_text()  # an earlier version kept the id in a file
    except NoRoom:
        return digest128(os.fsencode(f"{machine_id()} {os.path.realpath(folder)}")).hex()
    if not _RUN.fullmatch(text):
        raise StorageError(f"{path}: holds no node id; remove it while no job runs here")
    return text


def runs(folder: str) -> Iterator[RunMemory]:
    """Yield the memory that each run of this user takes on this node."""
    user = _user_path(folder)
    with _explained(user):
        try:
            _check_owner(user)
            names = sorted(os.listdir(user))
        except FileNotFoundError:
            return
    for path in [user / name for name in names]:
        if _RUN.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            try:
                root = os.readlink(path / "root")
            except OSError:
                root = "?"
            yield RunMemory(root, path, _bytes_in(path))


def _bytes_in(path: Path) -> int:
    num_bytes = 0
    with suppress(FileNotFoundError):  # its job, or a process that drops the run, may delete files meanwhile
        for name in os.listdir(path):
            with suppress(FileNotFoundError):
                num_bytes += os.lstat(path / name).st_blocks * 512
    return num_bytes


def remove_run(path: Path) -> None:
    """Delete a run's folder on this node, with all its checkpoints in memory.

    Raise `StorageError` if the folder cannot be deleted, or another process is deleting it too.
    """
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be dropped: {error.strerror}; look again with reshard-ckpt memory list") from error


def write_atomically(path: Path, data: bytes, spare: Path | None = None) -> None:
    """Write a small file under a temporary name and rename it into place, so that readers see all of it or nothing.

    If the file `spare` exists, it becomes the temporary file, so the memory that it has reserved is used.
    """
    own = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_TEMPORARY_SUFFIX}")
    try:
        if spare is not None:
            with suppress(FileNotFoundError):
                os.rename(spare, own)
        fd = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.truncate()
        os.replace(own, path)
    except OSError as error:
        own.unlink(missing_ok=True)
        raise StorageError(f"{path}: {error.strerror}; {_NEXT_STEP}") from error


def remove_temporaries(folder: Path) -> None:
    """Delete the files that killed calls of `write_atomically` have left in a run's folder. No such call may be running there."""
    for path in files_in(folder, _TEMPORARY_SUFFIX):
        with suppress(OSError):  # it takes memory, and does no other harm
            path.unlink()


def free_bytes(folder: str) -> int:
    """Return the bytes that saves may still take on this node: the least of the free tmpfs and of the rest of each cgroup."""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    for cgroup in _cgroups():
        for limit, used, cache in (  # first the names of cgroup v2, then those of v1
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with suppress(OSError, ValueError, StopIteration):
                most, now = int((cgroup / limit).read_text()), int((cgroup / used).read_text())
                lines = (cgroup / "memory.stat").read_text().splitlines()
                now -= next(int(line.split()[1]) for line in lines if line.startswith(f"{cache} "))  # the kernel frees these
                free = min(free, int((most - now) * (1 - RESERVE_SHARE)))
    return max(free, 0)


def _cgroups() -> Iterator[Path]:
    """Yield the folder of this process's memory cgroup, then those of its parents, up to the top that this process can see."""
    base = Path("/sys/fs/cgroup")
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)  # "0::/path" is cgroup v2, "7:memory:/path" is v1
            if kinds in ("", "memory"):
                top = base / kinds
                own = top / path.lstrip("/")
                yield from (folder for folder in (own, *own.parents) if folder == top or top in folder.parents)
