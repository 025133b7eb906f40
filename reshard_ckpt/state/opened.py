"""What is in the state, once its modules are read and its optimizers understood?

Modules come first, whatever the order of the keys: their ``state_dict`` puts an FSDP2 module back to the sharded parameters that
its optimizer knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..core.catalog.specs import Replication
from .modules import ModuleState, ModuleTensor, read_module
from .optimizers import Owners, View, views
from .scan import ModulesItem, OptimizersItem, Path, TensorItem, Tree, name_of, scan
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
    """Those of parameters, by their identity and claim."""

    def local_tensor_of(self, tensor: ModuleTensor, name: str) -> LocalTensor:
        """The leaf of a module's tensor."""
        return self.leaves.get((id(tensor.value), tensor.replication)) or local_tensor_of(tensor.value, name, tensor.replication)

    def meshes(self) -> tuple[DeviceMesh, ...]:
        """The distinct meshes of all DTensors."""
        values: list[Any] = [t.value for states in self.modules.values() for s in states for t in s.tensors]
        values += [item.value for tree in self.trees for item in tree.items if isinstance(item, TensorItem)]
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
    optimizers = {item.path: views(item.path, item.optimizers, owners) for item in items if isinstance(item, OptimizersItem)}
    return OpenedState(trees, modules, owners, optimizers, leaves)


def _tensors(
    modules: Mapping[Path, tuple[ModuleState, ...]], trees: tuple[Tree, ...]
) -> Iterator[tuple[Path, str, TensorLike, Replication]]:
    """Every tensor of modules and of plain dicts: the key that it is under, its FQN below that, itself, and its claim."""
    for path, states in modules.items():
        yield from ((path, t.fqn, t.value, t.replication) for s in states for t in s.tensors)
    for item in (item for tree in trees for item in tree.items):
        if isinstance(item, TensorItem) and len(item.path) > 1:
            yield item.path[:1], name_of(item.path[1:]), item.value, Replication.PLAIN
