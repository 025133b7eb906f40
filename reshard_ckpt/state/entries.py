"""The rows that a state becomes on its way to the engine.

Each part of a state is one `Entry`. The passes run in this order, and each works on the rows of the passes before it:

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
    owner
        The parameter, if it is a tensor of an optimizer's state: a plain one is laid out like the parameter.
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
    """A value of the state as the bytes that another program made of it; they are saved as they are."""

    data: bytes
