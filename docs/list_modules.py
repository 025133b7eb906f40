"""Writes the list of modules at the end of docs/architecture.md: each with the first line of its docstring.

Run ``python docs/list_modules.py`` after such a line has changed; `tests/docs/test_architecture.py` fails until then.
"""

from __future__ import annotations

import ast
from itertools import groupby
from pathlib import Path

PAGE = Path(__file__).with_name("architecture.md")
PACKAGE = PAGE.parents[1] / "reshard_ckpt"
HEADING = "## Every module\n"


def listed() -> str:
    """Return the list: a heading for each folder of the package, and a line for each module with a docstring."""
    lines = ["\nThe first line of each module's docstring (`python docs/list_modules.py` writes this list).\n"]
    modules = [file for file in PACKAGE.rglob("*.py") if file.stem != "__init__" and file.parent != PACKAGE]
    for folder, files in groupby(sorted(modules, key=lambda file: (file.parent, file.name)), lambda file: file.parent):
        lines.append(f"\n**`{folder.relative_to(PACKAGE)}/`**\n\n")
        for file in files:
            first = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
            lines.append(f"- `{file.stem}`: {first}\n")
    return "".join(lines)


def page() -> str:
    """Return the page with the list as it should be."""
    return PAGE.read_text().partition(HEADING)[0] + HEADING + listed()


if __name__ == "__main__":
    PAGE.write_text(page())
