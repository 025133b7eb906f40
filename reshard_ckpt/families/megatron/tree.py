"""Lowering Megatron's trees to shards, objects and common state, and building the tree that a load returns.

Dicts and lists are containers, as in Megatron; anything else is a leaf. `lower` turns leaves into nodes:

1. A `ShardedTensor` becomes a shard; a factory becomes the shards that it builds.
2. A `ShardedObject` becomes a named value. A `LocalNonpersistentObject` is not saved. An optimizer object becomes its own shards
   (`optimizers`).
3. Anything else is common state, which rank 0 saves.

After a load, `loaded_of` returns the loaded leaves in a tree of the same form, and `merged` puts them into the common state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from ...plugins.errors import MismatchError, UsageError
from ...plugins.names import name_of
from ...plugins.trees import flatten, leaves, map_tree
from .names import SHARDING, object_name
from .places import NamedShard, built_by, entry_of, is_factory, is_main, is_sharded_object, is_sharded_tensor, plain

NOTHING = object()
"""Stands for a missing node: the tree has nothing of the requested kind at this place."""
_STATE = "param_state"
"""The key of the parameters' state in a distributed optimizer's dict. The key `SHARDING` tells the form of that state."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Objects that a load has read, by name; `absent` are the names of wanted tensors and objects that the checkpoint lacks."""

    values: Mapping[str, Any]
    absent: frozenset[str] = frozenset()


class Leaf:
    """Base of the leaves of a lowered tree, with shards, objects, common state, and a value after a load. This leaf has none."""

    def entries(self) -> Iterable[NamedShard]:
        """Return the shards of this leaf."""
        return ()

    def objects(self) -> Iterable[ObjectLeaf]:
        """Return the objects of this leaf."""
        return ()

    def common(self) -> Any:
        """Return the common state of this leaf; `NOTHING` if it has none."""
        return NOTHING

    def problems(self, common: Any, at: str) -> list[str]:
        """Return a line for each value that this leaf needs, and that the saved common state lacks; runs before anything changes.

        Parameters
        ----------
        common
            The common state that was saved at this place; `NOTHING` if there was none.
        at
            The path of this place, for messages.
        """
        return []

    def loaded(self, common: Any, loaded: Loaded) -> Any:
        """Return the value that replaces this leaf in the tree, once all tensors are loaded; `NOTHING` drops the leaf.

        Parameters
        ----------
        common
            The common state that was saved at this place; `NOTHING` if there was none.
        """
        return NOTHING


@dataclass(frozen=True)
class PlainLeaf(Leaf):
    """A value of the common state; a load returns the saved one instead."""

    value: Any

    def common(self) -> Any:
        return self.value


@dataclass(frozen=True)
class KeptLeaf(Leaf):
    """A value that is not persistent: it is not saved, and a load returns it unchanged."""

    value: Any

    def loaded(self, common: Any, loaded: Loaded) -> Any:
        return self.value


@dataclass(frozen=True)
class ObjectLeaf(Leaf):
    """A `ShardedObject` in a lowered tree. `main` tells whether it is the replica that is saved."""

    name: str
    main: bool
    value: Any

    def objects(self) -> Iterable[ObjectLeaf]:
        return (self,)

    def loaded(self, common: Any, loaded: Loaded) -> Any:
        return NOTHING if self.name in loaded.absent else loaded.values[self.name]


@dataclass(frozen=True)
class TensorLeaf(Leaf):
    """A `ShardedTensor` in a lowered tree: its shard, and the tensor over the same memory that a load puts into the result."""

    entry: NamedShard
    data: torch.Tensor

    def entries(self) -> Iterable[NamedShard]:
        return (self.entry,)

    def loaded(self, common: Any, loaded: Loaded) -> Any:
        return NOTHING if self.entry.name in loaded.absent else self.data


@dataclass(frozen=True)
class TreeLeaf(Leaf):
    """A leaf that was replaced by a lowered tree of its own, such as the tree that a factory built."""

    tree: Node

    def entries(self) -> Iterable[NamedShard]:
        return entries_of(self.tree)

    def objects(self) -> Iterable[ObjectLeaf]:
        return objects_of(self.tree)


@dataclass(frozen=True)
class FactoryLeaf(TreeLeaf):
    """The leaf of a factory: the lowered tree that the factory built. After a load, the factory merges the loaded tree."""

    factory: Any

    def loaded(self, common: Any, loaded: Loaded) -> Any:
        names = {entry.name for entry in self.entries()} | {part.name for part in self.objects()}
        return NOTHING if names & loaded.absent else self.factory.merge_fn(loaded_of(self.tree, NOTHING, loaded))


Node = dict[Any, Any] | list[Any] | Leaf


def is_local(value: object) -> bool:
    """Tell whether an object is a `LocalNonpersistentObject`."""
    return hasattr(value, "obj") and callable(getattr(value, "unwrap", None))


def lower(tree: Any, *, loading: bool, own: Callable[[Any], Node | None] = lambda value: None) -> Node:
    """Replace each leaf of a tree by a node that holds its shards, objects or common state; dicts and lists stay.

    Parameters
    ----------
    own
        Called first on each leaf: returns a node for leaves of its own kinds, such as optimizers, and None for all others.

    Raises
    ------
    UsageError
        A shard has no data to save, or its attributes contradict each other.
    """
    if isinstance(tree, dict):
        return {key: lower(value, loading=loading, own=own) for key, value in tree.items()}
    if isinstance(tree, list):
        return [lower(value, loading=loading, own=own) for value in tree]
    if (node := own(tree)) is not None:
        return node
    if is_sharded_tensor(tree):
        return _lower_tensor(tree, loading)
    if is_factory(tree):
        return FactoryLeaf(lower(built_by(tree, tree.key, tree.data), loading=loading), tree)
    if is_sharded_object(tree):
        return ObjectLeaf(object_name(tree), is_main(tree.replica_id), tree.data)
    if is_local(tree):
        return KeptLeaf(tree.unwrap())
    return PlainLeaf(tree)


def _lower_tensor(sharded: Any, loading: bool) -> Leaf:
    run = getattr(sharded, "flattened_range", None)
    if run is not None and run.start == run.stop:
        return Leaf()  # an empty run; Megatron leaves these out, also from the tree that a load returns
    if sharded.data is None:
        if not loading:
            raise UsageError(f"{sharded.key}: this ShardedTensor has no data; set its `data`, or leave it out of the tree")
        sharded.init_data("cpu")
    data = plain(sharded.data)
    return TensorLeaf(entry_of(sharded, data), data)


def children(node: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the items of a dict, or the numbered items of a list; None for a leaf of one of Megatron's trees."""
    if isinstance(node, dict):
        return node.items()
    return enumerate(node) if isinstance(node, list) else None


def entries_of(node: Node) -> Iterator[NamedShard]:
    """Yield the shards of a lowered tree."""
    return (entry for leaf in leaves(node, children) for entry in leaf.entries())


def objects_of(node: Node) -> Iterator[ObjectLeaf]:
    """Yield the objects of a lowered tree."""
    return (part for leaf in leaves(node, children) for part in leaf.objects())


def common_of(node: Node) -> Any:
    """Return the common state of a lowered tree; `NOTHING` if there is none.

    Items without common state are dropped from lists, so the items behind them move up.
    """
    if isinstance(node, dict):
        found = {key: value for key, child in node.items() if (value := common_of(child)) is not NOTHING}
        return found if found or not node else NOTHING
    if isinstance(node, list):
        rest = [value for child in node if (value := common_of(child)) is not NOTHING]
        return rest if rest or not node else NOTHING
    return node.common()


def problems_of(node: Node, common: Any) -> list[str]:
    """Return a line for each value that the leaves of a lowered tree need, and that the saved common state lacks."""
    found = flatten(node, children)
    return [line for path, leaf in found for line in leaf.problems(reduce(child_of, path, common), name_of(path))]


def loaded_of(node: Node, common: Any, loaded: Loaded) -> Any:
    """Return the loaded values in a tree with the form of `node`; `NOTHING` if that has only common state."""
    if isinstance(node, dict):
        found = {k: v for k, child in node.items() if (v := loaded_of(child, child_of(common, k), loaded)) is not NOTHING}
        # The load brought the state into the form that the tree asks for, so the form key must say that one, not the saved one.
        if _STATE in found and isinstance(form := node.get(SHARDING), PlainLeaf):
            found[SHARDING] = form.value
        return found or NOTHING
    if isinstance(node, list):
        rest = [v for i, child in enumerate(node) if (v := loaded_of(child, child_of(common, i), loaded)) is not NOTHING]
        return rest or NOTHING
    return node.loaded(common, loaded)


def child_of(common: Any, key: Any) -> Any:
    """Return the child of a common state at a key or an index; `NOTHING` if there is none."""
    if isinstance(common, dict):
        return common.get(key, NOTHING)
    return common[key] if isinstance(common, list) and isinstance(key, int) and key < len(common) else NOTHING


@dataclass(frozen=True, slots=True)
class Replacement:
    """Wraps a loaded value that replaces the common state at its place; other values are merged into it."""

    value: Any


def merged(common: Any, loaded: Any, at: str = "") -> Any:
    """Put loaded values into the common state, as Megatron does; if both have a value at one place, the loaded one counts.

    Raises
    ------
    MismatchError
        Two lists have different lengths.
    """
    # `Replacement` replaces, dicts and lists of equal form are merged, anything else replaces too.
    if isinstance(loaded, Replacement):
        return loaded.value
    if loaded is NOTHING:
        return common
    if isinstance(loaded, dict) and (isinstance(common, dict) or common is NOTHING):
        common = {} if common is NOTHING else common
        for key, value in loaded.items():
            common[key] = merged(common.get(key, NOTHING), value, f"{at}.{key}" if at else str(key))
        return common
    if isinstance(common, list) and isinstance(loaded, list):
        if len(common) != len(loaded):
            line = f"{at}: a list of {len(common)} in the checkpoint's common state, of {len(loaded)} in the tree"
            raise MismatchError(f"{line}; load with the groups that were saved", [line])
        return [merged(one, other, f"{at}[{i}]") for i, (one, other) in enumerate(zip(common, loaded, strict=True))]
    return loaded


def copied(tree: Any) -> Any:
    """Copy the dicts and lists of a tree, for functions that change them; leaves are shared."""
    return map_tree(lambda path, node: node, tree)
