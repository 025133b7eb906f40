"""The calls of ``vescale.checkpoint``, on this library.

In place of ``import vescale.checkpoint`` write ``import reshard_ckpt.vescale``. veScale itself is not imported.
"""

from __future__ import annotations

from ..families.vescale.calls import load, save

__all__ = ["load", "save"]
