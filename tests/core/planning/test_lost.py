"""The parts of wanted tensors that a catalog lacks, against sets of single elements."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.catalog.specs import Piece, row_major_strides
from reshard_ckpt.core.planning.lost import lost_parts
from tests.jobs import save_job
from tests.layouts import addresses, filled, layouts, shapes, spec_of, values_of
from tests.topologies import cleared
from tests.tries import examples


@given(st.data())
@examples(300, usual=200)
def test_lost_parts_are_the_wanted_elements_that_no_row_has(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_size=9))
    whole = values_of(shape, "F32", 1)
    saved, wanted = data.draw(layouts(shape, 6)), data.draw(layouts(shape, 2))
    ranks = [[(spec_of(saved, rank, "w", "F32"), filled(saved, rank, whole))] for rank in range(6)]
    catalog = save_job(cleared("memory://lost"), ranks)
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=len(catalog.rows.box), max_size=len(catalog.rows.box))), bool)
    table = replace(catalog.tensors_table, row_start=np.array([0, kept.sum()], np.int64))
    left = replace(catalog, rows=catalog.rows.take(kept), tensors_table=table)
    has = {
        place
        for shard in left.tensor("w").shards
        for _, place in addresses(
            Piece(shard.offsets, shard.lengths, shard.start, shard.count, 0, row_major_strides(shard.lengths))
        )
    }
    specs = [spec_of(wanted, rank, "w", "F32") for rank in range(2)]
    for spec, found in zip(specs, lost_parts(specs, left), strict=True):
        lost = [at for piece in (() if found is None else found.pieces) for at in addresses(piece)]
        assert len(set(lost)) == len(lost)
        assert set(lost) == {(at, place) for piece in spec.pieces for at, place in addresses(piece) if place not in has}
