"""Conversion between the flat names of DCP's values and the values of a checkpoint.

DCP names every leaf of dicts, and of lists that hold dicts: ``optimizer.param_groups.0.lr``. This library names a list without
tensors as one value, ``optimizer.param_groups``. `join_leaves` makes such values of DCP's leaves; `leaves` makes DCP's leaves of
a value. So a checkpoint has the same names whoever saved it. DCP has two sets of names for the groups of an optimizer: by number,
and by parameter (``optimizer.param_groups.layer.weight.lr``). `leaves` gives both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.catalog.links import GROUPS, STATE
from ..core.catalog.specs import ValueKind, ValueSpec
from ..format.values import encode_path, encode_value
from ..formats.dcp.names import flat_groups, taken_apart
from ..state.optimizer_dicts import is_flattened
from ..state.scan import Index, Path, name_of, path_keys
from .state_dicts import nested


@dataclass(frozen=True, slots=True)
class Leaf:
    """One of DCP's values: its keys (an index into a list is an int), and the value itself."""

    path: tuple[str | int, ...]
    value: Any

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))


def leaves(path: tuple[str | int, ...], value: Any, kind: ValueKind) -> Iterator[Leaf]:
    """Yield the parts of a saved value under DCP's names."""
    found = taken_apart(path, value)
    # DCP has no entry for an empty dict.
    yield from (Leaf(at, part) for at, part in found if not isinstance(part, Mapping))
    if kind is ValueKind.PARAM_GROUPS:
        yield from (Leaf(at, part) for at, part in flat_groups(path[:-1], value))


def dcp_path(path: Path) -> tuple[str | int, ...]:
    """Return the keys to a value, as DCP spells them."""
    return tuple(int(key) if isinstance(key, Index) else str(key) for key in path)


def join_leaves(found: Iterable[Leaf], others: Iterable[tuple[str | int, ...]]) -> list[ValueSpec]:
    """Assemble the values that DCP's leaves are parts of.

    Parameters
    ----------
    others
        The paths of what else there is: tensors, and values whose bytes are not at hand. A list that holds any of them is none.
    """
    tree = _Tree()
    for path in others:
        tree.put(path, _UNAVAILABLE)
    for leaf in found:
        tree.put(leaf.path, leaf)
    return list(_values(tree, ()))


class _Unavailable:
    """A tensor, or a value whose bytes are not at hand."""


_UNAVAILABLE = _Unavailable()


class _Tree:
    """Children by key, which are trees, leaves or unavailable."""

    def __init__(self) -> None:
        self.children: dict[str | int, _Tree | Leaf | _Unavailable] = {}

    def put(self, path: Sequence[str | int], what: Leaf | _Unavailable) -> None:
        node = self
        for key in path[:-1]:
            child = node.children.get(key)
            if not isinstance(child, _Tree):
                child = node.children[key] = _Tree()
            node = child
        node.children.setdefault(path[-1], what)

    @property
    def is_list(self) -> bool:
        return bool(self.children) and all(type(key) is int for key in self.children)

    @property
    def is_whole(self) -> bool:
        """Whether all below is at hand, and each list has all its elements (DCP leaves out empty dicts)."""
        if self.is_list and set(self.children) != set(range(len(self.children))):
            return False
        return all(child.is_whole if isinstance(child, _Tree) else child is not _UNAVAILABLE for child in self.children.values())

    def value(self) -> Any:
        """Return the dicts and lists that were flattened."""
        values = {key: _value(child) for key, child in self.children.items()}
        return [values[i] for i in range(len(values))] if self.is_list else values


def _value(node: _Tree | Leaf | _Unavailable) -> Any:
    assert not isinstance(node, _Unavailable)
    return node.value() if isinstance(node, _Tree) else node.value


def _values(node: _Tree, path: Path) -> Iterator[ValueSpec]:
    if is_flattened(node.children):
        yield from _flattened_values(node, path)
        return
    for key, child in node.children.items():
        here = (*path, Index(key) if type(key) is int else key)
        if isinstance(child, Leaf):
            yield _spec(here, ValueKind.PLAIN, child.value)
        elif isinstance(child, _Tree):
            if child.is_list and child.is_whole:
                value = child.value()
                groups = key == GROUPS and _are_groups(value) and _is_state(node.children.get(STATE))
                yield _spec(here, ValueKind.PARAM_GROUPS if groups else ValueKind.PLAIN, value)
            else:
                yield from _values(child, here)


def _flattened_values(node: _Tree, path: Path) -> Iterator[ValueSpec]:
    """Yield the values of an optimizer's flattened state dict."""
    flat = {str(key): child.value for key, child in node.children.items() if isinstance(child, Leaf)}
    if not is_flattened(flat):
        yield from (_spec((*path, key), ValueKind.PLAIN, value) for key, value in flat.items())
        return
    tree = nested(flat, lambda tensor: tensor, merged=True)
    yield _spec((*path, GROUPS), ValueKind.PARAM_GROUPS, tree[GROUPS])
    for fqn, entry in tree[STATE].items():
        yield from (_spec((*path, STATE, fqn, key), ValueKind.PLAIN, value) for key, value in entry.items())


def _are_groups(value: Any) -> bool:
    return all(
        isinstance(group, dict) and isinstance(group.get("params"), list) and all(isinstance(p, str) for p in group["params"])
        for group in value
    )


def _is_state(node: _Tree | Leaf | _Unavailable | None) -> bool:
    """Return whether this is, or may have been, the state of an optimizer by parameter; DCP leaves out what is empty."""
    return node is None or (isinstance(node, _Tree) and all(isinstance(entry, _Tree) for entry in node.children.values()))


def _spec(path: Path, kind: ValueKind, value: Any) -> ValueSpec:
    name = name_of(path)
    return ValueSpec(name, encode_path(path_keys(path)), kind, encode_value(value, name))
