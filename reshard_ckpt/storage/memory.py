"""The store in this process's memory: files under ``memory://name``, shared by the whole process.

Stores of one name have the same files. The store ``run`` also has the files of the store ``run/step_100``, as a folder on a disk
has the files of folders below it. A deleted file frees its memory.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from ..errors import StorageError
from .local import version_of
from .protocol import (
    ABSENT,
    ANY,
    Document,
    Hints,
    Lock,
    Storage,
    Version,
    Writer,
    conflict,
    exists,
    fill,
    flat_bytes,
    folder_parts,
    key_parts,
    missing,
    short_file,
    too_large,
)

_LOCK = threading.Lock()


def _after_fork() -> None:
    """In a forked child, make a new lock and list the paths anew: a thread of the parent may have been changing them."""
    global _LOCK
    _LOCK = threading.Lock()
    _PATHS[:] = sorted(_FILES)


os.register_at_fork(after_in_child=_after_fork)

_FILES: dict[str, bytes] = {}
_PATHS: list[str] = []
"""The sorted paths of all files in memory. The files of a folder lie together in it."""

_LOCKS: dict[str, list[bool]] = {}
"""The locks held on each file, by the file's path: for each lock, whether it is shared."""


def _set(path: str, data: bytes) -> None:
    if path not in _FILES:
        insort(_PATHS, path)
    _FILES[path] = data


def _below(folder: str) -> Sequence[str]:
    """Return the paths of all files in a folder, whose own path ends with a slash.

    In sorted order they lie before the path that ends with the next character.
    """
    return _PATHS[bisect_left(_PATHS, folder) : bisect_left(_PATHS, folder[:-1] + chr(ord("/") + 1))]


class MemoryStorage(Storage):
    """A `Storage` that keeps its files in the memory of this process."""

    hints = Hints(shares_files=False)

    def __init__(self, name: str) -> None:
        self._root = f"{name}/"

    @property
    def url(self) -> str:
        return f"memory://{self._root[:-1]}"

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _get(self, key: str) -> bytes | None:
        key_parts(key)
        with _LOCK:
            return _FILES.get(self._root + key)

    def _put(self, key: str, data: bytes) -> None:
        with _LOCK:
            _set(self._root + key, data)

    def create(self, key: str, size: int | None = None, *, replace: bool = False) -> MemoryWriter:
        key_parts(key)
        if replace:
            self.delete([key])
        with _LOCK:
            if self._root + key in _FILES:
                raise exists(self._where(key))
            self._refuse_mixed(key)
            _set(self._root + key, b"")
        return MemoryWriter(self, key)

    def _refuse_mixed(self, key: str) -> None:
        """Refuse a key that would use a file as a folder, or a folder as a file, as a disk does."""
        path = self._root + key
        above = [path[:at] for at, letter in enumerate(path) if letter == "/" and path[:at] in _FILES]
        if above:
            raise StorageError(f"memory://{above[0]}: is a file, so {key!r} cannot be below it; use another path")
        if _below(path + "/"):
            raise StorageError(f"{self._where(key)}: is a folder, so it cannot be a file; use another path")

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        data = self._get(key)
        if data is None:
            raise missing(self._where(key))
        views = [flat_bytes(buffer) for buffer in buffers]
        wanted = sum(map(len, views))
        source = memoryview(data)[offset:]
        if len(source) < wanted:
            raise short_file(self._where(key), offset, wanted, len(source))
        fill(views, source)

    def document(self, key: str, limit: int) -> Document:
        data = self._get(key)
        if data is None:
            raise missing(self._where(key))
        if len(data) > limit:
            raise too_large(self._where(key), limit)
        return Document(data, version_of(data))

    def size(self, key: str) -> int | None:
        data = self._get(key)
        return None if data is None else len(data)

    def list(self, prefix: str = "") -> list[tuple[str, int]]:
        start = self._root + "/".join((*folder_parts(prefix), ""))
        with _LOCK:
            return [(path.removeprefix(self._root), len(_FILES[path])) for path in _below(start)]

    def lock(self, key: str, *, shared: bool = False, make: bool = False) -> MemoryLock | None:
        if self._get(key) is None:
            if not make:
                raise missing(self._where(key))
            self._put(key, b"")
        with _LOCK:
            others = _LOCKS.setdefault(self._root + key, [])
            if any(not (shared and other) for other in others):
                return None
            others.append(shared)
        return MemoryLock(self, key, shared)

    def publish(self, key: str, data: bytes, *, expected: Version = ANY) -> Version:
        key_parts(key)
        with _LOCK:
            self._refuse_mixed(key)
            held = _FILES.get(self._root + key)
            current = ABSENT if held is None else version_of(held)
            if expected not in (ANY, current):
                raise conflict(self._where(key), expected, current)
            _set(self._root + key, bytes(data))
        return version_of(data)

    def delete(self, keys: Iterable[str]) -> None:
        checked = ["/".join(key_parts(key)) for key in keys]
        with _LOCK:
            for key in checked:
                self._refuse_mixed(key)
                path = self._root + key
                if _FILES.pop(path, None) is not None:
                    del _PATHS[bisect_left(_PATHS, path)]


class MemoryLock(Lock):
    """A lock on a file of a `MemoryStorage`."""

    def __init__(self, storage: MemoryStorage, key: str, shared: bool) -> None:
        self._storage, self._key, self._shared, self._held = storage, key, shared, True

    def release(self) -> None:
        path = self._storage._root + self._key
        with _LOCK:
            if self._held:
                self._held = False
                _LOCKS[path].remove(self._shared)
                if not _LOCKS[path]:
                    del _LOCKS[path]

    def note(self, text: bytes) -> None:
        self._storage._put(self._key, text)


class MemoryWriter(Writer):
    """Writes a new file of a `MemoryStorage`; the file can be read once it is finished."""

    def __init__(self, storage: MemoryStorage, key: str) -> None:
        self._storage, self._key, self._where = storage, key, storage._where(key)
        self._parts: list[bytes] = []

    def _write(self, view: memoryview) -> None:
        self._parts.append(bytes(view))

    def _finish(self) -> None:
        self._storage._put(self._key, b"".join(self._parts))
        self._parts.clear()

    def _abort(self) -> None:
        self._parts.clear()
        self._storage.delete([self._key])
