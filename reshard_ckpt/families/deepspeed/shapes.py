"""The shapes that a file of model states tells, checked.

1. ``param_shapes`` has those of the parameters of each flat group (`shapes_in`), ``frozen_param_shapes`` those of frozen ones.
2. With those of the module, they are all that a tensor-parallel rank has (`local_shapes`).
"""

from __future__ import annotations

from typing import Any

from ...core.catalog.specs import Ints
from ...errors import CorruptError
from ...torchfile.archive import TorchFile
from ...torchfile.tensors import PickledTensor


def shapes_in(model: TorchFile) -> list[dict[str, Ints]]:
    """Return for each flat group the shapes of its parameters."""
    found = model.content.get("param_shapes")
    if not isinstance(found, list | tuple | None):
        raise CorruptError(f"{model.key}: its param_shapes are no list; use another copy")
    return [shapes_of(shapes, model.key) for shapes in found or ()]


def local_shapes(model: TorchFile) -> dict[str, Ints]:
    """Return the shapes of all that a tensor-parallel rank has."""
    module = model.content["module"]
    found = {fqn: view.shape for fqn, view in (module or {}).items() if isinstance(view, PickledTensor)}
    found |= shapes_of(model.content.get("frozen_param_shapes"), model.key)
    for shapes in shapes_in(model):
        found |= shapes
    return found


def shapes_of(shapes: Any, where: str) -> dict[str, Ints]:
    """Check that something maps names to shapes."""
    if shapes is None:
        return {}
    if not isinstance(shapes, dict) or not all(
        isinstance(name, str) and isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
        for name, shape in shapes.items()
    ):
        raise CorruptError(f"{where}: its shapes of parameters are none; use another copy")
    return shapes
