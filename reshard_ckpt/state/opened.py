"""What is in the state, once its modules are read and its optimizers understood?

1. Modules come first, whatever the order of the keys: their ``state_dict`` puts an FSDP2 module back to the sharded parameters
   that its optimizer knows.
2. An optimizer whose ``state_dict`` is torch's own is read as its state and groups. Any other is asked, and opens a tree.
3. State dicts by number are named by their parameters, if the state shows which these are; the others are dicts like any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..core.catalog.specs import Replication
from ..errors import UsageError
from .modules import ModuleState, ModuleTensor, read_module
from .numbered import Numbers, Watched, are_numbered_groups, keep_dtypes, names_in, numbers_of, optimizers_of, says_its_own
from .optimizers import View, numbered_view, owner_of, views
from .owners import Owner, Owners
from .scan import (
    Item,
    ModulesItem,
    NumberedItem,
    OptimizersItem,
    Path,
    TensorItem,
    Tree,
    by_number,
    check_names,
    name_of,
    opened_objects,
    scan,
    tree_of,
)
from .shards import FlatShard, LocalShard
from .tensors import LocalTensor, TensorLike, local_tensor_of


@dataclass(frozen=True, slots=True)
class OpenedState:
    """The scanned state, with the modules and optimizers that lie at each path."""

    trees: tuple[Tree, ...]
    modules: Mapping[Path, tuple[ModuleState, ...]]
    owners: Owners
    views: Mapping[Path, tuple[View, ...]]
    leaves: Mapping[tuple[int, Replication], LocalTensor]
    """Those of parameters, by their identity and replication."""
    numbered: tuple[str, ...]
    """Names of the optimizers' state dicts whose numbers nothing in the state names."""
    left_out: tuple[str, ...]
    """A line for each optimizer inside of another whose state that one leaves out."""

    def local_tensor_of(self, tensor: ModuleTensor, name: str) -> LocalTensor:
        """The leaf of a module's tensor."""
        return self.leaves.get((id(tensor.value), tensor.replication)) or local_tensor_of(tensor.value, name, tensor.replication)

    def warnings(self) -> tuple[str, ...]:
        """What its user should know of how it is saved."""
        by_number = [
            f"{name}: this state dict numbers the parameters, and nothing in the state says which parameter a number is, so it "
            "is saved by number and loads only where they are numbered alike; pass the optimizer itself, or make it of "
            "model.named_parameters()"
            for name in self.numbered
        ]
        return (*by_number, *self.left_out)

    def hints(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """What may help where the saved values do not fit: one of both knows an optimizer by number, the other by name."""
        named = {f"{name_of(path)}.param_groups": name_of(path) for path in self.views}
        saved = [named[name] for name, value in values.items() if name in named and are_numbered_groups(value)]
        wanted = [name for name in self.numbered if not are_numbered_groups(values.get(f"{name}.param_groups", []))]
        return (*map(_saved_by_number, saved), *map(_wanted_by_number, wanted))

    def meshes(self) -> tuple[DeviceMesh, ...]:
        """The distinct meshes of all DTensors."""
        values: list[Any] = [t.value for states in self.modules.values() for s in states for t in s.tensors]
        values += [item.value for tree in self.trees for item in tree.items if isinstance(item, TensorItem)]
        if not any(isinstance(v, DTensor) for v in values):  # it may be an optimizer alone
            states = [view.state[held.key] for views in self.views.values() for view in views for held in view.held_with_state()]
            values = [value for state in states for value in state.values()]
        return tuple({id(v.device_mesh): v.device_mesh for v in values if isinstance(v, DTensor)}.values())

    def ddp_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each process group over which DDP replicates a module."""
        modules = (m for states in self.modules.values() for s in states for m in s.module.modules())
        groups = {m.process_group for m in modules if isinstance(m, DistributedDataParallel)}
        return tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)


def open_state(state: Mapping[Any, Any]) -> OpenedState:
    """Open everything in the state.

    Raises
    ------
    UsageError
        The state is not one that can be saved or loaded into.
    """
    trees = scan(state)
    items = [item for tree in trees for item in tree.items]
    modules = {
        item.path: tuple(read_module(m, item.path) for m in item.modules) for item in items if isinstance(item, ModulesItem)
    }
    owners = Owners()
    leaves: dict[tuple[int, Replication], LocalTensor] = {}
    with torch.no_grad():
        for path, fqn, value, replication in _tensors(modules, trees):
            param = value.tensor if isinstance(value, LocalShard | FlatShard) else value
            if isinstance(param, torch.nn.Parameter) or param.requires_grad:  # an optimizer may have it
                leaf = leaves[id(value), replication] = local_tensor_of(value, name_of((*path, fqn)), replication)
                owners.add(param, fqn, name_of(path), leaf.layout)
            else:
                owners.add_other(value, fqn, name_of(path), replication)
    trees = _with_optimizers_asked(trees)
    found: dict[Path, tuple[View, ...]] = {}
    settled, numbered, left_out = [], [], []
    visible = Watched(tuple({id(o): o for o in _visible(trees)}.values()))
    for tree in trees:
        kept: list[Item] = []
        given: list[tuple[Optimizer, Mapping[str, Any]]] = []
        for item in tree.items:
            if isinstance(item, OptimizersItem):
                found[item.path] = views(item.path, item.optimizers, owners)
                left_out += [line for optimizer in item.optimizers for line in _left_out(item.path, optimizer)]
            elif isinstance(item, NumberedItem):
                source = tree.watched.source(item.tree) or visible.source(item.tree)
                members = _members(item, tree, source, owners)
                if members is None:
                    numbered.append(name_of(item.path))
                    kept += by_number(item)
                    continue
                found[item.path] = (numbered_view(item.path, item.tree, members),)
                if source is not None:
                    given.append((source, item.tree))
            kept.append(item)
        settled.append(replace(tree, items=tuple(kept), sink=_sink(tree, given)))
    return OpenedState(tuple(settled), modules, owners, found, leaves, tuple(numbered), tuple(left_out))


def _with_optimizers_asked(trees: Sequence[Tree]) -> tuple[Tree, ...]:
    """The trees, and those of optimizers that say their state themselves, which are no longer items.

    Raises
    ------
    UsageError
        Such an optimizer is one of several in a list.
    """
    out: list[Tree] = []
    waiting = list(trees)
    while waiting:
        tree = waiting.pop(0)
        asked = [i for i in tree.items if isinstance(i, OptimizersItem) and any(map(says_its_own, i.optimizers))]
        for item in asked:
            if len(item.optimizers) > 1:
                own = next(o for o in item.optimizers if says_its_own(o))
                raise UsageError(
                    f"{name_of(item.path)}: a list of optimizers, among them a {type(own).__name__}, whose state_dict() is its "
                    "own and cannot be merged with others; pass each optimizer under a key of its own"
                )
            new = tree_of(item.optimizers[0], item.path)
            waiting += [new, *opened_objects([new])]
        out.append(replace(tree, items=tuple(i for i in tree.items if not any(i is a for a in asked))))
    if len(out) > len(trees):
        check_names(out)
    return tuple(out)


def _left_out(path: Path, optimizer: Optimizer) -> Iterator[str]:
    """A line for each inner optimizer that has state which torch's own ``state_dict()`` of the outer one does not hold."""
    inside = [inner for inner in optimizers_of(optimizer) if inner is not optimizer]
    if not inside or hasattr(optimizer, "consolidate_state_dict"):
        return
    held = {id(value) for entry in optimizer.state.values() if isinstance(entry, Mapping) for value in entry.values()}
    for inner in inside:
        entries = (entry for entry in inner.state.values() if isinstance(entry, Mapping))
        if any(isinstance(value, torch.Tensor) and id(value) not in held for entry in entries for value in entry.values()):
            yield (
                f"{name_of(path)}: {type(optimizer).__name__} holds a {type(inner).__name__} whose state is not in its "
                f"state_dict(), so it is not saved; pass that optimizer too, under a key of its own"
            )


def _saved_by_number(name: str) -> str:
    return (
        f"{name} was saved by number, as in {name}.state.0.…, from a state_dict() that did not name its parameters: say which "
        f"each is, with rename={{f'{name}.state.{{i}}': f'{name}.state.{{fqn}}' for i, fqn in enumerate(fqns)}}, where fqns are "
        "the names of the parameters in the order of the optimizer that was saved (of one made of model.parameters(): "
        "[fqn for fqn, _ in model.named_parameters()])"
    )


def _wanted_by_number(name: str) -> str:
    return (
        f"{name} is wanted by number, as in {name}.state.0.…, where the checkpoint has names: pass the optimizer itself, or the "
        "state_dict() of one made of model.named_parameters()"
    )


def _visible(trees: Sequence[Tree]) -> Iterator[Optimizer]:
    """Every optimizer that the state shows: itself, inside another one, or inside an object such as a scheduler."""
    for tree in trees:
        yield from tree.watched.optimizers
        for item in tree.items:
            if isinstance(item, OptimizersItem):
                for optimizer in item.optimizers:
                    yield from optimizers_of(optimizer)


def _sink(tree: Tree, given: Sequence[tuple[Optimizer, Mapping[str, Any]]]) -> Callable[[Any], Any] | None:
    """What takes the root of a tree back, and sees to it that the optimizers whose state was in there take it unrounded."""
    sink = tree.sink
    if sink is None or not given:
        return sink

    def take(root: Any) -> None:
        sink(root)
        for optimizer, said in given:
            keep_dtypes(optimizer, said)

    return take


def _members(item: NumberedItem, tree: Tree, source: Optimizer | None, owners: Owners) -> Mapping[int, Owner] | None:
    """The owner of each number, which `source` gave, if that is known; None where the state does not tell.

    Raises
    ------
    UsageError
        A parameter of an optimizer that says its state itself belongs to no module in the state.
    """
    groups = item.tree["param_groups"]
    members = None if source is None else _owned(numbers_of(source, groups), owners)
    if members is not None:
        return members
    if (names := names_in(groups)) is not None:
        return {number: owners.named(name) for number, name in names.items()}
    if isinstance(tree.owner, Optimizer) and tree.path == item.path:  # it numbers its own groups
        source = source or tree.owner
        members = _owned(numbers_of(source, groups), owners)
        if members is None and numbers_of(source, groups) is not None:
            for i, group in enumerate(source.param_groups):
                for param in group["params"]:
                    owner_of(param, owners, name_of(item.path), i)
    return members


def _owned(numbers: Numbers | None, owners: Owners) -> dict[int, Owner] | None:
    members = {number: owners.of(param) for number, param in (numbers or {}).items()}
    known = {number: owner for number, owner in members.items() if owner is not None}
    return known if numbers is not None and len(known) == len(members) else None


def _tensors(
    modules: Mapping[Path, tuple[ModuleState, ...]], trees: tuple[Tree, ...]
) -> Iterator[tuple[Path, str, TensorLike, Replication]]:
    """Every tensor of modules and of plain dicts: the key that it is under, its FQN below that, itself, and its claim."""
    for path, states in modules.items():
        yield from ((path, t.fqn, t.value, t.replication) for s in states for t in s.tensors)
    for item in (item for tree in trees for item in tree.items):
        if isinstance(item, TensorItem) and len(item.path) > 1:
            yield item.path[:1], name_of(item.path[1:]), item.value, Replication.PLAIN
