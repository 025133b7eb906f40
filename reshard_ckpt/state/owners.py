"""Owners: the parameters of a state, as its optimizers refer to them.

1. A parameter that a module or a dict holds is found by its identity.
2. ``state_dict()`` hands out other tensors over the same memory. These are found by that memory, if they are exactly as large.
3. A name leads to the tensor of that name, for its layout, as long as all tensors of the name are laid out alike.
4. A flat parameter of FSDP1 leads to all parameters that it is made of.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ..core.catalog.names import unwrapped
from .dtensor import is_dtensor
from .entries import Entry
from .fsdp1 import FlatPart
from .layouts import Layout
from .shards import FlatShard, LocalShard
from .tensors import memory_of


@dataclass(frozen=True, slots=True)
class Owner:
    """A parameter: its FQNs, the key of the state that it is below, and the row with its layout.

    If only its name is known, `param` and `row` are None. If it is a part of a flat parameter of FSDP1, `part` says which.
    """

    param: torch.Tensor | None
    fqns: tuple[str, ...]
    key: str
    row: Entry | None
    part: FlatPart | None = None

    @property
    def layout(self) -> Layout | None:
        return None if self.row is None else memory_of(self.row).layout


class Owners:
    """The parameters of the state.

    A parameter that lies under several keys of the state belongs to the first; within one key it may have several FQNs.

    Parameters
    ----------
    rows
        Every tensor of modules and of plain dicts: the key of the state that it is under, and its row.
    """

    def __init__(self, rows: Iterable[tuple[str, Entry]]) -> None:
        self._by_id: dict[int, Owner] = {}
        self._inside: dict[int, dict[int, Owner]] = {}
        """The owners of the parts of each flat parameter, by its id and theirs."""
        self._others: list[Owner] = []
        """Tensors that are not parameters, but may be the memory of one."""
        for key, row in rows:
            fqn = row.name[len(key) + 1 :]
            param = row.value.tensor if isinstance(row.value, LocalShard | FlatShard) else row.value
            if isinstance(row.value, FlatPart) and row.value.shard is not None:
                inside, part = self._inside.setdefault(id(row.value.held_in), {}), row.value
                fqns = inside[id(part)].fqns if id(part) in inside else ()
                inside[id(part)] = Owner(param, (*fqns, fqn), key, row, part)
                continue
            param = row.value.held_in if isinstance(row.value, FlatPart) else param
            owner = Owner(param, (fqn,), key, row)
            if not (isinstance(param, torch.nn.Parameter) or param.requires_grad):
                self._others.append(owner)
            elif (known := self._by_id.setdefault(id(param), owner)).key == key and fqn not in known.fqns:
                self._by_id[id(param)] = replace(known, fqns=(*known.fqns, fqn))

    def all_of(self, param: torch.Tensor) -> tuple[Owner, ...]:
        """Find the owner of a parameter, or the owners of the parts of a flat parameter; empty if the state holds none."""
        if id(param) in self._inside:
            return tuple(self._inside[id(param)].values())
        owner = self.of(param)
        return () if owner is None else (owner,)

    def of(self, param: torch.Tensor) -> Owner | None:
        """Find the owner of a parameter, if the state holds it."""
        known = self._by_id.get(id(param))
        if known is None and (found := [o for o in self._by_place.get(_place(param), ()) if _is_memory_of(o.param, param)]):
            first = found[0]
            fqns = dict.fromkeys(fqn for other in found if other.key == first.key for fqn in other.fqns)
            known = self._by_id[id(param)] = replace(first, param=param, fqns=tuple(fqns))
        return known

    def named(self, param_name: str) -> Owner:
        """Find the owner of a parameter that is known by its name."""
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
        """Map each FQN to its owners. A tensor that is not a parameter is also found by each end of its name.

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


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():  # else `to_local` records the tensor for autograd
        return tensor.to_local() if is_dtensor(tensor) else tensor.detach()


def _place(tensor: torch.Tensor) -> tuple[torch.device, int]:
    local = _local(tensor)
    return local.device, local.untyped_storage().data_ptr()


def _is_memory_of(tensor: Any, param: torch.Tensor) -> bool:
    """Tell whether a tensor is the very memory of a parameter, also if that is empty."""
    if is_dtensor(tensor) != is_dtensor(param) or getattr(tensor, "placements", None) != getattr(param, "placements", None):
        return False
    one, other = _local(tensor), _local(param)
    return one.dtype == other.dtype and one.is_set_to(other)
