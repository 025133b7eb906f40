"""Megatron's optimizer objects as leaves of a tree: their shards are saved without a gather, and filled in place.

The kind of an optimizer follows from its attributes:

1. ``gbuf_ranges``: a distributed optimizer. This rank holds a run of each flattened parameter in its buffers. The master weight
   and each state tensor of that parameter are the same run.
2. ``chained_optimizers``: a chain, with one node for each member. A chain of one counts as its member, as in Megatron.
3. Any other object with ``sharded_state_dict``: every rank holds whole parameters, so this method needs no gather.

The tree also has a `ShardedTensor` or a factory for each parameter. It is found by identity: its ``data`` is the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch

from ...plugins import Catalog
from ...plugins.errors import UnsupportedError, UsageError
from ...plugins.names import name_of
from ...plugins.trees import flatten, leaves
from .names import FULLY_RESHARDABLE, SHARDING
from .places import NamedShard, is_factory, is_sharded_tensor, run_entries
from .tree import (
    NOTHING,
    Leaf,
    Loaded,
    Node,
    Replacement,
    child_of,
    children,
    common_of,
    copied,
    entries_of,
    loaded_of,
    lower,
    merged,
    objects_of,
)

STATE = "optimizer.state"
_MASTER = f"{STATE}.param."
_IN_FULL = "param_state"
_EXPERT = "is_expert_parallel"
_KIND = ("wd_mult", "lr_mult", _EXPERT, "is_decoupled_lr")
"""Keys of a parameter group by which Megatron recognizes the group again in a load."""


def is_optimizer(value: object) -> bool:
    """Tell whether an object is one of Megatron's optimizers."""
    return any(hasattr(value, name) for name in ("gbuf_ranges", "chained_optimizers")) or (
        callable(getattr(value, "sharded_state_dict", None)) and hasattr(value, "param_groups")
    )


def lower_tree(tree: Any, *, loading: bool) -> Node:
    """Lower a tree, as `tree.lower` does, in which optimizer objects may stand.

    Raise `UsageError` if a shard or an optimizer cannot be saved or loaded in its current state.
    """
    parameters = {id(v.data): v for v in leaves(tree, children) if (is_sharded_tensor(v) or is_factory(v)) and v.data is not None}

    def own(value: Any) -> Node | None:
        return _lower_optimizer(value, tree, parameters, loading) if is_optimizer(value) else None

    return lower(tree, loading=loading, own=own)


def _lower_optimizer(optimizer: Any, tree: Any, parameters: Mapping[int, Any], loading: bool) -> Node:
    chained = getattr(optimizer, "chained_optimizers", None)
    parts = [part for part in ([optimizer] if chained is None else chained) if not getattr(part, "is_stub_optimizer", False)]
    if not parts:
        return {}  # this rank trains nothing
    if all(hasattr(part, "gbuf_ranges") for part in parts):
        return _distributed([ChainMember(part, parameters, loading) for part in parts])
    if len(parts) == 1 and parts[0] is not optimizer:
        return _lower_optimizer(parts[0], tree, parameters, loading)
    if any(getattr(getattr(part, "ddp_config", None), "use_megatron_fsdp", False) for part in parts):
        raise UnsupportedError(
            f"{type(optimizer).__name__}: an optimizer of Megatron-FSDP holds DTensors; save its state_dict() with "
            "reshard_ckpt.dcp.save"
        )
    made = optimizer.sharded_state_dict(tree, is_loading=loading)
    return _whole(lower(made, loading=loading), optimizer)


def _whole(tree: Node, optimizer: Any) -> Leaf:
    """Return the leaf of an optimizer that holds whole parameters, given the tree that its ``sharded_state_dict`` returned."""

    def problems(common: Any, at: str) -> list[str]:
        found = flatten(tree, children, (at,))
        unsaved = (path for path, leaf in found if leaf.common() is not NOTHING and reduce(child_of, path[1:], common) is NOTHING)
        return [_lacking(name_of(path)) for path in unsaved]

    def take(common: Any, loaded: Loaded) -> Any:
        found = loaded_of(tree, common, loaded)
        optimizer.load_state_dict(merged(copied(common), copied(found)))
        return found

    return Leaf(tuple(entries_of(tree)), tuple(objects_of(tree)), lambda: common_of(tree), take, problems)


@dataclass(frozen=True)
class ChainMember:
    """One distributed optimizer, alone or in a chain. `parameters` maps a parameter's `id` to its `ShardedTensor` or factory."""

    optimizer: Any
    parameters: Mapping[int, Any]
    loading: bool

    @cached_property
    def states(self) -> list[tuple[torch.Tensor, int, dict[str, torch.Tensor]]]:
        """A tuple for each parameter with a run on this rank: the parameter, the run's first element, and the run's state by key.

        The first element counts in the flattened parameter.
        """
        # An optimizer that has not stepped yet has no state: create it, as Megatron does before a load. Existing state stays.
        make = getattr(self.optimizer, "init_state_fn", None)
        if self.loading and make is not None:
            make(self.optimizer.optimizer, self.optimizer.config)
        buckets = (bucket for buffer in self.optimizer.gbuf_ranges for listed in buffer.values() for bucket in listed)
        # Megatron's ranges of each parameter with a run on this rank: ``ranges["param"]`` is the run.
        runs = [(p, ranges["param"].start) for bucket in buckets for p, ranges in bucket["param_map"].items()]
        return [(p, start, _tensors(self.optimizer._get_main_param_and_optimizer_states(p))) for p, start in runs]

    def entries(self) -> Iterator[NamedShard]:
        """Yield the shards of the state of this optimizer on this rank."""
        instance = getattr(self.optimizer, "distributed_optimizer_instance_id", 0)
        for parameter, start, states in self.states:
            sharded = self.parameters.get(id(parameter))
            if sharded is None:
                raise UsageError(
                    f"a parameter of shape {tuple(parameter.shape)} of the distributed optimizer is in no ShardedTensor of the "
                    "tree; pass what model.sharded_state_dict() returned in the same tree, with the parameters themselves as "
                    "data (keep_vars=True)"
                )
            for key, state in states.items():
                yield from run_entries(sharded, parameter, f"{STATE}.{key}", state, start, instance)

    def common(self) -> dict[str, Any]:
        """Return the common state of this optimizer."""
        try:
            return {**self.optimizer.state_dict(), SHARDING: FULLY_RESHARDABLE}
        except AssertionError as error:
            raise UsageError(
                f"the distributed optimizer's state_dict() failed ({error or 'an assertion'}), as before its first step; save "
                "after it"
            ) from error

    def take(self, common: Any, number: int, num: int) -> dict[str, Any]:
        """Give the optimizer its loaded state and its common state. Return its part of the common state.

        Parameters
        ----------
        common
            The common state of the whole chain, as it was saved.
        number, num
            The number of this optimizer in the chain, and the length of the chain.
        """
        for parameter, _, states in self.states:
            # A getter that returns other memory each time returns scaled copies. The load filled such a copy, so write it back.
            now = _tensors(self.optimizer._get_main_param_and_optimizer_states(parameter))
            if any(now[key].data_ptr() != state.data_ptr() for key, state in states.items()):
                self.optimizer._set_main_param_and_optimizer_states(parameter, states)
        if hasattr(inner := self.optimizer.optimizer, "_sync_hdo_state_to_sub_optimizers"):
            inner._sync_hdo_state_to_sub_optimizers()
        own = _own_part(_saved_parts(common), number, num, inner.param_groups)
        self.optimizer.load_state_dict(copied(own))
        return own


class DistributedLeaf(Leaf):
    """The leaf of distributed optimizers: one, or the members of a chain. Megatron makes a chain if experts are parallel."""


def _distributed(members: Sequence[ChainMember]) -> DistributedLeaf:
    def one_or_all(parts: list[Any]) -> Any:
        return parts[0] if len(parts) == 1 else dict(enumerate(parts))

    return DistributedLeaf(
        tuple(entry for member in members for entry in member.entries()),
        common=lambda: one_or_all([member.common() for member in members]),
        loaded=lambda common, _: Replacement(one_or_all([m.take(common, i, len(members)) for i, m in enumerate(members)])),
        problems=lambda common, at: [] if _saved_parts(common) else [_lacking(at)],
    )


def _saved_parts(common: Any) -> list[dict[str, Any]]:
    """Return the saved common state of each optimizer of a chain, or of the only one; empty if any of them lacks its groups."""
    parts = [common] if isinstance(common, dict) and "optimizer" in common else []
    if isinstance(common, list):
        parts = common
    elif isinstance(common, dict) and all(isinstance(key, int) for key in common):
        parts = [common[key] for key in sorted(common)]
    return parts if all(isinstance(part, dict) and _groups(part) is not None for part in parts) else []


def _groups(part: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the parameter groups in the common state of one optimizer; None if it has none."""
    inner = part.get("optimizer")
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    return groups if isinstance(groups, list) and all(isinstance(group, dict) for group in groups) else None


def _own_part(saved: Sequence[dict[str, Any]], number: int, num: int, own_groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Build the common state of one of `num` chained optimizers.

    If experts are parallel, a job has a second optimizer, with groups for the experts; otherwise one optimizer has all groups.
    If a job of the other kind saved the checkpoint, the number of optimizers differs. Then every saved group is listed twice:
    once for the other kind of parameters, and after that as it was saved. If two groups are for the same parameters, the last one
    counts, as in Megatron.
    """
    parts = [saved[number]] if len(saved) == num else saved
    groups = [group for part in parts for group in _groups(part) or ()]
    if len(saved) != num:
        groups = [*({**group, _EXPERT: not group[_EXPERT]} for group in groups if _EXPERT in group), *groups]
    kept = {key: value for key, value in parts[0].items() if key != _IN_FULL}
    return {**kept, "optimizer": {**kept["optimizer"], "param_groups": _in_order(groups, own_groups)}}


def _in_order(groups: list[dict[str, Any]], own_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved group for each group of an optimizer. If groups cannot be told apart, return all in the saved order.

    The order of groups depends on which parameters a rank has. Newer versions of Megatron therefore find groups by their
    multipliers and flags (`_KIND`); 0.13 takes them by position.
    """
    found = {_flags_of(group): group for group in groups}
    wanted = [_flags_of(group) for group in own_groups]
    are_distinct = len({*wanted}) == len(wanted) and all(flags in found and None not in flags for flags in wanted)
    return [found[flags] for flags in wanted] if are_distinct else groups


def _flags_of(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values of a group's `_KIND` keys, by which groups are told apart; None for a missing key."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in _KIND)


def _tensors(states: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Select the tensors of a parameter's state, without its step, which is saved in the groups."""
    return {key: state for key, state in states.items() if key != "step" and isinstance(state, torch.Tensor)}


def unplaced_state(node: Node, catalog: Catalog) -> list[str]:
    """Return a line for each saved state, such as the ``exp_avg`` of a parameter, that the distributed optimizers lack.

    Only parameters whose master weights they hold are looked at.
    """
    leaves_of = [leaf for leaf in leaves(node, children) if isinstance(leaf, DistributedLeaf)]
    wanted = {entry.name for leaf in leaves_of for entry in leaf.entries}
    if not wanted:
        return []
    # kinds: all states that the checkpoint has, such as ``exp_avg``; keys: parameters whose master this rank holds
    kinds = {name.split(".")[2] for name in catalog.names if name.startswith(f"{STATE}.") and name.count(".") > 2}
    keys = {name.removeprefix(_MASTER) for name in wanted if name.startswith(_MASTER)}
    names = (f"{STATE}.{kind}.{key}" for kind in sorted(kinds) for key in sorted(keys))
    return [
        f"{name}: in the checkpoint, but this optimizer has no such state; give it its state before loading, as a step does"
        for name in names
        if name in catalog and name not in wanted
    ]


def _lacking(at: str) -> str:
    return f"{at or 'optimizer'}: not in the checkpoint's common state, which has the hyperparameters and the step"
