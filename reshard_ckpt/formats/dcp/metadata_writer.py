"""Writing ``.metadata``: a pickle of DCP's own classes, made without importing them.

The classes and fields are the ones in `metadata`. torch keeps them readable from one release to the next, and uses the defaults
of fields that are missing.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from ...core.catalog.specs import Ints
from ...format.files import digest128
from ...torchfile.pickle_writer import FunctionCall, Global, Instance, pickled
from .metadata import DCP_FILES, DCP_METADATA, Extent, SavedTensor
from .names import KeyPath

VERSION = "1.0.0"
"""The version that ``.metadata`` gets. torch has written this one ever since it writes a version."""


def metadata_bytes(tensors: Mapping[str, SavedTensor], values: Mapping[str, Extent], paths: Mapping[str, KeyPath]) -> bytes:
    """Encode the file ``.metadata`` of a DCP folder. The file does not name the folder, which may be moved to its place later.

    Parameters
    ----------
    tensors, values
        The tensors with their chunks, and the places of the values, by DCP name.
    paths
        The keys in the state that lead to each name.
    """
    stored = {
        _index(name, chunk.offsets, hint): _extent(chunk.extent)
        for name, tensor in tensors.items()
        for hint, chunk in enumerate(tensor.chunks)
    }
    stored |= {_index(name, None, None): _extent(extent) for name, extent in values.items()}
    fields = {
        "state_dict_metadata": {
            **{name: _tensor(tensor) for name, tensor in tensors.items()},
            **{name: _dcp("BytesStorageMetadata", {}) for name in values},
        },
        "planner_data": dict(paths),
        "storage_data": stored,
        "version": VERSION,
    }
    # The id follows from the content, so that any number of processes write the same bytes.
    save_id = uuid.UUID(bytes=digest128(pickled(_dcp("Metadata", fields))))
    about: dict[str, Any] = {"checkpoint_id": None, "save_id": str(save_id), "load_id": None, "modules": []}
    return pickled(_dcp("Metadata", {**fields, "storage_meta": _dcp("StorageMeta", about)}))


def _dcp(name: str, state: Any) -> Instance:
    return Instance(Global(DCP_METADATA, name), state)


def _size(values: Ints) -> FunctionCall:
    return FunctionCall(Global("torch", "Size"), (values,))


def _tensor(tensor: SavedTensor) -> Instance:
    # The properties: dtype, layout, whether it requires a gradient, memory format (0 is contiguous), whether memory is pinned.
    dtype = Global("torch", str(tensor.dtype).removeprefix("torch."))
    layout = FunctionCall(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    memory_format = FunctionCall(Global(DCP_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    properties = _dcp("TensorProperties", (dtype, layout, False, memory_format, False))
    chunks = [
        _dcp("ChunkStorageMetadata", {"offsets": _size(chunk.offsets), "sizes": _size(chunk.lengths)}) for chunk in tensor.chunks
    ]
    return _dcp("TensorStorageMetadata", {"properties": properties, "size": _size(tensor.shape), "chunks": chunks})


def _index(name: str, offsets: Ints | None, hint: int | None) -> Instance:
    fields: dict[str, Any] = {"fqn": name, "index": hint}
    return _dcp("MetadataIndex", fields if offsets is None else {**fields, "offset": _size(offsets)})


def _extent(extent: Extent) -> Instance:
    fields = {"relative_path": extent.file, "offset": extent.offset, "length": extent.length}
    return Instance(Global(DCP_FILES, "_StorageInfo"), fields)
