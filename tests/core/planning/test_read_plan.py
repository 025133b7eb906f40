"""What is read for a load: every wanted byte, each touched block once, and little else."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard_ckpt.core.planning.read_plan as reads_module
from reshard_ckpt.core.catalog.model import Catalog
from reshard_ckpt.core.catalog.specs import TensorSpec, box_piece, row_major_strides
from reshard_ckpt.core.planning.load_plan import LoadPlan, plan_load
from reshard_ckpt.core.planning.local_metadata import piece_columns
from reshard_ckpt.core.planning.match import match
from reshard_ckpt.core.planning.read_plan import NEAR_BYTES, ReadPlan, plan_reads
from reshard_ckpt.storage.memory import MemoryStorage
from tests.jobs import save_job
from tests.layouts import filled, layouts, shapes, spec_of, values_of
from tests.tries import examples

WINDOW = 8 << 20


def plan_for(catalog: Catalog, specs: list[TensorSpec], window: int = WINDOW) -> LoadPlan:
    source = match(specs, catalog, cast=False, allow_resize=False).source
    return plan_load(catalog, source, piece_columns(specs, max(len(s.shape) for s in specs) or 1), window)


def reads_for(catalog: Catalog, plan: LoadPlan, block_bytes: int, join: int = 1) -> ReadPlan:
    sizes = np.array([f.size for f in catalog.files])
    land = np.ones(int(plan.dest.max(initial=0)) + 1, bool)
    return plan_reads(plan, np.full(len(sizes), block_bytes), sizes, land, join=join)


def begins(lengths: np.ndarray, strides: np.ndarray) -> list[int]:
    """Where each element of a box begins, counted from the first one, in row-major order."""
    out = [0]
    for length, stride in zip(lengths.tolist(), strides.tolist(), strict=True):
        out = [at + i * stride for at in out for i in range(length)]
    return out


def wanted_bytes(plan: LoadPlan, file: int) -> set[int]:
    """The positions of all wanted bytes of a file, one by one."""
    out: set[int] = set()
    for i in np.flatnonzero(plan.file == file).tolist():
        first, each = int(plan.src[i]), int(plan.item_bytes[i])
        for at in begins(plan.lengths[i], plan.src_strides[i]):
            out.update(range(first + at, first + at + each))
    return out


@st.composite
def cases(draw: st.DrawFn) -> tuple[Catalog, list[TensorSpec]]:
    shape, saved = draw(shapes(9)), draw(st.integers(1, 4))
    layout = draw(layouts(shape, saved))
    targets = [draw(layouts(shape, draw(st.integers(1, 4)))) for _ in range(draw(st.integers(1, 2)))]
    whole = values_of(shape, "I16", 1)
    storage = MemoryStorage("reads")
    catalog = save_job(storage, [[(spec_of(layout, r, "t", "I16"), filled(layout, r, whole))] for r in range(saved)])
    return catalog, [spec_of(target, 0, "t", "I16") for target in targets]  # two want the same bytes, each for itself


def landing_pairs(reads: ReadPlan) -> list[tuple[int, int, int, int]]:
    """Each byte that lands: its file, its place there, its destination and its place there."""
    of_window = np.repeat(reads.file, np.diff(reads.run_start))
    rows = zip(*(c.tolist() for c in (of_window, reads.run_src, reads.run_bytes, reads.run_dest, reads.run_dst)), strict=True)
    return [(file, src + k, dest, dst + k) for file, src, size, dest, dst in rows for k in range(size)]


def item_pairs(plan: LoadPlan, i: int) -> list[tuple[int, int, int, int]]:
    """The same of an item of a load plan."""
    each, file, dest = int(plan.item_bytes[i]), int(plan.file[i]), int(plan.dest[i])
    src = [int(plan.src[i]) + at for at in begins(plan.lengths[i], plan.src_strides[i])]
    dst = [(int(plan.dst[i]) + at) * each for at in begins(plan.lengths[i], plan.dst_strides[i])]
    return [(file, one + k, dest, other + k) for one, other in zip(src, dst, strict=True) for k in range(each)]


@pytest.mark.slow
@given(
    cases(), st.sampled_from([16, 64, WINDOW]), st.sampled_from([0, 16]), st.sampled_from([1, 2, 5]), st.sampled_from([1, 8, 512])
)
@examples(400)
def test_each_wanted_byte_lands_or_is_copied_once(
    case: tuple[Catalog, list[TensorSpec]], window: int, block_bytes: int, join: int, land: int
) -> None:
    catalog, specs = case
    plan = plan_for(catalog, specs, window)
    with patch.object(reads_module, "LAND_BYTES", land):
        reads = reads_for(catalog, plan, block_bytes, join)
    landing, copying = landing_pairs(reads), [pair for i in reads.items.tolist() for pair in item_pairs(plan, i)]
    landed = {(file, at) for file, at, _, _ in landing}  # these are not in the buffer that others are copied from
    assert len(landed) == len(landing)
    assert landed.isdisjoint((file, at) for file, at, _, _ in copying)
    moved = landing + copying
    assert sorted(moved) == sorted(pair for i in range(len(plan.src)) for pair in item_pairs(plan, i))
    for w in range(reads.num_windows):  # what lands or is copied lies in what its window reads
        extents = [(reads.low[e], reads.high[e]) for e in range(reads.extent_start[w], reads.extent_start[w + 1])]
        for r in range(reads.run_start[w], reads.run_start[w + 1]):
            assert any(low <= reads.run_src[r] and reads.run_src[r] + reads.run_bytes[r] <= high for low, high in extents)
        copied = reads.items[reads.item_start[w] : reads.item_start[w + 1]].tolist()
        assert all(any(low <= at < high for low, high in extents) for i in copied for _, at, _, _ in item_pairs(plan, i))


def test_windows_join_only_where_nothing_is_copied() -> None:
    """Of 16 rows of 1 KiB, the first 8 are wanted whole, of the others the first quarters, which have to be copied."""
    catalog = one_matrix(16, 256, 256)
    specs = [wanted_box((16, 256), (0, 0), (8, 256)), wanted_box((16, 256), (8, 0), (8, 64))]
    plan = plan_for(catalog, specs, 2 << 10)
    begin = int(plan.src.min())  # behind the header of the file
    alone, joined = reads_for(catalog, plan, 0), reads_for(catalog, plan, 0, 4)
    assert alone.window.tolist() == list(range(8))
    assert alone.run_bytes.tolist() == [2048 - begin, 2048, 2048, 2048, begin]
    assert joined.window.tolist() == [0, 4, 5, 6, 7]
    assert joined.run_bytes.tolist() == [8192 - begin, begin]
    assert joined.items.tolist() == alone.items.tolist()


@pytest.mark.slow
@given(cases(), st.sampled_from([16, 64, WINDOW]), st.sampled_from([0, 16]), st.sampled_from([1, 2, 5]))
@examples(400)
def test_every_wanted_byte_is_in_exactly_one_extent(
    case: tuple[Catalog, list[TensorSpec]], window: int, block_bytes: int, join: int
) -> None:
    catalog, specs = case
    plan = plan_for(catalog, specs, window)
    with patch.object(reads_module, "LAND_BYTES", 8):
        reads = reads_for(catalog, plan, block_bytes, join)
    taken: dict[int, list[tuple[int, int]]] = {}
    for w in range(reads.num_windows):
        extents = range(reads.extent_start[w], reads.extent_start[w + 1])
        taken.setdefault(int(reads.file[w]), []).extend((int(reads.low[e]), int(reads.high[e])) for e in extents)
    for file in range(len(catalog.files)):
        extents = sorted(taken.get(file, []))
        assert all(a[1] <= b[0] for a, b in pairwise(extents))
        assert wanted_bytes(plan, file) <= {at for low, high in extents for at in range(low, high)}
        if block_bytes:
            assert all(low % block_bytes == 0 for low, _ in extents)


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
        runs = slice(together.run_start[first], together.run_start[last])
        for column in ("run_src", "run_bytes", "run_dest", "run_dst"):
            assert getattr(together, column)[runs].tolist() == getattr(alone, column).tolist()


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


def test_far_apart_columns_are_read_one_by_one_and_near_ones_together() -> None:
    far = one_matrix(16, 1 << 18, 1 << 18)
    plan = plan_for(far, [wanted_box((16, 1 << 18), (0, 7), (16, 1024))])
    assert reads_for(far, plan, 0).num_bytes == plan.num_bytes
    near = one_matrix(1 << 12, 1 << 10, 1 << 10)
    plan = plan_for(near, [wanted_box((1 << 12, 1 << 10), (0, 0), (1 << 12, 4))])
    reads = reads_for(near, plan, 0)
    assert len(reads.low) <= -(-prod((1 << 12, 1 << 10)) * 4 // WINDOW) + 1
    assert NEAR_BYTES >= 4 << 10
