"""Converting the paths of ByteCheckpoint's entries: a model's are below ``model``, an optimizer's below ``optimizer``.

Steps that torch's wrappers add to the names of tensors are dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from ...plugins.dcp import KeyPath, Metadata
from ...plugins.names import name_of, unwrapped, unwrapped_keys

NAME = "bytecheckpoint"
MODEL, OPTIMIZER = "model", "optimizer"


def model_paths(model: Metadata) -> Callable[[KeyPath], KeyPath]:
    """Return the function that converts the paths of a model; `model` is its metadata as it was saved."""
    names = [name_of(model.paths.get(fqn, (fqn,))) for fqn in (*model.tensors, *model.values)]
    clean = dict(zip(names, unwrapped_keys(names), strict=True))
    return lambda path: (MODEL, clean.get(name_of(path)) or unwrapped(name_of(path)))


def optimizer_path(path: KeyPath) -> KeyPath:
    """Convert a path of an optimizer."""
    return OPTIMIZER, *(unwrapped(key) if isinstance(key, str) else key for key in path)
