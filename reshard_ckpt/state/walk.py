"""The walk over the state that a user passes: each tensor, value and object in it becomes a row with a name.

The state is a tree of dicts and lists. A save and a load walk it in the same way, so that a name means the same in both:

1. A dict is always opened. A list or tuple is opened only if it holds more than plain values; otherwise it is one value. An empty
   container is one value too.
2. A module, an optimizer, or a list of either is one row. Modules are read at once.
3. An object with ``state_dict`` and ``load_state_dict`` opens a tree of its own, and takes the whole tree back after a load. So
   does an optimizer whose ``state_dict`` may return more than its state, such as an optimizer that wraps others.
4. An optimizer's state dict by number is one row, wherever it lies, and its other keys are rows beside it. A flattened state dict
   opens a tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.catalog.names import unwrapped_keys
from ..core.report import check_text, type_in_words
from ..core.trees import Path, name_of
from ..errors import NameCollisionError, UnsupportedError, UsageError
from ..format.values import MAX_STEPS
from .describe import Index, Unwrapped
from .entries import Entry, Kind
from .modules import EXTRA_STATE, ModuleState
from .optimizer_dicts import Flattened, PlainDict, beside_numbers, form_of
from .shards import PerRank, Shards, Value
from .tensors import is_tensor_like, named_parts, plain_local

StepsOf = Callable[[Mapping[Any, Any]], list[Any]]
"""A function that returns the path keys of a dict's values, in their order, as `steps` does."""

MAX_SHOWN = 6
"""The number of keys of a too long path that an error message shows."""

_MOST_CHILDREN = 10_000
"""The most children of a container in an object that is searched for optimizers; longer ones hold data, such as indices."""

PLAIN = frozenset((bool, int, float, str, bytes, type(None)))
"""Types of most values in a state; objects of these types contain nothing."""


class Verbatim(dict[Any, Any]):
    """A state dict whose keys are already the names of its tensors.

    They are kept unchanged, even parts that wrappers have added.
    """


@dataclass(slots=True)
class Watched:
    """The optimizers inside an object, and the state dicts that they returned during the object's own ``state_dict()``.

    This tells which optimizer a state dict belongs to, even if two optimizers have equal groups and no state yet.
    """

    optimizers: tuple[Optimizer, ...] = ()
    given: list[tuple[Optimizer, Mapping[str, Any]]] = field(default_factory=list)

    @classmethod
    def state_dict_of(cls, obj: Any) -> tuple[Any, Watched]:
        """Call an object's ``state_dict()``; return its result, and the state dicts that optimizers inside returned meanwhile."""
        watched = cls(tuple(optimizers_of(obj)))
        with ExitStack() as hooks:
            for optimizer in watched.optimizers:
                # A wrapper need not have called Optimizer.__init__; then it has no hooks, and runs none.
                if hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
                    hook = optimizer.register_state_dict_post_hook(lambda *given: watched.given.append(given))
                    hooks.callback(hook.remove)
            return obj.state_dict(), watched


@dataclass(slots=True)
class Tree:
    """A tree of dicts and lists in the state, and the rows for the tensors, values and objects in it.

    Attributes
    ----------
    sink
        Takes the root back after a load, if the tree is the state of an object.
    owner
        That object.
    watched
        The optimizers in that object.
    given
        Numbered optimizer state dicts in this tree, each with the optimizer that gave it.
    depth
        The number of objects around it.
    """

    path: Path
    root: Any
    rows: list[Entry]
    sink: Callable[[Any], Any] | None = None
    owner: Any = None
    watched: Watched = field(default_factory=Watched)
    given: list[tuple[Optimizer, Mapping[str, Any]]] = field(default_factory=list)
    depth: int = 0


def walk(state: Mapping[Any, Any]) -> list[Tree]:
    """Return the trees of a state: its own, then one for each object in it with a ``state_dict()`` of its own.

    Raise `UsageError` if the state is not a dict, or contains itself, and `NameCollisionError` if two paths give one name.
    """
    if not isinstance(state, Mapping):
        raise UsageError(f"state: wanted a dict such as {{'model': model, 'optimizer': optimizer}}, got {type(state).__name__}")
    steps_of: StepsOf = list if isinstance(state, Verbatim) else steps
    trees = [Tree((), state, [])]
    if state or is_stateful(state):  # an empty dict would be a value
        _add(trees[0].rows, state, (), (), steps_of)
    for tree in trees:  # the list grows while it is walked: an object may hold other objects
        # Modules come before objects and optimizers, whatever the order of the keys: `state_dict` puts an FSDP2 module back to
        # the sharded parameters that its optimizer knows.
        for row in tree.rows:
            if row.kind is Kind.MODULES:
                row.value = tuple(ModuleState(module, row.name, row.path) for module in row.value)
        trees += [_tree_of(row, steps_of, tree.depth + 1) for row in tree.rows if row.kind is Kind.OBJECT]
    _check_names(trees)
    return trees


def _tree_of(row: Entry, steps_of: StepsOf, depth: int) -> Tree:
    """Return the tree of the object in a row: its ``state_dict()``, or the state of a ``torch.Generator``."""
    obj, rows = row.value, list[Entry]()
    if isinstance(obj, torch.Generator):
        tree = Tree(row.path, obj.get_state(), rows, obj.set_state, depth=depth)
    else:
        root, watched = Watched.state_dict_of(obj)
        if root is obj:
            raise UsageError(f"{row.name}: the state_dict() of {type_in_words(obj)} returns the object itself; return dict(self)")
        tree = Tree(row.path, root, rows, obj.load_state_dict, obj, watched, depth=depth)
    _add(rows, tree.root, row.path, (), steps_of)
    return tree


def rows_of(trees: Iterable[Tree], *kinds: Kind) -> list[Entry]:
    """List the rows of all trees in order; only rows of these kinds, if any are given."""
    return [row for tree in trees for row in tree.rows if not kinds or row.kind in kinds]


def by_number(row: Entry) -> list[Entry]:
    """Return the rows for a numbered optimizer state dict whose parameters are unknown: it is saved like any dict."""
    tree, rows = row.value, list[Entry]()
    beside = beside_numbers(tree).get("state", {})
    state = {key: entry for key, entry in tree["state"].items() if key not in beside}
    _add(rows, PlainDict(state=state, param_groups=tree["param_groups"]), row.path, (), steps)
    return rows


def match_extra_states(trees: Sequence[Tree], saved: Container[str], is_apart: Callable[[str], bool]) -> list[Tree]:
    """Change the rows of extra states of modules to the form in which the checkpoint has them. Return trees to add.

    A save of a module has an extra state as one value. A save of its state dict has each tensor and value in it by name. If the
    checkpoint has one value, the rows in a dict become one row. If it has names, the row of a module gets a tree of its own.

    Parameters
    ----------
    saved
        The names of values in the checkpoint.
    is_apart
        Tells whether the checkpoint has a tensor of a name, or anything below the name.
    """
    # found: for each extra state that was saved in parts, its row, and the modules in a list that have it under this name
    found: dict[str, tuple[Entry, list[nn.Module]]] = {}
    for tree in trees:
        rows: list[Entry] = []
        for row in tree.rows:
            row = _joined(row, saved, is_apart) if EXTRA_STATE in row.name else row
            if row.kind is not Kind.VALUE or not rows or rows[-1].name != row.name:  # rows that were joined are adjacent
                rows.append(row)
            for state in row.value if row.kind is Kind.MODULES else ():
                takers = state.opened.takers
                for entry in state.opened.rows if takers else ():
                    owner = takers[entry.name][1] if entry.name in takers else None
                    if owner is not None and entry.name not in saved and is_apart(entry.name):
                        del takers[entry.name]
                        found.setdefault(entry.name, (entry, []))[1].append(owner)
        tree.rows = rows
    return list(starmap(_tree_of_extra_state, found.values()))


def _tree_of_extra_state(row: Entry, owners: Sequence[nn.Module]) -> Tree:
    """Return the tree of an extra state that was saved in parts. All `owners` take the loaded state."""
    # A copy: `set_extra_state` may clear the module's own dict, and then fill it from its argument.
    root = copy(row.value) if isinstance(row.value, dict | list) else row.value

    def give(state: Any) -> None:
        for owner in owners:
            owner.set_extra_state(state)

    tree = Tree(row.path, root, [], give)
    _add(tree.rows, root, row.path, (), steps)
    return tree


def _joined(row: Entry, saved: Container[str], is_apart: Callable[[str], bool]) -> Entry:
    """Return one row for the whole extra state that a row is a part of, if it was saved as one value; else the row itself.

    If one rank saved None and another rank saved parts, it was saved in parts.
    """
    above = (row.path[:i] for i, step in enumerate(row.path, 1) if f".{step}".endswith(f".{EXTRA_STATE}"))
    path = next((path for path in above if (name := name_of(path)) in saved and not is_apart(name)), None)
    if path is None or row.kind not in (Kind.TENSOR, Kind.VALUE):
        return row
    return Entry(name_of(path), path, Kind.VALUE, row.value)


def _add(rows: list[Entry], value: Any, path: Path, above: tuple[int, ...], steps_of: StepsOf) -> None:
    """Add the rows for a value and for everything inside it; `above` are the ids of the containers around it.

    The order of the tests matters. Exact types come first, for speed. A tensor, a `PerRank` and a module may have a `state_dict`
    too, so they come before objects; a list of modules comes before lists.
    """
    kind = type(value)
    name = name_of(path)
    if kind in PLAIN:
        rows.append(Entry(name, path, Kind.VALUE, value))
    elif plain_local(value) is not None:
        rows.append(Entry(name, path, Kind.TENSOR, value))
    elif kind is dict and value:
        _add_dict(rows, value, path, above, steps_of)
    elif is_tensor_like(value) or isinstance(value, Shards):
        rows += (Entry(below, at, Kind.TENSOR, part) for below, at, part in named_parts(value, name, path))
    elif isinstance(value, PerRank):
        rows.append(Entry(name, path, Kind.PER_RANK, value))
    elif isinstance(value, Value):
        rows.append(Entry(name, path, Kind.WHOLE, value))
    elif (modules := _modules(value)) is not None:
        rows.append(Entry(name, path, Kind.MODULES, modules))
    elif (optimizers := _optimizers(value)) is not None:
        rows.append(_row_of_optimizers(name, path, optimizers))
    elif is_stateful(value):
        rows.append(Entry(name, path, Kind.OBJECT, value))
    elif isinstance(value, Mapping) and value:
        _add_dict(rows, value, path, above, steps_of)
    elif isinstance(value, list | tuple) and not all(type(child) in PLAIN for child in value):
        above = _checked_above(value, path, above)
        inside: list[Entry] = []
        for i, child in enumerate(value):
            _add(inside, child, (*path, Index(i)), above, steps_of)
        # Known only after the walk: a list without a tensor or an object anywhere in it is one value.
        if all(row.kind is Kind.VALUE or row.kind is Kind.GROUPS for row in inside):
            rows.append(Entry(name, path, Kind.VALUE, value))
        else:
            rows += inside
    else:
        rows.append(Entry(name, path, Kind.VALUE, value))


def _add_dict(rows: list[Entry], value: Mapping[Any, Any], path: Path, above: tuple[int, ...], steps_of: StepsOf) -> None:
    above = _checked_above(value, path, above)
    form = form_of(value)
    if form == "flattened":
        rows.append(Entry(name_of(path), path, Kind.OBJECT, Flattened(value)))  # type: ignore[arg-type]
        return
    if form == "by number":
        rows.append(Entry(name_of(path), path, Kind.NUMBERED, value))
        value = beside_numbers(value)
    groups = value["param_groups"] if form == "by FQN" else None
    # names begin with the keys that lead here
    start = f"{name_of(path)}." if path else ""
    for step, child in zip(steps_of(value), value.values(), strict=True):
        below = (*path, step)
        if type(child) is torch.Tensor and not child.__dict__:  # nearly all are; the other function enters more
            rows.append(Entry(start + str(step), below, Kind.TENSOR, child))
        elif groups is not None and child is groups:
            rows.append(Entry(start + str(step), below, Kind.GROUPS, groups))
        else:
            _add(rows, child, below, above, steps_of)


def _checked_above(value: Any, path: Path, above: tuple[int, ...]) -> tuple[int, ...]:
    """Return `above`, the ids of the containers around this one, with its own. Refuse it if too deep, or inside of itself."""
    if len(above) >= MAX_STEPS:
        raise UnsupportedError(
            f"{name_of(path[:MAX_SHOWN])}…: dicts and lists are nested deeper than {MAX_STEPS} levels here; flatten the state"
        )
    if id(value) in above:
        raise UsageError(f"{name_of(path)}: {type_in_words(value)} that contains itself cannot be saved; take it out of itself")
    return (*above, id(value))


def steps(value: Mapping[Any, Any]) -> list[Any]:
    """Return the path keys of a dict's values, in order: its keys; for a dict of tensors, without the parts that wrappers add.

    So ``model.state_dict()`` of a compiled or DDP model has the names of the plain model, as the model itself has. Keys that
    would collide stay as they are.
    """
    keys = list(value)
    if isinstance(value, Verbatim) or not all(isinstance(key, str) for key in keys):
        return keys
    clean = unwrapped_keys(keys)
    if clean == keys or not any(is_tensor_like(child) for child in value.values()):
        return keys
    times = Counter(clean)
    return [key if name == key or times[name] > 1 else Unwrapped.of(name, key) for name, key in zip(clean, keys, strict=True)]


def is_stateful(value: Any) -> bool:
    """Tell whether an object has ``state_dict`` and ``load_state_dict`` methods, or is a ``torch.Generator``."""
    if isinstance(value, type):
        return False
    if isinstance(value, torch.Generator):
        return True
    # A dict may give its items as attributes: asked for another name, it then raises KeyError, or adds an item. Ask its class.
    owner = type(value) if isinstance(value, Mapping) else value
    return callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None))


def state_of(value: Any) -> Any:
    """Return the whole state of an object: its ``state_dict()``, or the state of a ``torch.Generator``."""
    return value.get_state() if isinstance(value, torch.Generator) else value.state_dict()


def give_state(value: Any, state: Any) -> None:
    """Load a state that `state_of` has returned into an object."""
    if isinstance(value, torch.Generator):
        value.set_state(state)
    else:
        value.load_state_dict(state)


def _module_of(value: Any) -> nn.Module | None:
    if isinstance(value, nn.Module):
        return value
    # A pipeline stage, of any of torch's classes: their common base is private. Of a dict, no attribute is read (`is_stateful`).
    submod = None if isinstance(value, Mapping) else getattr(value, "submod", None)
    return submod if isinstance(submod, nn.Module) and hasattr(value, "stage_index") else None


def _modules(value: Any) -> tuple[nn.Module, ...] | None:
    """Return the modules if the value is a module, a pipeline stage, or a list of these; None for any other value."""
    values = value if isinstance(value, list | tuple) else (value,)
    found: list[nn.Module] = []
    for each in values:
        if (module := _module_of(each)) is None:
            return None
        found.append(module)
    return tuple(found) or None


def _optimizers(value: Any) -> tuple[Optimizer, ...] | None:
    values = value if isinstance(value, list | tuple) else (value,)
    return tuple(values) if values and all(isinstance(v, Optimizer) for v in values) else None


def _row_of_optimizers(name: str, path: Path, optimizers: tuple[Optimizer, ...]) -> Entry:
    """Return the row for one or several optimizers. A single optimizer with a ``state_dict()`` of its own is a row of an object.

    Raise `UsageError` if the list has such an optimizer beside others.
    """
    own = next((optimizer for optimizer in optimizers if has_own_state_dict(optimizer)), None)
    if own is None:
        return Entry(name, path, Kind.OPTIMIZERS, optimizers)
    if len(optimizers) > 1:
        raise UsageError(
            f"{name}: a list of optimizers, among them a {type(own).__name__}, whose state_dict() is its "
            "own and cannot be merged with others; pass each optimizer under a key of its own"
        )
    return Entry(name, path, Kind.OBJECT, own)


def _check_names(trees: Iterable[Tree]) -> None:
    """Refuse a state in which two paths give one name, or in which a module, optimizer or object has an empty name.

    Such a name could not be told from that of the state itself.
    """
    seen: dict[str, Path] = {}
    for row in rows_of(trees):
        check_text(row.name, "a name")
        if row.path and not row.name and row.kind in (Kind.GROUPS, Kind.MODULES, Kind.OPTIMIZERS, Kind.NUMBERED, Kind.OBJECT):
            raise UsageError(f"{_spelled(row.path)}: a module, an optimizer or an object needs a key that is not empty")
        other = seen.setdefault(row.name, row.path)
        if other != row.path:
            raise NameCollisionError(
                f"{row.name}: both {_spelled(other)} and {_spelled(row.path)} have this name; rename one of the keys"
            )


def _spelled(path: Path) -> str:
    return "state" + "".join(f"[{key!r}]" for key in path)


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer's ``state_dict()`` may hold more than its groups and the state of its parameters."""
    if hasattr(optimizer, "consolidate_state_dict"):
        return False  # ZeroRedundancyOptimizer: its state_dict() wants the whole state on this rank, so its partitions are read
    # The hooks have no public name; where a release calls them otherwise, they are not seen.
    hooks = (getattr(optimizer, f"_optimizer_state_dict_{when}_hooks", None) for when in ("pre", "post"))
    if type(optimizer).state_dict is not Optimizer.state_dict or "state_dict" in vars(optimizer) or any(hooks):
        return True
    return any(not isinstance(key, torch.Tensor) for key in optimizer.state)


def optimizers_of(obj: Any) -> Iterator[Optimizer]:
    """Yield each optimizer that the attributes of an object lead to, once, inner ones first, and the object if it is one."""
    yield from _reached(obj, set())


def _reached(value: Any, seen: set[int]) -> Iterator[Optimizer]:
    if id(value) in seen or isinstance(value, nn.Module | torch.Tensor | type):
        return
    seen.add(id(value))
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        inside = value.values() if isinstance(value, Mapping) else value
        children: Iterable[Any] = inside if len(value) <= _MOST_CHILDREN else ()
    elif isinstance(value, Optimizer) or callable(getattr(value, "load_state_dict", None)):
        # Groups and state may hold many thousands of parameters, and no optimizers.
        children = [child for key, child in getattr(value, "__dict__", {}).items() if key not in ("param_groups", "state")]
    else:
        return
    for child in children:
        yield from _reached(child, seen)
    if isinstance(value, Optimizer):  # after the optimizers inside of it
        yield value


def left_out(name: str, optimizer: Optimizer, inside: Sequence[Optimizer]) -> Iterator[str]:
    """Yield a warning for each optimizer inside another one whose state is missing in the outer one's ``state_dict()``.

    `inside` has the optimizers inside, and `optimizer` itself, as `optimizers_of` yields them.
    """
    if len(inside) == 1 or hasattr(optimizer, "consolidate_state_dict"):
        return
    own = {id(value) for entry in optimizer.state.values() if isinstance(entry, Mapping) for value in entry.values()}
    for inner in (each for each in inside if each is not optimizer):
        entries = (entry for entry in inner.state.values() if isinstance(entry, Mapping))
        if any(isinstance(value, torch.Tensor) and id(value) not in own for entry in entries for value in entry.values()):
            yield (
                f"{name}: {type(optimizer).__name__} holds a {type(inner).__name__} whose state is not in its "
                f"state_dict(), so it is not saved; pass that optimizer too, under a key of its own"
            )
