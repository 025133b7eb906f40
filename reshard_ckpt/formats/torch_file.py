"""How is a file that ``torch.save`` wrote a checkpoint?

1. Its pickle is read with tensors and plain values alone allowed; its tensors are views of a map of the file (`archive`).
2. What it holds is named as `checkpoint.save` would name it: a flat state dict stands below ``model``, one of an optimizer below
   ``optimizer``, anything else below its own keys.
3. A tensor in row-major order is a run of bytes of the file; any other is read through `strided`.
4. An optimizer's state is keyed by position, and by name only where the file holds ``param_names``: then it is given names.

A folder with ``pytorch_model.bin``, or an index and its parts, is one flat state dict.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..core.catalog.model import FileEntry, ValueEntry
from ..core.catalog.specs import TensorSpec, row_major_strides
from ..core.words import a
from ..engine.common.tensor_bytes import LocalTensor
from ..errors import CorruptError, NameCollisionError, UnsupportedError
from ..state.capture import capture
from ..state.entries import Captured
from ..state.modules import EXTRA_STATE
from ..state.scan import Verbatim
from ..storage import LocalStorage, Storage
from .archive import HEAD_BYTES, LEGACY_MAGIC, ZIP_MAGIC, Mappings, load_archive
from .archive import Mapping as Mapped
from .hub import Chosen, chosen_files
from .named_optimizers import is_optimizer_state, with_names
from .protocol import Foreign, locate
from .strided import StridedStorage
from .table import ForeignTensor, build, foreign_file, whole
from .unreadable import without_unreadable

MODEL, OPTIMIZER = "model", "optimizer"
"""The keys of the state below which a flat state dict, and one of an optimizer, stand."""

_MAIN = "pytorch_model.bin"


@dataclass(frozen=True, slots=True)
class TorchFormat:
    """The format, as one of `FORMATS`."""

    name: str = "torch"
    looks_for: str = "a file that torch.save wrote, or a folder with pytorch_model.bin or its index"

    def open(self, path: str) -> Foreign | None:
        """See `ForeignFormat`."""
        with ExitStack() as stack:
            storage, key = locate(path)
            stack.enter_context(storage)
            if key is not None:
                return _open_file(storage, key) if _is_torch_file(storage, key) else None
            chosen = chosen_files(storage, ".bin", main=_MAIN)
            if chosen is None or not all(_is_torch_file(storage, key) for key in chosen):
                return None
            return _open_flat(storage, chosen)


def _is_torch_file(storage: Storage, key: str) -> bool:
    """Whether a file begins as those of torch do; a file of this kind of name that does not is damaged."""
    size = storage.size(key)
    if size is None:
        raise CorruptError(f"{storage.url}: {key} is missing, though the index names it; copy it, or use another checkpoint")
    head = memoryview(bytearray(min(size, HEAD_BYTES)))
    storage.read_into(key, 0, [head])
    if bytes(head).startswith(LEGACY_MAGIC):
        raise UnsupportedError(
            f"{storage.url}: {key} is of torch's old format, without places of its tensors; write it anew: "
            "torch.save(torch.load(path, weights_only=True), path)"
        )
    return bytes(head).startswith(ZIP_MAGIC)


def _local_path(storage: Storage, key: str) -> str:
    if not isinstance(storage, LocalStorage):
        raise UnsupportedError(
            f"{storage.url}: {key} cannot be mapped into memory, as torch files are; copy it to a local folder"
        )
    return os.path.join(storage.url, key)


def _open_file(storage: Storage, key: str) -> Foreign:
    loaded, mapped = _load(storage, key)
    try:
        state, advice = with_names(_rooted(loaded))
        state, unreadable = without_unreadable(state)
        captured = capture(Verbatim(state))
    except RecursionError as error:
        raise CorruptError(f"{storage.url}: {key} is nested too deep, or contains itself; use another copy") from error
    found = _foreign(storage, captured, {key: mapped})
    return replace(found, catalog=replace(found.catalog, unreadable=unreadable), advice=advice)


def _open_flat(storage: Storage, chosen: Chosen) -> Foreign:
    """Several files that together are one flat state dict."""
    mapped: dict[str, Mapped] = {}
    merged: dict[str, Any] = {}
    for key, names in chosen.items():
        loaded, mapped[key] = _load(storage, key)
        if not isinstance(loaded, Mapping):
            raise CorruptError(f"{storage.url}: {key} holds {a(type(loaded).__name__)}, no state dict; use another copy")
        for name in loaded if names is None else sorted(names):
            if name not in loaded:
                raise CorruptError(f"{storage.url}: {key} has no tensor {name!r:.200}, which the index says is there")
            if name in merged:
                raise NameCollisionError(
                    f"{storage.url}: {name} is in {key} and in a file before it; open one of them by its own path"
                )
            merged[name] = loaded[name]
    return _foreign(storage, capture(Verbatim({MODEL: merged})), mapped)


def _load(storage: Storage, key: str) -> tuple[Any, Mapped]:
    size = storage.size(key)
    assert size is not None
    return load_archive(_local_path(storage, key), size)


def _rooted(loaded: Any) -> Mapping[Any, Any]:
    """The state that was saved, if that was one, else one that holds it."""
    if is_optimizer_state(loaded):
        return {OPTIMIZER: loaded}
    return loaded if isinstance(loaded, Mapping) and not _is_flat(loaded) else {MODEL: loaded}


def _is_flat(state: Mapping[Any, Any]) -> bool:
    """Whether tensors stand at the top; beside them there may be what modules save of their own, but no other state."""
    nested = any(isinstance(value, Mapping) and not str(key).endswith(EXTRA_STATE) for key, value in state.items())
    return not nested and any(isinstance(value, torch.Tensor) for value in state.values())


@dataclass(slots=True)
class _Placing:
    """Turns captured tensors into foreign ones: a run of a file, or an entry of `strided`, as one more file."""

    files: list[FileEntry]
    mappings: Mappings
    strided: dict[str, torch.Tensor] = field(default_factory=dict)

    def place(self, entry: LocalTensor) -> ForeignTensor:
        spec = entry.spec
        if spec.alias_of is not None or not spec.pieces:
            return ForeignTensor(spec.name, spec.dtype, spec.shape, (), spec.alias_of)
        found = self.mappings.find(entry.memory)
        if found is None or not _is_in_order(spec):
            found = self._add(entry.memory.detach()), 0
        return whole(spec.name, spec.dtype, spec.shape, *found)

    def _add(self, tensor: torch.Tensor) -> int:
        key = f"strided/{len(self.strided)}"
        self.strided[key] = tensor
        self.files.append(foreign_file(key, tensor.numel() * tensor.itemsize, "torch"))
        return len(self.files) - 1


def _is_in_order(spec: TensorSpec) -> bool:
    """Whether the bytes of a tensor are one after the other, in row-major order."""
    (piece,) = spec.pieces
    dims = zip(piece.lengths, piece.strides, row_major_strides(piece.lengths), strict=True)
    return all(length == 1 or stride == wanted for length, stride, wanted in dims)


def _foreign(storage: Storage, captured: Captured, mapped: Mapping[str, Mapped]) -> Foreign:
    files = [foreign_file(key, one.size, "torch") for key, one in mapped.items()]
    placing = _Placing(files, Mappings(list(mapped.values())))
    tensors = [placing.place(entry) for entry in captured.tensors]
    ordered = sorted(captured.values, key=lambda value: value.name)
    values = [ValueEntry(value.name, value.path, value.kind, value.data) for value in ordered]
    catalog = build(tensors, placing.files, values, format="torch", where=storage.url)
    return Foreign(StridedStorage(storage.url, placing.strided), catalog, "torch")
