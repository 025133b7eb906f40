"""Objects of other frameworks in a state: tensors that hold a part of a global one, and placements of DTensors.

A package registers its `Objects` by an entry point of the group `GROUP`. They are loaded when a state first has a tensor or a
placement of a class that is not torch's and that nothing here knows, or a DTensor with a dim that several axes shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..core.catalog.specs import AxisPlacement, Ints
from ..engine.common.entry_points import load_all
from .shards import FlatShard, LocalShard

GROUP = "reshard_ckpt.objects"

OWN = {
    "megatron": "reshard_ckpt.families.megatron.objects:OBJECTS",
    "vescale": "reshard_ckpt.families.vescale.objects:OBJECTS",
}
"""The entry points of this package, as in pyproject.toml."""


def _lower_none(tensor: Any) -> Sequence[LocalShard | FlatShard]:
    return ()


def _recognize_none(axis: str, placement: Any, shape: Ints) -> AxisPlacement | None:
    return None


def _accept(mesh: Any, placements: Sequence[Any], name: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects of one framework.

    Attributes
    ----------
    name
        The name of the framework.
    lower
        Returns the shards over the memory of a tensor of the framework's own class; empty for any other tensor.
    recognize
        Takes the name of a mesh axis, a placement on it, and the shape of the tensor. Returns the placement as this library has
        it; None for a placement of another framework.
    check_mesh
        Takes the mesh and the placements of a DTensor with a dim that several axes shard, and its name. It raises `LayoutError`
        if the framework has noted at the mesh that these axes cut in another order than torch says.
    """

    name: str
    lower: Callable[[Any], Sequence[LocalShard | FlatShard]] = _lower_none
    recognize: Callable[[str, Any, Ints], AxisPlacement | None] = _recognize_none
    check_mesh: Callable[[Any, Sequence[Any], str], None] = _accept


@cache
def known_objects() -> tuple[Objects, ...]:
    """Load the objects of all frameworks."""
    return tuple(load_all(GROUP, OWN, Objects))


def lowered(tensor: Any) -> tuple[LocalShard | FlatShard, ...]:
    """Return the shards of a tensor of another framework's class; empty if no framework knows it."""
    if is_of_torch(tensor):
        return ()
    return next((tuple(shards) for one in known_objects() if (shards := one.lower(tensor))), ())


def recognized(axis: str, placement: Any, shape: Ints) -> AxisPlacement | None:
    """Return a placement of another framework's class as this library has it; None if no framework knows it."""
    if is_of_torch(placement):
        return None
    found = (one.recognize(axis, placement, shape) for one in known_objects())
    return next((one for one in found if one is not None), None)


def is_of_torch(value: Any) -> bool:
    """Tell whether torch itself brings the class of an object."""
    return type(value).__module__.partition(".")[0] == "torch"
