"""A cache of the last results of slow work, by inputs that are kept and compared whole.

For inputs that are slow to hash but quick to compare: most of what describes a state is, from save to save, the same objects,
which Python compares by identity first. Nothing is reused unless all that it follows from is equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Memo(Generic[Key, Value]):
    """The values of the last few keys; safe in threads.

    >>> recent = Memo(2)
    >>> [recent.get(key, lambda: key * 10) for key in (1, 2, 1)]
    [10, 20, 10]
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: tuple[tuple[Key, Value], ...] = ()

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the value of a key that is equal to this one, or else what `make` gives."""
        items = self._items
        for i, (known, value) in enumerate(items):
            if known == key:
                if i:
                    self._items = ((known, value), *items[:i], *items[i + 1 :])
                return value
        value = make()
        self._items = ((key, value), *items[: self._limit - 1])  # a tuple at a time: another thread sees the old or the new one
        return value
