"""Conversion between the flat names of DCP's values and the values of a checkpoint.

DCP names every leaf of dicts, and of lists that hold dicts: ``optimizer.param_groups.0.lr``. This library names a list without
tensors as one value, ``optimizer.param_groups``. `join_leaves` makes such values of DCP's leaves; `leaves` makes DCP's leaves of
a value. So a checkpoint has the same names whoever saved it. DCP has two sets of names for the groups of an optimizer: by number,
and by parameter (``optimizer.param_groups.layer.weight.lr``). `leaves` gives both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.catalog.links import GROUPS, STATE
from ..core.catalog.specs import ValueKind, ValueSpec
from ..core.trees import Path, name_of
from ..format.values import encode_path, encode_value
from ..formats.dcp.names import NestedBuilder, taken_apart
from ..state.optimizer_dicts import are_named_groups, flat_groups, is_flattened, nested, saved_groups
from ..state.paths import Index, path_keys


@dataclass(frozen=True, slots=True)
class KeyedValue:
    """One of DCP's values: its keys (an index into a list is an int), and the value itself."""

    path: tuple[str | int, ...]
    value: Any

    @property
    def name(self) -> str:
        return name_of(self.path)


def leaves(path: tuple[str | int, ...], value: Any, kind: ValueKind) -> Iterator[KeyedValue]:
    """Yield the parts of a saved value under DCP's names."""
    found = taken_apart(path, value)
    # DCP has no entry for an empty dict.
    yield from (KeyedValue(at, part) for at, part in found if not isinstance(part, Mapping))
    if kind is ValueKind.PARAM_GROUPS:
        yield from (KeyedValue((*path[:-1], name), part) for name, part in flat_groups(value))


def join_leaves(found: Iterable[KeyedValue], others: Iterable[tuple[str | int, ...]]) -> list[ValueSpec]:
    """Assemble the values that DCP's leaves are parts of.

    Parameters
    ----------
    others
        The paths of what else there is: tensors, and values whose bytes are not at hand. A list that holds any of them is none.
    """
    tree = NestedBuilder()
    for path in others:
        tree.put(path, _UNAVAILABLE)
    for leaf in found:
        tree.put(leaf.path, leaf.value)
    return list(_values(tree, ()))


_UNAVAILABLE = object()
"""A tensor, or a value whose bytes are not at hand."""


def _is_whole(node: NestedBuilder) -> bool:
    """Return whether all below is at hand, and each list has all its elements (DCP leaves out empty dicts)."""
    if node.is_list and set(node.children) != set(range(len(node.children))):
        return False
    return all(
        _is_whole(child) if isinstance(child, NestedBuilder) else child is not _UNAVAILABLE for child in node.children.values()
    )


def _values(node: NestedBuilder, path: Path) -> Iterator[ValueSpec]:
    if is_flattened(node.children):
        yield from _flattened_values(node, path)
        return
    for key, child in node.children.items():
        here = (*path, Index(key) if type(key) is int else key)
        if isinstance(child, NestedBuilder):
            if child.is_list and _is_whole(child):
                value = child.plain()
                groups = key == GROUPS and are_named_groups(value) and _is_state(node.children.get(STATE))
                yield _spec(here, ValueKind.PARAM_GROUPS if groups else ValueKind.PLAIN, value)
            else:
                yield from _values(child, here)
        elif child is not _UNAVAILABLE:
            yield _spec(here, ValueKind.PLAIN, child)


def _flattened_values(node: NestedBuilder, path: Path) -> Iterator[ValueSpec]:
    """Yield the values of an optimizer's flattened state dict."""
    flat = {
        str(key): child
        for key, child in node.children.items()
        if child is not _UNAVAILABLE and not isinstance(child, NestedBuilder)
    }
    if not is_flattened(flat):
        yield from (_spec((*path, key), ValueKind.PLAIN, value) for key, value in flat.items())
        return
    tree = nested(flat)
    yield _spec((*path, GROUPS), ValueKind.PARAM_GROUPS, saved_groups(tree[GROUPS]))
    for fqn, entry in tree[STATE].items():
        yield from (_spec((*path, STATE, fqn, key), ValueKind.PLAIN, value) for key, value in entry.items())


def _is_state(node: Any) -> bool:
    """Return whether this is, or may have been, the state of an optimizer by parameter; DCP leaves out what is empty."""
    return node is None or (
        isinstance(node, NestedBuilder) and all(isinstance(entry, NestedBuilder) for entry in node.children.values())
    )


def _spec(path: Path, kind: ValueKind, value: Any) -> ValueSpec:
    name = name_of(path)
    return ValueSpec(name, encode_path(path_keys(path)), kind, encode_value(value, name))
