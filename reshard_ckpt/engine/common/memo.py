"""A memo of results by their inputs: the last inputs are kept whole, and compared whole.

For inputs that are slow to hash but quick to compare: most of what describes a state is, from save to save, the same objects,
which Python compares by identity first. A result is reused only where all of its input is equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Memo(Generic[Key, Value]):
    """The values of the last few keys; safe in threads.

    >>> memo = Memo(2)
    >>> [memo.get(key, lambda: key * 10) for key in (1, 2, 1)]
    [10, 20, 10]
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: tuple[tuple[Key, Value], ...] = ()

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the value of a key that is equal to this one, or make it and keep it."""
        found = self._find(key)
        if found is not None:
            return found[0]
        value = make()
        self.keep(key, value)
        return value

    def find(self, key: Key) -> Value | None:
        """Return the value of a key that is equal to this one; None where there is none."""
        found = self._find(key)
        return None if found is None else found[0]

    def keep(self, key: Key, value: Value) -> None:
        """Keep a value, in place of the one of an equal key, or of the one that was not used for longest."""
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
