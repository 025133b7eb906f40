"""In what order new files are written at once: lanes that share rows together, others one by one, each file's own in order."""

from __future__ import annotations

from reshard_ckpt.engine.loading.stream import Run
from reshard_ckpt.engine.resharding.write_order import Item, Slice, windows

ROW = 8
"""Elements of a row of the tensors here, of one byte each."""


def part(tensor: int, offsets: tuple[int, int], lengths: tuple[int, int]) -> Item:
    return Item((1, tensor), Run(tensor, offsets, lengths, 0, lengths[0] * lengths[1]), 1)


def taken(slices: list[Slice]) -> list[tuple[int, int, int, int]]:
    """Lane, tensor, first element and number of elements."""
    return [(output, item.run.tensor, item.run.start, item.run.count) for output, item in slices]


def test_columns_of_the_same_rows_are_cut_side_by_side() -> None:
    outputs = [[part(0, (0, 0), (4, 4))], [part(0, (0, 4), (4, 4))]]
    found = [taken(window) for window in windows(outputs, 16)]
    assert found == [[(0, 0, 0, 8), (1, 0, 0, 8)], [(0, 0, 8, 8), (1, 0, 8, 8)]]


def test_lanes_with_rows_of_their_own_go_one_by_one() -> None:
    """Side by side, each window would be of both halves of the file, and each lane would write half a window at a time."""
    outputs = [[part(0, (0, 0), (4, ROW))], [part(0, (4, 0), (4, ROW))]]
    found = [taken(window) for window in windows(outputs, 16)]
    assert found == [[(0, 0, 0, 16)], [(0, 0, 16, 16)], [(1, 0, 0, 16)], [(1, 0, 16, 16)]]


def test_of_four_lanes_those_that_share_rows_go_together() -> None:
    """Two ranks hold columns of the upper rows, two of the lower ones."""
    outputs = [[part(0, (row, column), (2, 4))] for row in (0, 2) for column in (0, 4)]
    found = [taken(window) for window in windows(outputs, 8)]
    assert [[output for output, *_ in window] for window in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_small_tensors_share_a_window_and_each_file_stays_in_order() -> None:
    outputs = [[part(t, (0, 0), (1, ROW)) for t in range(3)], [part(t, (1, 0), (1, ROW)) for t in range(3)]]
    found = [taken(window) for window in windows(outputs, 32)]
    assert [len(window) for window in found] == [4, 2]
    for output in range(2):
        assert [tensor for window in found for number, tensor, *_ in window if number == output] == [0, 1, 2]


def test_a_cut_batch_has_each_item_only_in_the_windows_that_it_reaches() -> None:
    """Two lanes hold columns of two blocks of rows: each has two write items of one tensor."""
    outputs = [[part(0, (row, column), (2, 4)) for row in (0, 4)] for column in (0, 4)]
    found = [taken(window) for window in windows(outputs, 16)]
    assert found == [[(0, 0, 0, 8), (1, 0, 0, 8)]] * 2
