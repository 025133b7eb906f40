"""Optimizers and their parameters: find the parameter (module, name, layout) that each optimizer refers to.

`Owners` finds the owner of a parameter (`Owner`: its FQNs, and the tensor in the state with its layout):

1. A parameter that a module or a dict holds is found by its identity.
2. ``state_dict()`` hands out other tensors over the same memory. These are found by that memory, if they are exactly as large.
3. If an optimizer's state dict gives the name of a parameter, the tensor of that name is found, for its layout. If tensors of
   that name are laid out differently, the owner has no layout.
4. A flat parameter of FSDP1 leads to all parameters that it is made of.

`OptimizerView` is an optimizer, or its state dict by number, with the owners of its parameters:

1. An optimizer whose ``state_dict`` is torch's own is read as its state and groups. (Any other opens a tree: see `walk`.)
2. The parameter of a number in a state dict comes from the first of these that the state shows: the optimizer that gave the dict,
   itself or inside another object; ``param_names``, which torch puts into groups that were made of ``named_parameters()``; for an
   optimizer with a ``state_dict`` of its own, the order of its own groups, as the contract of ``Optimizer.state_dict`` says.
3. If the state does not show the parameters of a numbered state dict, it is saved by number, as any dict is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ..core.catalog.names import unwrapped
from ..core.catalog.specs import Ints
from ..errors import UnsupportedError, UsageError
from .dtensor import is_dtensor, local_of
from .entries import Entry, Kind
from .fsdp1 import FlatPart, FlatState
from .layouts import Layout, whole
from .optimizer_dicts import beside_numbers, names_by_number
from .tensors import local_memory
from .walk import Tree, Watched, by_number, left_out, optimizers_of, rows_of

State = MutableMapping[Any, dict[str, Any]]

Numbers = Mapping[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Owner:
    """A parameter as the state holds it: its FQNs, the `key` of the module or dict that has it, and its row.

    The key is the whole name of a module, and the first key of the path of a dict. If only the parameter's name is known, `param`
    and `row` are None. If it is a part of a flat parameter of FSDP1, the row has a `FlatPart`.
    """

    param: torch.Tensor | None
    fqns: tuple[str, ...]
    key: str
    row: Entry | None

    @property
    def layout(self) -> Layout | None:
        row = self.row
        if row is not None and row.layout is None:
            with torch.no_grad():
                row.layout = local_memory(row.value, row.name, row.replication)[1]
        return None if row is None else row.layout

    def layout_of_state(self, shape: Ints, name: str) -> Layout:
        """Return the layout of a plain tensor of this parameter's optimizer state, from its local shape; `name` is for messages.

        Raise `UnsupportedError` if the parameter is sharded, and the tensor has another shape, so its place in a global tensor is
        unknown.
        """
        layout = self.layout
        if layout is None:  # known by name alone
            return whole(shape)
        if shape == layout.local_shape:
            return layout
        if 0 in shape and 0 in layout.local_shape:
            return replace(layout, local_shape=shape)
        if shape == () or layout.is_whole:
            return whole(shape, layout.replication)
        raise UnsupportedError(
            f"{name}: has shape {shape}, its parameter {self.fqns[0]} {layout.local_shape} of {layout.shape} on this rank, so "
            "its place is unknown; have the optimizer hold it as a DTensor, or return it from a state_dict() by FQN as "
            "LocalShard or FlatShard"
        )


class Owners:
    """Finds the parameters in a state that its optimizers refer to.

    A parameter that lies under several keys of the state belongs to the first; within one key it may have several FQNs.

    Parameters
    ----------
    rows
        Every tensor of modules and of plain dicts: the key of the module or dict, and the tensor's row.
    """

    def __init__(self, rows: Iterable[tuple[str, Entry]]) -> None:
        self._by_id: dict[int, Owner] = {}
        self._inside: dict[int, dict[int, Owner]] = {}
        """The owners of the parts of each flat parameter, by its id and theirs."""
        self._others: list[Owner] = []
        """Tensors that are not parameters, but may be the memory of one."""
        for key, row in rows:
            fqn, param = row.name[len(key) + 1 :], row.value
            if type(param) is FlatPart and param.shard is not None:
                inside = self._inside.setdefault(id(param.held_in), {})
                fqns = inside[id(param)].fqns if id(param) in inside else ()
                inside[id(param)] = Owner(param.tensor, (*fqns, fqn), key, row)
                continue
            if not isinstance(param, torch.Tensor):
                param = param.held_in if type(param) is FlatPart else param.tensor
            owner = Owner(param, (fqn,), key, row)
            # A tensor of torch's own class is no Parameter, and to ask takes longer than all else here.
            if not (param.requires_grad or (type(param) is not torch.Tensor and isinstance(param, torch.nn.Parameter))):
                self._others.append(owner)
            elif (first_owner := self._by_id.setdefault(id(param), owner)).key == key and fqn not in first_owner.fqns:
                self._by_id[id(param)] = replace(first_owner, fqns=(*first_owner.fqns, fqn))

    def all_of(self, param: torch.Tensor) -> tuple[Owner, ...]:
        """Return the owner of a parameter; several for a flat parameter of FSDP1, one for each part.

        Empty if the state lacks it.
        """
        if id(param) in self._inside:
            return tuple(self._inside[id(param)].values())
        owner = self._by_id.get(id(param))
        if owner is None and (found := [o for o in self._by_place.get(_place(param), ()) if _is_memory_of(o.param, param)]):
            first = found[0]
            fqns = dict.fromkeys(fqn for other in found if other.key == first.key for fqn in other.fqns)
            owner = self._by_id[id(param)] = replace(first, param=param, fqns=tuple(fqns))
        return () if owner is None else (owner,)

    def named(self, param_name: str) -> Owner:
        """Return the owner of a parameter by its name in an optimizer's state dict.

        If the name is ambiguous or unknown, the owner has no layout.
        """
        name = unwrapped(param_name)
        for fqn in (name, name.removeprefix("module.")):  # DDP's own names of its parameters
            if found := self._by_name.get(fqn):
                layouts = {(is_dtensor(o.param), o.layout and (o.layout.shape, o.layout.local_shape)) for o in found}
                # Several tensors may have the name. If they are laid out differently, nobody knows which one it is.
                return found[0] if len(layouts) == 1 else Owner(None, (fqn,), found[0].key, None)
        return Owner(None, (name,), "", None)

    @cached_property
    def _by_place(self) -> dict[tuple[torch.device, int], list[Owner]]:
        found: dict[tuple[torch.device, int], list[Owner]] = {}
        for owner in self._others:
            assert owner.param is not None
            found.setdefault(_place(owner.param), []).append(owner)
        return found

    @cached_property
    def _by_name(self) -> dict[str, list[Owner]]:
        """The owners by FQN. A tensor that is no `nn.Parameter` and requires no gradient is also found by each end of its name.

        For example, ``student.layer.weight`` is found as ``layer.weight`` and as ``weight``.
        """
        found: dict[str, list[Owner]] = {}
        for owner in (*self._by_id.values(), *(owner for inside in self._inside.values() for owner in inside.values())):
            for fqn in owner.fqns:
                found.setdefault(fqn, []).append(owner)
        for owner in self._others:
            suffix = owner.fqns[0]
            while suffix:
                found.setdefault(suffix, []).append(replace(owner, fqns=(suffix,)))
                suffix = suffix.partition(".")[2]
        return found


def _place(tensor: torch.Tensor) -> tuple[torch.device, int]:
    local = local_of(tensor)
    return local.device, local.untyped_storage().data_ptr()


def _is_memory_of(tensor: Any, param: torch.Tensor) -> bool:
    """Tell whether a tensor has exactly the same memory as a parameter, even if both are empty."""
    if is_dtensor(tensor) != is_dtensor(param) or getattr(tensor, "placements", None) != getattr(param, "placements", None):
        return False
    first, second = local_of(tensor), local_of(param)
    return bool(first.dtype == second.dtype and first.is_set_to(second))


class ParamSlot(NamedTuple):
    """A parameter whose state an optimizer may have here: the dict of states and its key there, its owner, and its group."""

    state: State
    key: Any
    owner: Owner
    group: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OptimizerView:
    """An optimizer, or its state dict whose keys are the numbers of parameters, with the FQNs of its parameters (`Owner`).

    Attributes
    ----------
    groups
        Each parameter group that the user sees, with the owners of its parameters.
    followers
        Groups of an optimizer inside this one, which get the same hyperparameters.
    flat
        The part of the state that belongs to flat parameters of FSDP1, if there are any.
    beside
        Keys of the state that do not belong to parameters.
    optimizer
        The optimizer that holds the state; None if a state dict does.
    """

    name: str
    groups: Sequence[tuple[dict[str, Any], tuple[Owner, ...]]]
    followers: Sequence[dict[str, Any]]
    slots: tuple[ParamSlot, ...]
    flat: FlatState | None = None
    beside: tuple[str, ...] = ()
    optimizer: Optimizer | None = None

    def entries(self) -> Iterator[tuple[ParamSlot, Mapping[str, Any]]]:
        """Yield each parameter that has state, with its state."""
        # The state may be a defaultdict, where looking would make an entry.
        return ((slot, slot.state[slot.key]) for slot in self.slots if slot.key in slot.state)


def _owner_rows(trees: Sequence[Tree]) -> Iterator[tuple[str, Entry]]:
    """Yield the key of its module or dict, and the row, of each tensor that may be a parameter; those of modules come first.

    They include parameters that a module holds, and whose place in its state dict a hook gave to other tensors.
    """
    for row in rows_of(trees, Kind.MODULES):
        for state in row.value:
            yield from ((row.name, entry) for entry in state.opened.rows if entry.kind is Kind.TENSOR)
            if not state.opened.is_own:
                yield from ((row.name, entry) for entry in state.hidden)
    for row in rows_of(trees, Kind.TENSOR):
        if len(row.path) > 1:
            yield str(row.path[0]), row


def optimizer_parameters(trees: Sequence[Tree]) -> tuple[list[str], list[str]]:
    """Find the parameters of each optimizer in the trees of a state. Rows of optimizers get `OptimizerView`s as their value.

    So do rows of state dicts that number the parameters. If the state does not show which parameter a number is, the state dict
    becomes rows like an ordinary dict. Raise `UsageError` if a parameter belongs to no module in the state, or two parameters
    have one FQN.

    Returns
    -------
    The names of the state dicts that became such rows, and a warning for each optimizer inside another one whose
    ``state_dict()`` lacks its state.
    """
    if not rows_of(trees, Kind.OPTIMIZERS, Kind.NUMBERED):
        return [], []
    owners = Owners(_owner_rows(trees))
    # Every optimizer that the state shows: itself, inside another one, or inside an object such as a scheduler.
    inside = {id(each): list(optimizers_of(each)) for row in rows_of(trees, Kind.OPTIMIZERS) for each in row.value}
    shown = {id(o): o for of in (*(tree.watched.optimizers for tree in trees), *inside.values()) for o in of}
    visible = Watched(tuple(shown.values()))
    unnamed: list[str] = []
    lines: list[str] = []
    for tree in trees:
        rows: list[Entry] = []
        for row in tree.rows:
            if row.kind is Kind.OPTIMIZERS:
                several = len(row.value) > 1
                lines += [line for optimizer in row.value for line in left_out(row.name, optimizer, inside[id(optimizer)])]
                row.value = tuple(_view(f"{row.name}[{i}]" if several else row.name, o, owners) for i, o in enumerate(row.value))
            elif row.kind is Kind.NUMBERED:
                source = _source(tree.watched, row.value) or _source(visible, row.value)
                members = _members(row, tree, source, owners)
                if members is None:
                    unnamed.append(row.name)
                    rows += by_number(row)
                    continue
                if source is not None:
                    tree.given.append((source, row.value))
                row.kind, row.value = Kind.OPTIMIZERS, (_view_of_dict(row, members),)
            rows.append(row)
        tree.rows = rows
    return unnamed, lines


def _view(name: str, optimizer: Optimizer, owners: Owners) -> OptimizerView:
    inner: Any = optimizer
    if hasattr(optimizer, "consolidate_state_dict"):  # ZeroRedundancyOptimizer: this rank's partition is in an optimizer inside
        inner = getattr(optimizer, "optim", None)
        if not isinstance(inner, Optimizer):
            raise UsageError(
                f"{name}: this ZeroRedundancyOptimizer has no optimizer inside yet; with overlap_with_ddp=True it appears "
                "after some training steps: save or load after those"
            )
    outer = [(i, param) for i, group in enumerate(optimizer.param_groups) for param in group["params"]]
    owners_of = {id(param): _owners_of(param, owners, name, i) for i, param in outer}
    groups = [(group, tuple(o for param in group["params"] for o in owners_of[id(param)])) for group in optimizer.param_groups]
    _check_distinct(name, groups)
    held = [(param, owner, group) for group in inner.param_groups for param in group["params"] for owner in owners_of[id(param)]]
    slots, flat = _slots(held, inner.state)
    return OptimizerView(name, groups, () if inner is optimizer else inner.param_groups, slots, flat, optimizer=inner)


def _slots(held: Sequence[tuple[Any, Owner, Mapping[str, Any]]], state: State) -> tuple[tuple[ParamSlot, ...], FlatState | None]:
    """Return a `ParamSlot` for each parameter of an optimizer, and the state of flat parameters of FSDP1, if there are any.

    A parameter of FSDP1 has no slot if this rank holds no element of it.

    Parameters
    ----------
    held
        For each parameter, or part of a flat one: the parameter's key in the state, the owner, and the group.
    """
    slots: list[ParamSlot] = []
    flat: FlatState | None = None
    for key, owner, group in held:
        part = owner.row.value if owner.row is not None and isinstance(owner.row.value, FlatPart) else None
        if part is not None and not part.tensor.numel():
            continue  # FSDP1 gives this rank nothing of it, and so no gradient and no state
        if part is None or part.shard is None:
            slots.append(ParamSlot(state, key, owner, group))
        else:
            flat = flat or FlatState(state)
            slots.append(ParamSlot(flat.entries, flat.add(key, part), owner, group))
    return tuple(slots), flat


def _owners_of(param: torch.Tensor, owners: Owners, name: str, group: int) -> tuple[Owner, ...]:
    """Return the owner of a parameter in a group of an optimizer; several if it is a flat parameter of FSDP1.

    Raise `UsageError` if the state does not hold it.
    """
    found = owners.all_of(param)
    if not found and param.is_meta:
        raise UsageError(
            f"{name}: a parameter of shape {tuple(param.shape)} in group {group} is on the meta device, and belongs "
            "to no module in the state: to_empty() has replaced it; make the optimizer after that, of model.parameters()"
        )
    if not found:
        raise UsageError(
            f"{name}: a parameter of shape {tuple(param.shape)} in group {group} belongs to no module in the state; pass the "
            "module that holds it in the same state, as in {'model': model, 'optimizer': optimizer}"
        )
    return found


def _check_distinct(name: str, groups: Iterable[tuple[Mapping[str, Any], tuple[Owner, ...]]]) -> None:
    by_fqn: dict[str, Owner] = {}
    for fqn, owner in ((fqn, each) for _, members in groups for each in members for fqn in each.fqns):
        other = by_fqn.setdefault(fqn, owner)
        if other is not owner and other.key != owner.key:
            raise UsageError(
                f"{name}: holds two parameters called {fqn}, of {other.key} and of {owner.key}; use one optimizer "
                f"for each, or pass the modules as one: torch.nn.ModuleDict({{{other.key!r}: ..., {owner.key!r}: ...}})"
            )


def _view_of_dict(row: Entry, members: Mapping[int, tuple[Owner, ...]]) -> OptimizerView:
    """Return the `OptimizerView` of a state dict that numbers its parameters; `members` has the owners of each number."""
    tree = row.value
    groups = [(group, tuple(owner for number in group["params"] for owner in members[number])) for group in tree["param_groups"]]
    _check_distinct(row.name, groups)
    held = [(number, owner, group) for group, _ in groups for number in group["params"] for owner in members[number]]
    beside = tuple(map(str, beside_numbers(tree).get("state", {})))
    return OptimizerView(row.name, groups, (), *_slots(held, tree["state"]), beside)


def _members(row: Entry, tree: Tree, source: Optimizer | None, owners: Owners) -> Mapping[int, tuple[Owner, ...]] | None:
    """Map each parameter's number in an optimizer's state dict to its owners. Return None if the state does not show them.

    `source` is the optimizer that gave out the state dict; None if it is not known. Raise `UsageError` if a parameter of an
    optimizer with a ``state_dict()`` of its own belongs to no module in the state.
    """
    groups = row.value["param_groups"]
    numbers = None if source is None else _numbers_of(source, groups)
    members = _owned(numbers, owners)
    if members is not None:
        return members
    if (names := names_by_number(groups)) is not None:
        return {number: (owners.named(name),) for number, name in names.items()}
    if isinstance(tree.owner, Optimizer) and tree.path == row.path:  # it numbers its own groups
        source = source or tree.owner
        numbers = _numbers_of(source, groups)
        members = _owned(numbers, owners)
        if members is None and numbers is not None:
            for i, group in enumerate(source.param_groups):
                for param in group["params"]:
                    _owners_of(param, owners, row.name, i)
    return members


def _source(watched: Watched, tree: Mapping[str, Any]) -> Optimizer | None:
    """Return the optimizer that gave out a numbered state dict, or whose tensors it has; None if no known one did."""
    for optimizer, given in watched.given:
        if tree is given or tree["param_groups"] is given["param_groups"] or tree["state"] is given["state"]:
            return optimizer
    return next((o for o in watched.optimizers if _holds_state_of(o, tree)), None)


def _holds_state_of(optimizer: Optimizer, tree: Mapping[str, Any]) -> bool:
    """Tell whether the state in a numbered state dict has tensors, and all of them are this optimizer's own."""
    numbers = _numbers_of(optimizer, tree["param_groups"])
    entries = [(number, entry) for number, entry in tree["state"].items() if type(number) is int]
    if numbers is None or not any(_tensors(entry) for _, entry in entries) or not all(n in numbers for n, _ in entries):
        return False
    state: Mapping[Any, Any] = optimizer.state
    pairs = [(entry, state.get(numbers[number])) for number, entry in entries]
    return all(
        entry is own or (isinstance(own, Mapping) and all(own.get(key) is value for key, value in _tensors(entry)))
        for entry, own in pairs
    )


def _tensors(entry: Any) -> list[tuple[Any, torch.Tensor]]:
    return [(k, v) for k, v in entry.items() if isinstance(v, torch.Tensor)] if isinstance(entry, Mapping) else []


def _numbers_of(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> Numbers | None:
    """Map the numbers in a state dict's groups to an optimizer's parameters, in order; None if the groups have other sizes."""
    own = optimizer.param_groups
    if [len(group["params"]) for group in own] != [len(group["params"]) for group in groups]:
        return None
    pairs = (zip(given["params"], group["params"], strict=True) for given, group in zip(groups, own, strict=True))
    return {number: param for of_group in pairs for number, param in of_group}


def _owned(numbers: Numbers | None, owners: Owners) -> dict[int, tuple[Owner, ...]] | None:
    members = {number: owners.all_of(param) for number, param in (numbers or {}).items()}
    return members if numbers is not None and all(members.values()) else None


def keep_dtypes(optimizer: Optimizer, given_out: Mapping[str, Any]) -> None:
    """Give state tensors back the dtype in which they were loaded, after torch's ``load_state_dict`` has cast them.

    `given_out` is the state dict that was loaded: torch casts its tensors to the dtype of the parameter.
    """
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return
    for number, param in (_numbers_of(optimizer, given_out["param_groups"]) or {}).items():
        own = optimizer.state.get(param, {})
        for key, loaded in _tensors(given_out["state"].get(number)):
            cast = own.get(key)
            if isinstance(cast, torch.Tensor) and cast.dtype != loaded.dtype:
                own[key] = loaded
