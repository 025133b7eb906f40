"""The tier's folder on one node: one per user and run, below ``/dev/shm``; who may use it, and how much memory there is.

::

    /dev/shm/reshard-ckpt-1000/             mode 0700, of this user; links are not followed
      node                                  a link whose text is the node's random id
      <run>/                                by digest of the run's root, whatever path leads there
        root                                a link to the root, for people
        <n>.slot                            images: `slots`
        <attempt>-<step>-<save id>.gen      generations: `generations`
        spare                               memory for the next of them

A tmpfs without free memory takes all of these but images and generations: the text of a link lies in its inode. So a job finds
what is there, also where something else has filled the tmpfs.
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
from dataclasses import dataclass
from pathlib import Path

from ..errors import StorageError
from ..format.checksums import digest128
from ..storage import open_storage
from ..storage.locks import FileLock, await_lock, lock_file

FOLDER = "/dev/shm"
SLOT_SUFFIX, GENERATION_SUFFIX = ".slot", ".gen"
_RUN = re.compile(r"[0-9a-f]{32}")
_ALIVE = "alive"
"""Of a run's folder, the file that its processes hold locked."""
RESERVE_SHARE = 0.05
"""Of the memory that is free by the cgroup's count: what is left for others."""


class NoRoom(StorageError):
    """There is no memory; the save goes on without the tier."""


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)


@dataclass(frozen=True, slots=True)
class RunMemory:
    """What the tier of this node holds of one run."""

    root: str
    path: str
    num_bytes: int


def user_folder(folder: str) -> Path:
    """Return the folder of this user, made where there is none; its path is absolute, as the process may go elsewhere.

    Raises
    ------
    NoRoom
        There is no memory to make it.
    StorageError
        It is a link, belongs to somebody else, or is open to others.
    """
    path = _user_path(folder)
    try:
        os.makedirs(folder, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        _check_owner(path)
    except OSError as error:
        kind = NoRoom if error.errno in _FULL else StorageError
        raise kind(f"{path}: {error.strerror}; pass Memory(folder=…) of a tmpfs that this user can write") from error
    return path


def _user_path(folder: str) -> Path:
    return Path(os.path.abspath(folder)) / f"reshard-ckpt-{os.getuid()}"


def _check_owner(path: Path) -> None:
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise StorageError(
            f"{path}: must be a folder of this user (uid {os.getuid()}) with mode 0700, and is of uid {found.st_uid} with mode "
            f"{stat.S_IMODE(found.st_mode):04o}; remove it, or pass Memory(folder=…)"
        )


def real_root(root: str) -> str:
    """Return the one name of a root that any path to it has: absolute, without links; that of a store in memory is its URL."""
    url = open_storage(root).url
    return url if "://" in url else os.path.realpath(url)


def run_path(folder: str, root: str) -> Path:
    """Return where the folder of a run is, or would be; nothing is made.

    Raises
    ------
    StorageError
        This user's folder is a link, belongs to somebody else, or is open to others.
    """
    path = _user_path(folder)
    with _explained(path), suppress(FileNotFoundError):
        _check_owner(path)
    return path / digest128(os.fsencode(real_root(root))).hex()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = NoRoom if error.errno in _FULL else StorageError
        raise kind(
            f"{path}: {error.strerror}; look what is there with reshard-ckpt memory list, free memory, or pass Memory(folder=…)"
        ) from error


def files_in(folder: Path, suffix: str) -> list[Path]:
    """List the files of a run's folder that end so, in order; none where there is no such folder.

    Raises
    ------
    StorageError
        It cannot be listed, which does not mean that there are none.
    """
    with _explained(folder):
        try:
            return [folder / name for name in sorted(os.listdir(folder)) if name.endswith(suffix)]
        except FileNotFoundError:
            return []


@contextmanager
def passing_over_gone(path: Path) -> Iterator[None]:
    """Pass over a file that has gone meanwhile, or a link, which is not followed; that it cannot be opened means neither."""
    with _explained(path):
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise


def run_folder(folder: str, root: str) -> Path:
    """Return the folder of a run, made where there is none.

    Raises
    ------
    NoRoom
        There is no memory to make it.
    StorageError
        It cannot be made, or is a link.
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


def enter_run(folder: Path) -> FileLock:
    """Say that a process of the run is there, until the lock that is returned is released, or the process ends."""
    with _explained(folder):
        fd = os.open(folder / _ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    return await_lock(fd, str(folder / _ALIVE), shared=True)


def is_entered(folder: Path) -> bool:
    """Tell whether a process of the run is there."""
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
    """Return the id of this node: random, made by whoever comes first, and gone with the node's memory.

    Where there is no memory to keep one, all processes of the machine make the same one of the machine's id and the folder.
    """
    try:
        path = user_folder(folder) / "node"
        with _explained(path):
            with suppress(FileExistsError):  # another process was first, and its id counts
                os.symlink(secrets.token_hex(16), path)
            text = os.readlink(path) if path.is_symlink() else path.read_text()  # a file is an earlier version's
    except NoRoom:
        return digest128(os.fsencode(f"{machine_id()} {os.path.realpath(folder)}")).hex()
    if not _RUN.fullmatch(text):
        raise StorageError(f"{path}: holds no node id; remove it while no job runs here")
    return text


def machine_id() -> str:
    """Return what tells this machine, since it was started, from others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def runs(folder: str) -> Iterator[RunMemory]:
    """Yield what the tier of this node holds of each run."""
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
            yield RunMemory(root, str(path), _bytes_in(path))


def _bytes_in(path: Path) -> int:
    num_bytes = 0
    with suppress(FileNotFoundError):  # its job, or who drops it, removes files meanwhile
        for name in os.listdir(path):
            with suppress(FileNotFoundError):
                num_bytes += os.lstat(path / name).st_blocks * 512
    return num_bytes


def remove_run(path: Path) -> None:
    """Remove all that the tier of this node holds of a run.

    Raises
    ------
    StorageError
        It cannot be removed, or somebody else removes it too.
    """
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be dropped: {error.strerror}; look again with reshard-ckpt memory list") from error


def write_atomically(path: Path, data: bytes, spare: Path | None = None) -> None:
    """Put a small file in place: whole or not at all; in the memory of a `spare` one, if that is there."""
    own = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
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
        raise StorageError(f"{path}: {error.strerror}") from error


def free_bytes(folder: str) -> int:
    """Count the bytes that slots may still take on this node: what the tmpfs has left, and what each cgroup around us allows."""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    for cgroup in _cgroups():
        for limit, used, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with suppress(OSError, ValueError, StopIteration):
                most, now = int((cgroup / limit).read_text()), int((cgroup / used).read_text())
                lines = (cgroup / "memory.stat").read_text().splitlines()
                now -= next(int(line.split()[1]) for line in lines if line.startswith(f"{cache} "))  # the kernel gives this back
                free = min(free, int((most - now) * (1 - RESERVE_SHARE)))
    return max(free, 0)


def _cgroups() -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of those around it, as far as they are seen from here."""
    base = Path("/sys/fs/cgroup")
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds in ("", "memory"):
                top = base / kinds
                own = top / path.lstrip("/")
                yield from (folder for folder in (own, *own.parents) if folder == top or top in folder.parents)
