"""Ray Train registers checkpoints that its workers save through this library, once they are committed."""

from __future__ import annotations

from ..families.ray.calls import path_of, upload

__all__ = ["path_of", "upload"]
