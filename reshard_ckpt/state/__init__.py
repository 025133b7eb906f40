"""The state that a user passes, as plain data that the engine can save and load."""

from __future__ import annotations

from ..engine.common.tensor_bytes import LocalTensor
from .capture import Captured, Target, capture, prepare_load
from .shards import FlatShard, LocalShard, PerRank, PerRankValues

__all__ = [
    "Captured",
    "FlatShard",
    "LocalShard",
    "LocalTensor",
    "PerRank",
    "PerRankValues",
    "Target",
    "capture",
    "prepare_load",
]
