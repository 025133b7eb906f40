"""Trees of dicts, lists and tuples: flatten one into paths and leaves, build one from these, copy one with other leaves."""

from __future__ import annotations

from ..core.trees import children, children_of_dict, flatten, leaves, map_tree, put, unflatten

__all__ = ["children", "children_of_dict", "flatten", "leaves", "map_tree", "put", "unflatten"]
