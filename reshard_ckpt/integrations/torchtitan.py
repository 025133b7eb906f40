"""torchtitan's Trainer saves and loads through this library: give it a ``ReshardCheckpointManager.Config``."""

from __future__ import annotations

from typing import Any

__all__ = ["ReshardCheckpointManager"]  # noqa: F822


def __getattr__(name: str) -> Any:
    # The class is one of torchtitan's, which is imported only when the class is used.
    if name in __all__:
        from ..families.torchtitan import manager

        return getattr(manager, name)
    raise AttributeError(name)
