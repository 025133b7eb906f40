"""What is the state of an optimizer, by the FQN of its parameters?

1. Parameters are found by identity among those of the modules (and plain dicts) in the same state; each has an *owner* entry
   with its FQNs, several if it is tied, and its layout.
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
from ..core.catalog.specs import Ints
from ..errors import UnsupportedError, UsageError
from .declared import parts_of
from .layouts import Layout, whole
from .scan import Path, name_of
from .shards import FlatShard, LocalShard
from .tensors import LocalTensor, TensorLike, is_tensor_like, local_tensor_of, plain_memory

State = MutableMapping[torch.Tensor, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Owner:
    """What is known of a parameter: its FQNs, below which key of the state it is, and its layout."""

    param: torch.Tensor
    fqns: tuple[str, ...]
    key: str
    layout: Layout


class Owners:
    """The parameters of the state, by identity.

    A parameter that lies under several keys of the state belongs to the first; within one key it may have several FQNs.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, Owner] = {}

    def add(self, param: torch.Tensor, fqn: str, key: str, layout: Layout) -> None:
        known = self._by_id.get(id(param))
        if known is None:
            self._by_id[id(param)] = Owner(param, (fqn,), key, layout)
        elif known.key == key and fqn not in known.fqns:
            self._by_id[id(param)] = Owner(param, (*known.fqns, fqn), key, layout)

    def __getitem__(self, param: torch.Tensor) -> Owner:
        return self._by_id[id(param)]

    def __contains__(self, param: torch.Tensor) -> bool:
        return id(param) in self._by_id


@dataclass(frozen=True, slots=True)
class View:
    """An optimizer as saving and loading see it.

    `groups` are what its user sees, `followers` are groups inside that must have the same hyperparameters. `held` are the
    parameters whose state this rank may have, with the group that each is in.
    """

    name: str
    groups: Sequence[dict[str, Any]]
    followers: Sequence[dict[str, Any]]
    state: State
    held: tuple[tuple[torch.Tensor, dict[str, Any]], ...]


def views(path: Path, optimizers: Sequence[Optimizer], owners: Owners) -> tuple[View, ...]:
    """The views of the optimizers under one key.

    Raises
    ------
    UsageError
        A parameter belongs to no module in the state, or two parameters have one FQN.
    """
    name = name_of(path)
    out = tuple(_view(name if len(optimizers) == 1 else f"{name}[{i}]", opt) for i, opt in enumerate(optimizers))
    for view in out:
        _check_owned(view, owners)
    return out


def _view(name: str, optimizer: Optimizer) -> View:
    inner: Any = optimizer
    if hasattr(optimizer, "consolidate_state_dict"):  # ZeroRedundancyOptimizer: this rank's partition is in an optimizer inside
        inner = getattr(optimizer, "optim", None)
        if not isinstance(inner, Optimizer):
            raise UsageError(
                f"{name}: this ZeroRedundancyOptimizer has no optimizer inside yet; with overlap_with_ddp=True it appears "
                "after some training steps: save or load after those"
            )
    held = tuple((p, group) for group in inner.param_groups for p in group["params"])
    followers = () if inner is optimizer else inner.param_groups
    return View(name, optimizer.param_groups, followers, inner.state, held)


def _check_owned(view: View, owners: Owners) -> None:
    by_fqn: dict[str, Owner] = {}
    for i, group in enumerate(view.groups):
        for param in group["params"]:
            if param not in owners:
                raise UsageError(
                    f"{view.name}: a parameter of shape {tuple(param.shape)} in group {i} belongs to no module in the state; "
                    f"pass the module that holds it in the same state, as in {{'model': model, 'optimizer': optimizer}}"
                )
            owner = owners[param]
            for fqn in owner.fqns:
                other = by_fqn.setdefault(fqn, owner)
                if other is not owner and other.key != owner.key:
                    raise UsageError(
                        f"{view.name}: holds two parameters called {fqn}, of {other.key} and of {owner.key}; use one optimizer "
                        f"for each, or pass the modules as one: torch.nn.ModuleDict({{{other.key!r}: ..., {owner.key!r}: ...}})"
                    )


def saved_state(view: View, owners: Owners) -> Iterator[tuple[Owner, str, Any]]:
    """Each entry of the state of each parameter on this rank: its owner, its key and its value.

    Raises
    ------
    UnsupportedError
        A key of the state is no plain name.
    """
    for param, _ in view.held:
        if param not in view.state:  # a defaultdict: looking would make an entry
            continue
        owner = owners[param]
        for key, value in view.state[param].items():
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
    if not owner.layout.is_whole and _holds_tensors(value):
        raise UnsupportedError(
            f"{name}: a {type(value).__name__} of tensors for the parameter {owner.fqns[0]}, which is sharded, has no known "
            "place; hold its tensors as entries of their own"
        )
    return value


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensors(v) for v in value.values())
    return is_tensor_like(value) or (isinstance(value, list | tuple) and any(_holds_tensors(v) for v in value))


def saved_groups(name: str, all_views: Iterable[View], owners: Owners) -> list[dict[str, Any]]:
    """The groups of all optimizers under one key, by FQN."""
    named = [(view.name, [_named(group, owners) for group in view.groups]) for view in all_views]
    return merge(named, name=name)


def _named(group: Mapping[str, Any], owners: Owners) -> dict[str, Any]:
    hyperparameters = {key: value for key, value in group.items() if key not in NOT_SAVED}
    return {**hyperparameters, "params": [fqn for param in group["params"] for fqn in owners[param].fqns]}
