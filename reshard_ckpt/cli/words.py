"""How are numbers, shapes and placements written for people, and read from what people type? The same everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..core.catalog.placements import spell_axis
from ..core.catalog.specs import AxisPlacement, Mesh
from ..core.words import plural as plural
from ..errors import UsageError


def refuse_memory(dst: str) -> None:
    """Refuse to write where nothing stays.

    Raises
    ------
    UsageError
        The destination is the memory of this process.
    """
    if dst.lower().startswith("memory:"):
        raise UsageError(f"{dst}: memory ends with this command; pass a folder")


def short(value: object, limit: int = 60) -> str:
    """A value as Python writes it, on one line, cut where it is long.

    >>> short([1, 2]), short("x" * 100, 8)
    ('[1, 2]', "'xxxxxx…")
    """
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shape(lengths: Sequence[int]) -> str:
    """A shape; that of a scalar is empty.

    >>> shape((4, 3)), shape(())
    ('4 × 3', 'scalar')
    """
    return " × ".join(map(str, lengths)) if lengths else "scalar"


def parse_mesh(option: str, text: str) -> dict[str, int]:
    """A mesh as people type it, outermost axis first.

    >>> parse_mesh("--mesh", "pp=2,tp=4")
    {'pp': 2, 'tp': 4}

    Raises
    ------
    UsageError
        It is none.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (word.strip() for word in part.partition("="))
        if not axis.isidentifier() or not size.isdecimal() or int(size) < 1:
            raise UsageError(f"{option} {text!r} is no mesh: write axes and their sizes, outermost first, as in dp=2,tp=4")
        if axis in axes:
            raise UsageError(f"{option} {text!r}: {axis!r} is given twice; an axis has one size")
        axes[axis] = int(size)
    return axes


def parse_pairs(option: str, texts: Sequence[str] | None) -> dict[str, str] | None:
    """``OLD=NEW`` of an option that may be given several times; of several equals signs the last counts, as names may hold some.

    >>> parse_pairs("--rename", ["model=weights", "a=b=c"])
    {'model': 'weights', 'a=b': 'c'}

    Raises
    ------
    UsageError
        There is no equals sign, or nothing on one side of it, or one thing on the left twice.
    """
    pairs: dict[str, str] = {}
    for text in texts or ():
        left, sign, right = text.strip().rpartition("=")
        if not sign or not left or not right:
            raise UsageError(f"{option} {text!r}: wanted two parts with = between them")
        if left in pairs:
            raise UsageError(f"{option}: {left!r} is given twice; write one of them")
        pairs[left] = right
    return pairs or None


def parse_numbers(option: str, text: str) -> list[int]:
    """Numbers with commas between them.

    >>> parse_numbers("--stages", "8, 16")
    [8, 16]

    Raises
    ------
    UsageError
        One of them is none.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"{option} {text!r}: wanted numbers with commas between them, as in 8,16,24")
    return [int(part) for part in parts]


def mesh(of: Mesh | None) -> str:
    """A mesh, outermost axis first.

    >>> mesh(Mesh(("pp", "tp"), (2, 4)))
    'pp=2, tp=4'
    """
    if of is None:
        return "unknown"
    return ", ".join(f"{axis}={size}" for axis, size in zip(of.axes, of.sizes, strict=True)) or "one rank"


def placement(of: Sequence[AxisPlacement] | None) -> str:
    """Spell a placement axis by axis, as torch names placements; ``on`` lists the coordinates that hold it.

    Axes that cut one dim do so in the order that is shown; none is shown where the inner ones cut first, as FSDP2 does over tp.

    >>> placement([AxisPlacement("pp", "resident", coords=(0, 1, 3)), AxisPlacement("tp", "shard", dim=0)])
    'pp=on(0-1,3) tp=shard(0)'
    >>> placement([AxisPlacement("dp", "shard", 0, turn=0), AxisPlacement("tp", "shard", 0, turn=1, sections=(8, 4))])
    'dp=shard(0) tp=shard(0; 8+4) order=dp,tp'
    """
    return "" if of is None else " ".join([*map(spell_axis, of), *_order(of)])


def _order(of: Sequence[AxisPlacement]) -> Iterator[str]:
    by_dim: dict[int | None, list[AxisPlacement]] = {}
    for p in reversed(of):
        if p.turn is not None:
            by_dim.setdefault(p.dim, []).append(p)
    for inner_first in by_dim.values():
        first_to_last = sorted(inner_first, key=lambda p: p.turn or 0)
        if first_to_last != inner_first:
            yield f"order={','.join(p.axis for p in first_to_last)}"
