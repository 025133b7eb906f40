"""A memo: the values that were made last, by keys that are compared and not hashed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Memo(Generic[Key, Value]):
    """The values of the last `limit` keys. Thread-safe.

    >>> memo = Memo(2)
    >>> [memo.get(key, lambda: key * 10) for key in (1, 2, 1)]
    [10, 20, 10]
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.forget()

    def forget(self) -> None:
        """Drop all values."""
        self._items: tuple[tuple[Key, Value], ...] = ()

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the value of an equal key; if there is none, make the value and keep it."""
        found = self._find(key)
        if found is not None:
            return found[0]
        value = make()
        self.keep(key, value)
        return value

    def find(self, key: Key) -> Value | None:
        """Return the value of an equal key, or None."""
        found = self._find(key)
        return None if found is None else found[0]

    def keep(self, key: Key, value: Value) -> None:
        """Keep a value. It replaces the value of an equal key, or else the least recently used one."""
        others = [item for item in self._items if item[0] != key]
        self._items = ((key, value), *others[: self._limit - 1])

    def _find(self, key: Key) -> tuple[Value] | None:
        # Without a lock: another thread sees the old tuple or the new one. If two write at once, an entry is lost and made again.
        items = self._items
        for i, (known, value) in enumerate(items):
            if known == key:
                if i:
                    self._items = (items[i], *items[:i], *items[i + 1 :])
                return (value,)
        return None
