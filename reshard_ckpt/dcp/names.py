"""Which of DCP's flat names stand for which values of a checkpoint, and the other way round?

DCP names every leaf of dicts, and of lists that hold dicts: ``optimizer.param_groups.0.lr``. This library names a list without
tensors as one value, ``optimizer.param_groups``. `joined` makes such values of DCP's leaves, `leaves` makes DCP's leaves of a
value; so a checkpoint says the same whoever saved it. The groups of an optimizer have two sets of names with DCP, by number and
by parameter (``optimizer.param_groups.layer.weight.lr``); `leaves` gives both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.catalog.specs import ValueKind, ValueSpec
from ..format.values import encode_path, encode_value
from ..state.optimizer_dicts import GROUPS, STATE, is_flattened
from ..state.scan import Index, Path, name_of, path_keys
from .forms import nested


@dataclass(frozen=True, slots=True)
class Leaf:
    """One of DCP's values: its keys (a step into a list is an int), and itself."""

    path: tuple[str | int, ...]
    value: Any

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))


def leaves(path: tuple[str | int, ...], value: Any, kind: ValueKind) -> Iterator[Leaf]:
    """What DCP would call the parts of a saved value."""
    yield from _leaves(path, value)
    if kind is ValueKind.PARAM_GROUPS:
        for group in value:
            for fqn in group["params"]:
                yield from (Leaf((*path[:-1], f"{path[-1]}.{fqn}.{key}"), item) for key, item in group.items() if key != "params")


def _leaves(path: tuple[str | int, ...], value: Any) -> Iterator[Leaf]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _leaves((*path, str(key)), child)
    elif _is_opened(value):
        for index, child in enumerate(value):
            yield from _leaves((*path, index), child)
    else:
        yield Leaf(path, value)


def _is_opened(value: Any) -> bool:
    """Whether DCP names the elements of a value: of a list that holds dicts or tensors, at any depth of lists."""
    return isinstance(value, list) and any(isinstance(v, Mapping | torch.Tensor) or _is_opened(v) for v in value)


def dcp_path(path: Path) -> tuple[str | int, ...]:
    """The keys to a value, as DCP spells them."""
    return tuple(int(key) if isinstance(key, Index) else str(key) for key in path)


def joined(found: Iterable[Leaf], others: Iterable[tuple[str | int, ...]]) -> list[ValueSpec]:
    """The values that DCP's leaves are parts of.

    Parameters
    ----------
    others
        The paths of what else there is: tensors, and values whose bytes are not at hand. A list that holds any of them is none.
    """
    tree = _Tree()
    for path in others:
        tree.put(path, _OTHER)
    for leaf in found:
        tree.put(leaf.path, leaf)
    return list(_values(tree, ()))


class _Other:
    """What is no value at hand."""


_OTHER = _Other()


class _Tree:
    """Children by key, which are trees, leaves or others."""

    def __init__(self) -> None:
        self.children: dict[str | int, _Tree | Leaf | _Other] = {}

    def put(self, path: Sequence[str | int], what: Leaf | _Other) -> None:
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
        return all(child.is_whole if isinstance(child, _Tree) else child is not _OTHER for child in self.children.values())

    def value(self) -> Any:
        """The lists and dicts that this was."""
        values = {key: _value(child) for key, child in self.children.items()}
        return [values[i] for i in range(len(values))] if self.is_list else values


def _value(node: _Tree | Leaf | _Other) -> Any:
    assert not isinstance(node, _Other)
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
    """The values of an optimizer's flattened state dict."""
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


def _is_state(node: _Tree | Leaf | _Other | None) -> bool:
    """Whether this is, or may have been, the state of an optimizer by parameter; DCP leaves out what is empty."""
    return node is None or (isinstance(node, _Tree) and all(isinstance(entry, _Tree) for entry in node.children.values()))


def _spec(path: Path, kind: ValueKind, value: Any) -> ValueSpec:
    name = name_of(path)
    return ValueSpec(name, encode_path(path_keys(path)), kind, encode_value(value, name))
