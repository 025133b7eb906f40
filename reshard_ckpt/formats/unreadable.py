"""Dropping tensors and values of a foreign state that a catalog cannot hold; a load that wants one raises its error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..core.trees import children_of_dict, flatten, name_of, put
from ..errors import CheckpointError
from ..format.torch_dtypes import dtype_code
from ..format.values import encode_value
from ..state.optimizer_dicts import is_numbered, is_optimizer_tree, names_by_number
from ..state.tensors import is_tensor_like, local_memory


def without_unreadable(state: Mapping[Any, Any]) -> tuple[Mapping[Any, Any], dict[str, CheckpointError]]:
    """Drop unreadable tensors and values from the dicts of a state; return the rest of it, and the errors by name."""
    kept: dict[Any, Any] = {}
    unreadable: dict[str, CheckpointError] = {}
    for path, leaf in (entry for key, child in state.items() for entry in flatten(child, _children, (key,))):
        why = None if isinstance(leaf, Mapping) and leaf else _read_error(leaf, name_of(path))
        if why is None:
            put(kept, path, leaf)
        else:
            unreadable[name_of(path)] = why
    return kept, unreadable


def _children(node: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the keys and children of a dict; the state dict of an optimizer that names its parameters is a leaf."""
    numbered = is_numbered(node) and names_by_number(node["param_groups"]) is not None
    return None if numbered or (isinstance(node, Mapping) and is_optimizer_tree(node)) else children_of_dict(node)


def _read_error(leaf: Any, name: str) -> CheckpointError | None:
    try:
        if is_tensor_like(leaf):
            dtype_code(local_memory(leaf, name).memory.dtype, name)
        elif not isinstance(leaf, list | tuple):  # a list may hold tensors, and is then not a value
            encode_value(leaf, name)
    except CheckpointError as error:
        return error
    return None
