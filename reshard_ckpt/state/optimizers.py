"""Loading into optimizers, by the FQN of their parameters (`OptimizersTarget`); and which optimizers' steps can be delayed.

An optimizer that has not stepped yet can be loaded too.

1. For each parameter, the links in the catalog say which state was saved. State that the optimizer holds is loaded in place; the
   rest is allocated like the parameter, or as a scalar, but not yet put into the optimizer.
2. Before anything changes, each group finds its hyperparameters by the FQNs of its parameters.
3. After the tensors are in place, new state is put into the optimizer, state that the checkpoint does not have is taken out, and
   hyperparameters are set. The optimizer and its parameters are never stepped.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ..core.catalog.model import Catalog, TensorKind
from ..core.catalog.names import groups_name, state_name
from ..core.catalog.param_groups import Groups, Selection, are_groups, comparable
from ..core.catalog.problems import Problem, no_place
from ..core.catalog.specs import StateLink
from ..core.trees import leaves, map_tree
from ..format.dtypes import TORCH_DTYPES
from .dtensor import local_of
from .entries import Entry, Kind
from .modules import is_nothing
from .parameters import OptimizerView, Owner, ParamSlot
from .tensors import TensorLike
from .walk import optimizers_of


class ParamPlan(NamedTuple):
    """The load of one parameter's state: by state key, the rows of `tensors` to load, and the names of `values`.

    A key has several rows or names if the parameter is tied and its state was saved under several names.
    """

    slot: ParamSlot
    tensors: Mapping[str, tuple[Entry, ...]]
    values: Mapping[str, tuple[str, ...]]
    new: frozenset[str]
    """The keys of `tensors` whose tensors were allocated for this load, and are not in the optimizer yet."""


def saved_keys(optimizer: str, catalog: Catalog) -> dict[str, dict[str, str]]:
    """Return the state keys that the checkpoint has for one optimizer, by FQN: ``{fqn: {key: saved name}}``.

    A key with dots is left out, so that the load reports it as unexpected: torch's optimizers have no such keys.
    """
    table, above = catalog.tensors_table, state_name(optimizer)
    # By columns and names: a `StateLink` for each tensor would take longer than all else here.
    state = (table.key == 1) & (table.optimizer == above.count(".") - 1) & (table.kind == TensorKind.TENSOR)
    of_tensors = compress(table.names, state.tolist())
    of_values = [v.name for v in catalog.values_table if v.link and v.link.optimizer == optimizer and "." not in v.link.key]
    found: dict[str, dict[str, str]] = {}
    for name in (*of_tensors, *of_values):
        if name.startswith(above):
            fqn, _, key = name[len(above) :].rpartition(".")
            if fqn not in found:
                found[fqn] = {}
            found[fqn][key] = name
    return found


class OptimizersTarget:
    """The optimizers under one key of the state, as the target of a load.

    Parameters
    ----------
    given
        By the id of each tensor among the hyperparameters, the value that it got; one dict for all optimizers of a load.

    Attributes
    ----------
    rows
        The tensors to load.
    values
        The names of values that the checkpoint must have.
    unplaced
        By name, the saved tensors whose place on this rank is unknown, each with the reason.
    removed
        The names of state that the load takes out, because the checkpoint has no state of its parameter.
    """

    def __init__(self, name: str, views: Sequence[OptimizerView], catalog: Catalog, given: dict[int, torch.Tensor]) -> None:
        self.name, self._given = name, given
        self._views = views
        self._beside = [key for view in views for key in view.beside]
        self._catalog, self._saved = catalog, catalog.indices
        self.unplaced: dict[str, str] = {}
        self.removed: list[str] = []
        saved = saved_keys(name, catalog)
        self._plans = [self._plan(slot, saved) for view in views for slot in view.slots]
        self._selections: list[tuple[OptimizerView, dict[str, Any], Selection]] = []
        self._groups = Groups([])
        self.groups_name = groups_name(self.name)
        self.rows = [row for plan in self._plans for rows in plan.tensors.values() for row in rows]
        self.values = (self.groups_name, *[name for plan in self._plans for names in plan.values.values() for name in names])

    def _plan(self, slot: ParamSlot, saved: Mapping[str, Mapping[str, str]]) -> ParamPlan:
        owner, existing = slot.owner, slot.state.get(slot.key, {})
        # names[key]: the names under which this entry of the state is saved
        names: dict[str, tuple[str, ...]] = {}
        fqns = [fqn for fqn in owner.fqns if fqn in saved]
        for fqn in fqns:
            for key, full in saved[fqn].items():
                names[key] = (*names[key], full) if key in names else (full,)
        if not fqns:
            self.removed += [StateLink(self.name, fqn, key).name for fqn in owner.fqns for key in existing]
        lacking = [key for key in existing if key not in names] if fqns else []
        for key in lacking:  # other state of the optimizer is wanted too, so that its absence is found and named
            names[key] = (StateLink(self.name, fqns[0], key).name,)
        tensors: dict[str, tuple[Entry, ...]] = {}
        values: dict[str, tuple[str, ...]] = {}
        new: set[str] = set()
        for key, of_key in names.items():
            value = existing.get(key)
            has_tensor = isinstance(value, TensorLike)
            if not (has_tensor if key in lacking else of_key[0] in self._saved and of_key[-1] in self._saved):
                values[key] = of_key
                continue
            if not has_tensor:
                value = self._allocate(owner, slot.group, of_key[0])
                new.add(key)
            if value is None:
                self.unplaced.update(dict.fromkeys(of_key, self.unplaced[of_key[0]]))
            else:
                tensors[key] = tuple([Entry(name, (), Kind.TENSOR, value, self.name, owner=owner) for name in of_key])
        return ParamPlan(slot, tensors, values, frozenset(new & tensors.keys()))

    def _allocate(self, owner: Owner, group: Mapping[str, Any], name: str) -> torch.Tensor | None:
        """Allocate a tensor for saved state that the optimizer lacks.

        If its place is unknown, note why in `unplaced`; return None.
        """
        index = self._catalog.index(name)
        shape, dtype = self._catalog.shape(index), TORCH_DTYPES[self._catalog.dtype(index)]
        if owner.param is None or owner.layout is None:
            self.unplaced[name] = (
                f"{name}: the state dict to load into has no tensor for it, and the state none called {owner.fqns[0]}; "
                "pass the model or its state_dict() in the same state, or the state dict of an optimizer that has stepped"
            )
            return None
        like, layout = owner.param.detach(), owner.layout
        if shape == () and (layout.shape != () or name.endswith(".step")):
            # torch keeps step counts on the CPU unless a kernel on the device reads them.
            on_device = group.get("capturable") or group.get("fused")
            return torch.zeros((), dtype=dtype, device=like.device if on_device else "cpu")
        if shape == layout.shape:
            return torch.empty_like(like, dtype=dtype)
        # saved_shape: the global shape of the parameter in the checkpoint
        parameters = [parameter for fqn in owner.fqns if (parameter := f"{owner.key}.{fqn}") in self._catalog]
        saved_shape = self._catalog.shape(self._catalog.index(parameters[0])) if parameters else None
        if shape == saved_shape:
            # The parameter itself was resized, so the checkpoint does not cover all of its state: the rest is zero.
            return torch.zeros_like(like, dtype=dtype)
        if layout.is_whole and saved_shape in (None, layout.shape):
            return torch.empty(shape, dtype=dtype, device=like.device)
        self.unplaced[name] = (
            f"{name}: saved with shape {shape} for a parameter of {saved_shape or layout.shape}; {owner.fqns[0]} is "
            f"{layout.local_shape} of {layout.shape} on this rank, so its place is unknown; load into an optimizer that has "
            "stepped, or whose state_dict() declares it as LocalShard"
        )
        return None

    def takes(self, name: str) -> bool:
        below = name.removeprefix(f"{self.name}.state.")
        if below == name:
            return name in (self.name, self.groups_name, f"{self.name}.state")  # a state dict by FQN saves its empty state
        return "." in below and not any(below == key or below.startswith(f"{key}.") for key in self._beside)

    def check(self, values: Mapping[str, Any]) -> list[str]:
        """Choose the hyperparameters of each group, and return a line for each problem.

        To be called before any tensor changes.
        """
        problems = list(dict.fromkeys(self.unplaced.values()))
        groups = values.get(self.groups_name) or []
        if not are_groups(groups):
            problems.append(no_place(self.groups_name, what="is not the groups of an optimizer"))
            groups, values = [], {name: value for name, value in values.items() if name != self.groups_name}
        self._groups = Groups(groups)
        self._selections = []
        for view in self._views:
            if self.groups_name not in values:
                continue
            targets, fqns_of = [], []
            for group, members in view.groups:
                targets.append(group)
                fqns_of.append([fqn for o in members for fqn in [fqn for fqn in o.fqns if fqn in self._groups] or o.fqns[:1]])
            selections = self._groups.select_all(fqns_of, name=f"{view.name}.param_groups", targets=targets)
            for group, selection in zip(targets, selections, strict=True):
                problems += selection.problems
                self._selections.append((view, group, selection))
        for plan in self._plans:
            for first, *others in plan.values.values():
                for name in others:
                    if {first, name} <= values.keys() and comparable(values[first]) != comparable(values[name]):
                        what = f"tied to {first} in the state passed, but the checkpoint holds different values for them"
                        problems.append(Problem(name, what))
        taken = {self.groups_name, *self.values}
        links = {value.name: value.link for value in self._catalog.values_table}
        for name in [name for name, value in values.items() if name not in taken and not is_nothing(value)]:
            link = links.get(name)
            # A parameter in the saved groups is taken to be on another rank, and that rank reports problems with its state.
            if link is None or link.optimizer != self.name or link.fqn not in self._groups:
                problems.append(no_place(name, "optimizer"))
        return problems

    def finish(self, values: Mapping[str, Any], skipped: frozenset[str]) -> None:
        """Put loaded state and hyperparameters into the optimizers; `skipped` are the names of tensors that were not loaded."""
        for plan in self._plans:
            self._put(plan, values, skipped)
        for view in self._views:
            if view.flat is not None:
                view.flat.give_back()
        for view, group, selection in self._selections:
            _set_hyperparameters(group, selection.hyperparameters, self._given)
            members = {id(param) for param in group["params"]}
            for follower in view.followers:
                if any(id(param) in members for param in follower["params"]):
                    _set_hyperparameters(follower, selection.hyperparameters, self._given)
        if len(self.values) > 1:  # state that was saved as values, beside the groups
            for optimizer in [view.optimizer for view in self._views if view.optimizer is not None]:
                # As its load_state_dict does: it makes tensors of step counts that an older torch saved as numbers. A KeyError
                # means that a state lacks a key of the optimizer's class, as that of a subclass may; such numbers stay.
                with suppress(KeyError):
                    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
        for view in self._views:
            # Those of `register_load_state_dict_post_hook`. Private, as torch has no other way to see them; without the name,
            # they do not run.
            for hook in [*getattr(view.optimizer, "_optimizer_load_state_dict_post_hooks", {}).values()]:
                hook(view.optimizer)

    def _put(self, plan: ParamPlan, values: Mapping[str, Any], skipped: frozenset[str]) -> None:
        state, param, owner = plan.slot.state, plan.slot.key, plan.slot.owner
        if not plan.tensors and not plan.values:
            names = {StateLink(self.name, fqn, key).name for fqn in owner.fqns for key in state.get(param, {})}
            if param in state and any(fqn in self._groups for fqn in owner.fqns) and names.isdisjoint(skipped):
                del state[param]  # the checkpoint knows the parameter, and that it had no state yet
            return
        if not plan.new and not plan.values:
            return  # all of it was loaded in place
        # The names of a tied parameter stand for one tensor: it is loaded if one of them is.
        lost = {key for key in plan.new if all(w.name in skipped for w in plan.tensors[key])}
        if lost and param not in state:
            return  # half a state is worse than none: the optimizer will make its own
        # In the order of the names: programs run collectives over a state's entries, and ranks hash differently.
        entries = {key: wanted[0].value for key, wanted in plan.tensors.items() if key in plan.new - lost}
        found = {key: values[name] for key, names in plan.values.items() for name in names[:1] if name in values}
        if entries or found or param in state:
            device = None if owner.param is None else owner.param.device
            entry = state[param] if param in state else state.setdefault(param, {})
            entry.update(entries)
            # Decoded values may hold tensors, which go to the parameter's device.
            entry.update(map_tree(lambda _, node: node.to(device) if isinstance(node, torch.Tensor) else node, found))


def _set_hyperparameters(group: dict[str, Any], saved: Mapping[str, Any], given: dict[int, torch.Tensor]) -> None:
    for key, value in saved.items():
        present: Any = group.get(key)
        loaded = _fitted(value, present) if isinstance(present, torch.Tensor) else None
        if loaded is not None:  # into the tensor that is there: a captured graph may hold on to it
            # Groups and optimizers made with one tensor share it. A group whose saved value is another one gets one of its own.
            if not torch.equal(given.setdefault(id(present), loaded), loaded):
                present = group[key] = present.clone()
            present.data.copy_(loaded)  # it may require a gradient
        elif isinstance(value, torch.Tensor) and value.numel() == 1 and isinstance(present, float | int):
            group[key] = value.item()
        else:
            group[key] = copy.deepcopy(value)


def _fitted(value: Any, present: torch.Tensor) -> torch.Tensor | None:
    """Return a saved hyperparameter as a tensor to copy into `present`; None if it is not a number, or would change."""
    try:
        fits = torch.can_cast(torch.as_tensor(value).dtype, present.dtype)
        loaded = torch.as_tensor(value, dtype=present.dtype, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return None
    loaded = loaded.reshape(()) if loaded.numel() == 1 else loaded
    return loaded if fits and loaded.shape in ((), present.shape) else None


def held_back(state: Any) -> tuple[list[Optimizer], list[torch.Tensor]]:
    """Return the optimizers in a state whose steps can be delayed, and the local tensors that only these optimizers change.

    The optimizers may lie at any depth. Optimizers that they wrap count too, because these may be stepped by themselves.
    Inference tensors are left out: they have no version counter, which would show a change by other code.
    """
    found = (optimizer for leaf in leaves(state) if isinstance(leaf, Optimizer) for optimizer in optimizers_of(leaf))
    optimizers = list({id(optimizer): optimizer for optimizer in found}.values())
    held = [optimizer for optimizer in optimizers if can_be_held(optimizer)]
    others = [optimizer for optimizer in optimizers if not can_be_held(optimizer)]
    owned = [tensor for tensor in owned_tensors(held) if not tensor.is_inference()]
    shared = {tensor.untyped_storage().data_ptr() for tensor in owned_tensors(others)}
    return held, [tensor for tensor in owned if tensor.untyped_storage().data_ptr() not in shared] if shared else owned


def can_be_held(optimizer: Optimizer) -> bool:
    """Tell whether a hook can delay the steps of an optimizer; not if its step is compiled or in a CUDA graph."""
    step = vars(optimizer).get("step", type(optimizer).step)
    compiled = hasattr(step, "_torchdynamo_orig_callable")
    return not compiled and not any(group.get("capturable") for group in optimizer.param_groups)


def owned_tensors(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    """Return the local tensors of the optimizers' parameters and of their state."""
    tensors = [param for o in optimizers for group in o.param_groups for param in group["params"]]
    tensors += [v for o in optimizers for held in o.state.values() if isinstance(held, dict) for v in held.values()]
    found = [local_of(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return list({id(tensor): tensor for tensor in found}.values())
