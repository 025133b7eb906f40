"""What is in the state that a user passes, and under which names.

The state is a tree of dicts and lists. Saving and loading both see it as the same flat list of items, so that a name means one
thing:

1. Dicts always flatten. Lists and tuples flatten only where something inside is more than a plain value; otherwise they are one
   value, as are empty containers.
2. A module, an optimizer, or a list of either is one item, which is opened elsewhere.
3. An object with ``state_dict`` and ``load_state_dict`` opens a tree of its own, which is given back to it whole after loading.
   So does an optimizer whose ``state_dict`` may return something else than its state, such as one that wraps others.
4. An optimizer's state dict by number is one item too, wherever it lies, beside what else is in it. A flattened one opens a tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.catalog.wrappers import unwrapped_keys
from ..core.trees import Path, name_of
from ..core.words import a, check_text
from ..errors import NameCollisionError, UnsupportedError, UsageError
from ..format.values import MAX_STEPS
from .declared import parts_of
from .optimizer_dicts import Flattened, PlainDict, beside_numbers, form_of, names_by_number
from .paths import Index, Unwrapped
from .shards import PerRank, Shards
from .tensors import TensorLike, is_tensor_like
from .watched import Watched

StepsOf = Callable[[Mapping[Any, Any]], list[Any]]
"""The steps of a path into a dict, in the order of its values."""

MAX_SHOWN = 6
"""Keys of a path that is too long, of which a message shows the first."""


class Verbatim(dict[Any, Any]):
    """A whole state, below which all keys are names as they stand, whatever wrappers put into them."""


@dataclass(frozen=True, slots=True)
class _Item:
    """Something at a path of the state, and the name that this gives it."""

    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class TensorItem(_Item):
    value: TensorLike


@dataclass(frozen=True, slots=True)
class ValueItem(_Item):
    value: Any


@dataclass(frozen=True, slots=True)
class PerRankItem(_Item):
    """A value of this rank's own; `ask` gives the state of an object that has one, and is None for a plain value."""

    holder: PerRank
    ask: Callable[[], Any] | None


@dataclass(frozen=True, slots=True)
class GroupsItem(_Item):
    """The ``param_groups`` of something shaped like an optimizer's state dict by FQN."""

    groups: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ModulesItem(_Item):
    modules: tuple[nn.Module, ...]


@dataclass(frozen=True, slots=True)
class OptimizersItem(_Item):
    optimizers: tuple[Optimizer, ...]


@dataclass(frozen=True, slots=True)
class NumberedItem(_Item):
    """An optimizer's state dict by number.

    `beside` is what it holds besides its groups and the state of their parameters; `names` are those that its groups give to the
    numbers, if they do.
    """

    tree: Mapping[str, Any]
    beside: Mapping[str, Any]
    names: Mapping[int, str] | None


@dataclass(frozen=True, slots=True)
class StatefulItem(_Item):
    obj: Any


Item = TensorItem | ValueItem | PerRankItem | GroupsItem | ModulesItem | OptimizersItem | NumberedItem | StatefulItem


@dataclass(frozen=True, slots=True)
class Tree:
    """Containers and what is in them.

    `sink` takes the root back after loading, if it belongs to an object, the `owner`; `watched` are the optimizers in that.
    """

    path: Path
    root: Any
    items: tuple[Item, ...]
    sink: Callable[[Any], Any] | None = None
    owner: Any = None
    watched: Watched = field(default_factory=Watched)


def scan(state: Mapping[Any, Any]) -> tuple[Tree, ...]:
    """Return the trees of the state: itself first, then one for each object with a state of its own.

    Raises
    ------
    UsageError
        The state is no dict, or contains itself.
    NameCollisionError
        Two paths give one name.
    """
    if not isinstance(state, Mapping):
        raise UsageError(f"state: wanted a dict such as {{'model': model, 'optimizer': optimizer}}, got {type(state).__name__}")
    steps_of: StepsOf = list if isinstance(state, Verbatim) else steps
    trees = [Tree((), state, tuple(_items(state, (), (), steps_of, whole=True)))]
    trees += opened_objects(trees, steps_of)
    check_names(trees)
    return tuple(trees)


def opened_objects(trees: Sequence[Tree], steps_of: StepsOf | None = None) -> list[Tree]:
    """Open the trees of the objects in these trees, and of the objects in those."""
    waiting = [item for tree in trees for item in tree.items if isinstance(item, StatefulItem)]
    found: list[Tree] = []
    while waiting:
        item = waiting.pop(0)
        tree = tree_of(item.obj, item.path, steps_of)
        found.append(tree)
        waiting += [inner for inner in tree.items if isinstance(inner, StatefulItem)]
    return found


def tree_of(obj: Any, path: Path, steps_of: StepsOf | None = None) -> Tree:
    """Open the tree of what an object returns as its state."""
    steps_of = steps_of or steps
    if isinstance(obj, torch.Generator):
        return Tree(path, state := obj.get_state(), tuple(_items(state, path, (), steps_of)), obj.set_state)
    root, watched = Watched.asked(obj)
    return Tree(path, root, tuple(_items(root, path, (), steps_of)), obj.load_state_dict, obj, watched)


def by_number(item: NumberedItem) -> tuple[Item, ...]:
    """Return the items of an optimizer's state dict whose numbers nobody can name: it is saved as any dict is."""
    beside = item.beside.get("state", {})
    state = {key: entry for key, entry in item.tree["state"].items() if key not in beside}
    return tuple(_items(PlainDict(state=state, param_groups=item.tree["param_groups"]), item.path, (), steps))


def _items(value: Any, path: Path, above: tuple[int, ...], steps_of: StepsOf, *, whole: bool = False) -> Iterator[Item]:
    """Yield the items at and below a value; `whole` says that it is the state itself, which is never a value."""
    name = name_of(path)
    _check_depth(path, above)
    if is_tensor_like(value) or isinstance(value, Shards):
        yield from (TensorItem(path, name, part) for part in parts_of(value, name))
    elif isinstance(value, PerRank):
        yield PerRankItem(path, name, value, partial(state_of, value.value) if is_stateful(value.value) else None)
    elif (modules := _modules(value)) is not None:
        yield ModulesItem(path, name, modules)
    elif (optimizers := _optimizers(value)) is not None:
        yield OptimizersItem(path, name, optimizers)
    elif is_stateful(value):
        yield StatefulItem(path, name, value)
    elif isinstance(value, Mapping) and (value or whole):
        _check_cycle(value, path, above)
        yield from _items_of_dict(value, path, (*above, id(value)), steps_of)
    elif isinstance(value, list | tuple) and not all(type(child) in _PLAIN for child in value):
        _check_cycle(value, path, above)
        above = (*above, id(value))
        inside = [item for i, child in enumerate(value) for item in _items(child, (*path, Index(i)), above, steps_of)]
        if all(isinstance(item, ValueItem | GroupsItem) for item in inside):
            yield ValueItem(path, name, value)
        else:
            yield from inside
    else:
        yield ValueItem(path, name, value)


_PLAIN = frozenset((bool, int, float, str, bytes, type(None)))
"""Types of most values in lists, which may be long; nothing is inside of them."""


def _items_of_dict(value: Mapping[Any, Any], path: Path, above: tuple[int, ...], steps_of: StepsOf) -> Iterator[Item]:
    form = form_of(value)
    if form == "flattened":
        yield StatefulItem(path, name_of(path), Flattened(value))  # type: ignore[arg-type]
        return
    if form == "by number":
        beside = beside_numbers(value)
        yield NumberedItem(path, name_of(path), value, beside, names_by_number(value["param_groups"]))
        value = beside
    groups = value["param_groups"] if form == "by FQN" else None
    for step, child in zip(steps_of(value), value.values(), strict=True):
        below = (*path, step)
        if groups is not None and child is groups:
            yield GroupsItem(below, name_of(below), groups)
        else:
            yield from _items(child, below, above, steps_of)


def steps(value: Mapping[Any, Any]) -> list[Any]:
    """Return the steps to the children of a dict, in order: its keys; of a dict of tensors, without what wrappers put into them.

    ``model.state_dict()`` of a compiled or DDP model has the names of the plain one then, as the model itself has. Keys that
    would collide stay as they are.
    """
    keys = list(value)
    if isinstance(value, Verbatim) or not all(isinstance(key, str) for key in keys):
        return keys
    clean = unwrapped_keys(keys)
    if clean == keys or not any(is_tensor_like(child) for child in value.values()):
        return keys
    times = Counter(clean)
    return [key if name == key or times[name] > 1 else _unwrapped_step(name, key) for name, key in zip(clean, keys, strict=True)]


def _unwrapped_step(name: str, key: str) -> Unwrapped:
    step = Unwrapped(name)
    step.key = key
    return step


def _check_depth(path: Path, above: tuple[int, ...]) -> None:
    if len(above) > MAX_STEPS:
        raise UnsupportedError(
            f"{name_of(path[:MAX_SHOWN])}…: dicts and lists are nested deeper than {MAX_STEPS} levels here; flatten the state"
        )


def _check_cycle(value: Any, path: Path, above: tuple[int, ...]) -> None:
    if id(value) in above:
        raise UsageError(f"{name_of(path)}: {a(type(value).__name__)} that contains itself cannot be saved")


def is_stateful(value: Any) -> bool:
    """Tell whether an object gives and takes its state by itself."""
    if isinstance(value, type):
        return False
    if isinstance(value, torch.Generator):
        return True
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def state_of(value: Any) -> Any:
    """Ask an object for its state, whole."""
    return value.get_state() if isinstance(value, torch.Generator) else value.state_dict()


def give_state(value: Any, state: Any) -> None:
    """Give an object what `state_of` returned."""
    if isinstance(value, torch.Generator):
        value.set_state(state)
    else:
        value.load_state_dict(state)


def _module_of(value: Any) -> nn.Module | None:
    if isinstance(value, nn.Module):
        return value
    # A pipeline stage, of whichever of torch's classes: their common base is private.
    submod = getattr(value, "submod", None)
    return submod if isinstance(submod, nn.Module) and hasattr(value, "stage_index") else None


def _modules(value: Any) -> tuple[nn.Module, ...] | None:
    """Return the modules of a module, a stage, or a list of them; None if it is something else."""
    if (module := _module_of(value)) is not None:
        return (module,)
    if not isinstance(value, list | tuple) or not value:
        return None
    modules = [_module_of(v) for v in value]
    found = tuple(m for m in modules if m is not None)
    return found if len(found) == len(modules) else None


def _optimizers(value: Any) -> tuple[Optimizer, ...] | None:
    values = value if isinstance(value, list | tuple) else (value,)
    return tuple(values) if values and all(isinstance(v, Optimizer) for v in values) else None


def check_names(trees: Iterable[Tree]) -> None:
    """Refuse two paths that give one name, and an object without a name, which could not be told from the state itself."""
    seen: dict[str, Path] = {}
    for tree in trees:
        for item in tree.items:
            check_text(item.name, "a name")
            if item.path and not item.name and not isinstance(item, TensorItem | ValueItem | PerRankItem):
                raise UsageError(f"{_spelled(item.path)}: a module, an optimizer or an object needs a key that is not empty")
            other = seen.setdefault(item.name, item.path)
            if other != item.path:
                raise NameCollisionError(
                    f"{item.name}: both {_spelled(other)} and {_spelled(item.path)} have this name; rename one of the keys"
                )


def _spelled(path: Path) -> str:
    return "state" + "".join(f"[{key!r}]" for key in path)
