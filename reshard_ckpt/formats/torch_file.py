"""Reading a file that ``torch.save`` wrote, or a folder of them, as a checkpoint.

1. Load its pickle, which may hold only tensors and plain values. The tensors are views of a map of the file
   (`torchfile.mapped`).
2. Name the contents as `checkpoint.save` would: a flat state dict goes below ``model``, the state dict of an optimizer below
   ``optimizer``, anything else below its own keys.
3. A tensor in row-major order is a range of the file; any other is served by `strided`.
4. An optimizer's state is keyed by position: torch numbers the parameters of all groups in a row, and only the program that made
   the optimizer knows the parameter of a number. If the optimizer was made of ``model.named_parameters()``, its groups have
   ``param_names``, with which `state.capture` names its state. Any other loads with a ``rename=`` that names the numbers.

A folder with ``pytorch_model.bin``, or an index and its parts, is one flat state dict.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..core.report import type_in_words
from ..core.trees import children, flatten, name_of
from ..errors import CorruptError, NameCollisionError
from ..state.modules import EXTRA_STATE
from ..state.optimizer_dicts import are_numbered_groups, names_by_number
from ..storage import LocalStorage, Storage
from ..storage.protocol import read_parts, read_range
from ..torchfile.mapped import MappedFile, load_archive
from ..torchfile.zip_records import HEAD_BYTES, ZIP_MAGIC, refuse_legacy
from .catalog_builder import CatalogBuilder
from .huggingface import WeightFiles, refuse_pointer, weight_files
from .loaded_state import serve_state
from .source import Format, Source

MODEL, OPTIMIZER = "model", "optimizer"
"""Keys of the state: a flat state dict is put below the first one, the state dict of an optimizer below the second."""

_MAIN = "pytorch_model.bin"
_MAX_DEPTH = 64
"""How deep the dicts and lists of a file may nest: as deep as those of a value (`format.value_decode`)."""


def open_torch(storage: Storage, key: str | None) -> Source | None:
    """Open a file of ``torch.save``, or a folder of them; return None for anything else; see `Format.open`."""
    if key is not None:
        return _open_file(storage, key) if _is_torch_file(storage, key) else None
    weights = weight_files(storage, ".bin", main=_MAIN, others=False)
    if weights is None or not all(_is_torch_file(storage, key) for key in weights.names):
        return None
    return _open_flat(storage, weights)


def _is_torch_file(storage: Storage, key: str) -> bool:
    """Return whether a file begins like the zips of torch; refuse a missing file, one of torch's old format, and a pointer."""
    size = storage.size(key)
    if size is None:
        raise CorruptError(f"{storage.url}: {key} is missing, though the index names it; copy it, or use another checkpoint")
    head = bytes(read_range(storage, key, 0, min(size, HEAD_BYTES)))
    refuse_legacy(head, f"{storage.url}: {key}")
    refuse_pointer(head, f"{storage.url}: {key}")
    return head.startswith(ZIP_MAGIC)


def _open_file(storage: Storage, key: str) -> Source:
    loaded, mapped = _load(storage, key)
    try:
        state = _with_root_key(loaded)
        _refuse_state_without_a_group(state)
        return _source(storage, state, {key: mapped})
    except RecursionError as error:
        raise CorruptError(f"{storage.url}: {key} is nested too deep, or contains itself; use another copy") from error


def _open_flat(storage: Storage, weights: WeightFiles) -> Source:
    """Open files that hold one flat state dict together, such as a ``pytorch_model.bin`` in parts."""
    mapped: dict[str, MappedFile] = {}
    merged: dict[str, Any] = {}
    for key, names in weights.names.items():
        loaded, mapped[key] = _load(storage, key)
        if not isinstance(loaded, Mapping):
            raise CorruptError(f"{storage.url}: {key} holds {type_in_words(loaded)}, no state dict; use another copy")
        for name in loaded if names is None else sorted(names):
            if name not in loaded:
                raise CorruptError(
                    f"{storage.url}: {key} has no tensor {name!r:.200}, which the index says is there; use another copy"
                )
            if name in merged:
                raise NameCollisionError(
                    f"{storage.url}: {name} is in {key} and in a file before it; open one of them by its own path"
                )
            merged[name] = loaded[name]
    return _source(storage, {MODEL: merged}, mapped)


def _load(storage: Storage, key: str) -> tuple[Any, MappedFile]:
    size = storage.size(key)
    assert size is not None
    if isinstance(storage, LocalStorage):
        return load_archive(os.path.join(storage.url, key), size)
    # A torch file is mapped into memory, so one in another store is copied to a local disk. The map keeps the unlinked copy.
    with tempfile.TemporaryDirectory(prefix="reshard-ckpt-") as folder:
        path = os.path.join(folder, os.path.basename(key))
        with open(path, "wb") as file:
            for _, part in read_parts(storage, key, size, storage.hints.read_bytes):
                file.write(part)
        return load_archive(path, size)


def _with_root_key(loaded: Any) -> Mapping[Any, Any]:
    """Return a loaded file as a state: a flat state dict goes below ``model``, one of an optimizer below ``optimizer``.

    A state that already has keys at the top is returned as it is.
    """
    if _is_optimizer_state(loaded):
        return {OPTIMIZER: loaded}
    if not isinstance(loaded, Mapping):
        return {MODEL: loaded}
    # A flat state dict has tensors at the top, and beside them no dict except a module's extra state.
    nested = any(isinstance(value, Mapping) and not str(key).endswith(EXTRA_STATE) for key, value in loaded.items())
    is_flat = not nested and any(isinstance(value, torch.Tensor) for value in loaded.values())
    return {MODEL: loaded} if is_flat else loaded


def _source(storage: Storage, state: Mapping[Any, Any], mapped: Mapping[str, MappedFile]) -> Source:
    builder = CatalogBuilder("torch", storage.url)
    served = serve_state(builder, storage, state, "strided", mapped)
    return Source(served, builder.finish(links_from_names=False), "torch")


def _is_optimizer_state(value: Any) -> bool:
    """Return whether a value is the state dict of a torch optimizer, keyed by position."""
    if not isinstance(value, Mapping) or not {"state", "param_groups"} <= value.keys():
        return False
    state = value["state"]
    keyed = isinstance(state, Mapping) and all(type(key) is int and isinstance(entry, Mapping) for key, entry in state.items())
    return keyed and are_numbered_groups(value["param_groups"])


def _refuse_state_without_a_group(state: Mapping[Any, Any]) -> None:
    """Raise a `CorruptError` if the state is nested too deep, or an optimizer has state for a parameter in none of its groups."""
    for path, leaf in flatten(state, _children, max_depth=_MAX_DEPTH + 1):
        if len(path) > _MAX_DEPTH:
            raise CorruptError(f"{name_of(path[:3])}…: is nested deeper than {_MAX_DEPTH} levels; use another copy")
        names = names_by_number(leaf["param_groups"]) if _is_optimizer_state(leaf) else None
        # State without a group would get no name at all.
        if names is not None and (unknown := [key for key in leaf["state"] if key not in names]):
            raise CorruptError(
                f"an optimizer has state for parameter {unknown[0]}, which is in none of its groups; use another copy"
            )


def _children(node: Any) -> Iterable[tuple[Any, Any]] | None:
    return None if _is_optimizer_state(node) else children(node)


FORMAT = Format("torch", "a file that torch.save wrote, or a folder with pytorch_model.bin or its index", open_torch, order=70)
