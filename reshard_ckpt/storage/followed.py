"""The store of a checkpoint that refers to files of other checkpoints, as an incremental save does.

It reads those files in the folders of the other checkpoints; it writes, lists and deletes only in the checkpoint's own folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .protocol import Hints, Storage


def _of_own(name: str) -> Any:
    """Make a method of `FollowedStorage` that calls the method `name` of the checkpoint's own store."""

    def call(self: FollowedStorage, *args: Any, **options: Any) -> Any:
        return getattr(self._own, name)(*args, **options)

    return call


def _of_place(name: str) -> Any:
    """Make a method of `FollowedStorage` that calls the method `name` of the store that has the key, its first argument."""

    def call(self: FollowedStorage, key: str, *args: Any) -> Any:
        storage, key = self._place(key)
        return getattr(storage, name)(key, *args)

    return call


class FollowedStorage(Storage):
    """A `Storage` that also reads files of other stores, under keys that begin with such a store's folder.

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

    read_into = _of_place("read_into")
    document = _of_place("document")
    size = _of_place("size")
    stamp = _of_place("stamp")
    first_stamp = _of_place("first_stamp")

    def copy(self, source: Storage, key: str, to: str) -> bool:
        if source is self:
            source, key = self._place(key)
        return self._own.copy(source, key, to)

    create = _of_own("create")
    write_at = _of_own("write_at")
    sync = _of_own("sync")
    list = _of_own("list")
    free_bytes = _of_own("free_bytes")
    folders = _of_own("folders")
    lock = _of_own("lock")
    lease = _of_own("lease")
    publish = _of_own("publish")
    prove_conditions = _of_own("prove_conditions")
    delete = _of_own("delete")

    def close(self) -> None:
        self._own.close()
        for storage in self._others.values():
            storage.close()
