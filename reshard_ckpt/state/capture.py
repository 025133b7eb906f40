"""From a state to this rank's tensors and values: `capture` lists them for a save, `prepare_load` for a load.

Both open the state with the same passes (see `entries`), so both give the same names. `capture` describes all tensors as pieces
of global tensors, and encodes all values as bytes. `prepare_load` changes nothing. It returns the wanted tensors and values;
`Target.check`, to be called with the saved values before any tensor changes; and `Target.finish`, to be called after all tensors
are in place and verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..core.catalog.model import Catalog
from ..core.catalog.names import GROUPS, STATE, find_parameters, groups_name, state_name
from ..core.catalog.param_groups import merge, named_group
from ..core.catalog.specs import Mesh, StateLink, ValueSpec
from ..core.planning.match import matches
from ..core.report import type_in_words
from ..core.trees import leaves, name_of
from ..engine.common.tensor_bytes import LocalTensor, count_up
from ..errors import UnsupportedError
from ..format.values import check_keys, decode_steps, keys_of
from .describe import Describer, Steps, link_in_dict, saved_path
from .dtensor import dtensor_class
from .entries import Entry, Kind
from .kept import KNOWN, Description, find_facts, members_of
from .layouts import RankSet, declared_mesh, found_mesh, group_of
from .modules import ModulesTarget
from .optimizer_dicts import are_numbered_groups, saved_groups
from .optimizers import OptimizersTarget
from .parameters import OptimizerView, Owner, optimizer_parameters
from .targets import Prefixes, Router, TreeTarget, ValueOrigin, ValueTarget
from .tensors import find_memory, is_tensor_like
from .walk import Tree, is_stateful, match_extra_states, rows_of, state_of, steps, walk


@dataclass(frozen=True, slots=True)
class Captured:
    """All tensors and values that one rank has to save.

    Two tensors may have one name, if two pipeline stages on this rank hold the same tensor. `warnings` are messages for the user
    about the way in which the state is saved.
    """

    tensors: tuple[LocalTensor, ...]
    values: tuple[ValueSpec, ...]
    mesh: Mesh | None
    warnings: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    """The patterns of ``exclude=`` that match no name on this rank."""


@dataclass(frozen=True, slots=True)
class Target:
    """All tensors and values that one rank wants to load.

    Attributes
    ----------
    tensors
        The tensors that a load writes in place.
    values
        The names of values that must be in the checkpoint.
    unplaced
        Names of saved tensors of optimizer state that are wanted too, but whose place on this rank is unknown: `check` says why.
    prefixes
        The top-level keys of the state. If a saved name lies below one of them and no rank wants it, the load reports it as
        unexpected.
    check
        Takes ``{name: value}`` for every value of the checkpoint below the prefixes, wanted or not; values that differ by rank
        come as `PerRankValues`. Returns one line for each problem. It must be called once, before any tensor changes.
    finish
        Takes the same values, and the names of tensors that were not loaded (with ``strict=False``). It must be called once,
        after `check` and after all tensors are in place and verified. Until then the objects of the state do not change.
    mesh
        The mesh of the job, if the state shows it.
    hints
        Takes the values as `check` does, and returns further advice for values that do not fit.
    dtensors
        The wanted DTensors, with their names. A load writes into the local tensor of a DTensor; the DTensor has a version counter
        of its own, which `count_up` raises.
    removed
        Names of optimizer state that the load takes out, unless `finish` is told to skip one: the checkpoint knows the parameter,
        and has no state of it.
    holders
        The names of the objects and optimizers in the state, whose tensors may be made later, as by a first step.
    """

    tensors: tuple[LocalTensor, ...]
    values: tuple[str, ...]
    unplaced: tuple[str, ...]
    prefixes: tuple[str, ...]
    check: Callable[[Mapping[str, Any]], list[str]]
    finish: Callable[[Mapping[str, Any], Iterable[str]], None]
    mesh: Mesh | None = None
    hints: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda values: ()
    dtensors: tuple[tuple[str, torch.Tensor], ...] = ()
    removed: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()

    def count_up(self, written: Iterable[str]) -> None:
        """Raise the version counters of DTensors whose local tensors a load has written; `written` are names of tensors.

        A DTensor that is tied to a written one counts too.
        """
        specs = [spec for spec, _ in self.tensors]
        first = {spec.name: spec.name if spec.alias_of is None else spec.alias_of for spec in specs}
        done = {first[name] for name in written}
        count_up([dtensor for name, dtensor in self.dtensors if name in first and first[name] in done])


def capture(
    state: Mapping[Any, Any],
    *,
    mesh: DeviceMesh | Mapping[str, int] | None = None,
    process_group: Any = None,
    exclude: Sequence[str] = (),
) -> Captured:
    """List the tensors and values of a state that this rank has to save. No collective is called, and no tensor is copied.

    Raise `UsageError` if the state cannot be saved; the class and the message say why.

    Parameters
    ----------
    state
        As for `checkpoint.save`.
    mesh
        The mesh of the job, if the state does not show it.
    process_group
        The ranks that take part; None for all.
    exclude
        Patterns of names that are left out.
    """
    group = group_of(process_group)
    declared = None if mesh is None else declared_mesh(mesh, group)
    trees, ddp_groups = walk_state(state)
    seen = find_facts(trees)
    key = None if seen is None else (seen.facts, group, declared, ddp_groups, list(exclude))
    known = KNOWN.find(key)
    unnamed: Sequence[str] = ()
    warnings: tuple[str, ...] = ()
    if known is not None:
        known.keep_values(trees)
        found, unused = known.mesh, list(known.unused)
    else:
        unnamed, inner_warnings = optimizer_parameters(trees)
        warnings = (*map(_warning, unnamed), *inner_warnings)
        found, unused = declared or found_mesh(_meshes(trees), group, ddp_groups=ddp_groups), list(exclude)
    out = Describer(found)
    with torch.no_grad():  # once for all tensors: for each of them it would take longer than the description
        saved = [(Steps(tree.path, tree.root), _saved_rows(tree, unnamed)) for tree in trees]
        _complete_links([row for _, rows in saved for row in rows])
        for keys_of, rows in saved:
            if exclude:
                # Before they are described: of two tensors in one memory, the one that is left out must not be the first.
                left_out = {row.name for row in rows if matches(row.name, exclude)}
                unused = [pattern for pattern in unused if not any(matches(name, [pattern]) for name in left_out)]
                rows = [row for row in rows if row.name not in left_out]
            find_memory(rows)
            out.add(rows, keys_of)
        if known is not None and seen is not None:
            return Captured(known.tensors(seen), tuple(out.values), found, unused=known.unused)
    if seen is not None and not warnings:
        # at[i]: index of tensor i in `seen.tensors`; -1 if `find_facts` has not seen it, and then the state cannot be kept
        index = {id(tensor): i for i, tensor in enumerate(seen.tensors)}
        at = [index.get(id(row.value), -1) for row in out.sources]
        if -1 not in at:
            specs = tuple(spec for spec, _ in out.tensors)
            members = [list(map(members_of, row.value)) for row in rows_of(trees, Kind.OPTIMIZERS)]
            KNOWN.keep(key, Description(seen.places, specs, at, members, found, tuple(unused)))
    return Captured(tuple(out.tensors), tuple(out.values), found, warnings, tuple(unused))


def _saved_rows(tree: Tree, unnamed: Iterable[str]) -> list[Entry]:
    """Return the tensors and values of one tree of the state as rows, with those of its modules and optimizers in place."""
    # optimizers: the names of all dicts in the form of an optimizer's state dict, whose state is linked to its parameters.
    optimizers = {*unnamed, *[name_of(row.path[:-1]) for row in tree.rows if row.kind is Kind.GROUPS]}
    rows: list[Entry] = []
    for row in tree.rows:
        if row.kind is Kind.TENSOR or row.kind is Kind.VALUE:
            row.link = link_in_dict(row.path, optimizers) if optimizers else None
            rows.append(row)
        elif row.kind is Kind.MODULES:
            for state in row.value:
                rows += state.opened.rows
        elif row.kind is Kind.OPTIMIZERS:
            rows += _optimizer_rows(row)
        elif row.kind is Kind.GROUPS:
            rows.append(replace(row, value=merge([(row.name, saved_groups(row.value))], name=row.name)))
        elif row.kind is Kind.PER_RANK or row.kind is Kind.WHOLE:
            value = row.value.value
            rows.append(replace(row, value=state_of(value) if is_stateful(value) else value))
    return rows


def _optimizer_rows(row: Entry) -> Iterator[Entry]:
    """Yield the rows of optimizers under one key of the state: each parameter's state on this rank, then the parameter groups.

    State with the shape of the parameter's local tensor has the parameter's layout. A 0-dim tensor is whole everywhere. A tensor
    of another shape is whole if the parameter is whole on this rank; otherwise its place is unknown. Groups list FQNs in place of
    parameters, by which they are merged over ranks. Raise `UnsupportedError` if a key of the state is not a plain name, or the
    place of a tensor is unknown.
    """
    name, path = row.name, row.path
    views: Sequence[OptimizerView] = row.value
    above = f"{name}.{STATE}" if name else STATE
    for view in views:
        for slot, entry in view.entries():
            owner = slot.owner
            for key, value in entry.items():
                if not isinstance(key, str) or "." in key:
                    raise UnsupportedError(
                        f"{view.name}: the state of {owner.fqns[0]} has the key {key!r}; keys must be strings without dots, so "
                        f"if no parameter is sharded, save all of it as checkpoint.Value({view.name})"
                    )
                kind = Kind.TENSOR if is_tensor_like(value) else Kind.VALUE
                # A tied parameter has several FQNs, and its state is listed under each of them.
                for fqn in owner.fqns:
                    full = f"{above}.{fqn}.{key}"
                    link = StateLink(name, fqn, key, f"{owner.key}.{fqn}" if owner.key else None)
                    if kind is Kind.VALUE:
                        _check_value(value, owner, full)
                    yield Entry(full, (*path, STATE, fqn, key), kind, value, name, link, owner=owner)
    groups = groups_name(name)
    named = [
        (view.name, [named_group(group, (fqn for owner in owners for fqn in owner.fqns)) for group, owners in view.groups])
        for view in views
    ]
    yield Entry(groups, (*path, GROUPS), Kind.GROUPS, merge(named, name=groups), name)


def _check_value(value: Any, owner: Owner, name: str) -> None:
    """Refuse a value of optimizer state that contains tensors if its parameter is sharded: nothing tells where they lie."""
    if owner.layout is not None and not owner.layout.is_whole and any(map(is_tensor_like, leaves(value))):
        raise UnsupportedError(
            f"{name}: {type_in_words(value)} of tensors for the parameter {owner.fqns[0]}, which is sharded; nothing tells which "
            "parts of global tensors these are, so hold each of them under a key of its own"
        )


def _complete_links(rows: Sequence[Entry]) -> None:
    """Set the name of the parameter in links that have only its FQN, as links in state dicts do."""
    tensors = [row for row in rows if row.kind is Kind.TENSOR]
    names = {row.name for row in tensors}
    open_links = [(row, row.link) for row in tensors if row.link is not None and row.link.parameter not in names]
    if open_links:
        found = find_parameters({link.fqn for _, link in open_links}, (row.name for row in tensors if row.link is None))
        for row, link in open_links:
            row.link = link._replace(parameter=found.get(link.fqn, link.parameter))


def walk_state(state: Mapping[Any, Any]) -> tuple[list[Tree], tuple[tuple[int, ...], ...]]:
    """Return the trees of a state (see `walk`), and the ranks of each process group over which DDP replicates a module.

    Raise `UsageError` if the state is not one that can be saved or loaded into.
    """
    trees = walk(state)
    modules = [module for row in rows_of(trees, Kind.MODULES) for state in row.value for module in state.children.values()]
    groups = {module.process_group for module in modules if isinstance(module, DistributedDataParallel)}
    return trees, tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)


def _hints(
    trees: Sequence[Tree], unnamed: Sequence[str], saved_tensors: Sequence[str], values: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return advice for saved state that does not fit because of the form in which an optimizer is passed, or was saved.

    `unnamed` are the names of optimizer state dicts in the state that number the parameters.
    """
    names = [row.name for row in rows_of(trees, Kind.OPTIMIZERS)]
    saved = [name for name in names if are_numbered_groups(values.get(f"{name}.param_groups"))]
    if not unnamed:
        return tuple(map(_saved_by_number, saved))
    wanted = [name for name in unnamed if not are_numbered_groups(values.get(f"{name}.param_groups", []))]
    held = [row.name for row in rows_of(trees, Kind.TENSOR)]
    fresh = [name for name in unnamed if name not in wanted and _has_state(saved_tensors, name) and not _has_state(held, name)]
    return (*map(_never_stepped, fresh), *map(_saved_by_number, [*saved, *fresh]), *map(_wanted_by_number, wanted))


def _has_state(names: Sequence[str], optimizer: str) -> bool:
    return any(name.startswith(state_name(optimizer)) for name in names)


def prepare_load(state: Mapping[Any, Any], catalog: Catalog, *, rank: int, size: int, adds: bool = True) -> Target:
    """List the tensors and values of a state that this rank wants from a checkpoint.

    Nothing changes, and no collective is called. Raise `UsageError` if the state cannot be loaded into; the class and the message
    say why.

    Parameters
    ----------
    state
        As for `checkpoint.load`.
    catalog
        The catalog of the checkpoint, whose names are already those of the state (after ``rename=``).
    rank, size
        The rank in the loading job, and the number of its ranks.
    adds
        Whether saved values that a dict lacks are added to it.
    """
    walked, ddp_groups = walk_state(state)
    unnamed, _ = optimizer_parameters(walked)
    paths = {v.name: decode_steps(v.path) for v in catalog.values_table}
    check_keys(map(keys_of, paths.values()))
    saved = {v.name: ValueOrigin(saved_path(keys_of(paths[v.name])), v.kind, paths[v.name]) for v in catalog.values_table}
    prefixes = Prefixes((*catalog.names, *saved))
    walked += match_extra_states(walked, saved, lambda name: name in catalog or prefixes.include(name))
    group = RankSet(tuple(range(size)), rank)
    mesh = found_mesh(_meshes(walked), group, ddp_groups=ddp_groups)
    out = Describer(mesh)
    wanted: list[Entry] = []
    parts: list[ValueTarget] = []
    unplaced: list[str] = []
    removed: list[str] = []
    holders: list[str] = []
    given: dict[int, torch.Tensor] = {}
    with torch.no_grad():  # as for saving
        for row in rows_of(walked):
            if row.kind is Kind.TENSOR:
                wanted.append(row)
            elif row.kind is Kind.MODULES:
                parts.append(ModulesTarget(row.name, row.value))
                wanted += [entry for state in row.value for entry in state.opened.rows if entry.kind is Kind.TENSOR]
            elif row.kind is Kind.OPTIMIZERS:
                target = OptimizersTarget(row.name, row.value, catalog, given)
                parts.append(target)
                unplaced += target.unplaced
                removed += target.removed
                holders.append(row.name)
                wanted += target.rows
        find_memory(wanted, writes=True)
        out.add(wanted)
    # Trees of objects last, inner before outer: the state that they give back holds modules and tensors that are loaded by then.
    # Those of one depth stay in the order of the state: a program may put a random state behind objects that draw numbers.
    trees = sorted(walked, key=attrgetter("depth"), reverse=True)
    for tree in trees:
        parts.append(TreeTarget(tree, saved, prefixes.include, group, adds=adds))
        if tree.owner is not None:
            holders.append(parts[-1].name)
    dtensors = {kind for kind in {type(row.value) for row in wanted} if issubclass(kind, dtensor_class())}
    router = Router(parts, tuple(str(step) for step in steps(state)))
    return Target(
        tuple(out.tensors),
        router.values,
        tuple(unplaced),
        router.prefixes,
        router.check,
        router.finish,
        mesh,
        partial(_hints, walked, unnamed, catalog.names),
        tuple([(row.name, row.value) for row in wanted if type(row.value) in dtensors]),
        tuple(removed),
        tuple(holders),
    )


def _meshes(trees: Sequence[Tree]) -> tuple[DeviceMesh, ...]:
    """Return the distinct meshes of all DTensors."""
    inside = [entry for row in rows_of(trees, Kind.MODULES) for state in row.value for entry in state.opened.rows]
    found = _meshes_of([row.value for row in (*inside, *rows_of(trees, Kind.TENSOR))])
    if not found:  # it may be an optimizer alone
        views = [view for row in rows_of(trees, Kind.OPTIMIZERS) for view in row.value]
        found = _meshes_of([value for view in views for _, entry in view.entries() for value in entry.values()])
    return found


def _meshes_of(values: Iterable[Any]) -> tuple[DeviceMesh, ...]:
    dtensor = dtensor_class()
    meshes = [value.device_mesh for value in values if isinstance(value, dtensor)]
    return tuple({id(mesh): mesh for mesh in meshes}.values())


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
        "state_dict() of an optimizer made of model.named_parameters()"
    )


def _never_stepped(name: str) -> str:
    return (
        f"{name} is the state_dict() of an optimizer that has not stepped, which has no place for the saved state: pass the "
        "optimizer itself"
    )
