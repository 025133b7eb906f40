"""How tensors lie on the axes of a mesh, and in memory."""

from __future__ import annotations

from ..core.catalog.specs import AxisPlacement, row_major_strides
from ..formats.parts import parts_of_box
from ..state.dtensor import dtensor_layout

__all__ = ["AxisPlacement", "dtensor_layout", "parts_of_box", "row_major_strides"]
