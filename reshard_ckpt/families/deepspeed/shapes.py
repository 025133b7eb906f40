"""Reading and checking the shapes in a file of model states.

1. ``param_shapes`` has the shapes of the parameters in each flat group (`shapes_in`), ``frozen_param_shapes`` those outside.
2. Together with the tensors of the module, these are all that a tensor-parallel rank has (`local_shapes`).
"""

from __future__ import annotations

from typing import Any

from ...plugins import Ints
from ...plugins.errors import CorruptError
from ...plugins.torchfile import PickledTensor, TorchFile


def shapes_in(model: TorchFile) -> list[dict[str, Ints]]:
    """Return the shapes of the parameters in each flat group, by name."""
    found = model.content.get("param_shapes")
    if not isinstance(found, list | tuple | None):
        raise CorruptError(f"{model.key}: its param_shapes are no list; use another copy")
    return [shapes_of(shapes, model.key) for shapes in found or ()]


def local_shapes(model: TorchFile) -> dict[str, Ints]:
    """Return the shapes of all tensors of a tensor-parallel rank, by name."""
    module = model.content["module"]
    found = {fqn: view.shape for fqn, view in (module or {}).items() if isinstance(view, PickledTensor)}
    found |= shapes_of(model.content.get("frozen_param_shapes"), model.key)
    for shapes in shapes_in(model):
        found |= shapes
    return found


def shapes_of(shapes: Any, where: str) -> dict[str, Ints]:
    """Return a mapping of names to shapes, after checking that it is one; empty if it is None."""
    if shapes is None:
        return {}
    if not isinstance(shapes, dict) or not all(
        isinstance(name, str) and isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
        for name, shape in shapes.items()
    ):
        raise CorruptError(f"{where}: its shapes of parameters are none; use another copy")
    return shapes
