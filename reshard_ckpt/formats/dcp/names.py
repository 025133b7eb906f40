"""Converting the names in a DCP folder to the names of this library.

DCP flattens the state that it saves: a name is the keys that lead to a tensor or value, joined by dots, as in this library. Three
things differ:

1. *A model at the top.* Some trainers save the model's own state dict as the top level, and other things beside it under keys.
   Here, a model is below a key: it gets ``model``, unless the state has that key.
2. *Optimizer groups.* ``get_optimizer_state_dict`` returns every hyperparameter of a group as its own value; with
   ``flatten_optimizer_state_dict=True``, it does so for each parameter. Here, the groups are one value, keyed by FQN. Names of
   the state itself are the same in both forms and here. An optimizer saved at the top gets the key ``optimizer``.
3. *Indices.* ``optimizer.state_dict()`` itself numbers its parameters. If the optimizer was made with ``named_parameters()``, the
   groups also have the names, which replace the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...core.catalog.names import GROUPS, STATE
from ...core.trees import flatten, leaves, unflatten
from ...format.values import decode_path
from ...state.describe import Index, saved_path
from ...state.optimizer_dicts import OptimizerGroups, flat_hyperparameter, grouped, groups_from_list
from .metadata import Key, Metadata

MODEL = "model"
OPTIMIZER = "optimizer"

KeyPath = tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """The place of a hyperparameter: `owner` is the index of its group or the name of its parameter, `key` the path below."""

    owner: int | str
    key: KeyPath


def key_path(encoded: bytes) -> KeyPath:
    """Decode the encoded path of a value into keys as DCP has them: ints for indices of lists, and strings."""
    return tuple(int(key) if isinstance(key, Index) else str(key) for key in saved_path(decode_path(encoded)))


def inner_paths(paths: Iterable[KeyPath]) -> dict[KeyPath, type]:
    """Map the path of every dict and list on the way to these paths to the type of its keys."""
    return {path[:i]: type(path[i]) for path in paths for i in range(1, len(path))}


def tensor_path(name: str, inner: Mapping[KeyPath, type]) -> KeyPath:
    """Return the path of a tensor: the first part of its name as one key, then the rest of the name as one key.

    An example is ``{"model": {"layers.0.weight": …}}``. If values show that there are more dicts and lists on the way, their keys
    and indices come before the rest; the first key may have dots then.

    Parameters
    ----------
    inner
        The paths of dicts and lists, with the type of their keys; see `inner_paths`.
    """
    parts = name.split(".")
    first = next((n for n in range(1, len(parts)) if (".".join(parts[:n]),) in inner), 1)  # a key with dots has several parts
    path: KeyPath = (".".join(parts[:first]),)
    rest = parts[first:]
    while rest:
        if inner.get(path) is int and rest[0].isdecimal():
            path = (*path, int(rest.pop(0)))
        elif (len(rest) > 1 and (*path, rest[0]) in inner) or inner.get((*path, rest[0])) is int:
            path = (*path, rest.pop(0))
        else:
            return (*path, ".".join(rest))
    return path


def names_of(saved: Metadata) -> dict[str, KeyPath]:
    """Map DCP's name of every tensor and value in a folder to the path that this library gives it."""
    paths = dict(saved.paths)
    # An optimizer's state dict at the top shows by its groups. A model at the top is looked for unless there is one below a key.
    if any(path[0] == GROUPS or str(path[0]).startswith(f"{GROUPS}.") for path in paths.values()):
        is_of_optimizer = {fqn: str(path[0]).partition(".")[0] in (STATE, GROUPS) for fqn, path in paths.items()}
        paths = {fqn: (OPTIMIZER, *path) if is_of_optimizer[fqn] else path for fqn, path in paths.items()}
    if any(path[0] == MODEL or (len(path) == 1 and str(path[0]).startswith(f"{MODEL}.")) for path in paths.values()):
        return paths
    return {fqn: (MODEL, *path) if _is_of_model(fqn, path, fqn in saved.tensors) else path for fqn, path in paths.items()}


def _is_of_model(fqn: str, path: KeyPath, is_tensor: bool) -> bool:
    """Return whether an entry at the top level belongs to a model: any tensor, and a value such as ``layers.0._extra_state``."""
    return len(path) == 1 and (is_tensor or "." in fqn) and not fqn.startswith((f"{OPTIMIZER}.", "optim."))


def group_entry(path: KeyPath) -> tuple[KeyPath, GroupEntry] | None:
    """Split the path of a hyperparameter into the path of its optimizer and its place in the groups; None for any other path."""
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
        The hyperparameters' places and values, by DCP name.

    Returns
    -------
    OptimizerGroups
        None if the entries do not have the form of groups.
    """
    by_owner: dict[int | str, list[tuple[KeyPath, Any]]] = {}
    for fqn, entry in entries.items():
        by_owner.setdefault(entry.owner, []).append((entry.key, values[fqn]))
    groups = {owner: unflatten(found) for owner, found in by_owner.items()}
    if not all(isinstance(group, dict) for group in groups.values()):
        return None
    # Owners are parameters in the flat form, and indices of groups in the nested one; both together are neither.
    flat = {owner: group for owner, group in groups.items() if isinstance(owner, str)}
    nested = {owner: group for owner, group in groups.items() if isinstance(owner, int)}
    if flat and nested:
        return None
    return OptimizerGroups(grouped(flat.items()), {}) if flat else groups_from_list([nested[i] for i in sorted(nested)])


def taken_apart(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the paths and parts of a value that DCP would save on their own.

    Dicts are always taken apart, lists if they hold a dict or a tensor. DCP has no entry for an empty dict.
    """
    return ((at, leaf) for at, leaf in flatten(value, _children, path) if not isinstance(leaf, Mapping))


def is_taken_apart(value: Any) -> bool:
    """Return whether DCP would save the parts of a value on their own."""
    return all(path for path, _ in taken_apart((), value))


def _children(node: Any) -> Iterable[tuple[Key, Any]] | None:
    if isinstance(node, Mapping) and node:
        return ((str(key), child) for key, child in node.items())
    if not isinstance(node, list):
        return None
    inside = leaves(node, lambda child: enumerate(child) if isinstance(child, list) else None)
    return enumerate(node) if any(isinstance(leaf, Mapping | torch.Tensor) for leaf in inside) else None


def renumbered(path: KeyPath, optimizer: KeyPath, named: Mapping[str, str]) -> KeyPath:
    """Replace a parameter's number by its name, from `named`, in a path into the state of this optimizer; other paths stay."""
    at = len(optimizer)
    if path[:at] == optimizer and len(path) > at + 1 and path[at] == STATE and str(path[at + 1]) in named:
        return (*optimizer, STATE, named[str(path[at + 1])], *path[at + 2 :])
    return path


def value_paths(values: Iterable[KeyPath], tensors: Iterable[KeyPath]) -> dict[KeyPath, KeyPath]:
    """Map each path to the path of the value that it belongs to.

    DCP flattens lists of dicts. In this library, a list without tensors is one value.

    >>> value_paths([("a", "l", 0, "x"), ("a", "l", 1)], [("w",)])
    {('a', 'l', 0, 'x'): ('a', 'l'), ('a', 'l', 1): ('a', 'l')}
    """
    apart = {path[:i] for path in tensors for i, key in enumerate(path) if isinstance(key, int)}

    def whole(path: KeyPath) -> KeyPath:
        lists = (path[:i] for i, key in enumerate(path) if i and isinstance(key, int))
        return next((above for above in lists if above not in apart), path)

    return {path: whole(path) for path in values}
