"""Capturing a state for a save, and preparing it for a load.

*Saving*, `capture`: scan the state, and describe every tensor as pieces and every value as bytes.

*Loading*, `prepare_load`: the same scan gives the same names. It changes nothing: it says which tensors and values are wanted,
and hands back `Target.check`, to be called with the values before any tensor changes, and `Target.finish`, to be called after all
tensors are in place and verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..core.catalog.links import find_parameters
from ..core.catalog.model import Catalog
from ..core.catalog.param_groups import merge
from ..core.catalog.specs import StateLink, ValueKind
from ..core.trees import name_of
from ..engine.common.tensor_bytes import LocalTensor
from ..format.values import check_keys, decode_steps, keys_of
from .collector import Collector, NamedValue
from .entries import Captured, Target
from .mesh import RankSet, declared_mesh, found_mesh, group_of
from .modules import ModulesTarget
from .opened import OpenedState, open_state
from .optimizer_dicts import saved_groups
from .optimizer_target import OptimizersTarget
from .optimizers import optimizer_contents
from .paths import Steps, link_in_dict, saved_path
from .router import Below, Router, ValueTarget
from .scan import (
    GroupsItem,
    Item,
    ModulesItem,
    NumberedItem,
    OptimizersItem,
    PerRankItem,
    TensorItem,
    ValueItem,
    steps,
)
from .tensors import LocalMemory, TensorLike, check_writable
from .torch_classes import is_dtensor
from .tree_target import TreeTarget, ValueOrigin


def capture(
    state: Mapping[Any, Any], *, mesh: DeviceMesh | Mapping[str, int] | None = None, process_group: Any = None
) -> Captured:
    """Describe what this rank has to save. No collective is called, and no tensor is copied.

    Parameters
    ----------
    state
        As for `checkpoint.save`.
    mesh
        The mesh of the job, where the state does not show it.
    process_group
        The ranks that take part; None for all.

    Raises
    ------
    UsageError
        The state cannot be saved; the class and the message say why.
    """
    group = group_of(process_group)
    declared = None if mesh is None else declared_mesh(mesh, group)
    opened = open_state(state)
    found = declared or found_mesh(opened.meshes, group, ddp_groups=opened.ddp_groups)
    out = Collector(found)
    with torch.no_grad():  # once for all tensors, which takes longer than what it is around of each
        for tree in opened.trees:
            keys_to = Steps(tree.path, tree.root)
            optimizers = {*opened.unnamed, *(name_of(item.path[:-1]) for item in tree.items if isinstance(item, GroupsItem))}
            for item in tree.items:
                link = link_in_dict(item.path, optimizers)
                for content in _contents(item, opened, keys_to, link):
                    out.add(item.name, content)
    return Captured(_with_parameters(out.tensors), tuple(out.values), found, opened.warnings)


def _with_parameters(tensors: Sequence[LocalTensor]) -> tuple[LocalTensor, ...]:
    """Name the parameters of state whose link does not name one that is there, as in dicts, where they go by their FQN alone."""
    names = {t.spec.name for t in tensors}
    unknown = {t.spec.link.fqn for t in tensors if t.spec.link is not None and t.spec.link.parameter not in names}
    if not unknown:
        return tuple(tensors)
    found = find_parameters(unknown, (t.spec.name for t in tensors if t.spec.link is None))

    def complete(tensor: LocalTensor) -> LocalTensor:
        link = tensor.spec.link
        if link is None or link.parameter in names or link.fqn not in found:
            return tensor
        return LocalTensor(replace(tensor.spec, link=replace(link, parameter=found[link.fqn])), tensor.memory)

    return tuple(map(complete, tensors))


def _contents(item: Item, opened: OpenedState, keys_to: Steps, link: StateLink | None) -> Iterator[LocalTensor | NamedValue]:
    """Yield the tensors and values of one item, under their names; `link` is that of a tensor or value in a dict."""
    name = item.name
    if isinstance(item, TensorItem):
        yield opened.memories.of(item.value, name).named(name, link)
    elif isinstance(item, ValueItem):
        yield NamedValue(name, keys_to(item.path), ValueKind.PLAIN, item.value, link)
    elif isinstance(item, PerRankItem):
        yield NamedValue(name, keys_to(item.path), ValueKind.PER_RANK, item.holder.value if item.ask is None else item.ask())
    elif isinstance(item, GroupsItem):
        groups = merge([(name, saved_groups(item.groups))], name=name)
        yield NamedValue(name, keys_to(item.path), ValueKind.PARAM_GROUPS, groups)
    elif isinstance(item, ModulesItem):
        for state in opened.modules[item.path]:
            for tensor in state.tensors:
                full = f"{name}.{tensor.fqn}"
                yield opened.memories.of(tensor.value, full, tensor.replication).named(full)
            for module_value in state.values:
                path = (*item.path, module_value.fqn)
                yield NamedValue(f"{name}.{module_value.fqn}", keys_to(path), ValueKind.PLAIN, module_value.value)
    elif isinstance(item, OptimizersItem | NumberedItem):
        yield from optimizer_contents(name, item.path, opened.views[item.path], keys_to)


def prepare_load(state: Mapping[Any, Any], catalog: Catalog, *, rank: int, size: int, adds: bool = True) -> Target:
    """Describe what this rank wants of a checkpoint. Nothing in the state changes, and no collective is called.

    Parameters
    ----------
    state
        As for `checkpoint.load`.
    catalog
        What the checkpoint holds, under the names that the target knows.
    rank, size
        Of the loading job.
    adds
        Whether saved values that a dict lacks are added to it.

    Raises
    ------
    UsageError
        The state cannot be loaded into; the class and the message say why.
    """
    opened = open_state(state)
    paths = {v.name: decode_steps(v.path) for v in catalog.values_table}
    check_keys(map(keys_of, paths.values()))
    saved = {v.name: ValueOrigin(saved_path(keys_of(paths[v.name])), v.kind, paths[v.name]) for v in catalog.values_table}
    below = Below((*catalog.names, *saved))
    links = catalog.links()
    group = RankSet(tuple(range(size)), rank)
    mesh = found_mesh(opened.meshes, group, ddp_groups=opened.ddp_groups)
    out = Collector(mesh)
    parts: list[ValueTarget] = []
    with torch.no_grad():  # as for saving
        for tree in opened.trees:
            for item in tree.items:
                parts += _want_item(out, item, opened, catalog, links)
    # Trees of objects last, inner before outer: what they give back holds the modules and tensors that are done by then.
    parts += [TreeTarget(tree, saved, below, group, adds=adds) for tree in reversed(opened.trees)]
    router = Router(parts, tuple(str(step) for step in steps(state)))
    unplaced = tuple(name for part in parts if isinstance(part, OptimizersTarget) for name in part.unplaced)
    return Target(
        tuple(out.tensors),
        router.values,
        unplaced,
        router.prefixes,
        router.check,
        router.finish,
        mesh,
        opened.hints,
        tuple(out.dtensors),
    )


def _want_item(
    out: Collector, item: Item, opened: OpenedState, catalog: Catalog, links: Mapping[str, StateLink]
) -> Iterator[ValueTarget]:
    """Collect the tensors that an item wants, and give what fills it afterwards; values in trees are the tree's to fill."""
    name = item.name
    if isinstance(item, TensorItem):
        _want(out, name, name, item.value, opened.memories.of(item.value, name))
    elif isinstance(item, ModulesItem):
        for tensor in (t for s in opened.modules[item.path] for t in s.tensors):
            full = f"{name}.{tensor.fqn}"
            _want(out, name, full, tensor.value, opened.memories.of(tensor.value, full, tensor.replication))
        yield ModulesTarget(name, opened.modules[item.path])
    elif isinstance(item, OptimizersItem | NumberedItem):
        beside = item.beside.get("state", {}) if isinstance(item, NumberedItem) else {}
        target = OptimizersTarget(name, opened.views[item.path], catalog, links, map(str, beside))
        for wanted in target.wanted:
            _want(out, name, wanted.name, wanted.value, wanted.memory)
        yield target


def _want(out: Collector, source: str, name: str, value: TensorLike, local: LocalMemory) -> None:
    check_writable(value, local.memory, name)
    out.add(source, local.named(name))
    if is_dtensor(value):
        out.dtensors.append((name, value))
