"""Adding a state that was loaded into memory to a catalog: its tensors lie in a mapped file, or are served from memory.

Tensors and values that a catalog cannot hold are left out; a load that wants one raises its error.

A transposed or expanded view has no run of bytes longer than one element, so a catalog over the bytes themselves would need a row
for each element. For such tensors a store makes the row-major bytes when they are read, a range at a time, from the mapped file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..core.catalog.model import ValueEntry
from ..core.catalog.specs import is_row_major
from ..core.trees import Path, children_of_dict, flatten, name_of, put
from ..errors import CheckpointError
from ..format.columns import dtype_code
from ..format.values import encode_value
from ..state.capture import capture
from ..state.optimizer_dicts import is_numbered, is_optimizer_tree, names_by_number
from ..state.tensors import is_tensor_like, local_memory
from ..state.walk import Verbatim
from ..storage import Storage
from ..storage.followed import FollowedStorage
from ..storage.protocol import flat_bytes, short_file
from ..torchfile.mapped import MappedFile, find_mapped
from .catalog_builder import CatalogBuilder


def serve_state(
    builder: CatalogBuilder,
    storage: Storage,
    state: Mapping[Any, Any],
    folder: str,
    mapped: Mapping[str, MappedFile] | None = None,
) -> Storage:
    """Add all tensors and values of a loaded state to a catalog; return a store that also serves its tensors as files.

    Parameters
    ----------
    folder
        The beginning of the keys of these files.
    mapped
        Files of the store, by key. A tensor in row-major order that is a range of such a file is read from that file instead.
    """
    files = mapped or {}
    numbers = [builder.file(key, file.size) for key, file in files.items()]
    kept: dict[Any, Any] = {}
    for path, leaf in (entry for key, child in state.items() for entry in flatten(child, _children, (key,))):
        with builder.reading(name_of(path)):
            _check_leaf(leaf, name_of(path))
            put(kept, path, leaf)
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
        served[key] = memory.cpu()
        builder.piece(spec.name, file=builder.file(key, memory.numel() * memory.itemsize), offset=0)
    for value in captured.values:
        builder.entry(ValueEntry(value.name, value.path, value.kind, value.data, link=value.link))
    return StridedStorage(storage, served)


def divided_by_rank(
    states: Sequence[Mapping[Any, Any]], name: str, *, max_depth: int | None = None, may_miss: bool = False
) -> tuple[dict[str, Any], list[Path]]:
    """Join the states of all ranks to one state.

    Parameters
    ----------
    states
        The state of each rank, in order.
    max_depth
        The number of keys after which a dict is one value; without it, each leaf of nested dicts is a value.
    may_miss
        Whether a value counts as equal on all ranks if some ranks lack it.

    Returns
    -------
    dict
        Values that are equal on all ranks are below `name`, all others below ``<name>_of_rank`` and the number of their rank.
    list of Path
        The paths of those others, without the name and the rank.
    """
    by_path: dict[Path, dict[int, Any]] = {}
    for rank, state in enumerate(states):
        for path, value in flatten(state, children_of_dict, max_depth=max_depth) if state else ():
            by_path.setdefault(path, {})[rank] = value
    num = 1 if may_miss else len(states)
    own = {path for path, values in by_path.items() if len(values) < num or not are_equal(list(values.values()))}
    joined: dict[str, Any] = {}
    for path, values in by_path.items():
        if path not in own:
            put(joined, (name, *path), next(iter(values.values())))
        for rank, value in values.items() if path in own else ():
            put(joined, (f"{name}_of_rank", str(rank), *path), value)
    return joined, [path for path in by_path if path in own]


def are_equal(values: Sequence[Any]) -> bool:
    """Tell whether values are equal in type and content; False if one of them cannot be encoded."""
    try:
        return len({encode_value(value, "a value") for value in values}) == 1
    except CheckpointError:
        return False


def _children(node: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the items of a dict that is not empty; None marks a leaf.

    An optimizer's state dict that names its parameters is a leaf, and so is anything but a dict.
    """
    numbered = is_numbered(node) and names_by_number(node["param_groups"]) is not None
    return None if numbered or (isinstance(node, Mapping) and is_optimizer_tree(node)) else children_of_dict(node)


def _check_leaf(leaf: Any, name: str) -> None:
    """Raise the error of a leaf that a catalog cannot hold. Lists, tuples and dicts with entries pass: they may hold tensors."""
    if is_tensor_like(leaf):
        dtype_code(local_memory(leaf, name)[0].dtype, name)
    elif not isinstance(leaf, list | tuple) and not (isinstance(leaf, Mapping) and leaf):
        encode_value(leaf, name)


class StridedStorage(FollowedStorage):
    """A store with additional files; each is the elements of one tensor in row-major order.

    Parameters
    ----------
    tensors
        The tensor of each additional file, by key.
    """

    def __init__(self, own: Storage, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(own, {})
        self._tensors = tensors

    def size(self, key: str) -> int | None:
        tensor = self._tensors.get(key)
        return super().size(key) if tensor is None else tensor.numel() * tensor.itemsize

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        tensor = self._tensors.get(key)
        if tensor is None:
            super().read_into(key, offset, buffers)
            return
        views = [flat_bytes(buffer) for buffer in buffers]
        wanted, there = sum(map(len, views)), tensor.numel() * tensor.itemsize - offset
        if wanted > there:
            raise short_file(f"{self.url}/{key}", offset, wanted, max(there, 0))
        for view in views:
            view[:] = row_major_bytes(tensor, offset, len(view))
            offset += len(view)


def row_major_bytes(tensor: torch.Tensor, offset: int, num_bytes: int) -> memoryview:
    """Return the bytes ``[offset, offset + num_bytes)`` of a tensor's row-major order, for any strides.

    >>> row_major_bytes(torch.arange(6, dtype=torch.int16).reshape(2, 3).T, 2, 3).tolist()
    [3, 0, 1]
    """
    each = tensor.itemsize
    # Elements [first, last) cover the wanted bytes. numpy's flat iterator copies just these, whatever the strides are.
    first, last = offset // each, -(-(offset + num_bytes) // each)
    elements = tensor.view(_DTYPE_OF_SIZE[each]).numpy().flat[first:last]
    return elements.view(np.uint8).data[offset - first * each :][:num_bytes]


_DTYPE_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Maps the number of bytes of an element to a torch dtype of that size that numpy has too."""
