"""Tables of any length: drawn by rich on a terminal, plain text elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

MAX_DRAWN = 300
"""Rows that rich draws, folding cells that are too wide for the screen; it takes milliseconds for each."""

MAX_WORD, MIN_WIDTH, MIN_NAME = 12, 6, 16
"""How narrow a column may get: its longest word, up to the first; if that is not enough, the second; of names, the third."""

_GUIDES = re.compile("[│ ]*(?:[├└]─ )?")
_UNSHOWN = (*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000))
_HIDDEN = {code: repr(chr(code))[1:-1] for code in _UNSHOWN if chr(code) not in "\n\t"}


def visible(text: str) -> str:
    r"""Escape what would steer a terminal, or could not be written there: names come from anywhere.

    >>> visible("\x1b[2Jmodel")
    '\\x1b[2Jmodel'
    """
    return text.translate(_HIDDEN)


def _guide(name: str) -> str:
    """Return the guides of a tree that pass above a line of it."""
    found = _GUIDES.match(name)
    return found[0].translate(str.maketrans("├└─", "││ ")) if found else ""


def _folded(name: str, width: int, guide: str, height: int) -> str:
    """Fold a name that is too wide over several lines, with the guides of the tree down to the height of its row."""
    indent = next((lead for lead in (f"{guide}  ", guide) if len(lead) <= width - MIN_WIDTH), "")
    lines = []
    while cell_len(name) > width:
        end = next(end for end in range(width, 0, -1) if cell_len(name[:end]) <= width)
        dot = name.rfind(".", len(indent), end)
        end = dot + 1 if dot > width // 2 else end
        lines.append(name[:end])
        name = indent + name[end:]
    return "\n".join([*lines, name, *[guide] * (height - len(lines) - 1)])


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

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names, widths = self._name_column, self._widths(options.max_width)
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False, show_header=any(self.headings))
        for heading, right, width in zip(self.headings, self.right, widths, strict=True):
            table.add_column(heading, justify="right" if right else "left", width=width, overflow="fold")
        for row, below in zip(self.rows, [*self.rows[1:], [""] * len(self.headings)], strict=True):
            wrapped = [Text(cell).wrap(console, width) for cell, width in zip(row, widths, strict=True)]
            cells = [[line for line in lines if line.plain.strip()] for lines in wrapped]
            name = _folded(row[names], widths[names], _guide(below[names]), max(map(len, cells)))
            lines = [Text(name) if i == names else Text("\n").join(cell) for i, cell in enumerate(cells)]
            table.add_row(*lines)
        yield table

    @property
    def _name_column(self) -> int:
        """The column of names: the first with a heading, or of all."""
        return next((i for i, heading in enumerate(self.headings) if heading), 0)

    def _widths(self, room: int) -> list[int]:
        """Compute the column widths; on a narrow screen, the other columns shrink before the names do, the widest first."""
        widths = [max(map(cell_len, column), default=0) for column in zip(self.headings, *self.rows, strict=True)]
        words = [
            max((cell_len(word) for cell in column for word in cell.split()), default=0)
            for column in zip(*self.rows, strict=True)
        ]
        others = [i for i, right in enumerate(self.right) if not right and i != self._name_column]
        excess = sum(widths) + 2 * (len(widths) - 1) - room
        for floors in ([min(word, MAX_WORD) for word in words or widths], [MIN_WIDTH] * len(widths)):
            while excess > 0 and (wide := [i for i in others if widths[i] > floors[i]]):
                widest = max(wide, key=lambda i: widths[i])
                widths[widest] -= 1
                excess -= 1
        names = self._name_column
        widths[names] = max(widths[names] - max(excess, 0), min(widths[names], MIN_NAME))
        return widths

    def text(self) -> str:
        """Format every cell whole, on one line a row."""
        rows = [self.headings, *self.rows] if any(self.headings) else self.rows
        widths = [max(map(cell_len, column), default=0) for column in zip(*rows, strict=True)]
        return "\n".join(self._line(row, widths) for row in rows)

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        blanks = (" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
        cells = (f"{b}{c}" if right else f"{c}{b}" for b, c, right in zip(blanks, row, self.right, strict=True))
        return "  ".join(cells).rstrip()
