"""Trees: flattened and built again they are the same; a path that is taken is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.trees import children, flatten, leaves, map_tree, put, unflatten
from reshard_ckpt.errors import NameCollisionError
from tests.tries import examples

LEAVES = st.none() | st.integers() | st.text(max_size=3)
DICTS = st.recursive(LEAVES, lambda inner: st.dictionaries(st.text(max_size=2), inner, min_size=1, max_size=3), max_leaves=12)
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers(), inner), max_leaves=12)


@examples(60)
@given(tree=st.dictionaries(st.text(max_size=2), DICTS))
def test_a_tree_of_dicts_is_built_again_from_its_leaves(tree: dict[str, Any]):
    assert unflatten(flatten(tree)) == tree


@examples(60)
@given(tree=TREES)
def test_a_tree_is_copied_with_other_leaves_in_the_same_places(tree: Any):
    seen: dict[Any, Any] = {}

    def change(path: Any, node: Any) -> Any:
        if children(node) is None:
            seen[path] = node
            return (node,)
        return node

    copy = map_tree(change, tree)
    assert seen == dict(flatten(tree))
    assert map_tree(lambda _, node: node[0] if isinstance(node, tuple) else node, copy) == tree
    assert list(leaves(copy)) == list(seen.values())


def test_a_path_that_is_taken_is_refused_by_name():
    tree: dict[str, Any] = {}
    put(tree, ("a", "b"), 1)
    for path, message in ((("a", "b"), "a.b: two things have this name"), (("a", "b", "c"), "a.b: is a value, and has others")):
        with pytest.raises(NameCollisionError, match=f"{message}.*leave one out"):
            put(tree, path, 2, "leave one out")
    assert tree == {"a": {"b": 1}}


def test_nodes_deeper_than_allowed_are_leaves():
    assert list(flatten({"a": {"b": {"c": 1}}}, max_depth=2)) == [(("a", "b"), {"c": 1})]
