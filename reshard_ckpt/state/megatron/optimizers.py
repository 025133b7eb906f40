"""Megatron's optimizers that stand in a tree as themselves: their shards are saved as they are, and filled in place.

They are told by their attributes:

1. ``gbuf_ranges``: a distributed optimizer. Of every parameter that its buffers hold, this rank has a run of the flattened one;
   the master and each state are runs of the parameter's box. Nothing is gathered.
2. ``chained_optimizers``: one node for each; a chain of one is that one, as Megatron has it.
3. Any other that has ``sharded_state_dict``: every rank holds its parameters whole, so the tree that it makes needs no gather.

A parameter is matched with what the tree says of it by identity: a `ShardedTensor`, or a factory, whose ``data`` it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ...errors import UnsupportedError, UsageError
from .runs import Entry, is_factory, is_sharded_tensor, run_entries
from .tree import (
    NOTHING,
    Loaded,
    Node,
    ObjectLeaf,
    _Leaf,
    common_of,
    copied,
    entries_of,
    loaded_of,
    lower,
    merged,
    objects_of,
    problems_of,
)

STATE = "optimizer.state"
SHARDING = "fully_reshardable"
"""What Megatron calls state by parameter, in the parameters' own shapes."""

_IN_FULL = "param_state"


def is_optimizer(value: object) -> bool:
    """Tell whether something is one of Megatron's optimizers."""
    return any(hasattr(value, name) for name in ("gbuf_ranges", "chained_optimizers")) or (
        callable(getattr(value, "sharded_state_dict", None)) and hasattr(value, "param_groups")
    )


def lower_tree(tree: Any, *, loading: bool) -> Node:
    """Lower a tree in which optimizers may stand as themselves.

    Raises
    ------
    UsageError
        A shard or an optimizer cannot be saved or loaded as it is.
    """
    if not any(is_optimizer(value) for value in _leaves(tree)):
        return lower(tree, loading=loading)
    parameters = {id(v.data): v for v in _leaves(tree) if (is_sharded_tensor(v) or is_factory(v)) and v.data is not None}

    def walk(value: Any) -> Node:
        if isinstance(value, dict):
            return {key: walk(child) for key, child in value.items()}
        if isinstance(value, list):
            return [walk(child) for child in value]
        if is_optimizer(value):
            return _lower_optimizer(value, tree, parameters, loading)
        return lower(value, loading=loading)

    return walk(tree)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict | list):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(child)
    else:
        yield tree


def _lower_optimizer(optimizer: Any, tree: Any, parameters: Mapping[int, Any], loading: bool) -> Node:
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None and (len(chained) == 1 or any(hasattr(one, "gbuf_ranges") for one in chained)):
        nodes = [_lower_optimizer(one, tree, parameters, loading) for one in chained]
        return nodes[0] if len(nodes) == 1 else dict(enumerate(nodes))
    if getattr(optimizer, "is_stub_optimizer", False) or (chained is not None and not chained):
        return {}  # this rank trains nothing
    if hasattr(optimizer, "gbuf_ranges"):
        return DistributedLeaf(optimizer, parameters, loading)
    if getattr(getattr(optimizer, "ddp_config", None), "use_megatron_fsdp", False):
        raise UnsupportedError(
            f"{type(optimizer).__name__}: an optimizer of Megatron-FSDP holds DTensors; save its state_dict() with "
            "reshard_ckpt.dcp.save"
        )
    made = optimizer.sharded_state_dict(tree, is_loading=loading)
    return WholeLeaf(optimizer, lower(made, loading=loading))


@dataclass(frozen=True)
class WholeLeaf(_Leaf):
    """An optimizer that holds whole parameters, by the tree that it made of itself."""

    optimizer: Any
    tree: Node

    def entries(self) -> Iterable[Entry]:
        return entries_of(self.tree)

    def objects(self) -> Iterable[ObjectLeaf]:
        return objects_of(self.tree)

    def common(self) -> Any:
        return common_of(self.tree)

    def problems(self, common: Any, at: str) -> list[str]:
        return problems_of(self.tree, common, at) if isinstance(common, dict) else [_lacking(at)]

    def loaded(self, common: Any, loaded: Loaded) -> Any:
        found = loaded_of(self.tree, common, loaded)
        self.optimizer.load_state_dict(merged(copied(common), copied(found)))
        return found


@dataclass(frozen=True)
class DistributedLeaf(_Leaf):
    """A distributed optimizer, and what the tree says of its parameters."""

    optimizer: Any
    parameters: Mapping[int, Any]
    loading: bool

    @cached_property
    def states(self) -> list[tuple[torch.Tensor, int, dict[str, torch.Tensor]]]:
        """Each parameter of which this rank has a run, where that begins, and the master and state of the run."""
        if self.loading:
            self._make_state()
        runs = [(p, ranges["param"].start) for p, ranges in _param_ranges(self.optimizer)]
        return [(p, start, _tensors(self.optimizer._get_main_param_and_optimizer_states(p))) for p, start in runs]

    def _make_state(self) -> None:
        """Have an optimizer that has not stepped make its state, as Megatron does before it loads."""
        inner = self.optimizer.optimizer
        make = getattr(self.optimizer, "init_state_fn", None)
        if make is not None and not len(inner.state):
            make(inner, self.optimizer.config)

    def entries(self) -> Iterator[Entry]:
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

    def common(self) -> Any:
        try:
            return {**self.optimizer.state_dict(), "param_state_sharding_type": SHARDING}
        except AssertionError as error:
            raise UsageError(
                f"the distributed optimizer's state_dict() failed ({error or 'an assertion'}), as before its first step; save "
                "after it"
            ) from error

    def problems(self, common: Any, at: str) -> list[str]:
        return [] if isinstance(common, dict) and "optimizer" in common else [_lacking(at)]

    def loaded(self, common: Any, loaded: Loaded) -> Any:
        for parameter, _, states in self.states:
            now = _tensors(self.optimizer._get_main_param_and_optimizer_states(parameter))
            if any(now[key].data_ptr() != state.data_ptr() for key, state in states.items()):
                self.optimizer._set_main_param_and_optimizer_states(parameter, states)  # scaled, so what was loaded is a copy
        if hasattr(inner := self.optimizer.optimizer, "_sync_hdo_state_to_sub_optimizers"):
            inner._sync_hdo_state_to_sub_optimizers()
        self.optimizer.load_state_dict(copied({key: value for key, value in common.items() if key != _IN_FULL}))
        return NOTHING


def _param_ranges(optimizer: Any) -> Iterator[tuple[torch.Tensor, Mapping[str, Any]]]:
    """Yield the parameters of which this rank has a run, and its ranges."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                yield from bucket["param_map"].items()


def _tensors(states: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Leave out the step, which the groups have once."""
    return {key: state for key, state in states.items() if key != "step" and isinstance(state, torch.Tensor)}


def _lacking(at: str) -> str:
    return f"{at or 'optimizer'}: not in the checkpoint's common state, which has the hyperparameters and the step"
