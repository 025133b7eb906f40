"""Trees of dicts, lists and tuples: flatten one into paths and leaves, build one from these, copy one with other leaves."""

from __future__ import annotations

from ..core.trees import flatten, leaves, map_tree, put, unflatten

__all__ = ["flatten", "leaves", "map_tree", "put", "unflatten"]
