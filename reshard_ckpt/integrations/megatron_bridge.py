"""Megatron-Bridge saves and loads through this library after `install`."""

from __future__ import annotations

from ..families.megatron.bridge import install, uninstall

__all__ = ["install", "uninstall"]
