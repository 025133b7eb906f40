"""Dotted names in docstrings and comments, such as `core.trees`, name modules and definitions that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [ROOT / "reshard_ckpt", ROOT / "tests", ROOT / "benchmarks", ROOT / "examples"]
FILES = sorted(path for folder in FOLDERS for path in folder.rglob("*.py"))
DOTTED = re.compile(r"``?([a-z_]+(?:\.[A-Za-z_]+)+)`")
# A module here has the name of another library, of a variable or of a tensor's prefix.
OF_OTHERS = (
    "vescale.checkpoint",
    "megatron.core",
    "deepspeed.initialize",
    "engine.load_checkpoint",
    "experts.experts",
    "model.",
    "state.x.",
    "manager.preempted",
)


@cache
def defined(module: Path) -> frozenset[str]:
    """List the names that a module defines or imports, and the members of its classes as ``Class.member``."""
    tree = ast.parse(module.read_text())
    names: set[str] = set()
    for node in tree.body:
        names |= bound(node)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{member}" for part in node.body for member in bound(part)}
    return frozenset(names)


def bound(node: ast.stmt) -> set[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Import() | ast.ImportFrom():
            return {alias.asname or alias.name for alias in node.names}
        case ast.Assign() | ast.AnnAssign():
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        case ast.If() | ast.Try():
            return {name for part in ast.iter_child_nodes(node) if isinstance(part, ast.stmt) for name in bound(part)}
    return set()


def resolves(parts: list[str], folder: Path) -> bool | None:
    """Return whether a dotted name exists below `folder`; None if its first part is no module or folder there."""
    here, steps = folder, 0
    while steps < len(parts) and (here / parts[steps]).is_dir():
        here, steps = here / parts[steps], steps + 1
    module = here / f"{parts[steps]}.py" if steps < len(parts) else here / "__init__.py"
    if steps < len(parts) and module.is_file():
        rest = ".".join(parts[steps + 1 :])
    elif steps:
        module, rest = here / "__init__.py", ".".join(parts[steps:])
    else:
        return None
    return not rest or (module.is_file() and rest in defined(module))


def is_stale(dotted: str, file: Path) -> bool:
    """Return whether a name points into the tree, seen from `file`, to something that does not exist."""
    scopes = [
        ROOT,
        ROOT / "reshard_ckpt",
        *(scope for scope in file.parents if any(scope.is_relative_to(folder) for folder in FOLDERS)),
    ]
    found = [resolves(dotted.split("."), scope) for scope in scopes]
    return False in found and True not in found


def test_each_dotted_name_exists() -> None:
    stale = [
        f"{file.relative_to(ROOT)}: `{dotted}`"
        for file in FILES
        for dotted in DOTTED.findall(file.read_text())
        if not dotted.startswith(OF_OTHERS) and not dotted.endswith((".py", ".json")) and is_stale(dotted, file)
    ]
    assert stale == []


@pytest.mark.parametrize(
    ("dotted", "stale"),
    [
        ("core.state", True),
        ("core.trees", False),
        ("core.catalog.specs.Piece", False),
        ("core.catalog.specs.NoPiece", True),
        ("hashing", False),
        ("torch.save", False),
    ],
)
def test_a_stale_name_is_told_from_a_name_of_others(dotted: str, stale: bool) -> None:
    assert is_stale(dotted, ROOT / "reshard_ckpt" / "core" / "words.py") is stale
