"""Accelerate and the ``Trainer`` of transformers save and load FSDP modules through this library after `install`."""

from __future__ import annotations

from ..families.accelerate.background import background_saves
from ..families.accelerate.calls import install, uninstall

__all__ = ["background_saves", "install", "uninstall"]
