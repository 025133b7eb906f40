"""DeepSpeed's engine saves and loads through this library: `attach` it to one engine, or `install` it for many."""

from __future__ import annotations

from ..families.deepspeed.calls import attach, detach, install

__all__ = ["attach", "detach", "install"]
