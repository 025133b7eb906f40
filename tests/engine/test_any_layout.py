"""Saved from any layout, loaded into any other: bit for bit, over the memory store, thousands of times."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.catalog.specs import CODES, Piece, Replication, TensorSpec, item_bytes_of
from reshard_ckpt.core.geometry.runs import as_boxes, volumes
from reshard_ckpt.engine.loading.load import LoadOptions
from reshard_ckpt.errors import LayoutError
from reshard_ckpt.storage.memory import MemoryStorage
from reshard_ckpt.storage.protocol import DISK
from tests.jobs import load_job, save_job
from tests.layouts import Layout, filled, flat_layouts, layouts, shapes, spec_of, values_of, whole_piece
from tests.tries import examples


@st.composite
def cases(draw: st.DrawFn) -> list[tuple[Layout, Layout, str]]:
    saved, loaded = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    out = []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(shapes())
        out.append((draw(layouts(shape, saved)), draw(layouts(shape, loaded)), draw(st.sampled_from(CODES))))
    return out


@pytest.mark.slow
@given(cases(), st.sampled_from([0, 8, 96, 4096]))
@examples(300)
def test_what_is_saved_from_one_layout_loads_into_another(case: list[tuple[Layout, Layout, str]], window: int) -> None:
    whole = [values_of(saved.shape, dtype, i) for i, (saved, _, dtype) in enumerate(case)]
    ranks = [
        [(spec_of(saved, r, f"t{i}", dtype), filled(saved, r, whole[i])) for i, (saved, _, dtype) in enumerate(case)]
        for r in range(len(case[0][0].pieces))
    ]
    storage = MemoryStorage("job")
    catalog = save_job(storage, ranks)
    # Larger elements come first in a file, so each row begins at a multiple of its element.
    assert not (catalog.rows.offset % item_bytes_of(catalog.tensors_table.dtype)[catalog.row_tensors]).any()
    # A run that is a box is a row with a box of its own.
    rows = catalog.rows.take(catalog.rows.count > 0)
    lengths = catalog.boxes.lengths[rows.box]
    assert (as_boxes(lengths, rows.start, rows.count)[0] == (rows.count == volumes(lengths))).all()
    for i, (saved, _, _) in enumerate(case):
        assert catalog.shape(catalog.index(f"t{i}")) == saved.shape
        assert sum(s.num_bytes for s in catalog.tensor(f"t{i}").shards) == prod(saved.shape) * whole[i].element_size()
    for r in range(len(case[0][1].pieces)):
        wanted = [
            (spec_of(loaded, r, f"t{i}", dtype), torch.zeros(loaded.memory[r], dtype=whole[i].dtype))
            for i, (_, loaded, dtype) in enumerate(case)
        ]
        load_job(storage, wanted, LoadOptions(verify=not window), catalog, window_bytes=window or DISK.read_bytes)
        for i, (_, loaded, _) in enumerate(case):
            expected = filled(loaded, r, whole[i])
            # Also what lies between the pieces must be as it was: zeros.
            assert torch.equal(wanted[i][1].view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.slow
@given(st.data())
@examples(300)
def test_replicas_that_cut_a_tensor_elsewhere_save_as_one(data: st.DataObject) -> None:
    """Each column of ranks holds the whole tensor, in flat runs of its own cuts."""
    shape = data.draw(shapes().filter(prod))
    columns = [data.draw(flat_layouts(shape, data.draw(st.integers(1, 3)))) for _ in range(data.draw(st.integers(1, 3)))]
    dtype = data.draw(st.sampled_from(CODES))
    whole = values_of(shape, dtype, 3)
    ranks = [[(spec_of(c, r, "t", dtype), filled(c, r, whole))] for c in columns for r in range(len(c.pieces))]
    storage = MemoryStorage("cuts")
    catalog = save_job(storage, ranks)
    assert sum(s.num_bytes for s in catalog.tensor("t").shards) == prod(shape) * whole.element_size()
    into = torch.zeros(shape, dtype=whole.dtype)
    load_job(storage, [(TensorSpec("t", dtype, shape, (whole_piece(shape),)), into)])
    assert torch.equal(into.reshape(-1).view(torch.uint8), whole.reshape(-1).view(torch.uint8))


def test_overlapping_runs_that_differ_are_found() -> None:
    def held(start: int, values: torch.Tensor) -> list[tuple[TensorSpec, torch.Tensor]]:
        piece = Piece((0,), (10,), start, len(values), -start, (1,))
        return [(TensorSpec("t", "F32", (10,), (piece,), Replication.DECLARED), values)]

    whole = torch.arange(10.0)
    save_job(MemoryStorage("same"), [held(0, whole[:6].clone()), held(4, whole[4:].clone())])
    other = whole[4:].clone()
    other[1] = 9
    with pytest.raises(LayoutError, match="t: ranks 0 and 1 hold it as the same, but their values differ"):
        save_job(MemoryStorage("differ"), [held(0, whole[:6].clone()), held(4, other)])
