"""The store in a file system: files below one folder, local or shared between nodes.

1. *Write*: folders are walked from the root by descriptor and no symbolic link below the root is followed, so that a link that
   somebody placed there cannot send a write elsewhere. Reading follows links: a user may have moved a file to another disk.
2. *Durable*: a file is synced when it is finished; the folders that name it are synced by `sync`.
3. *Publish*: a temporary file beside the target, fsync, rename, fsync of the folder. A crash before the rename leaves the old
   file, after it the new one; a stray temporary file is all that can remain, and the next `publish` of that key removes it.
"""

from __future__ import annotations

import os
import re
import stat
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache

from ..errors import StorageError
from .locks import FileLock, lock_file
from .posix import (
    FOLDER,
    Explained,
    OpenFiles,
    begin_write_out,
    free_bytes_at,
    locked,
    preadv_all,
    read_at_most,
    sync_folder,
    write_all,
)
from .protocol import (
    Buffer,
    Storage,
    Writer,
    conflict,
    exists,
    flat_bytes,
    folder_parts,
    folders_above,
    key_parts,
    missing,
    short_file,
    too_large,
)

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_MODE, _FOLDER_MODE = 0o664, 0o775
"""The umask takes away from these; no umask makes a checkpoint writable for everybody."""

_WRITE_OUT_BYTES = 8 << 20
"""After so many bytes the kernel is asked to begin writing them to disk, so that little is left to do for the last fsync."""

_NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_MAX_OPEN_FILES = 64
_TRIES = 10


class LocalStorage(Storage):
    """A `Storage` below one folder of the file system, which is made when the first file is."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(root)
        self._open_files = OpenFiles(_MAX_OPEN_FILES)
        self._has_root = False

    @property
    def url(self) -> str:
        return self._root

    def _path(self, parts: Sequence[str]) -> str:
        return os.path.join(self._root, *parts)

    def create(self, key: str) -> LocalWriter:
        *folders, name = parts = key_parts(key)
        path = self._path(parts)
        with Explained("create", path):
            try:
                fd = self._create(folders, name)
            except FileExistsError:
                raise exists(path) from None
        return LocalWriter(self, key, path, fd)

    def _create(self, folders: Sequence[str], name: str) -> int:
        for tries_left in reversed(range(_TRIES)):
            try:
                with self._folder(folders, make=True) as folder:
                    return os.open(name, _NEW_FILE, _FILE_MODE, dir_fd=folder)
            except FileNotFoundError:
                # Another rank that cleans up may remove the folder, as it is empty, just after this one found or made it.
                if not tries_left:
                    raise
        raise AssertionError

    @contextmanager
    def _folder(self, folders: Sequence[str], *, make: bool = False) -> Iterator[int]:
        """Open a folder below the root, without following a link below it; gives its descriptor."""
        if make and not (self._has_root and os.path.isdir(self._root)):
            _make_root(self._root)
            self._has_root = True
        with ExitStack() as stack:
            fd = _opened(stack, self._root, FOLDER)
            for name in folders:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, _FOLDER_MODE, dir_fd=fd)
                fd = _opened(stack, name, FOLDER | os.O_NOFOLLOW, dir_fd=fd)
            yield fd

    def sync(self, keys: Iterable[str]) -> None:
        for parts in folders_above(keys):
            with Explained("sync", self._path(parts)):
                sync_folder(self._path(parts))

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        path = _path_of(self._root, key)
        views = [flat_bytes(buffer) for buffer in buffers]
        with Explained("read", path):
            try:
                left = preadv_all(self._open_files.get(path), views, offset)
            except _NO_FILE:
                raise missing(path) from None
        if left:
            wanted = sum(map(len, views))
            raise short_file(path, offset, wanted, wanted - left)

    def read(self, key: str, limit: int) -> bytes:
        path = self._path(key_parts(key))
        with Explained("read", path):
            try:
                data = read_at_most(path, limit + 1)
            except _NO_FILE:
                raise missing(path) from None
        if len(data) > limit:
            raise too_large(path, limit)
        return data

    def size(self, key: str) -> int | None:
        path = self._path(key_parts(key))
        with Explained("look at", path):
            try:
                status = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def list(self, prefix: str = "") -> list[tuple[str, int]]:
        parts = folder_parts(prefix)
        with Explained("list", self._path(parts)):
            return sorted(_files_below(self._path(parts), "".join(part + "/" for part in parts)))

    def free_bytes(self) -> int | None:
        with Explained("look at the free space of", self._root):
            return free_bytes_at(self._root)

    def folders(self, prefix: str = "") -> tuple[str, ...]:
        parts = folder_parts(prefix)
        with Explained("list", self._path(parts)), suppress(*_NO_FILE):
            entries = os.scandir(self._path(parts))
            return tuple(sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False)))
        return ()

    def lock(self, key: str, *, shared: bool = False, make: bool = False) -> FileLock | None:
        *folders, name = parts = key_parts(key)
        path = self._path(parts)
        # A network file system gives an exclusive lock only to who may write; a shared one must do on a read-only one.
        access = os.O_RDONLY if shared else os.O_RDWR
        # O_NONBLOCK: or a pipe would be waited for.
        flags = access | (os.O_CREAT if make else 0) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        with Explained("lock", path):
            try:
                with self._folder(folders, make=make) as folder:
                    lock = lock_file(os.open(name, flags, _FILE_MODE, dir_fd=folder), path, shared=shared)
                    # Between opening and locking, another process that had it locked may have deleted the file.
                    if lock is not None and not _is_same(name, folder, lock.fd):
                        lock.release()
                        raise missing(path)
            except _NO_FILE:
                raise missing(path) from None
        return lock

    def publish(self, key: str, data: bytes, *, expected: bytes | None = None) -> None:
        *folders, name = parts = key_parts(key)
        path = self._path(parts)
        temporary = f".{name}.{uuid.uuid4().hex}.tmp"
        with Explained("publish", path), self._folder(folders, make=True) as folder, locked(folder):
            try:
                self._compare(path, expected)
                _write_new(folder, temporary, data)
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                self._remove_empty(folders)
                raise
            self._open_files.forget(path)
            sync_folder(folder)
            for n in reversed(range(len(folders))):
                sync_folder(self._path(folders[:n]))
            _remove_temporaries(folder, name)

    def _compare(self, path: str, expected: bytes | None) -> None:
        if expected is None:
            return
        try:
            current = read_at_most(path, len(expected) + 1)
        except FileNotFoundError:
            current = b""
        if current != expected:
            raise conflict(path, expected, current)

    def delete(self, keys: Iterable[str]) -> None:
        folders: set[tuple[str, ...]] = set()
        for key in keys:
            *above, name = parts = key_parts(key)
            path = self._path(parts)
            with Explained("delete", path):
                self._open_files.forget(path)
                with suppress(FileNotFoundError), self._folder(above) as folder:
                    os.unlink(name, dir_fd=folder)
            folders.add(tuple(above))
        for parts in sorted(folders, key=len, reverse=True):
            self._remove_empty(parts)

    def _remove_empty(self, folders: Sequence[str]) -> None:
        """Remove a folder below the root and those above it, as far as they are empty."""
        # Refused where one is not empty, or where another rank was quicker: both are fine.
        with suppress(OSError):
            for n in range(len(folders), 0, -1):
                with self._folder(folders[: n - 1]) as folder:
                    os.rmdir(folders[n - 1], dir_fd=folder)

    def close(self) -> None:
        self._open_files.clear()


class LocalWriter(Writer):
    """A new file below a `LocalStorage`."""

    def __init__(self, storage: LocalStorage, key: str, path: str, fd: int) -> None:
        self._storage, self._key, self._path = storage, key, path
        self._fd: int | None = fd
        self._done = False
        self._written = self._begun = 0

    def write(self, data: Buffer) -> None:
        if self._fd is None:
            raise ValueError(f"{self._path}: written after it was closed")
        with Explained("write", self._path):
            view = flat_bytes(data)
            write_all(self._fd, view)
        self._written += len(view)
        if self._written - self._begun >= _WRITE_OUT_BYTES:
            begin_write_out(self._fd, self._begun, self._written - self._begun)
            self._begun = self._written

    def finish(self) -> None:
        if self._done:
            return
        with Explained("write", self._path):
            if self._fd is not None:
                os.fsync(self._fd)
            self._close()  # network file systems report a failed write as late as here
        self._done = True

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def abort(self) -> None:
        if self._done:
            return
        self._done = True
        # The caller raises the reason for this abort; that the clean-up failed too must not hide it.
        with suppress(OSError):
            self._close()
        with suppress(StorageError):
            self._storage.delete([self._key])


@lru_cache(1024)
def _path_of(root: str, key: str) -> str:
    """The path of a key; kept, as between the reads of a load each step of Python takes several times as long as elsewhere."""
    return os.path.join(root, *key_parts(key))


def _is_same(name: str, folder: int, fd: int) -> bool:
    """Tell whether the file of that name is still the one that is open."""
    try:
        return os.path.samestat(os.stat(name, dir_fd=folder, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def _opened(stack: ExitStack, path: str, flags: int, *, dir_fd: int | None = None) -> int:
    fd = os.open(path, flags, dir_fd=dir_fd)
    stack.callback(_close_folder, fd)
    return fd


def _close_folder(fd: int) -> None:
    with suppress(OSError):  # it was only looked through, so nothing is lost; to fail now would lose what was opened in it
        os.close(fd)


def _make_root(path: str) -> None:
    """Make a folder and what is missing above it, each durably: `sync` does not look above the root."""
    above = os.path.dirname(path)
    if not os.path.isdir(path):
        _make_root(above)
        with suppress(FileExistsError):
            os.mkdir(path, _FOLDER_MODE)
    # Also where it is there: its maker may have been killed before this. A folder that may not be read is not ours.
    with suppress(PermissionError):
        sync_folder(above)


def _remove_temporaries(folder: int, name: str) -> None:
    """Remove temporary files of killed publishers of this name; to publish takes the folder's lock, so none of them is alive."""
    stray = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{32}}\.tmp")
    with suppress(OSError):  # it is published: what cannot be removed now is no reason to fail
        for found in os.listdir(folder):
            if stray.fullmatch(found):
                os.unlink(found, dir_fd=folder)


def _write_new(folder: int, name: str, data: bytes) -> None:
    fd = os.open(name, _NEW_FILE, _FILE_MODE, dir_fd=folder)
    try:
        write_all(fd, flat_bytes(data))
        os.fsync(fd)
    finally:
        os.close(fd)


def _files_below(path: str, start: str) -> Iterator[tuple[str, int]]:
    try:
        entries = list(os.scandir(path))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files_below(entry.path, f"{start}{entry.name}/")
            continue
        # Another rank may delete while this one looks; a link may lead nowhere.
        with suppress(FileNotFoundError):
            status = entry.stat()
            if stat.S_ISREG(status.st_mode):
                yield start + entry.name, status.st_size
