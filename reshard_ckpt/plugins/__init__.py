"""All names that support for another library may import: formats, their catalogs, files of torch, shards, saves and loads.

A package adds a format by an entry point of the group ``reshard_ckpt.formats`` that names a `Format`. The page "Plugins" has a
whole format in 60 lines. Five modules have what belongs together: `dcp`, `errors`, `groups`,
`torchfile` and `trees`.
"""

from __future__ import annotations

from ..checkpoint.loading import load_wanted
from ..checkpoint.saving import begin_captured, save_captured
from ..core.catalog.model import Catalog
from ..core.catalog.specs import Ints, StateLink, ValueKind
from ..core.catalog.wrappers import unwrapped, unwrapped_keys
from ..formats.catalog_builder import CatalogBuilder, ForeignTensor
from ..formats.loaded_state import serve_state
from ..formats.parts import Part
from ..formats.protocol import BytesOf, Format, RawValue, Source, open_located
from ..state.shards import FlatShard, LocalShard
from ..storage import Storage
from ..storage.protocol import read_range
from . import dcp, errors, groups, torchfile, trees

__all__ = [
    "BytesOf",
    "Catalog",
    "CatalogBuilder",
    "FlatShard",
    "ForeignTensor",
    "Format",
    "Ints",
    "LocalShard",
    "Part",
    "RawValue",
    "Source",
    "StateLink",
    "Storage",
    "ValueKind",
    "begin_captured",
    "dcp",
    "errors",
    "groups",
    "load_wanted",
    "open_located",
    "read_range",
    "save_captured",
    "serve_state",
    "torchfile",
    "trees",
    "unwrapped",
    "unwrapped_keys",
]
