"""A tree over the dots of names, in which layers that are alike are one: a hundred thousand names fit on a page.

1. Names are split at their dots into a tree; each leaf is a tensor or a value, and carries a *look*: what is shown of it.
2. From the leaves up, each subtree gets a number for its look: equal numbers, equal subtrees.
3. Siblings that are numbered (``layers.0``, ``layers.1``, …) and look the same become one, and its label says which they are.
4. A node with one child and nothing else is joined with it: ``attn`` → ``attn.weight``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

MAX_DEPTH = 60
"""Dots at which a name is split; what a hostile one has beyond stays in one piece."""

_MAX_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Node:
    """One line of the tree: `leaves` are all that it stands for, at this very place; `count` how many places were folded into it.

    `label` is what to show, such as ``layers.0-31``; ``name`` is the name of the first that it stands for.
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
    """The tree of these names.

    Parameters
    ----------
    names
        All different.
    looks
        Of each name; numbered siblings are folded where all below them looks the same.

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
    return tuple(node for node, _ in _Folder(names, looks).children(root, ""))


class _Folder:
    """Numbers subtrees by their look, and folds."""

    def __init__(self, names: Sequence[str], looks: Sequence[Hashable]) -> None:
        self._names, self._looks = names, looks
        self._numbers: dict[Hashable, int] = {}

    def children(self, branch: _Branch, prefix: str) -> list[tuple[Node, int]]:
        """The nodes below a branch, alike ones folded, each with the number of its look."""
        if len(branch.below) <= 1:  # most have none, or one: nothing to sort or fold
            alone = [self._node(part, below, prefix) for part, below in branch.below.items()]
            return [(_join(node), look) for node, look in alone]
        found = [(part, *self._node(part, below, prefix)) for part, below in _in_order(branch.below)]
        groups: dict[Hashable, list[tuple[str, Node, int]]] = {}
        for part, node, look in found:
            groups.setdefault(("fold", look) if _is_number(part) else ("one", part), []).append((part, node, look))
        return [(_join(_merge([node for _, node, _ in group], _label(group))), group[0][2]) for group in groups.values()]

    def _node(self, part: str, branch: _Branch, prefix: str) -> tuple[Node, int]:
        name = f"{prefix}{part}"
        below = self.children(branch, f"{name}.")
        own = None if branch.leaf < 0 else self._looks[branch.leaf]
        look = self._number((own, tuple((node.label, look) for node, look in below)))
        leaves = () if branch.leaf < 0 else (branch.leaf,)
        return Node(part, name, 1, leaves, tuple(node for node, _ in below)), look

    def _number(self, look: Hashable) -> int:
        return self._numbers.setdefault(look, len(self._numbers))


def _in_order(below: dict[str, _Branch]) -> Iterable[tuple[str, _Branch]]:
    """Numbers by their size, after what has a name."""
    numbered = [(_is_number(part), part, branch) for part, branch in below.items()]
    ordered = sorted(numbered, key=lambda item: (item[0], int(item[1]) if item[0] else 0, item[1]))
    return [(part, branch) for _, part, branch in ordered]


def _is_number(part: str) -> bool:
    return part.isdecimal() and len(part) <= _MAX_DIGITS


def _label(group: Sequence[tuple[str, Node, int]]) -> str:
    return group[0][0] if len(group) == 1 else spans([int(part) for part, _, _ in group])


def _merge(nodes: Sequence[Node], label: str) -> Node:
    """One node for several that look the same, and so have the same children in the same order."""
    first = nodes[0]
    if len(nodes) == 1:
        return first
    children = tuple(
        _merge(alike, alike[0].label) for alike in (list(column) for column in zip(*(n.children for n in nodes), strict=True))
    )
    return Node(label, first.name, sum(node.count for node in nodes), tuple(i for n in nodes for i in n.leaves), children)


def _join(node: Node) -> Node:
    """With its child, if it has one and is no leaf itself."""
    if node.leaves or len(node.children) != 1:
        return node
    child = node.children[0]
    # What is folded below a folded node was counted at each of its places.
    return Node(f"{node.label}.{child.label}", child.name, max(node.count, child.count), child.leaves, child.children)


def spans(numbers: Sequence[int]) -> str:
    """Rising numbers, runs of them from first to last.

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
    """Yield each node in order, after the guides of its line, as a drawn tree has them."""
    for i, node in enumerate(nodes):
        last = i == len(nodes) - 1
        yield f"{lead}{'└─ ' if last else '├─ '}", node
        yield from walk(node.children, f"{lead}{'   ' if last else '│  '}")


def shorten(names: Sequence[str], looks: Sequence[Hashable]) -> list[tuple[str, tuple[int, ...]]]:
    """The names in few lines, each with the indices of those that it stands for.

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
