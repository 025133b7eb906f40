"""The scanned state, with its modules read and its optimizers understood.

Modules come first, whatever the order of the keys: their ``state_dict`` puts an FSDP2 module back to the sharded parameters that
its optimizer knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..core.catalog.specs import Replication
from ..core.trees import Path, name_of
from .modules import ModuleState, read_module
from .optimizer_dicts import are_numbered_groups
from .owners import Owners
from .scan import ModulesItem, TensorItem, Tree, scan
from .tensors import LocalMemories, TensorLike
from .torch_classes import is_dtensor
from .views import OptimizerView, find_optimizers, with_optimizers_asked


@dataclass(frozen=True, slots=True)
class OpenedState:
    """The scanned state, with the modules and optimizers that lie at each path.

    Attributes
    ----------
    meshes
        The distinct meshes of all DTensors.
    ddp_groups
        The ranks of each process group over which DDP replicates a module.
    unnamed
        Names of the optimizers' state dicts whose numbers nothing in the state names.
    warnings
        What its user should know of how it is saved.
    """

    trees: tuple[Tree, ...]
    modules: Mapping[Path, tuple[ModuleState, ...]]
    views: Mapping[Path, tuple[OptimizerView, ...]]
    memories: LocalMemories
    meshes: tuple[DeviceMesh, ...]
    ddp_groups: tuple[tuple[int, ...], ...]
    unnamed: tuple[str, ...]
    warnings: tuple[str, ...]

    def hints(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Say what may help where the saved values do not fit: one of both knows an optimizer by number, the other by name."""
        by_fqn = {f"{name_of(path)}.param_groups": name_of(path) for path in self.views}
        saved = [by_fqn[name] for name, value in values.items() if name in by_fqn and are_numbered_groups(value)]
        wanted = [name for name in self.unnamed if not are_numbered_groups(values.get(f"{name}.param_groups", []))]
        return (*map(_saved_by_number, saved), *map(_wanted_by_number, wanted))


def open_state(state: Mapping[Any, Any]) -> OpenedState:
    """Open everything in the state.

    Raises
    ------
    UsageError
        The state is not one that can be saved or loaded into.
    """
    trees = scan(state)
    modules = {
        item.path: tuple(read_module(module, item.name) for module in item.modules)
        for tree in trees
        for item in tree.items
        if isinstance(item, ModulesItem)
    }
    memories = LocalMemories()
    tensors = _tensors(modules, trees)
    owners = Owners(tensors, memories)
    optimizers = find_optimizers(with_optimizers_asked(trees), owners)
    states = [state for states in modules.values() for state in states]
    ddp_groups = _ddp_groups(states)
    meshes = _meshes(states, optimizers.trees, [view for views in optimizers.views.values() for view in views])
    return OpenedState(
        optimizers.trees,
        modules,
        optimizers.views,
        memories,
        meshes,
        ddp_groups,
        optimizers.unnamed,
        (*map(_warning, optimizers.unnamed), *optimizers.left_out),
    )


def _tensors(
    modules: Mapping[Path, tuple[ModuleState, ...]], trees: Sequence[Tree]
) -> Iterator[tuple[str, str, TensorLike, Replication]]:
    """Yield every tensor of modules and of plain dicts, as `Owners` wants them."""
    for path, states in modules.items():
        key = name_of(path)
        yield from ((key, t.fqn, t.value, t.replication) for s in states for t in s.tensors)
    for item in (item for tree in trees for item in tree.items):
        if isinstance(item, TensorItem) and len(item.path) > 1:
            key = str(item.path[0])
            yield key, item.name[len(key) + 1 :], item.value, Replication.PLAIN


def _meshes(states: Sequence[ModuleState], trees: Sequence[Tree], views: Sequence[OptimizerView]) -> tuple[DeviceMesh, ...]:
    values: list[Any] = [tensor.value for state in states for tensor in state.tensors]
    values += [item.value for tree in trees for item in tree.items if isinstance(item, TensorItem)]
    if not any(is_dtensor(value) for value in values):  # it may be an optimizer alone
        values = [value for view in views for _, entry in view.entries() for value in entry.values()]
    return tuple({id(v.device_mesh): v.device_mesh for v in values if is_dtensor(v)}.values())


def _ddp_groups(states: Sequence[ModuleState]) -> tuple[tuple[int, ...], ...]:
    modules = (module for state in states for module in state.module.modules())
    groups = {module.process_group for module in modules if isinstance(module, DistributedDataParallel)}
    return tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)


def _warning(name: str) -> str:
    return (
        f"{name}: this state dict numbers the parameters, and nothing in the state says which parameter a number is, so it "
        "is saved by number and loads only where they are numbered alike; pass the optimizer itself, or make it of "
        "model.named_parameters()"
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
