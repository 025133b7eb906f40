"""The calls of ``vescale.checkpoint``, with this library's engine and format.

Write ``import reshard_ckpt.vescale`` in the place of ``import vescale.checkpoint``. This module does not import veScale.
"""

from __future__ import annotations

from ..families.vescale.calls import load, save

__all__ = ["load", "save"]
