"""The calls of ``megatron.core.dist_checkpointing``, with this library's engine and format.

``from reshard_ckpt import megatron as dist_checkpointing`` replaces ``from megatron.core import dist_checkpointing``: `save`,
`load` and functions that describe a checkpoint have the same arguments and meaning; any other name is Megatron's own. `save` and
`load` also take optimizer objects in the tree: their shards are saved without a gather, and filled in place. `SaveStrategy` and
`LoadStrategy` are for Megatron's own functions. `add_rule` says how tensors in files of single ranks were cut.
`docs/megatron.md` has the details.

This module does not import megatron-core; it is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..families.megatron.calls import (
    async_save,
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    save,
)
from ..families.megatron.places import add_rule

if TYPE_CHECKING:
    LoadStrategy: type
    SaveStrategy: type

__all__ = [
    "LoadStrategy",
    "SaveStrategy",
    "add_rule",
    "async_save",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "save",
]


def __getattr__(name: str) -> Any:
    if name in ("SaveStrategy", "LoadStrategy"):
        strategies = importlib.import_module("..families.megatron.strategies", __name__)
        return strategies.save_strategy() if name == "SaveStrategy" else strategies.load_strategy()
    if not name.startswith("_"):
        try:
            return getattr(importlib.import_module("megatron.core.dist_checkpointing"), name)
        except ImportError:
            pass
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
