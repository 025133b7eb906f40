"""Numbers, shapes, meshes and placements as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..core.catalog.placements import spell_axis
from ..core.catalog.specs import AxisPlacement, Mesh
from ..core.report import plural as plural


def short(value: object, limit: int = 60) -> str:
    """Write a value as Python does, on one line, cut if it is long.

    >>> short([1, 2]), short("x" * 100, 8)
    ('[1, 2]', "'xxxxxx…")
    """
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shape(lengths: Sequence[int]) -> str:
    """Write a shape as text; that of a scalar is ``scalar``.

    >>> shape((4, 3)), shape(())
    ('4 × 3', 'scalar')
    """
    return " × ".join(map(str, lengths)) if lengths else "scalar"


def mesh(of: Mesh | None) -> str:
    """Write a mesh as text, outermost axis first.

    >>> mesh(Mesh(("pp", "tp"), (2, 4)))
    'pp=2, tp=4'
    """
    return "unknown" if of is None else str(of) or "one rank"


def placement(of: Sequence[AxisPlacement] | None) -> str:
    """Write a placement as text, axis by axis, in torch's terms; ``on`` lists the coordinates that hold the tensor.

    If several axes cut one dim, ``order`` lists them from first to last, unless the inner ones cut first, as in FSDP2 over tp.

    >>> placement([AxisPlacement("pp", "resident", coords=(0, 1, 3)), AxisPlacement("tp", "shard", dim=0)])
    'pp=on(0-1,3) tp=shard(0)'
    >>> placement([AxisPlacement("dp", "shard", 0, turn=0), AxisPlacement("tp", "shard", 0, turn=1, sections=(8, 4))])
    'dp=shard(0) tp=shard(0; 8+4) order=dp,tp'
    """
    return "" if of is None else " ".join([*map(spell_axis, of), *_order(of)])


def _order(of: Sequence[AxisPlacement]) -> Iterator[str]:
    """Yield ``order=…`` for each dim that several axes cut, unless the inner axes cut first."""
    by_dim: dict[int | None, list[AxisPlacement]] = {}
    for p in reversed(of):
        if p.turn is not None:
            by_dim.setdefault(p.dim, []).append(p)
    for inner_first in by_dim.values():
        first_to_last = sorted(inner_first, key=lambda p: p.turn or 0)
        if first_to_last != inner_first:
            yield f"order={','.join(p.axis for p in first_to_last)}"
