"""Tables as columns (frozen dataclasses of arrays with an entry for each row), and functions that sort and group rows.

Rows are sorted by several columns as follows.

1. Rows that are sorted already are left as they are, because the steps of a planner often pass on sorted rows.
2. The columns of a row are packed into one integer, with the row's number in its low bits: numpy sorts plain integers some ten
   times faster than it finds a sorting permutation, and the low bits of the sorted integers are the permutation.
3. If the columns need more than 63 bits together, values are first replaced by their ranks among the distinct values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

Table = TypeVar("Table", bound="ColumnTable")


@dataclass(frozen=True, slots=True)
class ColumnTable:
    """Base class of tables whose fields are numpy columns of equal length."""

    def take(self: Table, rows: Any) -> Table:
        """Return the table with only these rows: an array of indices in the wanted order, a mask, or a slice."""
        return type(self)(*[column[rows] for column in columns_of(self)])

    def rows(self) -> Iterator[tuple[int, ...]]:
        """Yield each row as a tuple of Python numbers."""
        return zip(*(column.tolist() for column in columns_of(self)), strict=True)

    @classmethod
    def empty(cls: type[Table]) -> Table:
        """Return a table without rows; all columns are int64."""
        return cls(*[np.zeros(0, np.int64)] * len(fields(cls)))


def columns_of(table: ColumnTable) -> list[I64]:
    """Return the columns of a table, in the order of its fields."""
    names: tuple[str, ...] = table.__match_args__  # of all fields; `fields` makes a call for each
    return [getattr(table, name) for name in names]


def concatenated(tables: Sequence[Table]) -> Table:
    """Join several tables of one class, end to end; at least one."""
    return type(tables[0])(*(np.concatenate(parts) for parts in zip(*map(columns_of, tables), strict=True)))


def batches(sizes: I64, limit: int) -> Iterator[slice]:
    """Yield consecutive slices of a list of sizes.

    Sizes in one slice add up to at most `limit`; a larger size gets a slice of its own.

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


_WORD_BITS = 63


def lex_order(*columns: I64) -> I64:
    """Return the indices that sort rows by their columns, stably; the first column is the most significant.

    >>> lex_order(np.array([1, 0, 1]), np.array([5, 9, 4])).tolist()
    [1, 2, 0]
    """
    num = len(columns[0])
    if _in_order(columns):
        return np.arange(num)
    # key: the columns taken so far, packed into `bits` bits. room: the bits of a word that the row's number leaves free.
    room = _WORD_BITS - (num - 1).bit_length()
    key, bits = _counted_from_zero(columns[0])
    for column in columns[1:]:
        part, width = _counted_from_zero(column)
        if bits + width > room:
            # Too wide: first make the key dense, then also the column, then both together.
            key, bits = _dense_ranks(key, bits)
        if bits + width > room:
            part, width = _dense_ranks(part, width)
        if bits + width > room:
            # Replace each pair by its rank: sort by the minor part, then stably by the major one.
            minor = _sorted(part, width)[1]
            order = minor[_sorted(key[minor], bits)[1]]
            key, bits = _ranks_in_order(order, is_new(key[order], part[order]))
        else:
            key, bits = (key << width) | part, bits + width
    return _sorted(key, bits)[1]


def group_ids(columns: I64) -> tuple[I64, I64]:
    """Number the distinct rows of ``(N, K)`` in sorted order. Return the id of each row, (N,), and the first row of each id.

    >>> [a.tolist() for a in group_ids(np.array([[1, 2], [0, 0], [1, 2]]))]
    [[1, 0, 1], [1, 0]]
    """
    if len(columns) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    split = [np.ascontiguousarray(column) for column in columns.T]
    order = lex_order(*split)
    new = is_new(*(column[order] for column in split))
    ids = np.empty(len(columns), np.int64)
    ids[order] = np.cumsum(new) - 1
    return ids, order[new]


def is_new(*columns: I64) -> Mask:
    """Return a mask of the rows that differ in some column from the row before; the first row counts as different.

    >>> is_new(np.array([3, 3, 4])).tolist()
    [True, False, True]
    """
    new = np.ones(len(columns[0]), bool)
    if len(new):
        new[1:] = columns[0][1:] != columns[0][:-1]
        for column in columns[1:]:
            new[1:] |= column[1:] != column[:-1]
    return new


def group_bounds(first: Mask) -> tuple[I64, I64]:
    """Return the index where each group of consecutive rows begins, and where it ends; `first` marks the first row of each group.

    >>> [a.tolist() for a in group_bounds(np.array([True, False, True]))]
    [[0, 2], [2, 3]]
    """
    begin = np.flatnonzero(first)
    return begin, np.append(begin[1:], len(first))[: len(begin)]


def rows_by_id(ids: I64, num: int) -> list[I64]:
    """Return, for each id from 0 to ``num - 1``, the indices of the rows with this id, ascending.

    >>> [rows.tolist() for rows in rows_by_id(np.array([1, 0, 1]), 2)]
    [[1], [0, 2]]
    """
    order = np.argsort(ids, kind="stable")
    return np.split(order, np.searchsorted(ids[order], np.arange(1, num)))


def running_max(values: I64, first: Mask) -> I64:
    """Return the running maximum of non-negative values within each group; `first` marks the first row of each group.

    >>> running_max(np.array([3, 1, 2, 1, 5]), np.array([True, False, True, False, False])).tolist()
    [3, 3, 2, 2, 5]
    """
    # One running maximum serves all groups: the values of each group are shifted above all values of the group before it.
    shift = np.cumsum(first) * (int(values.max(initial=0)) + 1)
    reach: I64 = np.maximum.accumulate(values + shift) - shift
    return reach


def _in_order(columns: Sequence[I64]) -> bool:
    """Tell whether rows are sorted already by these columns, the first column being the most significant."""
    # tied[i]: row i + 1 equals row i in all columns so far.
    tied = np.ones(max(len(columns[0]) - 1, 0), bool)
    for column in columns:
        before, after = column[:-1], column[1:]
        if (tied & (after < before)).any():
            return False
        tied &= after == before
    return True


def _counted_from_zero(column: I64) -> tuple[I64, int]:
    """Subtract the smallest value from a column. Return the result, and the number of bits of its largest value."""
    low = int(column.min())
    return column - low if low else column, (int(column.max()) - low).bit_length()


def _sorted(key: I64, bits: int) -> tuple[I64, I64]:
    """Sort a column of non-negative values of at most `bits` bits.

    Return the sorted values, and the indices that sort it stably.
    """
    index_bits = (len(key) - 1).bit_length()
    if bits + index_bits > _WORD_BITS:
        order = np.argsort(key, kind="stable")
        return key[order], order
    # Bit packing: the value in the high bits, the row's number in the low index_bits. Equal values keep the order of their rows.
    packed = key << index_bits
    packed |= np.arange(len(key))
    packed.sort()
    return packed >> index_bits, packed & ((1 << index_bits) - 1)


def _dense_ranks(key: I64, bits: int) -> tuple[I64, int]:
    """Replace each value by its rank among the distinct values. Return the ranks, and the number of bits of the largest rank."""
    ordered, order = _sorted(key, bits)
    return _ranks_in_order(order, is_new(ordered))


def _ranks_in_order(order: I64, new: Mask) -> tuple[I64, int]:
    """Return the rank of each row among distinct rows, from their sorted order, and the number of bits of the largest rank.

    ``order[i]`` is the row at place i of the sorted rows; ``new[i]`` says whether it differs from the row before it there.
    """
    # place[i]: the rank of the i-th row in sorted order; dense[i]: the rank of row i.
    place = np.cumsum(new) - 1
    dense = np.empty_like(place)
    dense[order] = place
    return dense, int(place[-1]).bit_length()
