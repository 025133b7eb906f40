"""What this rank's state holds, and how it is filled again: the two entry points of this room.

*Saving*, `capture`: scan the state, and describe every tensor as pieces and every value as bytes.

*Loading*, `prepare_load`: the same scan gives the same names. It changes nothing: it says which tensors and values are wanted,
and hands back `Target.check`, to be called with the values before any tensor changes, and `Target.finish`, to be called after all
tensors are in place and verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..core.catalog.links import STATE, find_parameters
from ..core.catalog.model import Catalog
from ..core.catalog.param_groups import merge
from ..core.catalog.specs import AxisPlacement, Mesh, StateLink, ValueKind
from ..format.values import check_keys, decode_steps, keys_of
from .collector import Collector
from .entries import Captured, NamedTensor, Target
from .flattened import Apart
from .mesh import RankSet, declared_mesh, found_mesh, group_of
from .modules import ModulesTarget
from .numbered import beside_numbers
from .opened import OpenedState, open_state
from .optimizer_target import OptimizersTarget
from .optimizers import saved_groups, saved_state, state_tensor, state_value
from .router import Below, Router, ValueTarget
from .scan import (
    GroupsItem,
    Item,
    ModulesItem,
    NumberedItem,
    OptimizersItem,
    Path,
    PerRankItem,
    TensorItem,
    ValueItem,
    is_stateful,
    name_of,
    saved_path,
    steps,
)
from .steps import Steps
from .tensors import LocalTensor, TensorLike, check_writable, is_tensor_like, local_tensor_of
from .tree_target import Job, TreeTarget, ValueOrigin


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
    out = Collector()
    with torch.no_grad():  # once for all tensors, which takes longer than what it is around of each
        for tree in opened.trees:
            out.steps = Steps(tree.path, tree.root)
            optimizers = {*opened.numbered, *(name_of(item.path[:-1]) for item in tree.items if isinstance(item, GroupsItem))}
            for item in tree.items:
                _capture_item(out, item, opened, _tree_link(item.path, optimizers))
    found = declared or found_mesh(opened.meshes(), group, ddp_groups=opened.ddp_groups())
    kept: dict[int, bool] = {}  # by identity: few placements, each shared by many entries, which hold them
    entries = []
    for entry in _with_parameters(out.entries):
        placement = entry.spec.placement
        if id(placement) not in kept:
            kept[id(placement)] = _is_in_terms_of(found, placement)
        entries.append(entry if kept[id(placement)] else NamedTensor(replace(entry.spec, placement=()), entry.memory))
    return Captured(tuple(entries), tuple(out.values), found, opened.warnings())


def _tree_link(path: Path, optimizers: set[str]) -> StateLink | None:
    """The link of what lies in a dict of the form of an optimizer's ``state_dict()``; `optimizers` names all such dicts."""
    for i in range(len(path) - 3, -1, -1) if optimizers else ():
        if path[i] == STATE and name_of(path[:i]) in optimizers:
            return StateLink(name_of(path[:i]), str(path[i + 1]), name_of(path[i + 2 :]))
    return None


def _with_parameters(entries: list[NamedTensor]) -> Iterator[NamedTensor]:
    """The entries; state that was found in dicts, where parameters go by their FQN alone, gets the parameter of that FQN."""
    unknown = {e.spec.link.fqn for e in entries if e.spec.link is not None and e.spec.link.parameter is None}
    found = find_parameters(unknown, (e.spec.name for e in entries if e.spec.link is None))
    for entry in entries:
        link = entry.spec.link
        if link is not None and link.parameter is None and link.fqn in found:
            entry = NamedTensor(replace(entry.spec, link=replace(link, parameter=found[link.fqn])), entry.memory)
        yield entry


def _capture_item(out: Collector, item: Item, opened: OpenedState, link: StateLink | None) -> None:
    path, name = item.path, name_of(item.path)
    if isinstance(item, TensorItem):
        out.add(name, path, local_tensor_of(item.value, name), link)
    elif isinstance(item, ValueItem):
        out.add_value(path, path, ValueKind.PLAIN, item.value, link)
    elif isinstance(item, PerRankItem):
        value = item.holder.value
        out.add_value(path, path, ValueKind.PER_RANK, value.state_dict() if is_stateful(value) else value)
    elif isinstance(item, GroupsItem):
        groups = item.groups.together() if isinstance(item.groups, Apart) else item.groups
        out.add_value(path, path, ValueKind.PARAM_GROUPS, merge([(name, groups)], name=name))
    elif isinstance(item, ModulesItem):
        _capture_modules(out, path, opened)
    elif isinstance(item, OptimizersItem | NumberedItem):
        _capture_optimizers(out, path, opened)


def _capture_modules(out: Collector, path: Path, opened: OpenedState) -> None:
    for state in opened.modules[path]:
        for tensor in state.tensors:
            name = name_of((*path, tensor.fqn))
            out.add(name, path, opened.local_tensor_of(tensor, name))
        for value in state.values:
            out.add_value((*path, value.fqn), path, ValueKind.PLAIN, value.value)


def _capture_optimizers(out: Collector, path: Path, opened: OpenedState) -> None:
    for view in opened.views[path]:
        for owner, key, value in saved_state(view):
            for fqn in owner.fqns:
                where = (*path, STATE, fqn, key)
                name = name_of(where)
                link = StateLink(name_of(path), fqn, key, f"{owner.key}.{fqn}" if owner.key else None)
                if is_tensor_like(value):
                    out.add(name, path, state_tensor(value, owner, name), link)
                else:
                    out.add_value(where, path, ValueKind.PLAIN, state_value(value, owner, name), link)
    groups = (*path, "param_groups")
    out.add_value(groups, path, ValueKind.PARAM_GROUPS, saved_groups(name_of(groups), opened.views[path]))


def _is_in_terms_of(mesh: Mesh | None, placement: tuple[AxisPlacement, ...]) -> bool:
    """Whether a placement names axes of the job's mesh; one that does not is left out."""
    axes = tuple(p.axis for p in placement)
    if not axes:
        return True
    unnamed = axes == tuple(f"axis{i}" for i in range(len(axes)))
    return mesh is not None and set(axes) <= set(mesh.axes) and (not unnamed or len(axes) == len(mesh.axes))


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
    out = Collector()
    links = catalog.links()
    parts: list[ValueTarget] = []
    with torch.no_grad():  # as for saving
        for tree in opened.trees:
            for item in tree.items:
                parts += _want_item(out, item, opened, catalog, links)
    # Trees of objects last, inner before outer: what they give back holds the modules and tensors that are done by then.
    parts += [TreeTarget(tree, saved, below, Job(rank, size), adds=adds) for tree in reversed(opened.trees)]
    router = Router(parts, tuple(str(step) for step in steps(state)))
    unplaced = tuple(name for part in parts if isinstance(part, OptimizersTarget) for name in part.unplaced)
    mesh = found_mesh(opened.meshes(), RankSet(tuple(range(size)), rank), ddp_groups=opened.ddp_groups())
    return Target(tuple(out.entries), router.values, unplaced, router.prefixes, router.check, router.finish, mesh, opened.hints)


def _want_item(
    out: Collector, item: Item, opened: OpenedState, catalog: Catalog, links: Mapping[str, StateLink]
) -> Iterator[ValueTarget]:
    """Collect the tensors that an item wants, and give what fills it afterwards; values in trees are the tree's to fill."""
    path = item.path
    if isinstance(item, TensorItem):
        _want(out, path, name_of(path), item.value, local_tensor_of(item.value, name_of(path)))
    elif isinstance(item, ModulesItem):
        for tensor in (t for s in opened.modules[path] for t in s.tensors):
            name = name_of((*path, tensor.fqn))
            _want(out, path, name, tensor.value, opened.local_tensor_of(tensor, name))
        yield ModulesTarget(path, opened.modules[path])
    elif isinstance(item, OptimizersItem | NumberedItem):
        beside = beside_numbers(item.tree).get("state", {}) if isinstance(item, NumberedItem) else {}
        target = OptimizersTarget(path, opened.views[path], catalog, links, map(str, beside))
        for wanted in target.wanted:
            _want(out, path, wanted.name, wanted.value, wanted.leaf)
        yield target


def _want(out: Collector, source: Path, name: str, value: TensorLike, leaf: LocalTensor) -> None:
    check_writable(value, leaf.memory, name)
    out.add(name, source, leaf)
