"""A catalog is a value: one that was made of another shares nothing with it that could change."""

from __future__ import annotations

from dataclasses import replace

from tests.format.building import Run, Tensor, build


def test_a_replaced_catalog_finds_its_own_tensors_and_the_old_one_still_its_own() -> None:
    one = (Run((0,), (1,), 0, 1, 0),)
    old = build([Tensor(name, "U8", (1,), b"a", one) for name in ("a", "b")], values={}).catalog
    new = replace(old, tensors_table=replace(old.tensors_table, names=("c", "d")))
    assert (old.names, new.names) == (("a", "b"), ("c", "d"))
    assert (new.index("d"), "a" in new, "d" in old) == (1, False, False)
