"""Tables of any length: rich draws them on a terminal; elsewhere they are plain text.

If the screen is too narrow for a table:

1. Cells fold between words, and paths behind a slash, so that no number and no file name is broken. Names fold at dots.
2. If the longest words are still too wide, each row becomes a paragraph: its name, and below it the other cells with their
   headings. Only a tree stays a table, and its cells are cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from ..errors import visible

MAX_DRAWN = 300
"""The most rows of a table that rich draws and folds, as each takes milliseconds. Longer tables are printed as plain text."""

SHORT, MIN_NAME = 12, 16
"""Widths in characters: columns shrink below `SHORT` last, and the column of names does not shrink below `MIN_NAME`."""

_GUIDES = re.compile("[│ ]*(?:[├└]─ )?")
_WORD = re.compile(r"[^\s/]*/+|[^\s/]+")


class Preview(str):
    """A cell of a table that is cut, not folded, if its column is narrower."""


def _guide(name: str) -> str:
    """Return the tree's vertical lines that lead down to the row of `name`: they indent a folded name in the row above."""
    found = _GUIDES.match(name)
    return found[0].translate(str.maketrans("├└─", "││ ")) if found else ""


def _folded(name: str, width: int, guide: str, height: int) -> str:
    """Fold a name to lines of at most `width` columns; pad it to `height` lines with the tree's vertical lines (`guide`)."""
    indent = next((lead for lead in (f"{guide}  ", guide) if len(lead) <= width - MIN_NAME // 2), "")
    lines = []
    # Break at the last blank, dot, slash or underscore in the second half of the line, or else at the edge.
    while cell_len(name) > width:
        end = next(end for end in range(width, 0, -1) if cell_len(name[:end]) <= width)
        ends = (name.rfind(between, len(indent) + 1, end) + 1 for between in (" ", ".", "/", "_"))
        end = next((at for at in ends if at > width // 2), end)
        lines.append(name[:end].rstrip())
        name = indent + name[end:]
    return "\n".join([*lines, name, *[guide] * (height - len(lines) - 1)])


def _wrapped(cell: str, width: int) -> list[str]:
    """Wrap a cell between words and behind slashes; cut lines that are still too wide, and cut a preview to one line.

    >>> _wrapped("4096 × 64", 6), _wrapped("run/rank00000-0.safetensors", 25), _wrapped("shard(0)", 6)
    (['4096 ×', '64'], ['run/', 'rank00000-0.safetensors'], ['shard…'])
    """
    lines = [""]
    for word in [cell] if isinstance(cell, Preview) else _words(cell):
        joined = lines[-1] + word
        if lines[-1] and cell_len(joined.rstrip()) > width:
            lines.append(word)
        else:
            lines[-1] = joined
    return [line.rstrip() if cell_len(line.rstrip()) <= width else set_cell_size(line, width - 1) + "…" for line in lines]


def _words(cell: str) -> Iterator[str]:
    """Yield the words of a table's cell, each with the blanks that follow it."""
    ends = [found.start() for found in _WORD.finditer(cell)] + [len(cell)]
    yield from (cell[a:b] for a, b in pairwise(ends))


class Columns:
    """A table: rows under headings. A heading that begins with ``>`` stands over numbers, aligned right. All may be empty."""

    def __init__(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.headings = [heading.removeprefix(">") for heading in headings]
        self.right = [heading.startswith(">") for heading in headings]
        # Each cell on one line: newlines and tabs are escaped.
        self.rows = [[type(cell)(visible(cell).replace("\n", "\\n").replace("\t", "\\t")) for cell in row] for row in rows]

    @property
    def is_drawn(self) -> bool:
        """Whether rich may draw the table on a terminal. It may not if the table has too many rows."""
        return len(self.rows) <= MAX_DRAWN

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names, widths = self._name_column, self._widths(options.max_width)
        if sum(widths) + 2 * (len(widths) - 1) > options.max_width and not self._is_tree:
            yield Text("\n").join(Text(line) for row in self.rows for line in self._paragraph(row, options.max_width))
            return
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False, show_header=any(self.headings))
        for heading, right, width in zip(self.headings, self.right, widths, strict=True):
            table.add_column(heading, justify="right" if right else "left", width=width, overflow="fold")
        for row, below in pairwise([*self.rows, [""] * len(self.headings)]):
            cells = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
            cells[names] = [_folded(row[names], widths[names], _guide(below[names]), max(map(len, cells)))]
            table.add_row(*(Text("\n".join(lines)) for lines in cells))
        yield table

    def _paragraph(self, row: Sequence[str], room: int) -> Iterator[str]:
        """Yield the lines of a row that is written as a paragraph: the cells up to its name, then the others with headings."""
        first = self._name_column + 1
        parts = (
            cell if heading == "name" else f"{heading} {cell}" for heading, cell in zip(self.headings, row[:first], strict=False)
        )
        yield from _wrapped(" ".join(parts).strip(), room)
        lines = [""]
        for heading, cell in zip(self.headings[first:], row[first:], strict=True):
            part = f"{heading} {cell}".strip() if cell else ""
            if lines[-1] and cell_len(lines[-1]) + cell_len(part) + 4 > room:
                lines.append("")
            lines[-1] = f"{lines[-1]}  {part}".strip()
        yield from (f"  {part}" for line in lines if line for part in _wrapped(line, room - 2))

    @property
    def _is_tree(self) -> bool:
        return any(row[self._name_column].startswith(("├", "└")) for row in self.rows)

    @property
    def _name_column(self) -> int:
        """The index of a table's column of names: the first column with a heading, or 0."""
        return next((i for i, heading in enumerate(self.headings) if heading), 0)

    def _widths(self, room: int) -> list[int]:
        """Compute the column widths. On a narrow screen the other columns shrink before the names do, the widest first.

        The columns shrink in two rounds, until the table fits: first down to `SHORT` and twice `MIN_NAME`, then down to their
        longest word and `MIN_NAME`. A tree shrinks further, because it is not turned into paragraphs.
        """
        columns = [list(column) for column in zip(self.headings, *self.rows, strict=True)]
        widths, names = [max(map(cell_len, column)) for column in columns], self._name_column
        longest = [
            max(cell_len(word.rstrip()) for cell in column if not isinstance(cell, Preview) for word in [*_words(cell), ""])
            for column in columns
        ]
        short = [max(word, min(width, SHORT)) for word, width in zip(longest, widths, strict=True)]
        others = [i for i, right in enumerate(self.right) if not right and i != names]
        excess = sum(widths) + 2 * (len(widths) - 1) - room

        def shrink(i: int, floor: int) -> None:
            nonlocal excess
            fewer = max(0, min(excess, widths[i] - floor))
            widths[i] -= fewer
            excess -= fewer

        for floors, whole_name in ((short, 2 * MIN_NAME), (longest, MIN_NAME)):
            while excess > 0 and (wide := [i for i in others if widths[i] > floors[i]]):
                widest = max(wide, key=lambda i: widths[i])
                shrink(widest, widths[widest] - 1)
            shrink(names, whole_name)
        for i in others if self._is_tree else ():  # the cells of a tree are cut to the width that is left
            shrink(i, SHORT // 2)
        return widths

    def text(self) -> str:
        """Format the whole table as plain text, with one line for each row."""
        rows = [self.headings, *self.rows] if any(self.headings) else self.rows
        widths = [max(map(cell_len, column), default=0) for column in zip(*rows, strict=True)]
        return "\n".join(self._line(row, widths) for row in rows)

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        blanks = (" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
        cells = (f"{b}{c}" if right else f"{c}{b}" for b, c, right in zip(blanks, row, self.right, strict=True))
        return "  ".join(cells).rstrip()
