"""The calls of ``megatron.core.dist_checkpointing``, by this library's engine and in its format.

``from reshard_ckpt import megatron as dist_checkpointing`` takes the place of ``from megatron.core import dist_checkpointing``:
`save`, `load` and the functions that look into a checkpoint have the same arguments and meaning, and any other name is Megatron's
own. In the tree that `save` and `load` are given, an optimizer may stand as itself: it is saved as its own shards, with nothing
gathered, and filled in place. `SaveStrategy` and `LoadStrategy` serve Megatron's own functions. `add_rule` says how tensors were
cut that lie in files of single ranks. `docs/megatron.md` has the whole.

megatron-core is imported when it is first needed, and not by this module.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..families.megatron.loading import (
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
)
from ..families.megatron.rules import add_rule
from ..families.megatron.saving import async_save, save

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
        torch_dist = importlib.import_module("..families.megatron.torch_dist", __name__)
        return torch_dist.save_strategy() if name == "SaveStrategy" else torch_dist.load_strategy()
    if not name.startswith("_"):
        try:
            return getattr(importlib.import_module("megatron.core.dist_checkpointing"), name)
        except ImportError:
            pass
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
