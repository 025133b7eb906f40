"""All names that support for another library may import: formats, their catalogs, files of torch, shards, saves and loads.

A package adds a format by an entry point of the group ``reshard_ckpt.formats`` that names a `Format`. The page "Plugins" has a
whole format in 60 lines.
"""

from __future__ import annotations

from .checkpoint.loading import load_wanted
from .checkpoint.saving import begin_captured, save_captured
from .core.catalog.model import Catalog
from .core.catalog.specs import StateLink, ValueKind
from .errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptError,
    LayoutError,
    MismatchError,
    NameCollisionError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from .formats.catalog_builder import CatalogBuilder
from .formats.protocol import BytesOf, Format, RawValue, Source, open_located
from .state.shards import FlatShard, LocalShard
from .storage import Storage
from .storage.protocol import read_range
from .torchfile.archive import FileReader, TorchFile
from .torchfile.object_writer import object_bytes
from .torchfile.tensors import PickledTensor

__all__ = [
    "BytesOf",
    "Catalog",
    "CatalogBuilder",
    "CheckpointError",
    "CheckpointNotFound",
    "CorruptError",
    "FileReader",
    "FlatShard",
    "Format",
    "LayoutError",
    "LocalShard",
    "MismatchError",
    "NameCollisionError",
    "PickledTensor",
    "RawValue",
    "Source",
    "StateLink",
    "Storage",
    "StorageError",
    "TorchFile",
    "UnsupportedError",
    "UsageError",
    "ValueKind",
    "begin_captured",
    "load_wanted",
    "object_bytes",
    "open_located",
    "read_range",
    "save_captured",
]
