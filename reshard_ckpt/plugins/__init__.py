"""All names that support for another library may import: formats, their catalogs, files of torch, shards, saves and loads.

A package adds a format by an entry point of the group `formats.source.GROUP` that names a `Format`, and tensors of its own
classes by one of the group `state.dtensor.GROUP` that names `Objects`. The page "Plugins" has a whole format in 60 lines.
Further names are in ten modules, by subject: `dcp`, `errors`, `groups`, `names`, `packages`, `placements`, `runs`, `states`,
`torchfile`, `trees`.
"""

from __future__ import annotations

from .. import checkpoint
from ..checkpoint.loading import load_wanted
from ..checkpoint.saving import begin_captured, save_captured
from ..core.catalog.model import Catalog
from ..core.catalog.specs import Ints, ValueKind
from ..format.dtypes import TORCH_DTYPES
from ..format.files import CATALOG_KEY
from ..format.values import is_plain
from ..formats.catalog_builder import CatalogBuilder, ForeignTensor
from ..formats.loaded_state import serve_state
from ..formats.parts import Part
from ..formats.source import BytesOf, Format, RawValue, Source
from ..state.dtensor import Objects
from ..state.shards import FlatShard, LocalShard
from ..storage import Storage, open_below, open_storage
from ..storage.protocol import read_range
from . import dcp, errors, groups, names, packages, placements, runs, states, torchfile, trees

__all__ = [
    "CATALOG_KEY",
    "TORCH_DTYPES",
    "BytesOf",
    "Catalog",
    "CatalogBuilder",
    "FlatShard",
    "ForeignTensor",
    "Format",
    "Ints",
    "LocalShard",
    "Objects",
    "Part",
    "RawValue",
    "Source",
    "Storage",
    "ValueKind",
    "begin_captured",
    "checkpoint",
    "dcp",
    "errors",
    "groups",
    "is_plain",
    "load_wanted",
    "names",
    "open_below",
    "open_storage",
    "packages",
    "placements",
    "read_range",
    "runs",
    "save_captured",
    "serve_state",
    "states",
    "torchfile",
    "trees",
]
