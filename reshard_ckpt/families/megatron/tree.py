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
    absent: frozenset[str]

    def value(self, name: str) -> Any:
        """Return the loaded object of a name; `NOTHING` if the checkpoint lacks it."""
        return NOTHING if name in self.absent else self.values[name]


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """The name and value of a `ShardedObject`; `main` tells whether it is the replica that is saved."""

    name: str
    main: bool
    value: Any


@dataclass(frozen=True)
class Leaf:
    """A leaf of a lowered tree. By default nothing is saved of it, and a load drops it from the tree.

    Attributes
    ----------
    entries, objects
        The shards and the objects of this leaf.
    common
        Returns the common state of this leaf; `NOTHING` if it has none.
    loaded
        Returns the value that replaces this leaf in the tree, once all tensors are loaded; `NOTHING` drops the leaf. Called with
        the common state that was saved at this place (`NOTHING` if there was none), and with the loaded objects.
    problems
        Returns a line for each value that this leaf needs, and that the saved common state lacks; runs before anything changes.
        Called with the common state that was saved at this place, and with the path of the place, for messages.
    """

    entries: tuple[NamedShard, ...] = ()
    objects: tuple[ObjectPart, ...] = ()
    common: Callable[[], Any] = lambda: NOTHING
    loaded: Callable[[Any, Loaded], Any] = lambda common, loaded: NOTHING
    problems: Callable[[Any, str], list[str]] = lambda common, at: []


Node = dict[Any, Any] | list[Any] | Leaf


def is_local(value: object) -> bool:
    """Tell whether an object is a `LocalNonpersistentObject`."""
    return hasattr(value, "obj") and callable(getattr(value, "unwrap", None))


def lower(tree: Any, *, loading: bool, own: Callable[[Any], Node | None] = lambda value: None) -> Node:
    """Replace each leaf of a tree by a node that holds its shards, objects or common state; dicts and lists stay.

    Raise `UsageError` if a shard has no data to save, or its attributes contradict each other.

    Parameters
    ----------
    own
        Called first on each leaf: returns a node for leaves of its own kinds, such as optimizers, and None for all others.
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
        return _lower_factory(tree, loading)
    if is_sharded_object(tree):
        part = ObjectPart(object_name(tree), is_main(tree.replica_id), tree.data)
        return Leaf(objects=(part,), loaded=lambda _, loaded: loaded.value(part.name))
    if is_local(tree):
        kept = tree.unwrap()
        return Leaf(loaded=lambda *_: kept)
    return Leaf(common=lambda: tree)


def _lower_tensor(sharded: Any, loading: bool) -> Leaf:
    run = getattr(sharded, "flattened_range", None)
    if run is not None and run.start == run.stop:
        return Leaf()  # an empty run; Megatron leaves these out, also from the tree that a load returns
    if sharded.data is None:
        if not loading:
            raise UsageError(f"{sharded.key}: this ShardedTensor has no data; set its `data`, or leave it out of the tree")
        sharded.init_data("cpu")
    data = plain(sharded.data)
    entry = entry_of(sharded, data)
    return Leaf((entry,), loaded=lambda _, loaded: NOTHING if entry.name in loaded.absent else data)


def _lower_factory(factory: Any, loading: bool) -> Leaf:
    """Lower the tree that a factory builds. After a load, the factory merges the loaded tree."""
    built = lower(built_by(factory, factory.key, factory.data), loading=loading)
    entries, objects = tuple(entries_of(built)), tuple(objects_of(built))
    names = {entry.name for entry in entries} | {part.name for part in objects}

    def merge(common: Any, loaded: Loaded) -> Any:
        return NOTHING if names & loaded.absent else factory.merge_fn(loaded_of(built, NOTHING, loaded))

    return Leaf(entries, objects, loaded=merge)


def children(node: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the items of a dict, or the numbered items of a list; None for a leaf of one of Megatron's trees."""
    if isinstance(node, dict):
        return node.items()
    return enumerate(node) if isinstance(node, list) else None


def entries_of(node: Node) -> Iterator[NamedShard]:
    """Yield the shards of a lowered tree."""
    return (entry for leaf in leaves(node, children) for entry in leaf.entries)


def objects_of(node: Node) -> Iterator[ObjectPart]:
    """Yield the objects of a lowered tree."""
    return (part for leaf in leaves(node, children) for part in leaf.objects)


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
        form = node.get(SHARDING)
        if _STATE in found and isinstance(form, Leaf) and (value := form.common()) is not NOTHING:
            found[SHARDING] = value
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
    """Wraps a loaded value that replaces the common state at its place; values without it are merged into the common state."""

    value: Any


def merged(common: Any, loaded: Any, at: str = "") -> Any:
    """Put loaded values into the common state, as Megatron does; if both have a value at one place, the loaded one counts.

    Raise `MismatchError` if two lists have different lengths.
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
