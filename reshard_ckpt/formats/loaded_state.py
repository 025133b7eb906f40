"""Adding a state that was loaded into memory to a catalog: its tensors lie in a mapped file, or are served from memory.

Tensors and values that a catalog cannot hold are left out; a load that wants one raises its error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..core.catalog.model import ValueEntry
from ..core.catalog.specs import is_row_major
from ..core.trees import children_of_dict, flatten, name_of, put
from ..errors import CheckpointError, UnsupportedError
from ..format.torch_dtypes import dtype_code
from ..format.values import encode_value
from ..state.capture import capture
from ..state.optimizer_dicts import is_numbered, is_optimizer_tree, names_by_number
from ..state.tensors import is_tensor_like, local_memory
from ..state.walk import Verbatim
from ..storage import LocalStorage, Storage
from ..torchfile.mapped import MappedFile, find_mapped
from .catalog_builder import CatalogBuilder
from .strided import StridedStorage


def serve_state(
    builder: CatalogBuilder,
    storage: Storage,
    state: Mapping[Any, Any],
    folder: str,
    mapped: Mapping[str, MappedFile] | None = None,
) -> Storage:
    """Add all tensors and values of a state to a catalog; return a store that has its tensors as files, too.

    Parameters
    ----------
    folder
        The beginning of the keys of these files.
    mapped
        Files of the store, by key. A tensor in row-major order that is a range of one is read from there instead.

    Raises
    ------
    UnsupportedError
        The store is not a local folder.
    """
    if not isinstance(storage, LocalStorage):
        raise UnsupportedError(f"{storage.url}: has files of torch.save, which are read from local folders; copy it to one")
    files = mapped or {}
    numbers = [builder.file(key, one.size) for key, one in files.items()]
    kept, errors = without_unreadable(state)
    captured = capture(Verbatim(kept))
    served: dict[str, torch.Tensor] = {}
    for spec, memory in captured.tensors:
        if spec.alias_of is not None:
            builder.alias(spec.name, spec.alias_of, spec.link)
            continue
        builder.tensor(spec.name, spec.dtype, spec.shape, link=spec.link)
        if not spec.pieces:
            continue
        (piece,) = spec.pieces
        found = find_mapped(list(files.values()), memory) if is_row_major(piece.lengths, piece.strides) else None
        if found is not None:
            builder.piece(spec.name, file=numbers[found[0]], offset=found[1])
            continue
        key = f"{folder}/{len(served)}"
        served[key] = memory.detach()
        builder.piece(spec.name, file=builder.file(key, memory.numel() * memory.itemsize), offset=0)
    for value in captured.values:
        builder.entry(ValueEntry(value.name, value.path, value.kind, value.data, link=value.link))
    for name, error in errors.items():
        builder.unreadable(name, error)
    return StridedStorage(storage.url, served)


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
