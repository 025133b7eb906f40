"""What is the state of an optimizer, by the FQN of its parameters?

1. Parameters are found by identity among those of the modules (and plain dicts) in the same state, else by the memory that they
   share with a tensor of a dict, such as a ``state_dict()``; each has an *owner* entry with its FQNs, several if it is tied, and
   its layout.
2. State with the shape of the parameter's local tensor has the parameter's layout; a 0-dim tensor is whole everywhere; any other
   shape is whole if the parameter is whole on this rank, and has no known place otherwise.
3. Groups are written with FQNs in place of parameters, and are merged over ranks by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..core.catalog.param_groups import NOT_SAVED, merge
from ..core.catalog.specs import Ints, Replication
from ..core.words import a
from ..errors import UnsupportedError, UsageError
from .declared import parts_of
from .layouts import Layout, whole
from .owners import Owner, Owners
from .scan import Path, name_of
from .shards import FlatShard, LocalShard
from .tensors import LocalTensor, TensorLike, is_tensor_like, local_tensor_of, plain_memory

State = MutableMapping[Any, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter whose state this rank may have: what the state is kept under, the parameter's owner, and its group."""

    key: Any
    owner: Owner
    group: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class View:
    """An optimizer, or its state dict by number, as saving and loading see it.

    `groups` are what its user sees, with the owners of their parameters; `followers` are groups inside that must have the same
    hyperparameters.
    """

    name: str
    groups: Sequence[tuple[dict[str, Any], tuple[Owner, ...]]]
    followers: Sequence[dict[str, Any]]
    state: State
    held: tuple[Held, ...]

    def held_with_state(self) -> Iterator[Held]:
        """The parameters that have state; the state may be a defaultdict, where looking would make an entry."""
        return (held for held in self.held if held.key in self.state)


def views(path: Path, optimizers: Sequence[Optimizer], owners: Owners) -> tuple[View, ...]:
    """The views of the optimizers under one key.

    Raises
    ------
    UsageError
        A parameter belongs to no module in the state, or two parameters have one FQN.
    """
    name = name_of(path)
    return tuple(_view(name if len(optimizers) == 1 else f"{name}[{i}]", opt, owners) for i, opt in enumerate(optimizers))


def _view(name: str, optimizer: Optimizer, owners: Owners) -> View:
    inner: Any = optimizer
    if hasattr(optimizer, "consolidate_state_dict"):  # ZeroRedundancyOptimizer: this rank's partition is in an optimizer inside
        inner = getattr(optimizer, "optim", None)
        if not isinstance(inner, Optimizer):
            raise UsageError(
                f"{name}: this ZeroRedundancyOptimizer has no optimizer inside yet; with overlap_with_ddp=True it appears "
                "after some training steps: save or load after those"
            )
    groups = [
        (group, tuple(owner_of(param, owners, name, i) for param in group["params"]))
        for i, group in enumerate(optimizer.param_groups)
    ]
    _check_distinct(name, groups)
    known = {id(o.param): o for _, members in groups for o in members}
    held = tuple(Held(p, known[id(p)], group) for group in inner.param_groups for p in group["params"])
    return View(name, groups, () if inner is optimizer else inner.param_groups, inner.state, held)


def owner_of(param: torch.Tensor, owners: Owners, name: str, group: int) -> Owner:
    """The owner of a parameter in a group of an optimizer.

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


def numbered_view(path: Path, tree: Mapping[str, Any], members: Mapping[int, Owner]) -> View:
    """The view of a state dict by number, of whose numbers the owners are known."""
    name = name_of(path)
    groups = [(group, tuple(members[number] for number in group["params"])) for group in tree["param_groups"]]
    _check_distinct(name, groups)
    held = tuple(Held(number, members[number], group) for group, _ in groups for number in group["params"])
    return View(name, groups, (), tree["state"], held)


def saved_state(view: View) -> Iterator[tuple[Owner, str, Any]]:
    """Each entry of the state of each parameter on this rank: its owner, its key and its value.

    Raises
    ------
    UnsupportedError
        A key of the state is no plain name.
    """
    for held in view.held_with_state():
        owner = held.owner
        for key, value in view.state[held.key].items():
            if not isinstance(key, str) or "." in key:
                raise UnsupportedError(
                    f"{view.name}: the state of {owner.fqns[0]} has the key {key!r}; keys must be strings without dots"
                )
            yield owner, key, value


def state_tensor(value: TensorLike, owner: Owner, name: str) -> LocalTensor:
    """The leaf of one state tensor.

    Raises
    ------
    UnsupportedError
        Its shape is not the parameter's, which is sharded, so nobody knows which part of what it is.
    """
    value, *more = parts_of(value, name)
    if more:
        raise UnsupportedError(
            f"{name}: is {len(more) + 1} local shards, of which the state of one parameter can have one; save the optimizer's "
            "state_dict() by FQN instead"
        )
    if isinstance(value, LocalShard | FlatShard | DTensor):
        return local_tensor_of(value, name)
    memory = plain_memory(value, name)
    return LocalTensor(memory, state_layout(tuple(memory.shape), owner, name))


def state_layout(shape: Ints, owner: Owner, name: str) -> Layout:
    """The layout of a plain local state tensor of this shape."""
    layout = owner.layout
    if layout is None:  # known by name alone
        return whole(shape, Replication.PLAIN)
    if shape == layout.local_shape:
        return layout
    if 0 in shape and 0 in layout.local_shape:
        return replace(layout, local_shape=shape)
    if shape == () or layout.is_whole:
        return whole(shape, layout.replication)
    raise UnsupportedError(
        f"{name}: has shape {shape}, its parameter {owner.fqns[0]} {layout.local_shape} of {layout.shape} on this rank, so its "
        "place is unknown; have the optimizer hold it as a DTensor, or return it from a state_dict() by FQN as LocalShard or "
        "FlatShard"
    )


def state_value(value: Any, owner: Owner, name: str) -> Any:
    """A state entry that is no tensor, proved to mean the same on every rank."""
    if owner.layout is not None and not owner.layout.is_whole and _holds_tensors(value):
        raise UnsupportedError(
            f"{name}: {a(type(value).__name__)} of tensors for the parameter {owner.fqns[0]}, which is sharded, has no known "
            "place; hold its tensors as entries of their own"
        )
    return value


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensors(v) for v in value.values())
    return is_tensor_like(value) or (isinstance(value, list | tuple) and any(_holds_tensors(v) for v in value))


def saved_groups(name: str, all_views: Iterable[View]) -> list[dict[str, Any]]:
    """The groups of all optimizers under one key, by FQN."""
    named = [(view.name, [_named(group, members) for group, members in view.groups]) for view in all_views]
    return merge(named, name=name)


def _named(group: Mapping[str, Any], members: Iterable[Owner]) -> dict[str, Any]:
    hyperparameters = {key: value for key, value in group.items() if key not in NOT_SAVED}
    return {**hyperparameters, "params": [fqn for owner in members for fqn in owner.fqns]}
