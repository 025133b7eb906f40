"""The state that a user passes to a save or load, as plain tensors and values that the engine can write and read."""

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
