"""The tier's folder on one node: one per user and run, below ``/dev/shm``; who may use it, and how much memory there is.

::

    /dev/shm/reshard-ckpt-1000/             mode 0700, of this user; links are not followed
      node                                  the node's random id
      <run>/                                by digest of the run's root, whatever path leads there
        root                                the root, for people
        <n>.slot                            images: `slots`
        <attempt>-<step>-<save id>.gen      generations: `generations`
        spare                               memory for the next of them
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
    StorageError
        It is a link, belongs to somebody else, or is open to others.
    """
    path = Path(os.path.abspath(folder)) / f"reshard-ckpt-{os.getuid()}"
    try:
        os.makedirs(folder, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        found = os.lstat(path)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}; pass Memory(folder=…) of a tmpfs that this user can write") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise StorageError(
            f"{path}: must be a folder of this user (uid {os.getuid()}) with mode 0700, and is of uid {found.st_uid} with mode "
            f"{stat.S_IMODE(found.st_mode):04o}; remove it, or pass Memory(folder=…)"
        )
    return path


def real_root(root: str) -> str:
    """Return the one name of a root that any path to it has: absolute, without links; that of a store in memory is its URL."""
    url = open_storage(root).url
    return url if "://" in url else os.path.realpath(url)


def run_path(folder: str, root: str) -> Path:
    """Return where the folder of a run is, or would be."""
    return user_folder(folder) / digest128(os.fsencode(real_root(root))).hex()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
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
    StorageError
        It cannot be made, or is a link.
    """
    path = run_path(folder, root)
    with _explained(path):
        path.mkdir(mode=0o700, exist_ok=True)
        if path.is_symlink():
            raise StorageError(f"{path}: is a link; remove it")
        note = path / "root"
        if not note.exists():
            write_atomically(note, os.fsencode(real_root(root)))
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
    """Return the id of this node: random, made by whoever comes first, and gone with the node's memory."""
    path = user_folder(folder) / "node"
    own = path.with_name(f"node.{secrets.token_hex(8)}")
    try:
        return _read_id(path)
    except FileNotFoundError:
        pass
    write_atomically(own, secrets.token_hex(16).encode())
    with _explained(path):
        try:
            os.link(own, path)  # fails where another process was first, and its id counts
        except FileExistsError:
            pass
        finally:
            own.unlink()
    return _read_id(path)


def _read_id(path: Path) -> str:
    text = path.read_text()
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
    for path in sorted(user_folder(folder).iterdir()):
        if _RUN.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            try:
                root = os.fsdecode((path / "root").read_bytes())
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
