"""The store of a checkpoint that refers to files in the folders of other checkpoints.

It reads those files in the other folders; it writes, lists and deletes only in the folder of the checkpoint itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from .protocol import ANY, Document, Hints, Lock, Storage, Version, Writer

T = TypeVar("T")


class FollowedStorage(Storage):
    """A `Storage` whose keys may also begin with the folder of another store.

    Parameters
    ----------
    own
        The checkpoint's own store. Its caller closes it, and the other stores too.
    others
        The other stores, each by the prefix of its files' keys, such as ``../step_90/``.
    """

    def __init__(self, own: Storage, others: Mapping[str, Storage]) -> None:
        self._own, self._others = own, dict(others)

    def _place(self, key: str) -> tuple[Storage, str]:
        for folder, storage in self._others.items():
            if key.startswith(folder):
                return storage, key[len(folder) :]
        return self._own, key

    @property
    def url(self) -> str:
        return self._own.url

    @property
    def hints(self) -> Hints:
        return self._own.hints

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        storage, key = self._place(key)
        storage.read_into(key, offset, buffers)

    def read(self, key: str, limit: int) -> bytes:
        storage, key = self._place(key)
        return storage.read(key, limit)

    def read_ranges(self, ranges: Sequence[tuple[str, int, Sequence[memoryview]]]) -> None:
        by_store: dict[int, tuple[Storage, list[tuple[str, int, Sequence[memoryview]]]]] = {}
        for key, offset, buffers in ranges:
            storage, key = self._place(key)
            by_store.setdefault(id(storage), (storage, []))[1].append((key, offset, buffers))
        for storage, its_ranges in by_store.values():
            storage.read_ranges(its_ranges)

    def read_many(self, keys: Sequence[str], limit: int) -> list[Document | None]:
        return self._by_store(keys, lambda storage, its_keys: storage.read_many(its_keys, limit))

    def size(self, key: str) -> int | None:
        storage, key = self._place(key)
        return storage.size(key)

    def stat(self, keys: Sequence[str]) -> list[int | None]:
        return self._by_store(keys, lambda storage, its_keys: storage.stat(its_keys))

    def _by_store(self, keys: Sequence[str], call: Callable[[Storage, list[str]], list[T]]) -> list[T]:
        """Call each store with its keys, and return the results in the order of `keys`."""
        places = [self._place(key) for key in keys]
        found: dict[tuple[int, str], T] = {}
        for storage in {id(storage): storage for storage, _ in places}.values():
            its_keys = [key for owner, key in places if owner is storage]
            found.update({(id(storage), key): result for key, result in zip(its_keys, call(storage, its_keys), strict=True)})
        return [found[id(storage), key] for storage, key in places]

    def create(self, key: str, size: int | None = None, *, replace: bool = False) -> Writer:
        return self._own.create(key, size, replace=replace)

    def write_at(self, key: str, offset: int) -> Writer:
        return self._own.write_at(key, offset)

    def copy(self, source: Storage, key: str, to: str) -> bool:
        if source is self:
            source, key = self._place(key)
        return self._own.copy(source, key, to)

    def sync(self, keys: Iterable[str]) -> None:
        self._own.sync(keys)

    def list(self, prefix: str = "") -> list[tuple[str, int]]:
        return self._own.list(prefix)

    def free_bytes(self) -> int | None:
        return self._own.free_bytes()

    def folders(self, prefix: str = "") -> tuple[str, ...]:
        return self._own.folders(prefix)

    def lock(self, key: str, *, shared: bool = False, make: bool = False) -> Lock | None:
        return self._own.lock(key, shared=shared, make=make)

    def lease(self, key: str, note: bytes, *, ttl_s: float = 60.0, once: bool = False) -> Lock | None:
        return self._own.lease(key, note, ttl_s=ttl_s, once=once)

    def publish(self, key: str, data: bytes, *, expected: Version = ANY) -> Version:
        return self._own.publish(key, data, expected=expected)

    def prove_conditions(self) -> None:
        self._own.prove_conditions()

    def delete(self, keys: Iterable[str]) -> None:
        self._own.delete(keys)

    def close(self) -> None:
        self._own.close()
        for storage in self._others.values():
            storage.close()
