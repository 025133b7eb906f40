"""What of a foreign state has no place in a catalog? It is left out, and said why, when somebody wants it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from ..format.torch_dtypes import dtype_code
from ..format.values import encode_value
from ..state.optimizer_dicts import is_optimizer_tree
from ..state.scan import name_of
from ..state.tensors import is_tensor_like, local_memory

Path = tuple[Any, ...]


def without_unreadable(state: Mapping[Any, Any]) -> tuple[Mapping[Any, Any], dict[str, CheckpointError]]:
    """The state without tensors and values in its dicts that could not be read, and why not, by name."""
    unreadable: dict[str, CheckpointError] = {}
    return _pruned(state, (), unreadable), unreadable


def _pruned(node: Mapping[Any, Any], path: Path, unreadable: dict[str, CheckpointError]) -> dict[Any, Any]:
    kept: dict[Any, Any] = {}
    for key, child in node.items():
        where = (*path, key)
        if isinstance(child, Mapping) and child:
            kept[key] = child if is_optimizer_tree(child) else _pruned(child, where, unreadable)
            if kept[key]:
                continue
            del kept[key]
        elif (why := _why_not(child, name_of(where))) is None:
            kept[key] = child
        else:
            unreadable[name_of(where)] = why
    return kept


def _why_not(leaf: Any, name: str) -> CheckpointError | None:
    try:
        if is_tensor_like(leaf):
            dtype_code(local_memory(leaf, name).memory.dtype, name)
        elif not isinstance(leaf, list | tuple):  # those may hold tensors, and are no value then
            encode_value(leaf, name)
    except CheckpointError as error:
        return error
    return None
