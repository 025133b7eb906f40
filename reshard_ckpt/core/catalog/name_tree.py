"""A tree of dotted names in which equal layers are folded into one line, so that a hundred thousand names fit on a page.

1. Split names at their dots into a tree. Each leaf is a tensor or a value, and has a *look*: a key that says how it is shown.
2. From the leaves up, number the looks of subtrees: subtrees that look the same get the same number.
3. Fold siblings that are numbered (``layers.0``, ``layers.1``, …) and look the same into one node, whose label lists the numbers.
4. Join a node that is not a leaf and has one child with that child: ``attn`` → ``attn.weight``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

MAX_DEPTH = 60
"""The most dots at which a name is split. Only hostile names have more; the rest of such a name stays in one piece."""

_MAX_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Node:
    """One line of a tree of names. It stands for several places in the tree if they are equal, such as the layers of a model.

    `label` is the text to show, such as ``layers.0-31``, and `name` the name of the first place. `leaves` are the indices of the
    tensors and values whose names end at these places. `count` is the number of places.
    """

    label: str
    name: str
    count: int
    leaves: tuple[int, ...]
    children: tuple[Node, ...]


@dataclass(slots=True)
class _Branch:
    leaf: int = -1
    below: dict[str, _Branch] = field(default_factory=dict)


def fold(names: Sequence[str], looks: Sequence[Hashable]) -> tuple[Node, ...]:
    """Fold dotted names into a tree in which numbered siblings that look the same are one node.

    Parameters
    ----------
    names
        The names, all different.
    looks
        For each name a key that is equal for tensors or values that look the same, such as dtype and shape. Numbered siblings are
        folded if everything below them has equal names and looks.

    Examples
    --------
    >>> nodes = fold(["layers.0.w", "layers.1.w", "layers.2.w", "norm"], ["4 × 4", "4 × 4", "8 × 4", "4"])
    >>> [node.label for node in nodes], [(node.label, node.count, node.leaves) for node in nodes[0].children]
    (['layers', 'norm'], [('0-1.w', 2, (0, 1)), ('2.w', 1, (2,))])
    """
    root = _Branch()
    for i, name in enumerate(names):
        branch = root
        for part in name.split(".", MAX_DEPTH):
            branch = branch.below.setdefault(part, _Branch())
        branch.leaf = i
    return tuple(node for node, _ in _Folder(looks).children(root, ""))


class _Folder:
    """The state of one call of `fold`: it numbers the looks of subtrees, so that equal looks have equal numbers."""

    def __init__(self, looks: Sequence[Hashable]) -> None:
        self._looks = looks
        self._numbers: dict[Hashable, int] = {}

    def children(self, branch: _Branch, prefix: str) -> list[tuple[Node, int]]:
        """Return the child nodes of a branch, folded where they look the same, each with the number of its look."""
        if len(branch.below) <= 1:  # most branches have no child or one: nothing to sort or fold
            alone = [self._node(part, below, prefix) for part, below in branch.below.items()]
            return [(_join(node), look) for node, look in alone]
        # Named children by name, and numbered ones behind them by their numbers.
        numbered = [(_is_number(part), part) for part in branch.below]
        ordered = sorted(numbered, key=lambda item: (item[0], int(item[1]) if item[0] else 0, item[1]))
        found = [(part, *self._node(part, branch.below[part], prefix)) for _, part in ordered]
        groups: dict[Hashable, list[tuple[str, Node, int]]] = {}
        for part, node, look in found:
            groups.setdefault(("fold", look) if _is_number(part) else ("one", part), []).append((part, node, look))
        merged: list[tuple[Node, int]] = []
        for group in groups.values():
            nodes = [node for _, node, _ in group]
            label = "" if len(group) == 1 else spans([int(part) for part, _, _ in group])  # such as "0-31"
            merged.append((_join(_merge(nodes, label)), group[0][2]))
        return merged

    def _node(self, part: str, branch: _Branch, prefix: str) -> tuple[Node, int]:
        """Return the node for a branch, with all nodes below it, and the number of its look."""
        name = f"{prefix}{part}"
        below = self.children(branch, f"{name}.")
        own = None if branch.leaf < 0 else self._looks[branch.leaf]
        look = self._number((own, tuple((node.label, look) for node, look in below)))
        leaves = () if branch.leaf < 0 else (branch.leaf,)
        return Node(part, name, 1, leaves, tuple(node for node, _ in below)), look

    def _number(self, look: Hashable) -> int:
        return self._numbers.setdefault(look, len(self._numbers))


def _is_number(part: str) -> bool:
    return part.isdecimal() and len(part) <= _MAX_DIGITS


def _merge(nodes: Sequence[Node], label: str) -> Node:
    """Merge nodes that look the same, and so have the same children in the same order, into one node with this label.

    A single node is returned as it is.
    """
    first = nodes[0]
    if len(nodes) == 1:
        return first
    children = tuple(
        _merge(alike, alike[0].label) for alike in (list(column) for column in zip(*(n.children for n in nodes), strict=True))
    )
    return Node(label, first.name, sum(node.count for node in nodes), tuple(i for n in nodes for i in n.leaves), children)


def _join(node: Node) -> Node:
    """Join a node with its only child, as in ``attn.weight``. A leaf, or a node with several children, stays as it is."""
    if node.leaves or len(node.children) != 1:
        return node
    child = node.children[0]
    # A node below a folded one has counted its places already, so the counts are not multiplied.
    return Node(f"{node.label}.{child.label}", child.name, max(node.count, child.count), child.leaves, child.children)


def spans(numbers: Sequence[int]) -> str:
    """Write ascending numbers as text, with runs of consecutive numbers as ``first-last``.

    >>> spans([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def walk(nodes: Sequence[Node], lead: str = "") -> Iterator[tuple[str, Node]]:
    """Yield the nodes of a tree from top to bottom, each with the box-drawing lines to print before its label."""
    for i, node in enumerate(nodes):
        last = i == len(nodes) - 1
        yield f"{lead}{'└─ ' if last else '├─ '}", node
        yield from walk(node.children, f"{lead}{'   ' if last else '│  '}")


def shorten(names: Sequence[str], looks: Sequence[Hashable]) -> list[tuple[str, tuple[int, ...]]]:
    """Fold dotted names into few lines; return each line with the indices of the names that it stands for.

    >>> shorten(["layers.0.w", "layers.1.w", "norm"], ["", "", ""])
    [('layers.0-1.w', (0, 1)), ('norm', (2,))]
    """
    out: list[tuple[str, tuple[int, ...]]] = []

    def add(nodes: Sequence[Node], above: str) -> None:
        for node in nodes:
            if node.leaves:
                out.append((f"{above}{node.label}", node.leaves))
            add(node.children, f"{above}{node.label}.")

    add(fold(names, looks), "")
    return out
