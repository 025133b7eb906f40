"""Folding loses no name, joins only what looks the same, and says which places it stands for."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.catalog.name_tree import Node, fold, walk

PARTS = st.sampled_from(["a", "b", "layers", "0", "1", "2", "3", "10", "007", "9" * 30, ""])
NAMES = st.lists(st.lists(PARTS, min_size=1, max_size=5).map(".".join), unique=True, max_size=40)


def nodes_of(tree: tuple[Node, ...]) -> list[Node]:
    return [node for _, node in walk(tree)]


def places(label: str) -> list[str]:
    """The texts that a label with spans stands for, as far as it has numbers that a span can."""
    first, *rest = label.split(".")
    texts = [first]
    if re.fullmatch(r"[\d,-]+", first) and len(first) < 19:
        spans = [span.split("-") for span in first.split(",")]
        texts = [str(n) for span in spans for n in range(int(span[0]), int(span[-1]) + 1)]
    return [
        ".".join([text, *tail]) for text in texts for tail in ([p.split(".") for p in places(".".join(rest))] if rest else [[]])
    ]


@given(NAMES, st.data())
def test_every_name_is_a_leaf_once_and_those_folded_look_the_same(names: list[str], data: st.DataObject):
    looks = [data.draw(st.integers(0, 1)) for _ in names]
    nodes = nodes_of(fold(names, looks))
    leaves = [leaf for node in nodes for leaf in node.leaves]
    assert sorted(leaves) == list(range(len(names)))
    assert all(len({looks[leaf] for leaf in node.leaves}) <= 1 for node in nodes)
    assert all(node.count == len(node.leaves) for node in nodes if node.leaves)


@given(NAMES)
def test_labels_say_which_names_they_stand_for(names: list[str]):
    names = [name for name in names if "007" not in name]  # a span does not keep leading zeros

    def said(nodes: tuple[Node, ...], above: list[str]) -> list[str]:
        out = []
        for node in nodes:
            here = [f"{up}{text}" for up in above for text in places(node.label)]
            out += (here if node.leaves else []) + said(node.children, [f"{name}." for name in here])
        return out

    assert sorted(said(fold(names, ["same"] * len(names)), [""])) == sorted(names)


def test_layers_alike_are_one_and_others_stay():
    names = [f"model.layers.{i}.{part}" for i in range(12) for part in ("attn.w", "mlp.w")] + ["model.norm"]
    looks = ["moe" if ".5.mlp" in name else "dense" for name in names]
    lines = [f"{guide}{node.label} {node.count}" for guide, node in walk(fold(names, looks))]
    assert lines == [
        "└─ model 1",
        "   ├─ layers 1",
        "   │  ├─ 0-4,6-11 11",
        "   │  │  ├─ attn.w 11",
        "   │  │  └─ mlp.w 11",
        "   │  └─ 5 1",
        "   │     ├─ attn.w 1",
        "   │     └─ mlp.w 1",
        "   └─ norm 1",
    ]


def test_numbers_come_in_order_of_size():
    nodes = nodes_of(fold([f"x.{i}" for i in (10, 9, 2)], ["a", "b", "c"]))
    assert [node.label for node in nodes] == ["x", "2", "9", "10"]


def test_hostile_names_are_no_trouble():
    names = [".".join("a" * 5000), "0" * 5000, "x." + "7" * 5000, ""]
    assert sorted(leaf for node in nodes_of(fold(names, names)) for leaf in node.leaves) == [0, 1, 2, 3]
