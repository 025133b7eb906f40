"""What is read for a load: every wanted byte, each touched block once, and little else."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard_ckpt.core.catalog import Catalog
from reshard_ckpt.core.load_plan import LoadPlan, plan_load
from reshard_ckpt.core.match import match
from reshard_ckpt.core.offer import piece_columns
from reshard_ckpt.core.reads import NEAR_BYTES, ReadPlan, plan_reads
from reshard_ckpt.core.state import TensorSpec, box_piece, row_major_strides
from reshard_ckpt.storage.memory import MemoryStorage
from tests.jobs import save_job
from tests.layouts import filled, layouts, shapes, spec_of, values_of

WINDOW = 8 << 20


def plan_for(catalog: Catalog, specs: list[TensorSpec], window: int = WINDOW) -> LoadPlan:
    source = match(specs, catalog, cast=False, allow_resize=False).source
    return plan_load(catalog, source, piece_columns(specs, max(len(s.shape) for s in specs) or 1), window)


def reads_for(catalog: Catalog, plan: LoadPlan, block_bytes: int) -> ReadPlan:
    sizes = np.array([f.size for f in catalog.files])
    return plan_reads(plan, np.full(len(sizes), block_bytes), sizes, np.ones(int(plan.dest.max(initial=0)) + 1, bool))


def wanted_bytes(plan: LoadPlan, file: int) -> set[int]:
    """The positions of all wanted bytes of a file, one by one."""
    out: set[int] = set()
    for i in np.flatnonzero(plan.file == file).tolist():
        for x in np.ndindex(*plan.lengths[i].tolist()):
            at = int(plan.src[i] + (np.array(x) * plan.src_strides[i]).sum())
            out.update(range(at, at + int(plan.item_bytes[i])))
    return out


@st.composite
def cases(draw: st.DrawFn) -> tuple[Catalog, list[TensorSpec]]:
    shape, saved = draw(shapes(9)), draw(st.integers(1, 4))
    layout, target = draw(layouts(shape, saved)), draw(layouts(shape, draw(st.integers(1, 4))))
    whole = values_of(shape, "I16", 1)
    storage = MemoryStorage("reads")
    catalog = save_job(storage, [[(spec_of(layout, r, "t", "I16"), filled(layout, r, whole))] for r in range(saved)])
    return catalog, [spec_of(target, 0, "t", "I16")]


@given(cases(), st.sampled_from([16, 64, WINDOW]), st.sampled_from([0, 16]))
@settings(max_examples=400)
def test_every_wanted_byte_is_in_exactly_one_extent(
    case: tuple[Catalog, list[TensorSpec]], window: int, block_bytes: int
) -> None:
    catalog, specs = case
    plan = plan_for(catalog, specs, window)
    reads = reads_for(catalog, plan, block_bytes)
    assert sorted(reads.items.tolist()) == list(range(len(plan.src)))
    taken: dict[int, list[tuple[int, int]]] = {}
    for w in range(reads.num_windows):
        extents = range(reads.extent_start[w], reads.extent_start[w + 1])
        taken.setdefault(int(reads.file[w]), []).extend((int(reads.low[e]), int(reads.high[e])) for e in extents)
        for i in reads.items[reads.item_start[w] : reads.item_start[w + 1]].tolist():
            one = replace(
                plan, **{k: getattr(plan, k)[i : i + 1] for k in ("file", "src", "lengths", "src_strides", "item_bytes")}
            )
            for at in wanted_bytes(one, int(plan.file[i])):
                assert any(reads.low[e] <= at < reads.high[e] for e in extents)
    for extents in taken.values():
        extents.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(extents))
        if block_bytes:
            assert all(low % block_bytes == 0 for low, _ in extents)


@given(cases(), st.sampled_from([16, 64, WINDOW]), st.sampled_from([0, 16]), st.data())
@settings(max_examples=200)
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
        assert together.direct[items].tolist() == alone.direct.tolist()


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
