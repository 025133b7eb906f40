"""veScale's DTensors and placements: those of 2024, of a class that is not torch's, and ``RaggedShard`` of its newer releases.

They are told by their attributes, because veScale may not be installed.
"""

from __future__ import annotations

from typing import Any

import torch

from ...plugins import Ints, LocalShard, Objects
from ...plugins.errors import LayoutError, UnsupportedError
from ...plugins.placements import AxisPlacement, dtensor_layout
from .names import NAME

_DTENSOR = ("placements", "device_mesh", "to_local")


def lower(tensor: Any) -> tuple[LocalShard, ...]:
    """Return a DTensor of veScale's own class as a `LocalShard`; an empty tuple for any other tensor."""
    if not all(hasattr(tensor, field) for field in _DTENSOR):
        return ()
    with torch.no_grad():
        local = tensor.to_local()
    layout = dtensor_layout(tensor, tuple(local.shape), "its DTensor")
    if layout.flat_start is not None:
        raise UnsupportedError(f"{tensor.placements} of a {type(tensor).__name__} cut it flattened; pass a FlatShard")
    return (LocalShard(local, layout.shape, pieces=[(box.local_offsets, box.offsets, box.lengths) for box in layout.boxes]),)


def recognize(axis: str, placement: Any, shape: Ints) -> AxisPlacement | None:
    """Convert a placement of veScale's classes to this library's; None for a placement of another class."""
    return _shard(axis, placement, shape) or _ragged(axis, placement, shape)


def _shard(axis: str, placement: Any, shape: Ints) -> AxisPlacement | None:
    """Convert veScale's own ``Shard(dim)`` and its ``InterleavedShard(dim, interleaved_size)`` of 2024; else None.

    An interleaved shard cuts each of `interleaved_size` equal parts of the dim, as tensor parallelism cuts fused weights.
    """
    kind, dim = type(placement), getattr(placement, "dim", None)
    is_shard = kind.__name__ == "Shard" and kind.__module__.partition(".")[0] == "vescale"
    parts = getattr(placement, "interleaved_size", None)
    if not is_shard and parts is None:
        return None
    if type(dim) is not int or not -len(shape) <= dim < len(shape):
        raise LayoutError(f"{placement!r} on axis {axis!r} cuts dim {dim} of shape {shape}, which it does not have")
    dim %= len(shape)
    if parts is None:
        return AxisPlacement(axis, "shard", dim)
    if type(parts) is not int or parts < 1 or shape[dim] % parts:
        raise LayoutError(f"{placement!r} on axis {axis!r} makes {parts} equal parts of dim {dim} of shape {shape}; correct it")
    return AxisPlacement(axis, "shard", dim, sections=(shape[dim] // parts,) * parts if parts > 1 else ())


def _ragged(axis: str, placement: Any, shape: Ints) -> AxisPlacement | None:
    """Convert veScale's ``RaggedShard(dims, local_units)``; None for any other placement.

    It is recognized by its attributes, because its class may be missing.
    """
    dims, units = getattr(placement, "dims", None), getattr(placement, "local_units", None)
    if dims is None or units is None:
        return None
    dims, units = tuple(dims), tuple(units)
    if dims != tuple(range(len(dims))) or len(dims) > len(shape):
        raise UnsupportedError(
            f"{placement!r} on axis {axis!r} flattens dims {dims} of shape {shape}, which are not the leading ones; pass a "
            "FlatShard or LocalShard that says what it holds"
        )
    if any(type(unit) is not int or unit < 0 for unit in units) or not any(units) or (not dims and sum(map(bool, units)) > 1):
        raise LayoutError(
            f"{placement!r} on axis {axis!r}: units are whole numbers, not all 0, and without dims one coordinate has all of "
            "them; correct the placement"
        )
    return AxisPlacement(axis, "ragged", len(dims) - 1 if dims else None, units)


OBJECTS = Objects(NAME, lower, recognize)
