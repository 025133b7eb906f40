"""How tensors lie on the axes of a mesh."""

from __future__ import annotations

from ..core.catalog.specs import AxisPlacement
from ..state.dtensor import dtensor_layout

__all__ = ["AxisPlacement", "dtensor_layout"]
