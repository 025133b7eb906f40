"""What is in the state that a user passes, and under which names?

The state is a tree of dicts and lists. Saving and loading both see it as the same flat list of items, so that a name means one
thing:

1. Dicts always flatten. Lists and tuples flatten only where something inside is more than a plain value; otherwise they are one
   value, as are empty containers.
2. A module, an optimizer, or a list of either is one item; other rooms open it.
3. An object with ``state_dict`` and ``load_state_dict`` opens a tree of its own, which is given back to it whole after loading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import NameCollisionError, UsageError
from .declared import parts_of
from .shards import PerRank
from .tensors import TensorLike, is_tensor_like

Path = tuple[Any, ...]


class Index(int):
    """A step of a path into a list or tuple, as opposed to a dict's key that is an int."""


@dataclass(frozen=True, slots=True)
class TensorItem:
    path: Path
    value: TensorLike


@dataclass(frozen=True, slots=True)
class ValueItem:
    path: Path
    value: Any


@dataclass(frozen=True, slots=True)
class PerRankItem:
    path: Path
    holder: PerRank


@dataclass(frozen=True, slots=True)
class GroupsItem:
    """The ``param_groups`` of something shaped like an optimizer's state dict by FQN."""

    path: Path
    groups: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ModulesItem:
    path: Path
    modules: tuple[nn.Module, ...]


@dataclass(frozen=True, slots=True)
class OptimizersItem:
    path: Path
    optimizers: tuple[Optimizer, ...]


@dataclass(frozen=True, slots=True)
class StatefulItem:
    path: Path
    obj: Any


Item = TensorItem | ValueItem | PerRankItem | GroupsItem | ModulesItem | OptimizersItem | StatefulItem


@dataclass(frozen=True, slots=True)
class Tree:
    """Containers and what is in them; `sink` takes the root back after loading, if it belongs to an object."""

    path: Path
    root: Any
    items: tuple[Item, ...]
    sink: Callable[[Any], Any] | None = None


def name_of(path: Path) -> str:
    """The name of what lies at a path.

    >>> name_of(("model", "layers.0.weight"))
    'model.layers.0.weight'
    """
    return ".".join(str(key) for key in path)


def path_keys(path: Path) -> list[Any]:
    """A path as it is saved: a step into a list is a tuple of the one index.

    >>> path_keys(("extra", 7, Index(0)))
    ['extra', 7, (0,)]
    """
    return [(int(key),) if isinstance(key, Index) else key for key in path]


def saved_path(keys: tuple[Any, ...]) -> Path:
    """The inverse of `path_keys`."""
    return tuple(Index(key[0]) if isinstance(key, tuple) and len(key) == 1 and type(key[0]) is int else key for key in keys)


def scan(state: Mapping[Any, Any]) -> tuple[Tree, ...]:
    """The trees of the state: itself first, then one for each object with a state of its own.

    Raises
    ------
    UsageError
        The state is no dict, or contains itself.
    NameCollisionError
        Two paths give one name.
    """
    if not isinstance(state, Mapping):
        raise UsageError(f"state: wanted a dict such as {{'model': model, 'optimizer': optimizer}}, got {type(state).__name__}")
    waiting: list[tuple[Path, Any, Callable[[Any], Any] | None]] = [((), state, None)]
    trees: list[Tree] = []
    while waiting:
        path, root, sink = waiting.pop(0)
        items = tuple(_items(root, path, (), whole=not path))
        trees.append(Tree(path, root, items, sink))
        waiting += [(item.path, *_open(item.obj)) for item in items if isinstance(item, StatefulItem)]
    _check_names(trees)
    return tuple(trees)


def _open(obj: Any) -> tuple[Any, Callable[[Any], Any]]:
    if isinstance(obj, torch.Generator):
        return obj.get_state(), obj.set_state
    return obj.state_dict(), obj.load_state_dict


def _items(value: Any, path: Path, above: tuple[int, ...], *, whole: bool = False) -> Iterator[Item]:
    """The items at and below a value; `whole` says that it is the state itself, which is never a value."""
    if is_tensor_like(value):
        yield from (TensorItem(path, part) for part in parts_of(value, name_of(path)))
    elif isinstance(value, PerRank):
        yield PerRankItem(path, value)
    elif (modules := _modules(value)) is not None:
        yield ModulesItem(path, modules)
    elif (optimizers := _optimizers(value)) is not None:
        yield OptimizersItem(path, optimizers)
    elif is_stateful(value):
        yield StatefulItem(path, value)
    elif isinstance(value, Mapping) and (value or whole):
        _check_cycle(value, path, above)
        groups = value["param_groups"] if is_optimizer_tree(value) else None
        for key, child in value.items():
            if groups is not None and child is groups:
                yield GroupsItem((*path, key), groups)
            else:
                yield from _items(child, (*path, key), (*above, id(value)))
    elif isinstance(value, list | tuple) and _has_more_than_values(value, path, above):
        for index, child in enumerate(value):
            yield from _items(child, (*path, Index(index)), (*above, id(value)))
    else:
        yield ValueItem(path, value)


def _has_more_than_values(value: Any, path: Path, above: tuple[int, ...]) -> bool:
    if isinstance(value, Mapping | list | tuple):
        _check_cycle(value, path, above)
        children = value.values() if isinstance(value, Mapping) else value
        return any(_has_more_than_values(child, path, (*above, id(value))) for child in children)
    return is_tensor_like(value) or isinstance(value, PerRank | Optimizer) or _module_of(value) is not None or is_stateful(value)


def _check_cycle(value: Any, path: Path, above: tuple[int, ...]) -> None:
    if id(value) in above:
        raise UsageError(f"{name_of(path)}: a {type(value).__name__} that contains itself cannot be saved")


def is_stateful(value: Any) -> bool:
    """Whether an object gives and takes its state by itself."""
    if isinstance(value, type):
        return False
    if isinstance(value, torch.Generator):
        return True
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_optimizer_tree(value: Mapping[Any, Any]) -> bool:
    """Whether a dict has the shape of an optimizer's state dict keyed by FQN."""
    state, groups = value.get("state"), value.get("param_groups")
    return (
        isinstance(state, Mapping)
        and all(isinstance(key, str) and isinstance(entry, Mapping) for key, entry in state.items())
        and isinstance(groups, list)
        and all(isinstance(group, dict) and _is_names(group.get("params")) for group in groups)
    )


def _is_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)


def _module_of(value: Any) -> nn.Module | None:
    if isinstance(value, nn.Module):
        return value
    # A pipeline stage, of whichever of torch's classes: their common base is private.
    submod = getattr(value, "submod", None)
    return submod if isinstance(submod, nn.Module) and hasattr(value, "stage_index") else None


def _modules(value: Any) -> tuple[nn.Module, ...] | None:
    """The modules of a module, a stage, or a list of them; None if it is something else."""
    if (module := _module_of(value)) is not None:
        return (module,)
    if not isinstance(value, list | tuple) or not value:
        return None
    modules = [_module_of(v) for v in value]
    found = tuple(m for m in modules if m is not None)
    return found if len(found) == len(modules) else None


def _optimizers(value: Any) -> tuple[Optimizer, ...] | None:
    values = value if isinstance(value, list | tuple) else (value,)
    if not values or not all(isinstance(v, Optimizer) for v in values):
        return None
    if any(_speaks_fqns(v) for v in values):
        if not isinstance(value, Optimizer):
            raise UsageError(
                "a list of optimizers whose state_dict() is keyed by FQN cannot be merged; pass each under a key of its own"
            )
        return None
    return tuple(values)


def _speaks_fqns(optimizer: Optimizer) -> bool:
    """Whether an optimizer's own ``state_dict`` is keyed by FQN already, as those that hold flat ranges write theirs."""
    if type(optimizer).state_dict is Optimizer.state_dict or hasattr(optimizer, "consolidate_state_dict"):
        return False  # torch's own, or ZeroRedundancyOptimizer, whose state_dict() wants the whole state on this rank
    tree = optimizer.state_dict()
    return isinstance(tree, Mapping) and bool(tree.get("param_groups")) and is_optimizer_tree(tree)


def _check_names(trees: list[Tree]) -> None:
    seen: dict[str, Path] = {}
    for tree in trees:
        for item in tree.items:
            other = seen.setdefault(name_of(item.path), item.path)
            if other != item.path:
                raise NameCollisionError(
                    f"{name_of(item.path)}: both {_spelled(other)} and {_spelled(item.path)} have this name; rename one of the "
                    "keys"
                )


def _spelled(path: Path) -> str:
    return "state" + "".join(f"[{key!r}]" for key in path)
