"""Folders of veScale's checkpoints of 2024: read as they are."""

from __future__ import annotations

from .format import VeScaleFormat

__all__ = ["VeScaleFormat"]
