"""Rows: the list of named tensors, values and objects that a state is turned into, for a save or a load.

Each row is one `Entry`. The passes run in this order, and each works on the rows of the passes before it:

1. `walk` lists the tensors and values of dicts and lists, and one row for each module, optimizer and object in them.
2. `modules` reads a row of modules: its tensors and values become rows.
3. `optimizers` reads a row of optimizers: their state becomes rows under the names of their parameters.
4. `tensors` finds the local memory and the layout of each row that is a tensor.
5. `describe` makes of each row the spec that the engine saves or loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch

from ..core.catalog.specs import Replication, StateLink
from ..core.trees import Path
from .layouts import Layout

if TYPE_CHECKING:
    from .parameters import Owner


class Kind(Enum):
    """The kinds of rows of a state. The first five are saved; the others stand for objects that the passes open."""

    TENSOR = auto()
    """A tensor: a plain one, a DTensor, a `LocalShard` or a `FlatShard`."""
    VALUE = auto()
    """A value that is the same on all ranks; it may be a whole list."""
    PER_RANK = auto()
    """A `PerRank`: a value that each rank has of its own."""
    WHOLE = auto()
    """A `Value`: one value for all ranks, which may have tensors in it."""
    GROUPS = auto()
    """The parameter groups of an optimizer, with FQNs as parameters."""
    MODULES = auto()
    """A tuple of modules; after the walk, of `ModuleState`s."""
    OPTIMIZERS = auto()
    """A tuple of optimizers; once their parameters are found, of `OptimizerView`s."""
    NUMBERED = auto()
    """An optimizer's state dict that numbers its parameters. Once these are found, the row becomes one of `OPTIMIZERS`."""
    OBJECT = auto()
    """An object with a ``state_dict()`` of its own, which is walked as a tree of its own."""


@dataclass(slots=True, eq=False)
class Entry:
    """One row: a tensor, a value or an object of the state, under its name.

    Attributes
    ----------
    name
        The name in the checkpoint.
    path
        The keys that lead to it in the state.
    value
        The tensor, the value or the object itself.
    source
        The name of the item of the state that the row comes from, such as a module; None stands for its own name.
    link
        The optimizer, the parameter and the key, if it is optimizer state.
    replication
        For a plain tensor, which declares nothing itself: how ranks treat a piece of it that several of them hold.
    owner
        The parameter, if the row is a tensor of optimizer state: a plain tensor is laid out like the parameter.
    memory, layout
        The local memory of a tensor, and the part of the global tensor that it holds, once `tensors` has found them.
    """

    name: str
    path: Path
    kind: Kind
    value: Any
    source: str | None = None
    link: StateLink | None = None
    replication: Replication = Replication.PLAIN
    owner: Owner | None = None
    memory: torch.Tensor | None = None
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class Opaque:
    """Bytes in place of a value of the state, encoded by another program; they are saved as they are."""

    data: bytes
