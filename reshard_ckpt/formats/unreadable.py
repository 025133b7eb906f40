"""Dropping tensors and values of a foreign state that a catalog cannot hold; a load that wants one raises its error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from ..format.torch_dtypes import dtype_code
from ..format.values import encode_value
from ..state.optimizer_dicts import is_numbered, is_optimizer_tree, names_by_number
from ..state.paths import name_of
from ..state.tensors import is_tensor_like, local_memory

Path = tuple[Any, ...]


def without_unreadable(state: Mapping[Any, Any]) -> tuple[Mapping[Any, Any], dict[str, CheckpointError]]:
    """Drop unreadable tensors and values from the dicts of a state; return the rest of it, and the errors by name."""
    unreadable: dict[str, CheckpointError] = {}
    return _prune(state, (), unreadable), unreadable


def _prune(node: Mapping[Any, Any], path: Path, unreadable: dict[str, CheckpointError]) -> dict[Any, Any]:
    kept: dict[Any, Any] = {}
    for key, child in node.items():
        where = (*path, key)
        if isinstance(child, Mapping) and child:
            kept[key] = child if _is_named_optimizer(child) else _prune(child, where, unreadable)
            if kept[key]:
                continue
            del kept[key]
        elif (why := _read_error(child, name_of(where))) is None:
            kept[key] = child
        else:
            unreadable[name_of(where)] = why
    return kept


def _is_named_optimizer(value: Mapping[Any, Any]) -> bool:
    return is_optimizer_tree(value) or (is_numbered(value) and names_by_number(value["param_groups"]) is not None)


def _read_error(leaf: Any, name: str) -> CheckpointError | None:
    try:
        if is_tensor_like(leaf):
            dtype_code(local_memory(leaf, name).memory.dtype, name)
        elif not isinstance(leaf, list | tuple):  # a list may hold tensors, and is then not a value
            encode_value(leaf, name)
    except CheckpointError as error:
        return error
    return None
