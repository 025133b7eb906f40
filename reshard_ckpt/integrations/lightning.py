"""Lightning's ``Trainer`` and Fabric save and load through this library: strategies beside its own, made on first use."""

from __future__ import annotations

from typing import Any

from ..families.lightning.saving import newest
from ..families.lightning.strategies import STRATEGIES, install, strategy

__all__ = ["install", "newest", *STRATEGIES]


def __getattr__(name: str) -> Any:
    if name in STRATEGIES:
        return strategy(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
