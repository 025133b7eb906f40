"""The rows that a state becomes, and the result for the engine: one rank's tensors and values, for a save and for a load.

Each part of a state is one `Entry`. The passes run in this order, and each works on the rows of the passes before it:

1. `walk` lists the tensors and values of dicts and lists, and one row for each module, optimizer and object in them.
2. `modules` reads a row of modules: its tensors and values become rows.
3. `optimizers` reads a row of optimizers: their state becomes rows under the names of their parameters.
4. `tensors` finds the local memory and the layout of each row that is a tensor.
5. `describe` makes of each row the spec that the engine saves or loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from ..core.catalog.specs import Mesh, Replication, StateLink, ValueSpec
from ..core.trees import Path
from ..engine.common.tensor_bytes import LocalTensor, count_up
from .layouts import LocalMemory


class Kind(Enum):
    """The kinds of rows. The first five are saved; the others stand for objects that the passes open."""

    TENSOR = auto()
    """A tensor, a DTensor, a `LocalShard` or a `FlatShard`."""
    VALUE = auto()
    """A plain value; it may be a whole list."""
    PER_RANK = auto()
    """A `PerRank`."""
    WHOLE = auto()
    """A `Value`."""
    GROUPS = auto()
    """The groups of an optimizer, with FQNs as parameters."""
    MODULES = auto()
    """A tuple of modules; once they are read, of `ModuleState`s."""
    OPTIMIZERS = auto()
    """A tuple of optimizers; once their parameters are known, of `OptimizerView`s."""
    NUMBERED = auto()
    """An optimizer's state dict by number; once its parameters are known, the row is one of OPTIMIZERS."""
    OBJECT = auto()
    """An object with a state of its own, which is a tree of its own."""


@dataclass(slots=True, eq=False)
class Entry:
    """One row: a part of the state under its name.

    Attributes
    ----------
    name
        The name in the checkpoint.
    path
        The keys that lead to it in the state.
    value
        The tensor, the value or the object itself.
    source
        The name of the item of the state that it belongs to, such as a module; by default its own name.
    link
        The parameter and the key, if it is state of an optimizer.
    replication
        The declaration for a plain tensor, which has none of its own.
    local
        The local memory of a tensor and its layout, once they are found.
    """

    name: str
    path: Path
    kind: Kind
    value: Any
    source: str | None = None
    link: StateLink | None = None
    replication: Replication = Replication.PLAIN
    local: LocalMemory | None = None


@dataclass(frozen=True, slots=True)
class Captured:
    """All tensors and values that one rank has to save.

    Two tensors may have one name, if two stages on this rank hold the same tensor. `warnings` are messages for the user about the
    way in which the state is saved.
    """

    tensors: tuple[LocalTensor, ...]
    values: tuple[ValueSpec, ...]
    mesh: Mesh | None
    warnings: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    """The patterns of ``exclude`` that match no name on this rank."""


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
        Names of saved tensors that are wanted too, but have no place on this rank: `check` says why.
    prefixes
        The top-level keys. A saved name below one of them that no rank wants is unexpected.
    check
        Takes ``{name: value}`` for every value of the checkpoint below the prefixes, wanted or not; a per-rank one as
        `PerRankValues`. Returns one line for each problem. It must be called once, before any tensor changes.
    finish
        Takes the same values, and the names of tensors that were not loaded (with ``strict=False``). It must be called once,
        after `check` and after all tensors are in place and verified. Until then the objects of the state do not change.
    mesh
        The mesh of the job, if the state shows it.
    hints
        Takes the values as `check` does, and returns further advice for values that do not fit.
    dtensors
        The wanted DTensors, with their names. A DTensor has a version of its own beside that of its local tensor, which is
        written.
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

    def count_up(self, written: Iterable[str]) -> None:
        """Count up the versions of DTensors whose local tensors were written under one of these names, or under a tied name."""
        first = {tensor.spec.name: tensor.spec.first_name for tensor in self.tensors}
        done = {first[name] for name in written}
        for name, dtensor in self.dtensors:
            if first.get(name) in done:
                count_up(dtensor)


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value of the state as the bytes that another program made of it; they are saved as they are."""

    data: bytes
