"""The names that this library gives to the contents of a DCP folder.

DCP flattens the state that it saves: a name is the keys that lead to a tensor or value, joined by dots, and so are names here.
Three things differ:

1. *A model at the top.* Some trainers save the model's own state dict as the top level, and the rest beside it under keys. Here a
   model has a key; it gets ``model``, if nothing else has that.
2. *Optimizer groups.* ``get_optimizer_state_dict`` returns, for each group, every hyperparameter as a value of its own; with
   ``flatten_optimizer_state_dict=True`` it does so for each parameter. Here the groups are one value, keyed by FQN. The state
   itself has the same names in all three. An optimizer saved at the top gets the key ``optimizer``.
3. *Indices.* ``optimizer.state_dict()`` itself has parameters by their numbers alone. If the optimizer was made with
   ``named_parameters()``, the groups also have their names, which replace the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.catalog.links import GROUPS, STATE
from ...core.catalog.specs import StateLink
from ...format.values import decode_path
from ...state.optimizer_dicts import OptimizerGroups, flat_hyperparameter, grouped, groups_from_list
from ...state.paths import Index, saved_path
from .metadata import Key, Metadata

MODEL = "model"
OPTIMIZER = "optimizer"

KeyPath = tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """One hyperparameter: of the group with that index or the parameter with that name, and the keys below the hyperparameter."""

    owner: int | str
    key: KeyPath


@dataclass(slots=True)
class Names:
    """The path of each DCP name; the entries of optimizer groups, which have none, are listed by the path of their optimizer."""

    paths: dict[str, KeyPath] = field(default_factory=dict)
    groups: dict[KeyPath, dict[str, GroupEntry]] = field(default_factory=dict)


def dotted(path: Iterable[Key]) -> str:
    """Join the keys of a path by dots."""
    return ".".join(map(str, path))


def key_path(encoded: bytes) -> KeyPath:
    """Decode the path of a value to keys as DCP spells them."""
    return tuple(int(key) if isinstance(key, Index) else str(key) for key in saved_path(decode_path(encoded)))


def names_of(saved: Metadata, *, as_saved: bool = False) -> Names:
    """Find the names of everything in the folder.

    Parameters
    ----------
    as_saved
        Nothing gets a key that it did not have.
    """
    paths = raw_paths(saved)
    if as_saved:
        return _names(paths)
    if any(path[0] == GROUPS or str(path[0]).startswith(f"{GROUPS}.") for path in paths.values()):
        paths = {fqn: _below_optimizer(path) for fqn, path in paths.items()}
    if any(_is_below_model(path) for path in paths.values()):
        return _names(paths)
    of_model = {fqn: (MODEL, *path) for fqn, path in paths.items() if _is_of_model(fqn, path, fqn in saved.tensors)}
    return _names({**paths, **of_model})


def _is_below_model(path: KeyPath) -> bool:
    return path[0] == MODEL or (len(path) == 1 and str(path[0]).startswith(f"{MODEL}."))


def _names(paths: Mapping[str, KeyPath]) -> Names:
    out = Names()
    for fqn, path in paths.items():
        found = _group_entry(path)
        if found is not None:
            out.groups.setdefault(found[0], {})[fqn] = found[1]
        else:
            out.paths[fqn] = path
    return out


def _below_optimizer(path: KeyPath) -> KeyPath:
    """Return the path of an entry that was saved with the state of an optimizer as the top level."""
    first = str(path[0]).partition(".")[0]
    return (OPTIMIZER, *path) if first in (STATE, GROUPS) else path


def raw_paths(saved: Metadata) -> dict[str, KeyPath]:
    """Return the paths in the state that was saved; a name is its own path where the planner recorded none."""
    return {fqn: saved.paths.get(fqn, (fqn,)) for fqn in (*saved.tensors, *saved.values)}


def _is_of_model(fqn: str, path: KeyPath, is_tensor: bool) -> bool:
    """Return whether an entry at the top belongs to a model: any tensor, and values such as ``layers.0._extra_state``."""
    return len(path) == 1 and (is_tensor or "." in fqn) and not fqn.startswith((f"{OPTIMIZER}.", "optim."))


def _group_entry(path: KeyPath) -> tuple[KeyPath, GroupEntry] | None:
    """Return the optimizer and the entry of its groups that a path leads to; None if it leads to no group."""
    for i, key in enumerate(path):
        if key == GROUPS and len(path) > i + 2 and isinstance(path[i + 1], int):
            return path[:i], GroupEntry(path[i + 1], path[i + 2 :])
        if i and isinstance(key, str) and path[0] != MODEL:
            found = flat_hyperparameter(key)
            if found is not None and found[0]:
                return path[:i], GroupEntry(found[0], (found[1], *path[i + 1 :]))
    return None


def groups_from_entries(entries: Mapping[str, GroupEntry], values: Mapping[str, Any]) -> OptimizerGroups | None:
    """Assemble the groups of an optimizer from their hyperparameters.

    Parameters
    ----------
    entries, values
        By DCP name: what each is, and its value.

    Returns
    -------
    OptimizerGroups
        None if they are no groups of an optimizer after all.
    """
    owners: dict[int | str, NestedBuilder] = {}
    for fqn, entry in entries.items():
        owners.setdefault(entry.owner, NestedBuilder()).put(entry.key, values[fqn])
    flat = {owner: group.plain() for owner, group in owners.items() if isinstance(owner, str)}
    nested = {owner: group.plain() for owner, group in owners.items() if isinstance(owner, int)}
    if (flat and nested) or not all(isinstance(group, dict) for group in (*flat.values(), *nested.values())):
        return None
    return OptimizerGroups(grouped(flat.items()), {}) if flat else groups_from_list([nested[i] for i in sorted(nested)])


def state_path(link: StateLink, form: str) -> KeyPath:
    """Give the path of an entry of an optimizer's state, in the nested or the flat form."""
    above = tuple(link.optimizer.split(".")) if link.optimizer else ()
    return (*above, STATE, link.fqn, link.key) if form == "nested" else (*above, f"{STATE}.{link.fqn}.{link.key}")


def taken_apart(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Flatten a value as DCP does: dicts always, lists where a dict or a tensor is inside."""
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            yield from taken_apart((*path, str(key)), child)
    elif isinstance(value, list) and not _is_terminal(value):
        for index, child in enumerate(value):
            yield from taken_apart((*path, index), child)
    else:
        yield path, value


def _is_terminal(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_terminal(child) for child in value)
    return not isinstance(value, Mapping | torch.Tensor)


class NestedBuilder:
    """Builds a dict or list from its flattened entries; it is a list if all its keys are indices."""

    def __init__(self) -> None:
        self.children: dict[Key, Any] = {}

    def put(self, path: KeyPath, value: Any) -> None:
        """Add the value at a path below, unless there is one."""
        node = self
        for key in path[:-1]:
            child = node.children.get(key)
            if not isinstance(child, NestedBuilder):
                child = node.children[key] = NestedBuilder()
            node = child
        node.children.setdefault(path[-1], value)

    @property
    def is_list(self) -> bool:
        return all(isinstance(key, int) for key in self.children)

    def plain(self) -> Any:
        """Return the dict or list."""
        children = {key: child.plain() if isinstance(child, NestedBuilder) else child for key, child in self.children.items()}
        return [children[key] for key in sorted(children)] if self.is_list else children


def renumbered(path: KeyPath, optimizer: KeyPath, named: Mapping[str, str]) -> KeyPath:
    """Replace the number of a parameter by its name in a path into an optimizer's state."""
    at = len(optimizer)
    if path[:at] == optimizer and len(path) > at + 1 and path[at] == STATE and str(path[at + 1]) in named:
        return (*optimizer, STATE, named[str(path[at + 1])], *path[at + 2 :])
    return path


def value_paths(values: Iterable[KeyPath], tensors: Iterable[KeyPath]) -> dict[KeyPath, KeyPath]:
    """Map each path to that of the value it belongs to: DCP flattens lists of dicts; here a list without tensors is one value.

    >>> value_paths([("a", "l", 0, "x"), ("a", "l", 1)], [("w",)])
    {('a', 'l', 0, 'x'): ('a', 'l'), ('a', 'l', 1): ('a', 'l')}
    """
    apart = {path[:i] for path in tensors for i, key in enumerate(path) if isinstance(key, int)}

    def whole(path: KeyPath) -> KeyPath:
        lists = (path[:i] for i, key in enumerate(path) if i and isinstance(key, int))
        return next((above for above in lists if above not in apart), path)

    return {path: whole(path) for path in values}
