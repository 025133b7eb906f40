"""State dicts of optimizers that number their parameters, and which parameter each number is.

torch's ``state_dict()`` numbers the parameters of all groups in a row: ``{"state": {0: …}, "param_groups": [{"params": [0]}]}``.
A number means a parameter only to the optimizer that gave it, so order alone names nothing. What does, in this order:

1. The optimizer that the dict is of: it gave the dict out while it was watched (`Watched`), or the dict's state is its own state.
2. ``param_names``, which torch puts into groups that were made of ``named_parameters()``.
3. An optimizer with a ``state_dict`` of its own numbers its own groups, as the contract of ``Optimizer.state_dict`` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

Numbers = Mapping[int, torch.Tensor]

_MOST_HELD = 10_000
"""Longer containers in an object are data, such as the indices of a sampler, and are not searched for optimizers."""


class Literal(dict[Any, Any]):
    """A dict that is saved as it stands, though it may look like an optimizer's."""


def is_numbered(value: Any) -> bool:
    """Whether something is the state dict of an optimizer, by number.

    >>> is_numbered({"state": {0: {"step": 1}}, "param_groups": [{"lr": 0.1, "params": [0]}]})
    True
    >>> is_numbered({"state": {}, "param_groups": [{"lr": 0.1, "params": ["weight"]}]})
    False
    """
    if not isinstance(value, Mapping) or isinstance(value, Literal):
        return False
    state, groups = value.get("state"), value.get("param_groups")
    return isinstance(state, Mapping) and are_numbered_groups(groups) and any(group["params"] for group in groups or ())


def are_numbered_groups(value: Any) -> bool:
    """Whether something is the groups of an optimizer, whose parameters are numbers."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple) for group in value)
        and all(type(number) is int for group in value for number in group["params"])
    )


def beside_numbers(tree: Mapping[str, Any]) -> dict[str, Any]:
    """What a numbered state dict holds besides its groups and the state of their parameters."""
    numbers = {number for group in tree["param_groups"] for number in group["params"]}
    state = {k: v for k, v in tree["state"].items() if type(k) is not int or k not in numbers or not isinstance(v, Mapping)}
    rest = {key: value for key, value in tree.items() if key not in ("state", "param_groups")}
    return {**rest, "state": state} if state else rest


def names_in(groups: Sequence[Mapping[str, Any]]) -> dict[int, str] | None:
    """The name of each number, from ``param_names``; None where a group does not say, or where two numbers have one name."""
    names: dict[int, str] = {}
    for group in groups:
        said = group.get("param_names")
        if not isinstance(said, list | tuple) or len(said) != len(group["params"]) or not all(isinstance(n, str) for n in said):
            return None
        names.update(zip(group["params"], said, strict=True))
    return names if len(set(names.values())) == len(names) == sum(len(group["params"]) for group in groups) else None


def says_its_own(optimizer: Optimizer) -> bool:
    """Whether an optimizer's ``state_dict()`` may say more than the state of its parameters and its groups."""
    if hasattr(optimizer, "consolidate_state_dict"):
        return False  # ZeroRedundancyOptimizer: its state_dict() wants the whole state on this rank, so its partitions are read
    # The hooks have no public name; where a release calls them otherwise, they are not seen.
    hooks = (getattr(optimizer, f"_optimizer_state_dict_{when}_hooks", None) for when in ("pre", "post"))
    if type(optimizer).state_dict is not Optimizer.state_dict or "state_dict" in vars(optimizer) or any(hooks):
        return True
    return any(not isinstance(key, torch.Tensor) for key in optimizer.state)


def optimizers_of(obj: Any) -> Iterator[Optimizer]:
    """The optimizers that an object holds in its attributes: inner ones before those that hold them, each once; also itself."""
    yield from _reached(obj, set())


def _reached(value: Any, seen: set[int]) -> Iterator[Optimizer]:
    if id(value) in seen or isinstance(value, nn.Module | torch.Tensor | type):
        return
    seen.add(id(value))
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        held = value.values() if isinstance(value, Mapping) else value
        children: Iterable[Any] = held if len(value) <= _MOST_HELD else ()
    elif isinstance(value, Optimizer) or callable(getattr(value, "load_state_dict", None)):
        # Groups and state hold parameters, of which there may be many thousands, and no optimizers.
        children = [child for key, child in getattr(value, "__dict__", {}).items() if key not in ("param_groups", "state")]
    else:
        return
    for child in children:
        yield from _reached(child, seen)
    if isinstance(value, Optimizer):
        yield value


@dataclass(slots=True)
class Watched:
    """Optimizers, and the state dicts that they gave out while they were watched.

    An optimizer without any state yet can be told from another of the same groups by nothing else.
    """

    optimizers: tuple[Optimizer, ...] = ()
    given: list[tuple[Optimizer, Mapping[str, Any]]] = field(default_factory=list)

    @classmethod
    def asked(cls, obj: Any) -> tuple[Any, Watched]:
        """What an object's ``state_dict()`` says, and the optimizers in it that were watched meanwhile."""
        watched = cls(tuple(optimizers_of(obj)))
        with ExitStack() as hooks:
            for optimizer in watched.optimizers:
                # A wrapper need not have called Optimizer.__init__; then it has no hooks, and runs none.
                if hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
                    hooks.callback(optimizer.register_state_dict_post_hook(watched._note).remove)
            return obj.state_dict(), watched

    def _note(self, optimizer: Optimizer, given: Mapping[str, Any]) -> None:
        self.given.append((optimizer, given))

    def source(self, tree: Mapping[str, Any]) -> Optimizer | None:
        """The optimizer that a numbered state dict is of."""
        for optimizer, given in self.given:
            if tree is given or tree["param_groups"] is given["param_groups"] or tree["state"] is given["state"]:
                return optimizer
        return next((o for o in self.optimizers if _holds_state_of(o, tree)), None)


def numbers_of(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> Numbers | None:
    """The parameters that an optimizer numbers in its groups; None where they are not as many."""
    own = optimizer.param_groups
    if [len(group["params"]) for group in own] != [len(group["params"]) for group in groups]:
        return None
    pairs = zip(groups, own, strict=True)
    return {number: param for group, mine in pairs for number, param in zip(group["params"], mine["params"], strict=True)}


def keep_dtypes(optimizer: Optimizer, said: Mapping[str, Any]) -> None:
    """Give an optimizer that has taken a state dict back what it rounded: torch casts state to the dtype of its parameter."""
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return
    for number, param in (numbers_of(optimizer, said["param_groups"]) or {}).items():
        own = optimizer.state.get(param, {})
        for key, loaded in _tensors(said["state"].get(number)):
            mine = own.get(key)
            if isinstance(mine, torch.Tensor) and mine.dtype != loaded.dtype:
                own[key] = loaded


def _holds_state_of(optimizer: Optimizer, tree: Mapping[str, Any]) -> bool:
    """Whether the state in a dict is this optimizer's own, entry by entry."""
    numbers = numbers_of(optimizer, tree["param_groups"])
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
