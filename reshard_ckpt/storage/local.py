"""The store in a file system: files below one folder, local or shared between nodes.

1. *Write*: folders are opened one by one from the root, by descriptor, and symbolic links below the root are refused. So a link
   that somebody placed there cannot send a write elsewhere. Reads follow links: a user may have moved a file to another disk.
2. *Durable*: `Writer.finish` syncs a file; `sync` syncs the folders that have its name, also for files of other processes. So
   one process may sync the folders for all processes that wrote there.
3. *Publish*: a temporary file beside the target, fsync, rename, fsync of the folder. A crash before the rename leaves the old
   file, after it the new one. Only a temporary file can be left over, and the next `publish` of that key removes it.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache

import xxhash

from ..errors import StorageError
from .posix import (
    FOLDER,
    MOMENTS_S,
    Explained,
    FileLock,
    OpenFiles,
    begin_write_out,
    free_bytes_at,
    lock_file,
    locked,
    preadv_all,
    read_at_most,
    stamp_of,
    sync_folder,
    write_all,
)
from .protocol import (
    ABSENT,
    ANY,
    Buffer,
    Document,
    PublishUnknown,
    Storage,
    Version,
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
"""Permissions of new files and folders, before the umask. They do not let everybody write, whatever the umask."""

_WRITE_OUT_BYTES = 8 << 20
"""Each time that a writer has written this many bytes, the kernel is asked to begin to write them to disk, so that the last fsync
is short."""

_NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_MAX_OPEN_FILES = 64
"""The most files that stay open between reads; a process may have 1,024 descriptors in all."""

_TRIES = 10
"""Number of attempts to create a file, if another rank removes the empty folder for it meanwhile."""


class LocalStorage(Storage):
    """A `Storage` below one folder of the file system. The first file that is created creates the folder too.

    Parameters
    ----------
    timeout_s
        Seconds that `publish` waits for the lock of a folder that another process has (`await_lock`).
    """

    def __init__(self, root: str | os.PathLike[str], *, timeout_s: float = MOMENTS_S) -> None:
        self._root, self._timeout_s = os.path.abspath(root), timeout_s
        self._open_files = OpenFiles(_MAX_OPEN_FILES)
        self._is_root_durable = False

    @property
    def url(self) -> str:
        return self._root

    def _path(self, parts: Sequence[str]) -> str:
        return os.path.join(self._root, *parts)

    def create(self, key: str, size: int | None = None, *, replace: bool = False) -> LocalWriter:
        if replace:
            self.delete([key])
        return self._writer(key, _NEW_FILE)

    def write_at(self, key: str, offset: int) -> LocalWriter:
        return self._writer(key, _NEW_FILE & ~os.O_EXCL, offset)

    def _writer(self, key: str, flags: int, begin: int | None = None) -> LocalWriter:
        *folders, name = parts = key_parts(key)
        path = self._path(parts)
        with Explained("create", path):
            for tries_left in reversed(range(_TRIES)):
                try:
                    with self._folder(folders, make=True) as folder:
                        return LocalWriter(self, key, path, os.open(name, flags, _FILE_MODE, dir_fd=folder), begin)
                except FileExistsError:
                    raise exists(path) from None
                except FileNotFoundError:
                    # Another rank that cleans up may remove the empty folder just after this rank found or made it.
                    if not tries_left:
                        raise
        raise AssertionError

    @contextmanager
    def _folder(self, folders: Sequence[str], *, make: bool = False) -> Iterator[int]:
        """Open a folder below the root, and yield its descriptor. Symbolic links below the root are not followed."""
        if make and not os.path.isdir(self._root):
            make_durable_folder(os.path.realpath(self._root))  # a link to a folder that is not there yet
            self._is_root_durable = True
        with ExitStack() as stack:
            fd = stack.enter_context(_opened(self._root, FOLDER))
            for name in folders:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, _FOLDER_MODE, dir_fd=fd)
                fd = stack.enter_context(_opened(name, FOLDER | os.O_NOFOLLOW, dir_fd=fd))
            yield fd

    def sync(self, keys: Iterable[str]) -> None:
        parts_above = folders_above(keys)
        self._sync_root()
        for parts in parts_above:
            with Explained("sync", self._path(parts)):
                sync_folder(self._path(parts))

    def _sync_root(self) -> None:
        """Make the name of the root folder durable, once: another process may have made it, and may have been killed since."""
        if not self._is_root_durable:
            # A folder above that this user cannot read is not this job's.
            with Explained("sync the folder above it", self._root), suppress(PermissionError):
                sync_folder(os.path.dirname(self._root))
            self._is_root_durable = True

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

    def document(self, key: str, limit: int) -> Document:
        path = self._path(key_parts(key))
        with Explained("read", path):
            try:
                data = read_at_most(path, limit + 1)
            except _NO_FILE:
                raise missing(path) from None
        if len(data) > limit:
            raise too_large(path, limit)
        return Document(data, version_of(data))

    def size(self, key: str) -> int | None:
        path = self._path(key_parts(key))
        with Explained("look at", path):
            try:
                status = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def stamp(self, key: str) -> object:
        with suppress(OSError):
            return stamp_of(os.stat(_path_of(self._root, key)))
        return None

    def first_stamp(self, key: str) -> object:
        return self._open_files.first_stamp(_path_of(self._root, key)) or self.stamp(key)

    def list(self, prefix: str = "") -> list[tuple[str, int]]:
        parts = folder_parts(prefix)
        with Explained("list", self._path(parts)):
            if any(os.path.islink(self._path(parts[: n + 1])) for n in range(len(parts))):
                return []  # as if this were a part of the list of all files
            return sorted(_files_below(self._path(parts), "".join(part + "/" for part in parts)))

    def free_bytes(self) -> int | None:
        with Explained("look at the free space of", self._root):
            return free_bytes_at(self._root)

    def folders(self, prefix: str = "", *, linked: bool = False) -> tuple[str, ...]:
        parts = folder_parts(prefix)
        with Explained("list", self._path(parts)), suppress(*_NO_FILE):
            entries = os.scandir(self._path(parts))
            # Where a link leads is not looked at, so that a disk that does not answer fails the call that needs it, by name.
            return tuple(sorted(e.name for e in entries if e.is_dir(follow_symlinks=False) or (linked and e.is_symlink())))
        return ()

    def lock(self, key: str, *, shared: bool = False, make: bool = False) -> FileLock | None:
        *folders, name = parts = key_parts(key)
        path = self._path(parts)
        # On a network file system an exclusive lock needs a file open for writing; a shared lock must work on a read-only one.
        access = os.O_RDONLY if shared else os.O_RDWR
        # O_NONBLOCK: otherwise opening a pipe would wait for its other end.
        flags = access | (os.O_CREAT if make else 0) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        with Explained("lock", path):
            try:
                with self._folder(folders, make=make) as folder:
                    lock = lock_file(os.open(name, flags, _FILE_MODE, dir_fd=folder), path, shared=shared)
                    if lock is not None:
                        try:
                            # Between opening and locking, the process that held the lock may have deleted the file.
                            if not _is_same(name, folder, lock.fd):
                                raise missing(path)
                        except BaseException:  # whoever keeps the error would keep the lock
                            lock.release()
                            raise
            except _NO_FILE:
                raise missing(path) from None
        return lock

    def publish(self, key: str, data: bytes, *, expected: Version = ANY) -> Version:
        *folders, name = parts = key_parts(key)
        path = self._path(parts)
        temporary = f".{name}.{uuid.uuid4().hex}.tmp"
        with Explained("publish", path), self._folder(folders, make=True) as folder, locked(folder, self._timeout_s):
            self._sync_root()
            try:
                self._compare(path, expected)
                _write_new(folder, temporary, data)
                try:
                    os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                except OSError as error:
                    _refuse_unknown(error, folder, temporary, path)
                    raise
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
        return version_of(data)

    def _compare(self, path: str, expected: Version) -> None:
        if expected == ANY:
            return
        try:
            current = version_of(read_at_most(path, sys.maxsize))
        except FileNotFoundError:
            current = ABSENT
        if current != expected:
            raise conflict(path, expected, current)

    def delete(self, keys: Iterable[str]) -> None:
        names: dict[tuple[str, ...], set[str]] = defaultdict(set)
        for key in keys:
            *above, name = key_parts(key)
            names[tuple(above)].add(name)
        errors: list[StorageError] = []
        for folders in sorted(names, key=len, reverse=True):
            where = self._path(folders)
            with _kept(errors), Explained("delete", where), suppress(FileNotFoundError), self._folder(folders) as folder:
                for name in sorted(names[folders]):  # in the same order in each process
                    path = self._path((*folders, name))
                    self._open_files.forget(path)
                    with _kept(errors), Explained("delete", path), suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=folder)
            self._remove_empty(folders)
        for error in errors:
            raise error

    def _remove_empty(self, folders: Sequence[str]) -> None:
        """Remove a folder below the root and the folders above it, as long as they are empty."""
        # The system refuses to remove a folder that is not empty, or that another rank has removed: both are fine.
        with suppress(OSError):
            for n in range(len(folders), 0, -1):
                with self._folder(folders[: n - 1]) as folder:
                    os.rmdir(folders[n - 1], dir_fd=folder)

    def close(self) -> None:
        self._open_files.clear()


class LocalWriter(Writer):
    """Writes a new file below a `LocalStorage`. With `begin`, only from that byte on, as other processes write the rest."""

    def __init__(self, storage: LocalStorage, key: str, path: str, fd: int, begin: int | None) -> None:
        self._storage, self._key, self._where = storage, key, path
        self._fd: int | None = fd
        self._is_own = begin is None
        self._written = self._begun = os.lseek(fd, begin or 0, os.SEEK_SET)

    def _write(self, view: memoryview) -> None:
        assert self._fd is not None
        with Explained("write", self._where):
            write_all(self._fd, view)
        self._written += len(view)
        if self._written - self._begun >= _WRITE_OUT_BYTES:
            begin_write_out(self._fd, self._begun, self._written - self._begun)
            self._begun = self._written

    def _finish(self) -> None:
        with Explained("write", self._where):
            if self._fd is not None:
                os.fsync(self._fd)
            self._close()  # network file systems may report a failed write only here

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _abort(self) -> None:
        with suppress(OSError):
            self._close()
        if self._is_own:
            with suppress(StorageError):
                self._storage.delete([self._key])


def version_of(data: Buffer) -> Version:
    """Return the version of a file's contents, to be compared when the file is replaced. It is a digest of the bytes."""
    return Version(xxhash.xxh3_128_hexdigest(data))


@lru_cache(1024)
def _path_of(root: str, key: str) -> str:
    """Return the path of a file by its key. Cached: a load calls this between reads, where Python is several times slower."""
    return os.path.join(root, *key_parts(key))


def _is_same(name: str, folder: int, fd: int) -> bool:
    """Return whether `name`, in an open folder, still names the file that the descriptor `fd` has open."""
    try:
        return os.path.samestat(os.stat(name, dir_fd=folder, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


@contextmanager
def _opened(path: str, flags: int, *, dir_fd: int | None = None) -> Iterator[int]:
    """Open a path with ``os.open``, yield the descriptor, and close it after the ``with`` block."""
    fd = os.open(path, flags, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        with suppress(OSError):  # nothing was written to it; raising an error would lose the result of the block
            os.close(fd)


@contextmanager
def _kept(errors: list[StorageError]) -> Iterator[None]:
    """Append a `StorageError` of the ``with`` block to a list, so that other files are still deleted."""
    try:
        yield
    except StorageError as error:
        errors.append(error)


def make_durable_folder(path: str) -> None:
    """Make a folder and the missing folders above it, durably: sync the folder above each.

    `LocalStorage.sync` looks no further up than the folder above the root.
    """
    above = os.path.dirname(path)
    if not os.path.isdir(path):
        make_durable_folder(above)
        with suppress(FileExistsError):
            os.mkdir(path, _FOLDER_MODE)
    # Also if it existed: its maker may have been killed before it synced. A folder that this user cannot read is not ours.
    with suppress(PermissionError):
        sync_folder(above)


def _remove_temporaries(folder: int, name: str) -> None:
    """Remove temporary files of killed `publish` calls of a file. The caller holds the folder's lock, so no such call runs."""
    stray = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{32}}\.tmp")
    with suppress(OSError):  # the new file is published: a leftover that cannot be removed now does no harm
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


def _refuse_unknown(error: OSError, folder: int, temporary: str, path: str) -> None:
    """After a failed rename delete the temporary file. Raise `PublishUnknown` if it is gone, so the rename may have been done.

    A network file system may lose the answer to a rename, and then show the old file from its cache. It cannot answer a deletion
    from its cache.
    """
    try:
        os.unlink(temporary, dir_fd=folder)
    except FileNotFoundError:
        reason = f"{path}: cannot publish: {error.strerror}; it may hold the new file or the old one: load it, or save again"
        raise PublishUnknown(reason) from error
    except OSError:
        pass  # the error of the rename says more


def _files_below(path: str, start: str) -> Iterator[tuple[str, int]]:
    try:
        entries = list(os.scandir(path))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files_below(entry.path, f"{start}{entry.name}/")
            continue
        try:
            status = entry.stat()
        except FileNotFoundError:
            # A link may lead nowhere. A file was deleted meanwhile; or the system denies it from a cache, and the list is newer.
            if entry.is_file(follow_symlinks=False):
                yield start + entry.name, 0
            continue
        if stat.S_ISREG(status.st_mode):
            yield start + entry.name, status.st_size
