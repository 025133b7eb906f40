"""Checkpoints of Megatron-Core: read as they are, and written."""

from __future__ import annotations

from .format import MegatronFormat

__all__ = ["MegatronFormat"]
