"""A small cache of the last keys and their values (`Memo`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Memo(Generic[Key, Value]):
    """A cache of the last `limit` keys and their values. Thread-safe.

    >>> memo = Memo(2)
    >>> [memo.get(key, lambda: key * 10) for key in (1, 2, 1)]
    [10, 20, 10]
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: tuple[tuple[Key, Value], ...] = ()

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the cached value of a key; if there is none, make it and keep it."""
        found = self.find(key)
        if found is None:
            found = make()
            self.keep(key, found)
        return found

    def find(self, key: Key) -> Value | None:
        """Return the cached value of a key; None if there is none, so None must not be kept as a value."""
        # Without a lock: another thread sees the old tuple or the new one. If two write at once, an entry is lost and made again.
        items = self._items
        for i, (known, value) in enumerate(items):
            if known == key:
                if i:
                    self._items = (items[i], *items[:i], *items[i + 1 :])
                return value
        return None

    def forget(self) -> None:
        """Drop all keys and values."""
        self._items = ()

    def keep(self, key: Key, value: Value) -> None:
        """Keep a value. It replaces the value of the same key, or else the least recently used value."""
        others = [item for item in self._items if item[0] != key]
        self._items = ((key, value), *others[: self._limit - 1])
