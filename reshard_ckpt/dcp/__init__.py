"""The calls of `torch.distributed.checkpoint`, run by this library's engine and saved in its format.

``import reshard_ckpt.dcp as dcp`` takes the place of ``import torch.distributed.checkpoint as dcp``: `save`, `async_save` and
`load` have the same arguments and meaning. `ReshardWriter` and `ReshardReader` serve torch's own functions, for trainers that
pass a storage to them. The guide "Coming from DCP" lists the differences.
"""

from __future__ import annotations

from typing import Any

import torch.distributed.checkpoint as _torch_dcp

from . import format_utils
from .loading import load
from .reader import ReshardReader
from .saving import AsyncCheckpointerType, AsyncSaveResponse, async_save, save
from .writer import ReshardWriter

__all__ = [
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "ReshardReader",
    "ReshardWriter",
    "async_save",
    "format_utils",
    "load",
    "save",
]

_PASSED_ON = frozenset(
    {
        "BytesStorageMetadata",
        "CheckpointException",
        "ChunkStorageMetadata",
        "DefaultLoadPlanner",
        "DefaultSavePlanner",
        "FileSystemReader",
        "FileSystemWriter",
        "LoadPlan",
        "LoadPlanner",
        "Metadata",
        "ReadItem",
        "SavePlan",
        "SavePlanner",
        "StorageReader",
        "StorageWriter",
        "TensorStorageMetadata",
        "WriteItem",
        "state_dict",
        "stateful",
    }
)
"""Names of `torch.distributed.checkpoint` that trainers also use, and that ``reshard_ckpt.dcp`` passes on unchanged."""

_INSTEAD = {
    "save_state_dict": "torch has deprecated it; call save",
    "load_state_dict": "torch has deprecated it; call load",
    "load_sharded_optimizer_state_dict": "get_optimizer_state_dict gives a state dict that load loads into",
}


def __getattr__(name: str) -> Any:
    if name in _PASSED_ON:
        return getattr(_torch_dcp, name)
    why = _INSTEAD.get(name)
    if why is None and hasattr(_torch_dcp, name) and not name.startswith("_"):
        why = "import it from torch.distributed.checkpoint, if it is to work with torch's own functions"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}" + (f": {why}" if why else ""))
