"""How is a table printed, of three lines or of a hundred thousand? By rich for people who look at it, as plain text otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

MAX_DRAWN = 300
"""Rows that rich draws, folding cells that are too wide for the screen; it takes milliseconds for each."""


_HIDDEN = {code: repr(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def visible(text: str) -> str:
    r"""Text without what would steer a terminal: names come from files, and those from anywhere.

    >>> visible("\x1b[2Jmodel")
    '\\x1b[2Jmodel'
    """
    return text.translate(_HIDDEN)


class Columns:
    """Rows under headings; a heading after ``>`` stands over numbers, flush right. Without headings, just the rows."""

    def __init__(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.headings = [heading.removeprefix(">") for heading in headings]
        self.right = [heading.startswith(">") for heading in headings]
        self.rows = [[visible(cell).replace("\n", "\\n").replace("\t", "\\t") for cell in row] for row in rows]

    @property
    def is_drawn(self) -> bool:
        """Whether rich may draw it, on a screen."""
        return len(self.rows) <= MAX_DRAWN

    def __rich__(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False, show_header=any(self.headings))
        for heading, right in zip(self.headings, self.right, strict=True):
            table.add_column(heading, justify="right" if right else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table

    def text(self) -> str:
        """Every cell whole, on one line a row."""
        rows = [self.headings, *self.rows] if any(self.headings) else self.rows
        widths = [max(map(cell_len, column), default=0) for column in zip(*rows, strict=True)]
        return "\n".join(self._line(row, widths) for row in rows)

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        blanks = (" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
        cells = (f"{b}{c}" if right else f"{c}{b}" for b, c, right in zip(blanks, row, self.right, strict=True))
        return "  ".join(cells).rstrip()
