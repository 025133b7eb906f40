"""How are numbers, shapes and placements written for people? The same everywhere."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.state import AxisPlacement, Mesh

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def num_bytes(count: int) -> str:
    """A size, to three digits or so.

    >>> num_bytes(512), num_bytes(1536), num_bytes(20 << 30)
    ('512 B', '1.5 KiB', '20.0 GiB')
    """
    size, unit = float(count), 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{size:.1f} {UNITS[unit]}"


def plural(count: int, noun: str) -> str:
    """A number and its noun.

    >>> plural(1, "file"), plural(1200, "file")
    ('1 file', '1,200 files')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shape(lengths: Sequence[int]) -> str:
    """A shape; that of a scalar is empty.

    >>> shape((4, 3)), shape(())
    ('4 × 3', 'scalar')
    """
    return " × ".join(map(str, lengths)) if lengths else "scalar"


def mesh(of: Mesh | None) -> str:
    """A mesh, outermost axis first.

    >>> mesh(Mesh(("pp", "tp"), (2, 4)))
    'pp=2, tp=4'
    """
    return "unknown" if of is None else ", ".join(f"{axis}={size}" for axis, size in zip(of.axes, of.sizes, strict=True))


def placement(of: Sequence[AxisPlacement] | None) -> str:
    """Axis by axis, as torch names placements; ``on`` lists the coordinates that hold it.

    >>> placement([AxisPlacement("pp", "resident", coords=(0, 1, 3)), AxisPlacement("tp", "shard", dim=0)])
    'pp=on(0-1,3) tp=shard(0)'
    """
    return "" if of is None else " ".join(map(_axis, of))


def _axis(of: AxisPlacement) -> str:
    if of.kind == "shard":
        return f"{of.axis}=shard({of.dim})"
    return f"{of.axis}=on({spans(of.coords)})" if of.kind == "resident" else f"{of.axis}={of.kind}"


def spans(numbers: Sequence[int]) -> str:
    """Rising numbers, runs of them from first to last.

    >>> spans([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
