"""Tables as columns: frozen dataclasses whose fields are arrays with one entry for each row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np

from .runs import I64

Table = TypeVar("Table", bound="ColumnTable")


@dataclass(frozen=True, slots=True)
class ColumnTable:
    """A table whose rows are chosen or reordered in all columns at once."""

    def take(self: Table, rows: Any) -> Table:
        """Return the table with only these rows: indices in the order wanted, a mask, or a slice."""
        return type(self)(*(getattr(self, column.name)[rows] for column in fields(self)))


def batches(sizes: I64, limit: int) -> Iterator[slice]:
    """Yield consecutive slices whose sizes add up to at most the limit; a slice has at least one entry, however large.

    >>> list(batches(np.array([2, 2, 9, 1]), 4))
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    total = np.cumsum(sizes)
    begin = 0
    while begin < len(total):
        used = int(total[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(total, used + limit, side="right")))
        yield slice(begin, end)
        begin = end
