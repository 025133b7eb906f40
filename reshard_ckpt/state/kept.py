"""A cache of the descriptions of the last states that were saved, so that the next save of the same state is fast.

A training loop saves the same objects again and again. The description of a state (the specs of its tensors) follows from some
facts about it. Describing a state anew takes twice as long as showing that these facts have not changed:

1. `find_facts` lists the facts of a state that has been walked: paths; classes and names of modules, and keys of their state
   dicts; keys of the state of optimizers; which tensors are one object, or begin at one address; and of each tensor the class,
   shape, strides, dtype, device, mesh and placements, its offset in its storage, and the size of that.
2. Equal facts give equal specs, so the specs are cached by the facts. Each save finds the memory of the tensors anew, and encodes
   values anew, such as the hyperparameters of optimizers.
3. Neither facts nor specs hold a tensor, a module or an optimizer, so the cache keeps none of these alive, but only meshes and
   placements.

A state with anything else is described anew in each save: extra state of modules, modules of FSDP1, shards that are declared,
tensors of other classes or with attributes, optimizers that hold others or have values in their state, and state dicts by number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from ..core.catalog.specs import Mesh, TensorSpec
from ..core.planning.local_metadata import Memo
from ..engine.common.tensor_bytes import LocalTensor
from .dtensor import dtensor_class, local_tensors
from .entries import Kind
from .modules import EXTRA_STATE
from .parameters import OptimizerView, Owner
from .tensors import TORCH_CLASSES
from .walk import Tree, optimizers_of, rows_of

MAX_TENSORS = 1 << 16
"""The most tensors of a state that is cached: the facts about a tensor take about a kilobyte."""

_LOOKS: Callable[[torch.Tensor], Any] = attrgetter("shape", "dtype", "device")
_PLACES: Callable[[torch.Tensor], Any] = attrgetter("device_mesh", "placements", "shape")

Members = Sequence[tuple[str, Sequence[tuple[Owner, ...]]]]
"""The optimizers of one row of the state: the name of each, and for each of its groups one owner with all FQNs."""


class StateFacts(NamedTuple):
    """The facts about a state from which its description follows, and the state's tensors with the local memory of each.

    The facts contain the `id` of meshes and placements. `places` keeps these objects alive, so that no other gets the same id.
    """

    facts: list[Any]
    places: list[Any]
    tensors: list[torch.Tensor]
    memories: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Description:
    """The cached description of a state: the specs of its tensors, and the parameters of its optimizers.

    Attributes
    ----------
    places
        Meshes and placements whose ids are among the facts, kept alive.
    specs, at
        The specs of tensors, and for each the index of its memory in `StateFacts.memories`.
    members
        For each optimizer in each row of optimizers, its name and the owners of its parameters.
    unused
        The patterns of ``exclude=`` that match no name.
    """

    places: list[Any]
    specs: Sequence[TensorSpec]
    at: Sequence[int]
    members: Sequence[Members]
    mesh: Mesh | None
    unused: tuple[str, ...]

    def tensors(self, seen: StateFacts) -> tuple[LocalTensor, ...]:
        """Return the described tensors, each with the memory that it has in the state now, without autograd."""
        memories = list(map(torch.Tensor.detach, seen.memories))
        return tuple([LocalTensor(spec, memories[i]) for spec, i in zip(self.specs, self.at, strict=True)])

    def keep_values(self, trees: Sequence[Tree]) -> None:
        """Remove the rows of tensors and modules from the trees of a state, as their specs are cached.

        Of optimizers keep only the groups, as `OptimizerView`s.
        """
        members = iter(self.members)
        for tree in trees:
            tree.rows = [row for row in tree.rows if row.kind is not Kind.TENSOR and row.kind is not Kind.MODULES]
            for row in tree.rows:
                if row.kind is Kind.OPTIMIZERS:
                    row.value = tuple(
                        OptimizerView(name, list(zip(optimizer.param_groups, owners, strict=True)), (), ())
                        for optimizer, (name, owners) in zip(row.value, next(members), strict=True)
                    )


def members_of(view: OptimizerView) -> tuple[str, list[tuple[Owner, ...]]]:
    """Return an optimizer's name and the FQNs of each of its groups, for `Description.members`.

    The FQNs of a group are in one `Owner` without its tensor, so that the cache keeps no tensor alive.
    """
    return view.name, [(Owner(None, tuple(f for each in owners for f in each.fqns), "", None),) for _, owners in view.groups]


KNOWN: Memo[Any, Description] = Memo(2)
"""The descriptions in this process, by facts and options: enough for a job that saves its model and its whole state by turns."""


def find_facts(trees: Sequence[Tree]) -> StateFacts | None:
    """Return the facts about a state by which to find its cached description.

    None if the state may have other relevant facts, or has more than `MAX_TENSORS` tensors.
    """
    facts: list[Any] = []
    tensors: list[Any] = []
    # others: parameters and keys of optimizers, which must be among the tensors
    others: list[Any] = []
    for row in rows_of(trees):
        facts.append((row.kind, row.name, row.path))
        if row.kind is Kind.NUMBERED:
            return None
        if row.kind is Kind.TENSOR:
            tensors.append(row.value)
            facts.append(isinstance(row.value, nn.Parameter))
        for state in row.value if row.kind is Kind.MODULES else ():
            if state.flat is not None or any(key.endswith(EXTRA_STATE) for key in state.raw):
                return None
            tensors += state.raw.values()
            facts += (*state.raw, [isinstance(value, nn.Parameter) for value in state.raw.values()])
            facts += [(at, type(inner), *inner._parameters, *inner._buffers) for at, inner in state.children.items()]
        for optimizer in row.value if row.kind is Kind.OPTIMIZERS else ():
            entries = optimizer.state.values()
            plain = all(type(entry) is dict for entry in entries) and not hasattr(optimizer, "consolidate_state_dict")
            if not plain or any(inner is not optimizer for inner in optimizers_of(optimizer)):
                return None
            facts += [[len(group["params"]) for group in optimizer.param_groups], *map(tuple, entries)]
            others += [param for group in optimizer.param_groups for param in group["params"]]
            others += optimizer.state
            tensors += [value for entry in entries for value in entry.values()]
    if len(tensors) > MAX_TENSORS or not {*map(id, others)} <= {*map(id, tensors)}:
        return None
    dtensor = dtensor_class()
    kinds = list(map(type, tensors))
    memories = local_tensors(tensors)
    if not {*kinds} <= {*TORCH_CLASSES, dtensor} or not {*map(type, memories)} <= {*TORCH_CLASSES} or any(map(vars, memories)):
        return None
    try:
        looks, strides = list(map(_LOOKS, memories)), list(map(torch.Tensor.stride, memories))
        addresses = list(map(torch.Tensor.data_ptr, memories))
        # The description refuses freed memory, which makes a storage smaller, and a tensor with elements at a null address.
        storages: list[Any] = [*map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, memories))]
        storages += (*map(torch.Tensor.storage_offset, memories), addresses.count(0))
    except RuntimeError:  # memory that is not strided, or none at all
        return None
    if any(map(torch.Tensor.is_neg, memories)) or any(dtype.is_complex for dtype in {dtype for _, dtype, *_ in looks}):
        return None
    places = list(map(_PLACES, [tensor for tensor, kind in zip(tensors, kinds, strict=True) if kind is dtensor]))
    facts += (kinds, looks, strides, storages, [(id(mesh), id(placements), shape) for mesh, placements, shape in places])
    facts += ([tensor.requires_grad for tensor in tensors], _first_like(map(id, (*tensors, *others))), _first_like(addresses))
    return StateFacts(facts, places, tensors, memories)


def _first_like(numbers: Iterable[int]) -> list[int]:
    """Return for each number the index of the first number equal to it.

    >>> _first_like([7, 5, 7])
    [0, 1, 0]
    """
    first: dict[int, int] = {}
    return [first.setdefault(number, i) for i, number in enumerate(numbers)]
