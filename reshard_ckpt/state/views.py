"""The optimizers of a state and their parameters, whether the state holds them themselves or their state dicts by number.

1. An optimizer whose ``state_dict`` is torch's own is read as its state and groups. Any other is asked, and opens a tree.
2. What a number in a state dict means, its optimizer tells, if the state shows that: itself, or inside another object. Then
   ``param_names``, which torch puts into groups that were made of ``named_parameters()``. Then, for an optimizer with a
   ``state_dict`` of its own, the order of its own groups, as the contract of ``Optimizer.state_dict`` says.
3. A state dict whose numbers nothing names is saved by number, as any dict is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from ..core.trees import Path
from ..errors import UsageError
from .owners import Owner, Owners
from .scan import Item, NumberedItem, OptimizersItem, Tree, by_number, check_names, opened_objects, tree_of
from .watched import Watched, has_own_state_dict, optimizers_of

State = MutableMapping[Any, dict[str, Any]]

Numbers = Mapping[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ParamSlot:
    """A parameter whose state this rank may have: what the state is kept under, the parameter's owner, and its group."""

    key: Any
    owner: Owner
    group: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OptimizerView:
    """An optimizer, or its state dict by number, as saving and loading see it.

    `groups` are what its user sees, with the owners of their parameters; `followers` are groups inside that must have the same
    hyperparameters.
    """

    name: str
    groups: Sequence[tuple[dict[str, Any], tuple[Owner, ...]]]
    followers: Sequence[dict[str, Any]]
    state: State
    slots: tuple[ParamSlot, ...]

    def entries(self) -> Iterator[tuple[ParamSlot, Mapping[str, Any]]]:
        """Yield the parameters that have state, and their state."""
        # The state may be a defaultdict, where looking would make an entry.
        return ((slot, self.state[slot.key]) for slot in self.slots if slot.key in self.state)


@dataclass(frozen=True, slots=True)
class Optimizers:
    """The optimizers of all trees of a state.

    Attributes
    ----------
    trees
        With the state dicts by number that nothing names turned into items like any dict's.
    views
        By the path of each optimizer, list of optimizers, or state dict.
    unnamed
        Names of those state dicts.
    left_out
        A line for each optimizer inside of another whose state that one leaves out.
    """

    trees: tuple[Tree, ...]
    views: Mapping[Path, tuple[OptimizerView, ...]]
    unnamed: tuple[str, ...]
    left_out: tuple[str, ...]


def find_optimizers(trees: Sequence[Tree], owners: Owners) -> Optimizers:
    """Find the optimizers of these trees, and which parameters they have.

    Raises
    ------
    UsageError
        A parameter belongs to no module in the state, or two parameters have one FQN.
    """
    visible = Watched(tuple({id(o): o for o in _visible(trees)}.values()))
    views: dict[Path, tuple[OptimizerView, ...]] = {}
    given: dict[Path, list[tuple[Optimizer, Mapping[str, Any]]]] = {}
    left_out: list[str] = []
    unnamed: list[str] = []
    for tree in trees:
        for item in tree.items:
            if isinstance(item, OptimizersItem):
                names = [item.name] if len(item.optimizers) == 1 else [f"{item.name}[{i}]" for i in range(len(item.optimizers))]
                views[item.path] = tuple(_view(name, each, owners) for name, each in zip(names, item.optimizers, strict=True))
                left_out += [line for optimizer in item.optimizers for line in _left_out(item.name, optimizer)]
            elif isinstance(item, NumberedItem):
                source = _source(tree.watched, item.tree) or _source(visible, item.tree)
                members = _members(item, tree, source, owners)
                if members is None:
                    unnamed.append(item.name)
                    continue
                views[item.path] = (_view_of_dict(item, members),)
                if source is not None:
                    given.setdefault(tree.path, []).append((source, item.tree))
    settled = [replace(t, items=_settled(t.items, frozenset(unnamed)), sink=_sink(t, given.get(t.path, ()))) for t in trees]
    return Optimizers(tuple(settled), views, tuple(unnamed), tuple(left_out))


def _settled(items: Sequence[Item], unnamed: frozenset[str]) -> tuple[Item, ...]:
    """Replace the state dicts by number that nothing names by the items of what is in them."""
    return tuple(
        part
        for item in items
        for part in (by_number(item) if isinstance(item, NumberedItem) and item.name in unnamed else (item,))
    )


def with_optimizers_asked(trees: Sequence[Tree]) -> tuple[Tree, ...]:
    """Add the trees of optimizers whose ``state_dict()`` is their own, which are then no longer items.

    Raises
    ------
    UsageError
        Such an optimizer is one of several in a list.
    """
    out: list[Tree] = []
    waiting = list(trees)
    while waiting:
        tree = waiting.pop(0)
        asked = [i for i in tree.items if isinstance(i, OptimizersItem) and any(map(has_own_state_dict, i.optimizers))]
        for item in asked:
            if len(item.optimizers) > 1:
                own = next(o for o in item.optimizers if has_own_state_dict(o))
                raise UsageError(
                    f"{item.name}: a list of optimizers, among them a {type(own).__name__}, whose state_dict() is its "
                    "own and cannot be merged with others; pass each optimizer under a key of its own"
                )
            new = tree_of(item.optimizers[0], item.path)
            waiting += [new, *opened_objects([new])]
        out.append(replace(tree, items=tuple(i for i in tree.items if not any(i is a for a in asked))))
    if len(out) > len(trees):
        check_names(out)
    return tuple(out)


def _visible(trees: Sequence[Tree]) -> Iterator[Optimizer]:
    """Yield every optimizer that the state shows: itself, inside another one, or inside an object such as a scheduler."""
    for tree in trees:
        yield from tree.watched.optimizers
        for item in tree.items:
            if isinstance(item, OptimizersItem):
                for optimizer in item.optimizers:
                    yield from optimizers_of(optimizer)


def _view(name: str, optimizer: Optimizer, owners: Owners) -> OptimizerView:
    inner: Any = optimizer
    if hasattr(optimizer, "consolidate_state_dict"):  # ZeroRedundancyOptimizer: this rank's partition is in an optimizer inside
        inner = getattr(optimizer, "optim", None)
        if not isinstance(inner, Optimizer):
            raise UsageError(
                f"{name}: this ZeroRedundancyOptimizer has no optimizer inside yet; with overlap_with_ddp=True it appears "
                "after some training steps: save or load after those"
            )
    groups = [
        (group, tuple(_owner_of(param, owners, name, i) for param in group["params"]))
        for i, group in enumerate(optimizer.param_groups)
    ]
    _check_distinct(name, groups)
    known = {id(o.param): o for _, members in groups for o in members}
    slots = tuple(ParamSlot(p, known[id(p)], group) for group in inner.param_groups for p in group["params"])
    return OptimizerView(name, groups, () if inner is optimizer else inner.param_groups, inner.state, slots)


def _owner_of(param: torch.Tensor, owners: Owners, name: str, group: int) -> Owner:
    """Find the owner of a parameter in a group of an optimizer.

    Raises
    ------
    UsageError
        The state does not hold it.
    """
    owner = owners.of(param)
    if owner is None and param.is_meta:
        raise UsageError(
            f"{name}: a parameter of shape {tuple(param.shape)} in group {group} is on the meta device, and belongs "
            "to no module in the state: to_empty() has replaced it; make the optimizer after that, of model.parameters()"
        )
    if owner is None:
        raise UsageError(
            f"{name}: a parameter of shape {tuple(param.shape)} in group {group} belongs to no module in the state; pass the "
            "module that holds it in the same state, as in {'model': model, 'optimizer': optimizer}"
        )
    return owner


def _check_distinct(name: str, groups: Iterable[tuple[Mapping[str, Any], tuple[Owner, ...]]]) -> None:
    by_fqn: dict[str, Owner] = {}
    for fqn, owner in ((fqn, each) for _, members in groups for each in members for fqn in each.fqns):
        other = by_fqn.setdefault(fqn, owner)
        if other is not owner and other.key != owner.key:
            raise UsageError(
                f"{name}: holds two parameters called {fqn}, of {other.key} and of {owner.key}; use one optimizer "
                f"for each, or pass the modules as one: torch.nn.ModuleDict({{{other.key!r}: ..., {owner.key!r}: ...}})"
            )


def _view_of_dict(item: NumberedItem, members: Mapping[int, Owner]) -> OptimizerView:
    """View a state dict by number, of whose numbers the owners are known."""
    groups = [(group, tuple(members[number] for number in group["params"])) for group in item.tree["param_groups"]]
    _check_distinct(item.name, groups)
    slots = tuple(ParamSlot(number, members[number], group) for group, _ in groups for number in group["params"])
    return OptimizerView(item.name, groups, (), item.tree["state"], slots)


def _members(item: NumberedItem, tree: Tree, source: Optimizer | None, owners: Owners) -> Mapping[int, Owner] | None:
    """Find the owner of each number, which `source` gave, if that is known; None where the state does not tell.

    Raises
    ------
    UsageError
        A parameter of an optimizer with a ``state_dict()`` of its own belongs to no module in the state.
    """
    groups = item.tree["param_groups"]
    numbers = None if source is None else _numbers_of(source, groups)
    members = _owned(numbers, owners)
    if members is not None:
        return members
    if item.names is not None:
        return {number: owners.named(name) for number, name in item.names.items()}
    if isinstance(tree.owner, Optimizer) and tree.path == item.path:  # it numbers its own groups
        source = source or tree.owner
        numbers = _numbers_of(source, groups)
        members = _owned(numbers, owners)
        if members is None and numbers is not None:
            for i, group in enumerate(source.param_groups):
                for param in group["params"]:
                    _owner_of(param, owners, item.name, i)
    return members


def _source(watched: Watched, tree: Mapping[str, Any]) -> Optimizer | None:
    """Find the optimizer that a state dict by number is of: it gave the dict, or the dict's state is its own state."""
    for optimizer, given in watched.given:
        if tree is given or tree["param_groups"] is given["param_groups"] or tree["state"] is given["state"]:
            return optimizer
    return next((o for o in watched.optimizers if _holds_state_of(o, tree)), None)


def _holds_state_of(optimizer: Optimizer, tree: Mapping[str, Any]) -> bool:
    """Tell whether the state in a dict is this optimizer's own, entry by entry."""
    numbers = _numbers_of(optimizer, tree["param_groups"])
    entries = [(number, entry) for number, entry in tree["state"].items() if type(number) is int]
    if numbers is None or not any(_tensors(entry) for _, entry in entries):
        return False
    return all(number in numbers and _is_same(entry, _state_of(optimizer, numbers[number])) for number, entry in entries)


def _state_of(optimizer: Optimizer, param: torch.Tensor) -> Any:
    state: MutableMapping[Any, Any] = optimizer.state
    return state.get(param)


def _is_same(entry: Any, own: Any) -> bool:
    return entry is own or (isinstance(own, Mapping) and all(own.get(key) is value for key, value in _tensors(entry)))


def _tensors(entry: Any) -> list[tuple[Any, torch.Tensor]]:
    return [(k, v) for k, v in entry.items() if isinstance(v, torch.Tensor)] if isinstance(entry, Mapping) else []


def _numbers_of(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> Numbers | None:
    """Return the parameters that an optimizer numbers in its groups; None where they are not as many."""
    own = optimizer.param_groups
    if [len(group["params"]) for group in own] != [len(group["params"]) for group in groups]:
        return None
    pairs = zip(groups, own, strict=True)
    return {number: param for group, mine in pairs for number, param in zip(group["params"], mine["params"], strict=True)}


def _owned(numbers: Numbers | None, owners: Owners) -> dict[int, Owner] | None:
    members = {number: owners.of(param) for number, param in (numbers or {}).items()}
    known = {number: owner for number, owner in members.items() if owner is not None}
    return known if numbers is not None and len(known) == len(members) else None


def _left_out(name: str, optimizer: Optimizer) -> Iterator[str]:
    """Yield a line for each inner optimizer that has state which torch's own ``state_dict()`` of the outer one does not hold."""
    inside = [inner for inner in optimizers_of(optimizer) if inner is not optimizer]
    if not inside or hasattr(optimizer, "consolidate_state_dict"):
        return
    own = {id(value) for entry in optimizer.state.values() if isinstance(entry, Mapping) for value in entry.values()}
    for inner in inside:
        entries = (entry for entry in inner.state.values() if isinstance(entry, Mapping))
        if any(isinstance(value, torch.Tensor) and id(value) not in own for entry in entries for value in entry.values()):
            yield (
                f"{name}: {type(optimizer).__name__} holds a {type(inner).__name__} whose state is not in its "
                f"state_dict(), so it is not saved; pass that optimizer too, under a key of its own"
            )


def _keep_dtypes(optimizer: Optimizer, given_out: Mapping[str, Any]) -> None:
    """Give an optimizer that has taken a state dict back what it rounded: torch casts state to the dtype of its parameter."""
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return
    for number, param in (_numbers_of(optimizer, given_out["param_groups"]) or {}).items():
        own = optimizer.state.get(param, {})
        for key, loaded in _tensors(given_out["state"].get(number)):
            mine = own.get(key)
            if isinstance(mine, torch.Tensor) and mine.dtype != loaded.dtype:
                own[key] = loaded


def _sink(tree: Tree, given: Sequence[tuple[Optimizer, Mapping[str, Any]]]) -> Callable[[Any], Any] | None:
    """Return what takes the root of a tree back, and has the optimizers whose state was in there take it unrounded."""
    sink = tree.sink
    if sink is None or not given:
        return sink

    def take(root: Any) -> None:
        sink(root)
        for optimizer, given_out in given:
            _keep_dtypes(optimizer, given_out)

    return take
