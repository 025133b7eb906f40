"""Folders of ByteCheckpoint: read as they are."""

from __future__ import annotations

from .format import ByteCheckpointFormat

__all__ = ["ByteCheckpointFormat"]
