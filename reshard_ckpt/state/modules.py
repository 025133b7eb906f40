"""The tensors and values of a module as rows, under names without the parts that wrappers add.

1. ``state_dict(keep_vars=True)`` gives the tensors and values of the module. It also puts an FSDP2 module that an eval forward
   left unsharded back to its shards, so it must be called before any optimizer is looked at.
2. Each key is followed down from the root module. A part of it that only leads through a wrapper (DDP, ``torch.compile``,
   activation checkpointing, ``AveragedModel``) is dropped; a user's submodule that happens to be called ``module`` stays.
3. A load writes into the module's own tensors. ``load_state_dict`` is called at the end if ``state_dict`` returns other tensors,
   made by a hook, if the module's class has a ``load_state_dict`` of its own, or if hooks run after it. Extra state goes to
   ``set_extra_state`` of the module that gave it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ..core.catalog.names import MODULE, WRAPPED
from ..core.catalog.problems import elsewhere, no_place
from ..core.catalog.specs import Replication
from ..core.report import few
from ..core.trees import Path
from ..errors import MismatchError, NameCollisionError, UnsupportedError
from .dtensor import known_class
from .entries import Entry, Kind
from .fsdp1 import FlatModule
from .tensors import is_tensor_like, named_parts, plain_local

EXTRA_STATE = "_extra_state"

_HOLD_MODULE = (DistributedDataParallel, DataParallel, AveragedModel)
"""Wrappers that store the wrapped module as their child `MODULE`."""


class ModuleRows(NamedTuple):
    """The tensors and values of a module.

    Attributes
    ----------
    rows
        A row for each tensor and value, under names without the parts that wrappers add.
    takers
        For each value by name: its key in `ModuleState.raw`, and the module whose ``set_extra_state`` takes it back. The module
        is None if a hook has put the value into the state dict.
    is_own
        Whether all of these tensors are the module's own, so that a write into them changes the module.
    """

    rows: tuple[Entry, ...]
    takers: dict[str, tuple[str, nn.Module | None]]
    is_own: bool


class ModuleState:
    """A module in the state (under `name`), with its state dict as of now.

    Attributes
    ----------
    raw
        The state dict as torch gives it.
    children
        The module and all modules in it, by name.
    flat
        The parts of the module that FSDP1 wraps; None if there are none.

    Raises
    ------
    UnsupportedError
        FSDP1 flattened a parameter in an unknown way.
    """

    def __init__(self, module: nn.Module, name: str, path: Path) -> None:
        self.module, self.name, self._path = module, name, path
        self._own: set[int] | None = None
        self.children = dict(module.named_modules())
        fsdp1 = _fsdp1_class()
        units = [child for child in self.children.values() if isinstance(child, fsdp1)] if fsdp1 else []
        self.flat = FlatModule(units, name) if units else None
        with nullcontext() if self.flat is None else self.flat.without_hooks():
            self.raw: dict[str, Any] = dict(module.state_dict(keep_vars=True) if _keeps_vars(module) else module.state_dict())

    @cached_property
    def opened(self) -> ModuleRows:
        """The tensors and values of the module. They are made on first use: a save with a cached description does not need them.

        Raise `UnsupportedError` if the module is on the meta device, and `NameCollisionError` if two keys have the same name
        without the parts that wrappers add.
        """
        module, name, path, raw, flat = self.module, self.name, self._path, self.raw, self.flat
        _refuse_meta(module, raw, name)
        rows: list[Entry] = []
        takers: dict[str, tuple[str, nn.Module | None]] = {}
        seen: dict[str, str] = {}
        is_own = True
        # places[above]: the place that a key leads to without its last step; None for a key of one step
        fsdp = _fsdp_classes()
        root = ModulePlace("", module, False, isinstance(module, fsdp), _inner_name(module) is not None)
        places: dict[str | None, ModulePlace] = {None: root}
        for key, value in raw.items() if flat is None else flat.entries(raw):
            above, dot, last = key.rpartition(".")
            at = places.get(above if dot else None) or _place(above, places, fsdp)
            if at.is_wrapper or last in at.owner._modules:
                at = at.below(last, fsdp)
                fqn = at.fqn
            else:  # nearly always: `below` enters more functions
                fqn = f"{at.fqn}.{last}" if at.fqn else last
            if seen.setdefault(fqn, key) != key:
                raise NameCollisionError(f"{name}.{fqn}: both {seen[fqn]} and {key} of the module have this name; rename one")
            if flat is not None:
                value = flat.saved_form(at.owner, last, value)
            full, below = f"{name}.{fqn}", (*path, fqn)
            if is_tensor_like(value) and last != EXTRA_STATE:
                is_own = is_own and (value is at.owner._parameters.get(last) or self._is_own(value))
                if (at.under_ddp or at.under_fsdp) and not isinstance(value, nn.Parameter):
                    how = Replication.BUFFER  # each rank's own, such as the statistics of BatchNorm
                else:
                    how = Replication.DECLARED if at.under_ddp else Replication.PLAIN
                if plain_local(value) is not None:  # nearly all are; the other function enters more
                    rows.append(Entry(full, below, Kind.TENSOR, value, name, replication=how))
                    continue
                for at_name, at_path, part in named_parts(value, full, below):
                    rows.append(Entry(at_name, at_path, Kind.TENSOR, part, name, replication=how))
            else:
                takers[full] = key, at.owner if last == EXTRA_STATE else None
                rows.append(Entry(full, below, Kind.VALUE, value, name))
        return ModuleRows(tuple(rows), takers, is_own)

    @cached_property
    def hidden(self) -> tuple[Entry, ...]:
        """A row for each parameter in whose place a hook put other tensors into the state dict, as hooks that split one do.

        These rows are not saved: an optimizer may refer to such a parameter, and then its name and layout are needed.
        """
        if self.flat is not None:
            return ()
        shown, fsdp = {id(value) for value in self.raw.values()}, _fsdp_classes()
        root = ModulePlace("", self.module, False, isinstance(self.module, fsdp), _inner_name(self.module) is not None)
        places: dict[str | None, ModulePlace] = {None: root}
        rows: list[Entry] = []
        for key, param in self.module.named_parameters(remove_duplicate=False):
            if id(param) not in shown:
                above, dot, last = key.rpartition(".")
                at = _place(above, places, fsdp) if dot else root
                fqn = at.below(last, fsdp).fqn
                how = Replication.DECLARED if at.under_ddp else Replication.PLAIN
                rows.append(Entry(f"{self.name}.{fqn}", (*self._path, fqn), Kind.TENSOR, param, self.name, replication=how))
        return tuple(rows)

    def _is_own(self, value: Any) -> bool:
        """Tell whether a tensor is a parameter, buffer or attribute in the module: a hook may add other tensors to its state."""
        if self._own is None:
            held = (of for child in self.children.values() for of in (child._parameters, child._buffers, vars(child)))
            self._own = {id(each) for of in held for each in of.values()}
        return id(value) in self._own or (self.flat is not None and self.flat.is_own(value))


def _keeps_vars(module: nn.Module) -> bool:
    """Tell whether the module's ``state_dict`` can be called with ``keep_vars=True``; a class may have a method of its own."""
    if type(module).state_dict is nn.Module.state_dict and "state_dict" not in vars(module):
        return True  # `inspect` takes a tenth of a millisecond
    try:
        inspect.signature(module.state_dict).bind(keep_vars=True)
    except TypeError:
        return False
    return True


class ModulePlace(NamedTuple):
    """The end of a state dict key: its name without wrappers, the module with the entry, and whether DDP or FSDP wraps that."""

    fqn: str
    owner: nn.Module
    under_ddp: bool
    under_fsdp: bool
    is_wrapper: bool
    """Whether the key ends at a wrapper, from which a further step may lead into the wrapped module."""

    def below(self, step: str, fsdp: Any) -> ModulePlace:
        """Follow the key by one more step; `fsdp` are the classes of modules under FSDP.

        The hooks of some wrappers have already dropped their part of the key, so a wrapper that the key does not name is entered
        too.
        """
        fqn = f"{self.fqn}.{step}" if self.fqn else step
        module, is_wrapper_step, ddp = _enter(self.owner, step)
        child = module if is_wrapper_step else module._modules.get(step)
        return ModulePlace(
            self.fqn if is_wrapper_step else fqn,
            module if child is None else child,
            self.under_ddp or ddp,
            self.under_fsdp or isinstance(module, fsdp) or isinstance(child, fsdp),
            child is not None and _inner_name(child) is not None,
        )


def _place(key: str, places: dict[str | None, ModulePlace], fsdp: Any) -> ModulePlace:
    """Return the place of a state dict key, found by following the key from the root module, which is ``places[None]``.

    Add it to `places`, and also the place of each key that this one begins with, such as ``a`` and ``a.b`` of ``a.b.weight``.
    """
    if key not in places:
        above, dot, last = key.rpartition(".")
        places[key] = (_place(above, places, fsdp) if dot else places[None]).below(last, fsdp)
    return places[key]


def _refuse_meta(module: nn.Module, raw: Mapping[str, Any], name: str) -> None:
    """Refuse a module with tensors on the meta device, which have no memory; the message says how to give it memory.

    Only the program can give it memory: it knows the device, the values of buffers outside of the state dict, and the optimizers
    that hold the parameters that ``to_empty`` replaces.
    """
    tensors = {key: value for key, value in raw.items() if isinstance(value, torch.Tensor)}
    # A `ShardedTensor` of several local shards cannot be asked; if its shards are on the meta device, they are refused later.
    meta = [key for key, value in tensors.items() if not hasattr(value, "local_shards") and value.is_meta]
    if not meta:
        return
    unsaved = [key for key, buffer in module.named_buffers() if buffer.is_meta and key not in raw]
    again = f"set the buffers again that no checkpoint holds ({few(unsaved, 3)}), and " if unsaved else ""
    raise UnsupportedError(
        f"{name}: {len(meta)} of {len(tensors)} tensors are on the meta device and have no data ({few(meta, 3)}); give them "
        "memory, and load into that:\n"
        f'    {name}.to_empty(device="cuda")  # or "cpu"\n'
        f'    checkpoint.load(path, {{"{name}": {name}}})\n'
        f"After to_empty, {again}make optimizers of the parameters that the module has then"
    )


def _enter(module: nn.Module, step: str) -> tuple[nn.Module, bool, bool]:
    """Go from a wrapper to the wrapped module, through several wrappers if need be, for one part (`step`) of a state dict key.

    It stops at the module behind the wrapper that `step` names, at a wrapper that has `step` as a name of its own, or at a module
    that is not a wrapper.

    Returns
    -------
    The module inside the entered wrappers, whether `step` names the last of them, and whether one of them was DDP.
    """
    ddp = False
    while True:
        inner = _inner_name(module)
        own = module._modules, module._parameters, module._buffers
        if inner is None or (step != inner and any(step in names for names in own)):
            return module, False, ddp
        ddp = ddp or isinstance(module, DistributedDataParallel)
        module = module.get_submodule(inner)
        if step == inner:
            return module, True, ddp


def _inner_name(module: nn.Module) -> str | None:
    """Return the attribute name under which a wrapper holds the wrapped module; None if the module is not a wrapper."""
    if isinstance(module, _HOLD_MODULE):
        return MODULE
    for name in WRAPPED:
        if name in module._modules:
            return name
    return None


class ModulesTarget:
    """The modules under one key of the state, as the target of a load. `values` are the names of values that they want."""

    def __init__(self, name: str, states: Sequence[ModuleState]) -> None:
        self.name = name
        self._states = states
        self._wanted = {name: None for state in states for name in state.opened.takers}
        self.values = tuple(self._wanted)
        self._here = {row.name.rpartition(".")[0] for state in states for row in state.opened.rows if row.kind is Kind.TENSOR}

    def takes(self, name: str) -> bool:
        return True

    def check(self, values: Mapping[str, Any]) -> list[str]:
        # If this rank has no tensor of the module, it may lie in another pipeline stage, whose rank takes the value.
        return [
            no_place(name, "module") if name.rpartition(".")[0] in self._here else elsewhere(name)
            for name, value in values.items()
            if name not in self._wanted and not is_nothing(value)
        ] + [
            f"{self.name}: a hook of its state_dict() gives tensors that are not its own, and FSDP1 takes no state dict of "
            "parts; remove the hook while you load"
            for state in self._states
            if state.flat is not None and not state.opened.is_own
        ]

    def finish(self, values: Mapping[str, Any], skipped: frozenset[str]) -> None:
        for state in self._states:
            if state.flat is not None:
                state.flat.finish()
            loaded = [(*taker, values[name]) for name, taker in state.opened.takers.items() if name in values]
            # A class with a method of its own may do more than copy, such as compute a table from the weights; so may hooks that
            # run after it. Those of torch need not: FSDP2 has one for each parameter, in case that it is replaced.
            is_plain = state.opened.is_own and type(state.module).load_state_dict is nn.Module.load_state_dict
            for each in state.children.values():
                # Private, as torch has no other way to see these hooks. Without the name, they do not run.
                for hook in getattr(each, "_load_state_dict_post_hooks", {}).values():
                    is_plain = is_plain and str(getattr(hook, "__module__", "")).startswith("torch.")
            if state.flat is not None or (is_plain and all(owner is not None for _, owner, _ in loaded)):
                for _, owner, value in loaded:
                    assert owner is not None
                    owner.set_extra_state(value)
                continue
            try:
                with torch.no_grad():  # autograd would refuse views of a parameter, which a hook gave and the load wrote into
                    state.module.load_state_dict({**state.raw, **{key: value for key, _, value in loaded}})
            except Exception as error:
                raise MismatchError(f"{self.name}: the module's load_state_dict refused the loaded state: {error}") from error


def is_nothing(value: Any) -> bool:
    """Tell whether a value is None or an empty container, which stands for a module or optimizer that only other ranks have."""
    return value is None or (isinstance(value, list | tuple | dict) and not value)


def _fsdp1_class() -> Any:
    return known_class("torch.distributed.fsdp", "FullyShardedDataParallel")


def _fsdp_classes() -> Any:
    """Return the classes of modules wrapped by FSDP1 and of modules passed to ``fully_shard`` (FSDP2)."""
    return _fsdp1_class(), known_class("torch.distributed.fsdp", "FSDPModule")
