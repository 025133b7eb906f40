"""DeepSpeed's engine saves and loads through this library: `attach` it to one, or `install` it for all that are configured so."""

from __future__ import annotations

from ..families.deepspeed.calls import attach, detach, install

__all__ = ["attach", "detach", "install"]
