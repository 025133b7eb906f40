"""What is read for a load: every wanted byte, each touched block once, and little else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import pairwise
from math import prod
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard_ckpt.core.planning.load_plan as load_module
import reshard_ckpt.core.planning.read_plan as reads_module
from reshard_ckpt.core.catalog.model import Catalog
from reshard_ckpt.core.catalog.specs import TensorSpec, box_piece, piece_columns, row_major_strides
from reshard_ckpt.core.geometry.columns import batches
from reshard_ckpt.core.planning.load_plan import LoadPlan, plan_load
from reshard_ckpt.core.planning.match import match
from reshard_ckpt.core.planning.read_plan import NEAR_BYTES, ReadPlan, Runs, plan_reads
from reshard_ckpt.errors import CorruptError
from reshard_ckpt.storage.memory import MemoryStorage
from tests.jobs import planned_job, save_job
from tests.layouts import filled, layouts, shapes, spec_of, values_of
from tests.tries import examples

WINDOW = 8 << 20


def plan_for(catalog: Catalog, specs: list[TensorSpec], window: int = WINDOW) -> LoadPlan:
    source = match(specs, catalog, cast=False, allow_resize=False).source
    return plan_load(catalog, source, piece_columns(specs), window)


def reads_for(catalog: Catalog, plan: LoadPlan, block_bytes: int) -> ReadPlan:
    sizes = np.array([f.size for f in catalog.files])
    land = np.ones(int(plan.dest.max(initial=0)) + 1, bool)
    return plan_reads(plan, np.full(len(sizes), block_bytes), sizes, land)


def begins(lengths: np.ndarray, strides: np.ndarray) -> np.ndarray:
    """Where each element of a box begins, counted from the first one, in row-major order."""
    out = np.zeros(1, np.int64)
    for length, stride in zip(lengths.tolist(), strides.tolist(), strict=True):
        out = (out[:, None] + np.arange(length) * stride).reshape(-1)
    return out


@st.composite
def cases(draw: st.DrawFn) -> tuple[Catalog, list[TensorSpec]]:
    shape, saved = draw(shapes(9)), draw(st.integers(1, 4))
    layout = draw(layouts(shape, saved))
    targets = [draw(layouts(shape, draw(st.integers(1, 4)))) for _ in range(draw(st.integers(1, 2)))]
    whole = values_of(shape, "I16", 1)
    catalog = planned_job([[(spec_of(layout, r, "t", "I16"), filled(layout, r, whole))] for r in range(saved)])
    return catalog, [spec_of(target, 0, "t", "I16") for target in targets]  # two want the same bytes, each for itself


def bytes_from(file: int, src: np.ndarray, dest: int, dst: np.ndarray, size: int) -> np.ndarray:
    """Each of `size` bytes from each place on: its file, its place there, its destination and its place there."""
    k = np.arange(size)
    places = ((src[:, None] + k).reshape(-1), (dst[:, None] + k).reshape(-1))
    return np.stack([np.full(len(places[0]), file), places[0], np.full(len(places[0]), dest), places[1]], axis=1)


def run_bytes(reads: ReadPlan, start: np.ndarray, runs: Runs) -> np.ndarray:
    """Each byte of some runs, in order of window."""
    columns = (np.repeat(reads.file, np.diff(start)), runs.src, runs.dest, runs.dst, runs.size)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return np.concatenate(
        [np.empty((0, 4), np.int64), *(bytes_from(file, np.array([s]), dest, np.array([d]), n) for file, s, dest, d, n in rows)]
    )


def item_bytes(plan: LoadPlan, items: Iterable[int]) -> np.ndarray:
    """Each byte of some items of a load plan."""
    out = [np.empty((0, 4), np.int64)]
    for i in items:
        each = int(plan.item_bytes[i])
        src = plan.src[i] + begins(plan.lengths[i], plan.src_strides[i])
        dst = (plan.dst[i] + begins(plan.lengths[i], plan.dst_strides[i])) * each
        out.append(bytes_from(int(plan.file[i]), src, int(plan.dest[i]), dst, each))
    return np.concatenate(out)


def in_order(moved: np.ndarray) -> np.ndarray:
    return moved[np.lexsort(moved.T)]


def places(moved: np.ndarray) -> np.ndarray:
    """File and place of each byte, as one number."""
    return (moved[:, 0] << 40) | moved[:, 1]


def extents_of(reads: ReadPlan, window: int) -> list[tuple[int, int]]:
    """The ranges of its file that a window reads."""
    extents = slice(reads.extent_start[window], reads.extent_start[window + 1])
    return list(zip(reads.low[extents].tolist(), reads.high[extents].tolist(), strict=True))


@pytest.mark.slow
@given(cases(), st.sampled_from([16, 64, WINDOW]), st.sampled_from([0, 16]), st.sampled_from([1, 8, 512]))
@examples(400)
def test_each_wanted_byte_is_read_once_and_lands_or_is_copied_once(
    case: tuple[Catalog, list[TensorSpec]], window: int, block_bytes: int, land: int
) -> None:
    catalog, specs = case
    plan = plan_for(catalog, specs, window)
    with patch.object(reads_module, "LAND_BYTES", land):
        reads = reads_for(catalog, plan, block_bytes)
    landing = run_bytes(reads, reads.landing_start, reads.landing)
    copying = np.concatenate([run_bytes(reads, reads.copied_start, reads.copied), item_bytes(plan, reads.items.tolist())])
    landed = places(landing)  # these are not in the buffer that others are copied from
    assert len(np.unique(landed)) == len(landed)
    assert not np.isin(places(copying), landed).any()
    moved = np.concatenate([landing, copying])
    assert plan.covered.tolist() == [piece.count for spec in specs for piece in spec.pieces]
    wanted = item_bytes(plan, range(len(plan.src)))
    assert np.array_equal(in_order(moved), in_order(wanted))
    for w in range(reads.num_windows):  # what lands or is copied lies in what its window reads
        extents = extents_of(reads, w)
        for start, runs in ((reads.landing_start, reads.landing), (reads.copied_start, reads.copied)):
            for r in range(start[w], start[w + 1]):
                assert any(low <= runs.src[r] and runs.src[r] + runs.size[r] <= high for low, high in extents)
        copied = item_bytes(plan, reads.items[reads.item_start[w] : reads.item_start[w + 1]].tolist())[:, 1]
        assert np.any([(low <= copied) & (copied < high) for low, high in extents], axis=0).all()
    for file in range(len(catalog.files)):  # no two windows read the same, and together they read all
        taken = sorted((low, high) for w in np.flatnonzero(reads.file == file).tolist() for low, high in extents_of(reads, w))
        assert all(a[1] <= b[0] for a, b in pairwise(taken))
        read = np.concatenate([np.empty(0, np.int64), *(np.arange(low, high) for low, high in taken)])
        assert np.isin(wanted[wanted[:, 0] == file, 1], read).all()
        if block_bytes:
            assert all(low % block_bytes == 0 for low, _ in taken)


@given(cases(), st.sampled_from([16, 64, WINDOW]), st.sampled_from([0, 16]), st.data())
@examples(200)
def test_groups_are_read_as_if_each_were_alone(
    case: tuple[Catalog, list[TensorSpec]], window: int, block_bytes: int, data: st.DataObject
) -> None:
    catalog, specs = case
    plan = plan_for(catalog, specs, window)
    num = len(plan.src)
    group = np.array(data.draw(st.lists(st.integers(0, 2), min_size=num, max_size=num)), np.int64)
    sizes = np.array([f.size for f in catalog.files])
    land = np.ones(int(plan.dest.max(initial=0)) + 1, bool)
    together = plan_reads(plan, np.full(len(sizes), block_bytes), sizes, land, group)
    assert together.group.tolist() == sorted(together.group.tolist())
    for number in range(3):
        own = np.flatnonzero(group == number)
        columns = {k: getattr(plan, k)[own] for k in LoadPlan.__slots__ if k != "covered"}
        alone = plan_reads(replace(plan, **columns), np.full(len(sizes), block_bytes), sizes, land)
        first, last = np.searchsorted(together.group, [number, number + 1])
        extents = slice(together.extent_start[first], together.extent_start[last])
        items = slice(together.item_start[first], together.item_start[last])
        assert together.file[first:last].tolist() == alone.file.tolist()
        assert together.low[extents].tolist() == alone.low.tolist()
        assert together.high[extents].tolist() == alone.high.tolist()
        assert together.items[items].tolist() == own[alone.items].tolist()
        for name in ("landing", "copied"):
            start = getattr(together, f"{name}_start")
            runs = getattr(together, name).take(slice(start[first], start[last]))
            for column in fields(Runs):
                assert getattr(runs, column.name).tolist() == getattr(getattr(alone, name), column.name).tolist()


def one_matrix(rows: int, columns: int, saved_columns: int) -> Catalog:
    """A float32 matrix saved as column blocks by as many ranks as there are."""
    import torch

    storage = MemoryStorage("matrix")
    ranks = []
    for begin in range(0, columns, saved_columns):
        local = torch.zeros(rows, saved_columns)
        piece = box_piece((0, begin), (rows, saved_columns), 0, row_major_strides((rows, saved_columns)))
        ranks.append([(TensorSpec("w", "F32", (rows, columns), (piece,)), local)])
    return save_job(storage, ranks)


def wanted_box(shape: tuple[int, int], offsets: tuple[int, int], lengths: tuple[int, int]) -> TensorSpec:
    return TensorSpec("w", "F32", shape, (box_piece(offsets, lengths, 0, row_major_strides(lengths)),))


def test_a_slice_of_rows_reads_those_rows_alone() -> None:
    catalog = one_matrix(4096, 1024, 1024)
    plan = plan_for(catalog, [wanted_box((4096, 1024), (100, 0), (1000, 1024))])
    assert plan.num_bytes == 1000 * 1024 * 4
    assert reads_for(catalog, plan, 0).num_bytes == plan.num_bytes
    assert reads_for(catalog, plan, 128 << 10).num_bytes <= plan.num_bytes + (256 << 10)


def test_whole_rows_come_as_one_run_from_each_window_although_its_borders_cut_rows() -> None:
    catalog = one_matrix(1000, 100, 100)
    plan = plan_for(catalog, [wanted_box((1000, 100), (10, 0), (800, 100))], 4096)
    assert len(plan.window) == len(np.unique(plan.window)) > 70
    assert plan.num_bytes == 800 * 100 * 4


def test_far_apart_columns_are_read_one_by_one_and_near_ones_together() -> None:
    far = one_matrix(16, 1 << 18, 1 << 18)
    plan = plan_for(far, [wanted_box((16, 1 << 18), (0, 7), (16, 1024))])
    assert reads_for(far, plan, 0).num_bytes == plan.num_bytes
    near = one_matrix(1 << 12, 1 << 10, 1 << 10)
    plan = plan_for(near, [wanted_box((1 << 12, 1 << 10), (0, 0), (1 << 12, 4))])
    reads = reads_for(near, plan, 0)
    assert len(reads.low) <= -(-prod((1 << 12, 1 << 10)) * 4 // WINDOW) + 1
    assert NEAR_BYTES >= 4 << 10


def test_of_a_large_row_only_the_windows_with_what_is_wanted_count() -> None:
    """A rank may want little of a tensor that one process has saved whole, or all of more than it has windows at once."""
    rows, columns = 100, 64
    catalog = one_matrix(rows, columns, columns)  # one row of 100 windows
    some, all_ = wanted_box((rows, columns), (90, 0), (3, columns)), wanted_box((rows, columns), (0, 0), (rows, columns))
    last = wanted_box((rows, columns), (0, columns - 1), (rows, 1))
    with patch.object(load_module, "MAX_WINDOWS", 5), patch.object(load_module, "MAX_WINDOWS_IN_ALL", 5):
        plan = plan_for(catalog, [some], 4 * columns)
        whole = plan_for(catalog, [some])
        assert np.array_equal(*(in_order(item_bytes(each, range(len(each.src)))) for each in (plan, whole)))
        assert plan.num_bytes == 3 * columns * 4
        for wanted in (all_, last):
            with pytest.raises(CorruptError, match="rows of 25600 bytes are more than one rank can read"):
                plan_for(catalog, [wanted], 4 * columns)
    with patch.object(load_module, "MAX_WINDOWS", 102), patch.object(load_module, "MAX_WINDOWS_IN_ALL", 203):
        assert plan_for(catalog, [all_, last], 4 * columns).covered.tolist() == [rows * columns, rows]
        with pytest.raises(CorruptError, match="are more than one rank can read"):
            plan_for(catalog, [all_, last, all_], 4 * columns)


@given(cases(), st.sampled_from([2, 16, 64]))
@examples(100)
def test_rows_that_are_cut_one_after_the_other_come_to_the_same_plan(case: tuple[Catalog, list[TensorSpec]], window: int) -> None:
    catalog, specs = case
    together = plan_for(catalog, specs, window)
    with patch.object(load_module, "batches", lambda sizes, limit: batches(sizes, 1)):
        apart = plan_for(catalog, specs, window)
    for column in fields(LoadPlan):
        assert np.array_equal(getattr(together, column.name), getattr(apart, column.name))
