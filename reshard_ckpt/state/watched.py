"""The optimizers inside of objects, and the state dicts that they gave out while the object was asked for its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_MOST_CHILDREN = 10_000
"""Longer containers in an object are data, such as the indices of a sampler, and are not searched for optimizers."""


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer's ``state_dict()`` may hold more than the state of its parameters and its groups."""
    if hasattr(optimizer, "consolidate_state_dict"):
        return False  # ZeroRedundancyOptimizer: its state_dict() wants the whole state on this rank, so its partitions are read
    # The hooks have no public name; where a release calls them otherwise, they are not seen.
    hooks = (getattr(optimizer, f"_optimizer_state_dict_{when}_hooks", None) for when in ("pre", "post"))
    if type(optimizer).state_dict is not Optimizer.state_dict or "state_dict" in vars(optimizer) or any(hooks):
        return True
    return any(not isinstance(key, torch.Tensor) for key in optimizer.state)


def optimizers_of(obj: Any) -> Iterator[Optimizer]:
    """Yield the optimizers in the attributes of an object, and itself: inner ones before those that have them, each once."""
    yield from _reached(obj, set())


def _reached(value: Any, seen: set[int]) -> Iterator[Optimizer]:
    if id(value) in seen or isinstance(value, nn.Module | torch.Tensor | type):
        return
    seen.add(id(value))
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        inside = value.values() if isinstance(value, Mapping) else value
        children: Iterable[Any] = inside if len(value) <= _MOST_CHILDREN else ()
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
        """Call an object's ``state_dict()``, and watch the optimizers in it meanwhile."""
        watched = cls(tuple(optimizers_of(obj)))
        with ExitStack() as hooks:
            for optimizer in watched.optimizers:
                # A wrapper need not have called Optimizer.__init__; then it has no hooks, and runs none.
                if hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
                    hooks.callback(optimizer.register_state_dict_post_hook(watched._note).remove)
            return obj.state_dict(), watched

    def _note(self, optimizer: Optimizer, given: Mapping[str, Any]) -> None:
        self.given.append((optimizer, given))
