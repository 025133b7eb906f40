"""Order and groups of rows, against numpy's own sort over several keys and against Python's sets."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.geometry.columns import group_ids, lex_order
from tests.tries import examples

# Narrow columns pack into one integer, wide ones do not. Wide ones that leave room for the row's number are sorted in one word.
narrow, wide = st.integers(-2, 2), st.sampled_from([0, 1, 2, 1 << 40])
numbers = st.sampled_from([narrow, wide, st.one_of(narrow, st.integers(0, 1 << 30), st.integers(0, (1 << 62) - 1))])
columns = st.tuples(st.integers(1, 4), numbers).flatmap(
    lambda kind: st.lists(st.tuples(*[kind[1]] * kind[0]), max_size=30).map(
        lambda rows: np.array(rows, np.int64).reshape(len(rows), kind[0])
    )
)


@given(columns, st.booleans())
@examples(500)
def test_lex_order_is_the_stable_order_of_the_columns(table: np.ndarray, ordered: bool) -> None:
    if ordered:
        table = table[np.lexsort(table.T[::-1])]
    assert lex_order(*table.T).tolist() == np.lexsort(table.T[::-1]).tolist()


def test_lex_order_of_columns_that_no_single_integer_holds() -> None:
    generator = np.random.default_rng(0)
    # 22 bits a row number leave 41; three columns of 2 ** 21 distinct values need more, however they are numbered.
    rows = generator.integers(0, 1 << 62, (1 << 21) + 5)
    table = [rows >> 8, generator.permutation(rows), generator.permutation(rows) | 1]
    table[0][::2] = table[0][1::2][0]
    order = lex_order(*table)
    assert (np.bincount(order) == 1).all()
    # rising: each row is after the one before it, by the columns so far; tied: it is equal to it.
    rising, tied = np.zeros(len(rows) - 1, bool), np.ones(len(rows) - 1, bool)
    for column in [*(column[order] for column in table), order]:
        rising |= tied & (column[1:] > column[:-1])
        tied &= column[1:] == column[:-1]
    assert rising.all()


@given(columns)
@examples(300)
def test_group_ids_are_equal_for_equal_rows_alone_and_in_their_order(table: np.ndarray) -> None:
    ids, first = group_ids(table)
    rows = [tuple(row) for row in table.tolist()]
    distinct = sorted(set(rows))
    assert [distinct[i] for i in ids.tolist()] == rows
    assert [rows[i] for i in first.tolist()] == distinct
    assert first.tolist() == [rows.index(row) for row in distinct]
