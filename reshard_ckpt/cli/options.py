"""Options that several commands take, under the same names, and parsers for their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from ..errors import UsageError

Path = Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint: a folder, or a file of another format.")]
Src = Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint of any format that can be opened.")]
TimeoutS = Annotated[float, typer.Option(metavar="SECONDS", help="Under torchrun: how long processes wait for each other.")]
Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Threads; 8 MiB of memory each.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]

Select = Annotated[
    list[str] | None,
    typer.Option("--select", metavar="NAME", help="Take only this: a name, with everything below it, or a pattern."),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="NAME", help="Leave this out: a name, with everything below it, or a pattern."),
]
Rename = Annotated[
    list[str] | None, typer.Option("--rename", metavar="OLD=NEW", help="Give a name, and everything below it, another name.")
]
Cast = Annotated[
    list[str] | None, typer.Option("--cast", metavar="NAME=DTYPE", help="Convert floating-point tensors: 'model.*=bfloat16'.")
]


def refuse_memory(dst: str) -> None:
    """Refuse a ``memory://`` destination, because it ends with this command.

    Raises
    ------
    UsageError
        The destination is the memory of this process.
    """
    if dst.lower().startswith("memory:"):
        raise UsageError(f"{dst}: memory ends with this command; pass a folder")


def parse_mesh(option: str, text: str) -> dict[str, int]:
    """Parse a mesh, outermost axis first.

    >>> parse_mesh("--mesh", "pp=2,tp=4")
    {'pp': 2, 'tp': 4}

    Raises
    ------
    UsageError
        The text is not a mesh.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (word.strip() for word in part.partition("="))
        if not axis.isidentifier() or not size.isdecimal() or int(size) < 1:
            raise UsageError(f"{option} {text!r} is not a mesh: write axes and their sizes, outermost first, as in dp=2,tp=4")
        if axis in axes:
            raise UsageError(f"{option} {text!r}: {axis!r} is given twice; an axis has one size")
        axes[axis] = int(size)
    return axes


def parse_pairs(option: str, texts: Sequence[str] | None) -> dict[str, str] | None:
    """Parse ``OLD=NEW`` options; if a text has several equals signs, the last one counts, because names may contain some.

    >>> parse_pairs("--rename", ["model=weights", "a=b=c"])
    {'model': 'weights', 'a=b': 'c'}

    Raises
    ------
    UsageError
        A text has no equals sign, or nothing on one side of it, or two texts have the same left side.
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
    """Parse numbers with commas between them.

    >>> parse_numbers("--stages", "8, 16")
    [8, 16]

    Raises
    ------
    UsageError
        A part is not a number.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"{option} {text!r}: wanted numbers with commas between them, as in 8,16,24")
    return [int(part) for part in parts]
