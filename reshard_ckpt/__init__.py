"""Checkpoints of distributed PyTorch training, which load into any other layout: world size, mesh or way of sharding.

>>> import torch
>>> from reshard_ckpt import checkpoint
>>> _ = checkpoint.save("memory://readme", {"model": torch.nn.Linear(2, 3), "extra": {"step": 7}})
>>> sorted(checkpoint.read("memory://readme"))
['extra.step', 'model.bias', 'model.weight']
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import errors

if TYPE_CHECKING:
    from . import checkpoint
    from .state.registered import register_placement
    from .state.shards import FlatShard, LocalShard, Shards

__all__ = ["FlatShard", "LocalShard", "Shards", "checkpoint", "errors", "register_placement"]
__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> Any:
    # Importing torch takes seconds: a command line that prints its help, or a mistake in it, must not wait for that.
    if name == "checkpoint":
        return importlib.import_module(".checkpoint", __name__)
    if name in {"FlatShard", "LocalShard", "Shards"}:
        return getattr(importlib.import_module(".state.shards", __name__), name)
    if name == "register_placement":
        return importlib.import_module(".state.registered", __name__).register_placement
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
