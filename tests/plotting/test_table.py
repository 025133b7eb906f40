"""A table shows every element once, of its part; with more cuts than can be drawn, what lies in the middle of a cell."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.plotting import table as tables
from reshard_ckpt.plotting.feeds import boxes_of
from reshard_ckpt.plotting.table import CellTable, lay_out
from tests.layouts import Layout, cells, layouts, shapes
from tests.tries import examples


def laid_out(layout: Layout) -> CellTable:
    """The table of all ranks' pieces."""
    pieces = [(rank, p) for rank, held in enumerate(layout.pieces) for p in held]
    offsets, lengths, run = boxes_of([(p.offsets, p.lengths, p.start, p.count) for _, p in pieces], len(layout.shape))
    return lay_out(layout.shape, offsets, lengths, np.array([rank for rank, _ in pieces], np.int64)[run])


def owners(layout: Layout) -> np.ndarray:
    """The last rank that holds each element, by brute force; -1 where none does."""
    held = np.full(layout.shape, -1)
    for rank, pieces in enumerate(layout.pieces):
        for piece in pieces:
            held[tuple(cells(piece)[1])] = rank
    return held


def shown(table: CellTable) -> np.ndarray:
    """The part that is drawn over each element; no element is drawn over twice."""
    out = np.full((table.rows[-1], table.columns[-1]), -1)
    for (x, y, width, height), part in zip(*(column.tolist() for column in table.boxes()), strict=True):
        assert (out[y : y + height, x : x + width] == -1).all()
        out[y : y + height, x : x + width] = part
    return out


@examples(150)
@given(st.data())
def test_table_shows_every_element_in_its_place(data: st.DataObject):
    shape = data.draw(shapes().filter(lambda s: len(s) > 0 and prod(s) > 0))
    layout = data.draw(layouts(shape, data.draw(st.integers(1, 4))))
    table = laid_out(layout)
    assert (table.rows[-1], table.columns[-1]) == (prod(shape[: table.row_dims]), prod(shape[table.row_dims :]))
    assert (shown(table).reshape(-1) == owners(layout).reshape(-1)).all()


@examples(60)
@given(st.data())
def test_crowded_table_shows_what_lies_in_the_middle_of_its_cells(data: st.DataObject):
    shape = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    layout = data.draw(layouts(shape, data.draw(st.integers(1, 4))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "MAX_CUTS", 7)
        table = laid_out(layout)
    held = owners(layout)
    assert max(table.parts.shape) <= 7
    rows, columns = ((edges[:-1] + edges[1:]) // 2 for edges in (table.rows, table.columns))
    assert (table.parts == held[np.ix_(rows, columns)]).all()


def test_table_of_twenty_thousand_shards_is_no_larger_than_can_be_drawn():
    begin = np.arange(20_000) * 3
    offsets, lengths = (np.stack([column, np.full(20_000, width)], axis=1) for column, width in ((begin, 0), (begin * 0 + 3, 5)))
    table = lay_out((60_000, 5), offsets, lengths, np.arange(20_000))
    middles = (table.rows[:-1] + table.rows[1:]) // 2
    assert table.parts.shape == (tables.MAX_CUTS, 1)
    assert (table.parts[:, 0] == middles // 3).all()


@pytest.mark.parametrize("shape", [(), (0, 5), (7,)])
def test_scalar_empty_and_flat_tensors_have_a_table(shape: tuple[int, ...]):
    runs = [((0,) * len(shape), shape, 0, prod(shape))]
    offsets, lengths, run = boxes_of(runs, len(shape))
    assert lay_out(shape, offsets, lengths, run).parts.tolist() == [[0 if prod(shape) else -1]]
