"""verl's FSDP checkpoint manager saves and loads through this library after `install`."""

from __future__ import annotations

from ..families.verl.calls import install, uninstall

__all__ = ["install", "uninstall"]
