"""What a user passes, as plain data that the engine can save and load."""

from __future__ import annotations

from .entries import Captured, Entry, Target
from .shards import FlatShard, LocalShard, PerRank, PerRankValues
from .state import capture, prepare_load

__all__ = [
    "Captured",
    "Entry",
    "FlatShard",
    "LocalShard",
    "PerRank",
    "PerRankValues",
    "Target",
    "capture",
    "prepare_load",
]
