"""Checkpoints of distributed PyTorch training that any other layout can load.

>>> import torch
>>> from reshard_ckpt import checkpoint
>>> checkpoint.save("memory://readme", {"model": torch.nn.Linear(2, 3), "extra": {"step": 7}})
>>> sorted(checkpoint.read("memory://readme"))
['extra.step', 'model.bias', 'model.weight']
"""

from __future__ import annotations

from . import checkpoint, errors
from .adapters.shards import FlatShard, LocalShard

__all__ = ["FlatShard", "LocalShard", "checkpoint", "errors"]
__version__ = "0.1.0.dev0"
