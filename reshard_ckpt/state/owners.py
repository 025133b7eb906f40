"""The parameters of a state, as its optimizers refer to them: by identity, by memory, or by name.

1. A parameter that a module or a dict holds is found by its identity.
2. ``state_dict()`` hands out other tensors over the same memory: these are found by that, if they are exactly as large.
3. A name leads to the tensor of that name, for its layout, as long as all that have the name are laid out alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..core.catalog.specs import Replication
from ..core.catalog.wrappers import unwrapped
from .layouts import Layout, whole
from .shards import FlatShard, LocalShard
from .tensors import LocalMemories, TensorLike, local_memory
from .torch_classes import is_dtensor


@dataclass(frozen=True, slots=True)
class Owner:
    """What is known of a parameter: its FQNs, below which key of the state it is, and its layout.

    Of one that is known by name alone, there is neither the parameter nor its layout.
    """

    param: torch.Tensor | None
    fqns: tuple[str, ...]
    key: str
    layout: Layout | None


class _Tensor(NamedTuple):
    """A tensor of the state that may be a parameter: the key that it is under, and its FQN below that."""

    value: TensorLike
    fqn: str
    key: str
    replication: Replication

    @property
    def tensor(self) -> torch.Tensor:
        return self.value.tensor if isinstance(self.value, LocalShard | FlatShard) else self.value

    def _layout(self) -> Layout:
        return local_memory(self.value, f"{self.key}.{self.fqn}", lambda shape: whole(shape, self.replication)).layout

    def owner(self, param: torch.Tensor, fqns: tuple[str, ...]) -> Owner:
        """Return the owner of a parameter that has the layout of this tensor."""
        return Owner(param, fqns, self.key, self._layout())


class Owners:
    """The parameters of the state.

    A parameter that lies under several keys of the state belongs to the first; within one key it may have several FQNs.

    Parameters
    ----------
    tensors
        Every tensor of modules and of plain dicts: the key of the state that it is under, its FQN below that, itself, and
        whether it is replicated.
    """

    def __init__(self, tensors: Iterable[tuple[str, str, TensorLike, Replication]], memories: LocalMemories) -> None:
        self._by_id: dict[int, Owner] = {}
        self._others: list[_Tensor] = []
        self._by_place: dict[tuple[torch.device, int], list[_Tensor]] | None = None
        self._by_name: dict[str, list[Owner | _Tensor]] | None = None
        with torch.no_grad():
            for key, fqn, value, replication in tensors:
                param = value.tensor if isinstance(value, LocalShard | FlatShard) else value
                if isinstance(param, torch.nn.Parameter) or param.requires_grad:  # an optimizer may have it
                    self._add(param, fqn, key, memories.of(value, f"{key}.{fqn}", replication).layout)
                else:  # no parameter, but it may be the memory of one
                    self._others.append(_Tensor(value, fqn, key, replication))

    def _add(self, param: torch.Tensor, fqn: str, key: str, layout: Layout) -> None:
        known = self._by_id.get(id(param))
        if known is None:
            self._by_id[id(param)] = Owner(param, (fqn,), key, layout)
        elif known.key == key and fqn not in known.fqns:
            self._by_id[id(param)] = Owner(param, (*known.fqns, fqn), key, layout)

    def of(self, param: torch.Tensor) -> Owner | None:
        """Find the owner of a parameter, if the state holds it."""
        known = self._by_id.get(id(param))
        if known is None and (found := [other for other in self._near(param) if _is_memory_of(other.tensor, param)]):
            first = found[0]
            fqns = dict.fromkeys(other.fqn for other in found if other.key == first.key)
            known = self._by_id[id(param)] = first.owner(param, tuple(fqns))
        return known

    def _near(self, param: torch.Tensor) -> list[_Tensor]:
        if self._by_place is None:
            self._by_place = {}
            for other in self._others:
                self._by_place.setdefault(_place(other.tensor), []).append(other)
        return self._by_place.get(_place(param), [])

    def named(self, param_name: str) -> Owner:
        """Find the owner of a parameter that is known by its name."""
        if self._by_name is None:
            self._by_name = {}
            for owner in self._by_id.values():
                for fqn in owner.fqns:
                    self._by_name.setdefault(fqn, []).append(owner)
            for other in self._others:
                for suffix in _suffixes(other.fqn):
                    self._by_name.setdefault(suffix, []).append(other)
        name = unwrapped(param_name)
        for fqn in (name, name.removeprefix("module.")):  # DDP's own names of its parameters
            if fqn in self._by_name:
                return _agreed(fqn, self._by_name[fqn])
        return Owner(None, (name,), "", None)


def _suffixes(fqn: str) -> Iterator[str]:
    """Yield a name, and what is left of it below each of its containers."""
    yield fqn
    while "." in fqn:
        fqn = fqn.partition(".")[2]
        yield fqn


def _agreed(fqn: str, found: Iterable[Owner | _Tensor]) -> Owner:
    """Return the owner of a name that several tensors may have, of which nobody says which one it is."""
    owners = [each if isinstance(each, Owner) else each.owner(each.tensor, (fqn,)) for each in found]
    first = owners[0]
    if len({(is_dtensor(o.param), o.layout and (o.layout.shape, o.layout.local_shape)) for o in owners}) > 1:
        return Owner(None, (fqn,), first.key, None)
    return first


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():  # else `to_local` records the tensor for autograd
        return tensor.to_local() if is_dtensor(tensor) else tensor


def _place(tensor: torch.Tensor) -> tuple[torch.device, int]:
    local = _local(tensor)
    return local.device, local.untyped_storage().data_ptr()


def _is_memory_of(tensor: torch.Tensor, param: torch.Tensor) -> bool:
    """Tell whether a tensor is the very memory of a parameter, also where that is empty."""
    if is_dtensor(tensor) != is_dtensor(param):
        return False
    if is_dtensor(tensor) and is_dtensor(param) and tensor.placements != param.placements:
        return False
    one, other = _local(tensor).detach(), _local(param).detach()
    return one.dtype == other.dtype and one.is_set_to(other)
