"""A catalog is a value: one that was made of another, narrowed or with other dtypes, says what it keeps as the whole one does."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.catalog.model import retyped, select_entries
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
