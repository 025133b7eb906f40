"""A linter for sentences that a reader must take apart: a clause stands where a noun belongs.

``python -m tests.plain_english`` reads every docstring and comment of the package, and prints each place with one of `RIDDLES`.
``python -m tests.plain_english --same-code REVISION`` shows that a change rewrote docstrings and comments and no code.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "reshard_ckpt"

RIDDLES = {
    r"\b[Ww]hat (is|are|was|were|has|have|had|they|it|a|an|the|this|that|each|ranks?|others?|there)\b": (
        "name the thing in place of 'what'"
    ),
    r"\b[Oo]f (which|what|whom)\b": "begin a new sentence, or use 'whose'",
    r"\b[Tt]hose (that|which|of which)\b": "repeat the noun",
    r"\b[Ww]ho (has|have|is|are|had)\b": "say which rank or process",
    r"(?<![Tt]here )\b(is|are) none\b|\b[Nn]one for what\b": "say what is missing, as in 'there is no …' or 'returns None if …'",
    r"(?<![Tt]here )\bis no [a-z]": "write 'is not a …'",
    r"\bso that what\b": "name the thing in place of 'what'",
}
"""Each pattern, and the way out of it."""


def sentences(source: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and comments of a module, each with its first line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def riddles(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the words and the advice of each riddle in a module."""
    for first, text in sentences(source):
        for pattern, advice in RIDDLES.items():
            for match in re.finditer(pattern, re.sub(r">>> .*|``[^`]*``", lambda quoted: " " * len(quoted[0]), text)):
                line = first + text.count("\n", 0, match.start())
                yield line, " ".join(text[max(0, match.start() - 30) : match.end() + 30].split()), advice


def code_of(source: str) -> str:
    """Return the syntax of a module without its docstrings; comments are not in it."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list):
                setattr(node, name, [part for part in body if not _is_text(part)] or [ast.Pass()])
    return ast.dump(tree)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def changed_code(revision: str) -> list[str]:
    """List the modules of the package whose code differs from a revision's."""
    command = ["git", "diff", "--name-only", revision, "--", "reshard_ckpt"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return [name for name in names if name.endswith(".py") and _differs(name, revision)]


def _differs(name: str, revision: str) -> bool:
    path, before = ROOT / name, subprocess.run(["git", "show", f"{revision}:{name}"], cwd=ROOT, capture_output=True, text=True)
    return before.returncode != 0 or not path.exists() or code_of(before.stdout) != code_of(path.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--same-code", metavar="REVISION")
    parser.add_argument("paths", nargs="*", type=Path, default=[PACKAGE])
    options = parser.parse_args()
    if options.same_code:
        changed = changed_code(options.same_code)
        print("\n".join(f"{name}: its code differs from that of {options.same_code}" for name in changed) or "no code differs")
        return bool(changed)
    found = 0
    for path in sorted(file for given in options.paths for file in (given.rglob("*.py") if given.is_dir() else [given])):
        for line, words, advice in riddles(path.read_text()):
            print(f"{path.resolve().relative_to(ROOT)}:{line}: {words!r}: {advice}")
            found += 1
    print(f"{found} riddles" if found else "no riddles")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
