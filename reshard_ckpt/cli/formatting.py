"""Numbers, shapes, meshes and placements as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.catalog.name_tree import spans
from ..core.catalog.specs import AxisPlacement, Mesh
from ..core.words import plural as plural


def short(value: object, limit: int = 60) -> str:
    """Write a value as Python does, on one line, cut where it is long.

    >>> short([1, 2]), short("x" * 100, 8)
    ('[1, 2]', "'xxxxxx…")
    """
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shape(lengths: Sequence[int]) -> str:
    """Write a shape; that of a scalar is empty.

    >>> shape((4, 3)), shape(())
    ('4 × 3', 'scalar')
    """
    return " × ".join(map(str, lengths)) if lengths else "scalar"


def mesh(of: Mesh | None) -> str:
    """Write a mesh, outermost axis first.

    >>> mesh(Mesh(("pp", "tp"), (2, 4)))
    'pp=2, tp=4'
    """
    if of is None:
        return "unknown"
    return ", ".join(f"{axis}={size}" for axis, size in zip(of.axes, of.sizes, strict=True)) or "one rank"


def placement(of: Sequence[AxisPlacement] | None) -> str:
    """Write a placement axis by axis, as torch names placements; ``on`` lists the coordinates that hold it.

    >>> placement([AxisPlacement("pp", "resident", coords=(0, 1, 3)), AxisPlacement("tp", "shard", dim=0)])
    'pp=on(0-1,3) tp=shard(0)'
    """
    return "" if of is None else " ".join(map(_axis, of))


def _axis(of: AxisPlacement) -> str:
    if of.kind == "shard":
        return f"{of.axis}=shard({of.dim})"
    return f"{of.axis}=on({spans(of.coords)})" if of.kind == "resident" else f"{of.axis}={of.kind}"
