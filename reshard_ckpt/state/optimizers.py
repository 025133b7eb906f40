"""What is saved of an optimizer, by the FQN of its parameters.

1. State with the shape of the parameter's local tensor has the parameter's layout; a 0-dim tensor is whole everywhere; any other
   shape is whole if the parameter is whole on this rank, and has no known place otherwise.
2. Groups are written with FQNs in place of parameters, and are merged over ranks by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.catalog.links import GROUPS, STATE, groups_name
from ..core.catalog.param_groups import hyperparameters, merge
from ..core.catalog.specs import Ints, Replication, StateLink, ValueKind
from ..core.trees import Path, leaves
from ..core.words import a
from ..engine.common.tensor_bytes import LocalTensor
from ..errors import UnsupportedError
from .collector import NamedValue
from .declared import parts_of
from .layouts import Layout, whole
from .owners import Owner
from .tensors import LocalMemory, TensorLike, is_tensor_like, local_memory
from .views import OptimizerView


def optimizer_contents(
    name: str, path: Path, views: Sequence[OptimizerView], saved_keys: Callable[[Path], list[Any]]
) -> Iterator[LocalTensor | NamedValue]:
    """Yield the state of each parameter on this rank, and the groups of all optimizers under one key.

    Parameters
    ----------
    saved_keys
        Gives a path as it is saved.

    Raises
    ------
    UnsupportedError
        A key of the state is no plain name, or nobody knows the place of a tensor.
    """
    for view in views:
        for slot, entry in view.entries():
            for key, value in entry.items():
                if not isinstance(key, str) or "." in key:
                    raise UnsupportedError(
                        f"{view.name}: the state of {slot.owner.fqns[0]} has the key {key!r}; keys must be strings without dots"
                    )
                for fqn in slot.owner.fqns:
                    parameter = f"{slot.owner.key}.{fqn}" if slot.owner.key else None
                    link = StateLink(name, fqn, key, parameter)
                    if is_tensor_like(value):
                        yield state_memory(value, slot.owner, link.name).named(link.name, link)
                    else:
                        keys = saved_keys((*path, STATE, fqn, key))
                        yield NamedValue(link.name, keys, ValueKind.PLAIN, _state_value(value, slot.owner, link.name), link)
    groups = groups_name(name)
    named = [(view.name, [_named(group, members) for group, members in view.groups]) for view in views]
    yield NamedValue(groups, saved_keys((*path, GROUPS)), ValueKind.PARAM_GROUPS, merge(named, name=groups))


def state_memory(value: TensorLike, owner: Owner, name: str) -> LocalMemory:
    """Find the memory of one state tensor.

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
    return local_memory(value, name, lambda shape: _state_layout(shape, owner, name))


def _state_layout(shape: Ints, owner: Owner, name: str) -> Layout:
    """Return the layout of a plain local state tensor of this shape."""
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


def _state_value(value: Any, owner: Owner, name: str) -> Any:
    """Return a state entry that is no tensor, once it is known to mean the same on every rank."""
    if owner.layout is not None and not owner.layout.is_whole and any(map(is_tensor_like, leaves(value))):
        raise UnsupportedError(
            f"{name}: {a(type(value).__name__)} of tensors for the parameter {owner.fqns[0]}, which is sharded, has no known "
            "place; hold its tensors as entries of their own"
        )
    return value


def _named(group: Mapping[str, Any], members: Iterable[Owner]) -> dict[str, Any]:
    return {**hyperparameters(group), "params": [fqn for owner in members for fqn in owner.fqns]}
