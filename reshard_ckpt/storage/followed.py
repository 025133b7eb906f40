"""The store of a checkpoint that refers to files in the folders of other checkpoints.

It reads those files in the other folders; it writes, lists and deletes only in the folder of the checkpoint itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .protocol import ANY, Document, Hints, Lock, Storage, Version, Writer


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

    def document(self, key: str, limit: int) -> Document:
        storage, key = self._place(key)
        return storage.document(key, limit)

    def size(self, key: str) -> int | None:
        storage, key = self._place(key)
        return storage.size(key)

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
