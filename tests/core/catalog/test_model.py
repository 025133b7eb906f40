"""A catalog is a value: one that was made of another, narrowed or with other dtypes, says what it keeps as the whole one does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.catalog.model import retyped, select_entries
from reshard_ckpt.core.catalog.specs import TensorSpec, box_piece, piece_columns
from reshard_ckpt.core.geometry.columns import columns_of
from reshard_ckpt.format.catalog_check import problems
from tests.format.building import Built, Run, Tensor, build, checkpoints


def test_a_replaced_catalog_finds_its_own_tensors_and_the_old_one_still_its_own() -> None:
    one = (Run((0,), (1,), 0, 1, 0),)
    old = build([Tensor(name, "U8", (1,), b"a", one) for name in ("a", "b")], values={}).catalog
    new = replace(old, tensors_table=replace(old.tensors_table, names=("c", "d")))
    assert (old.names, new.names) == (("a", "b"), ("c", "d"))
    assert (new.index("d"), "a" in new, "d" in old) == (1, False, False)


def own_shards(catalog, name):
    """What holds a tensor's bytes, in a form to compare."""
    return [(s.offsets, s.lengths, s.start, s.count, s.file, s.offset) for s in catalog.tensor(name).shards]


@given(checkpoints(), st.data())
def test_what_is_kept_is_as_it_was(built: Built, data: st.DataObject):
    whole = built.catalog
    tensors = data.draw(st.lists(st.sampled_from(whole.names), unique=True)) if whole.names else []
    values = data.draw(st.lists(st.sampled_from(whole.value_names), unique=True)) if whole.value_names else []
    kept = select_entries(whole, tensors, values)
    assert not list(problems(kept))
    assert (set(kept.names), set(kept.value_names)) == (set(tensors), set(values))
    for name in tensors:
        assert (kept.tensor(name).shape, kept.tensor(name).dtype) == (whole.tensor(name).shape, whole.tensor(name).dtype)
        assert own_shards(kept, name) == own_shards(whole, name)
    # Of those that share bytes, one has them.
    groups: dict[int, list[str]] = {}
    for name in tensors:
        groups.setdefault(whole.source(whole.index(name)), []).append(name)
    for names in groups.values():
        assert sum(kept.tensor(name).alias_of is None for name in names) == 1
    table = {value.name: value for value in whole.values_table}
    for value in kept.values_table:
        assert value.data == table[value.name].data
        blobs = [whole.tensors_table.names[blob] for blob in table[value.name].blobs]
        assert [kept.tensors_table.names[blob] for blob in value.blobs] == blobs


@given(checkpoints(), st.data())
def test_what_is_of_another_dtype_shares_nothing(built: Built, data: st.DataObject):
    whole = built.catalog
    chosen = data.draw(st.lists(st.sampled_from(whole.names), unique=True)) if whole.names else []
    dtypes = dict.fromkeys(chosen, "F64")
    out = retyped(whole, dtypes)
    for name in whole.names:
        view, before = out.tensor(name), whole.tensor(name)
        assert view.dtype == dtypes.get(name, before.dtype)
        if before.alias_of is not None:
            alike = view.dtype == out.tensor(before.alias_of).dtype
            assert view.alias_of == (before.alias_of if alike else None)


def test_names_are_found_together_as_they_are_one_by_one() -> None:
    tensors = [
        Tensor("scalar", "F32", (), b"abcd", (Run((), (), 0, 1, 0),)),
        Tensor("wide", "U8", (1, 2), b"ab", (Run((0, 0), (1, 2), 0, 2, 0),)),
    ]
    catalog = build(tensors, values={}).catalog
    names = ["wide", "absent", "scalar"]
    alone = [(catalog.index(n), catalog.dtype(catalog.index(n)), catalog.shape(catalog.index(n))) for n in ("wide", "scalar")]
    assert catalog.found(names) == [alone[0], None, alone[1]] == [(1, "U8", (1, 2)), None, (0, "F32", ())]
    assert build([], values={}).catalog.found(names) == [None] * 3


def test_equal_tensors_that_share_their_pieces_have_the_columns_of_their_own() -> None:
    specs = [
        TensorSpec("a", "U8", (4,), (box_piece((0,), (1,), 0, (1,)), box_piece((2,), (2,), 1, (1,)))),
        TensorSpec("b", "U8", (2, 3), (box_piece((1, 0), (1, 3), 0, (3, 1)),)),
        TensorSpec("none", "U8", (0,), ()),
    ]
    shared = [specs[0], specs[1], specs[2], specs[0], specs[1]]
    apart = [replace(spec, pieces=tuple([replace(piece) for piece in spec.pieces])) for spec in shared]
    for one, other in zip(columns_of(piece_columns(shared)), columns_of(piece_columns(apart)), strict=True):
        assert np.array_equal(one, other)
    assert piece_columns(shared).tensor.tolist() == [0, 0, 1, 3, 3, 4]
    assert piece_columns(shared).offsets.tolist() == [[0, 0], [0, 2], [1, 0], [0, 0], [0, 2], [1, 0]]
