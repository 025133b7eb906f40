"""Which room may import which? The arrows of the architecture, read from the source without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "reshard_ckpt"
MODULES = sorted(PACKAGE.rglob("*.py"))

_BASE = {"errors", "config"}
_CORE = _BASE | {"core"}
_BYTES = _CORE | {"comm", "format", "storage"}

ALLOWED = {
    "errors": set(),
    "config": {"errors"},
    "core": _CORE,
    "format": _CORE | {"format"},
    "storage": _CORE | {"storage"},
    "comm": _CORE | {"comm"},
    "engine": _BYTES | {"engine"},
    "adapters": _BYTES | {"adapters"},
    "plotting": _CORE | {"engine", "plotting"},
    "checkpoint": _BYTES | {"engine", "adapters", "plotting", "checkpoint"},
    "dcp": _BYTES | {"engine", "adapters", "checkpoint", "dcp"},
    "__init__": _BYTES | {"engine", "adapters", "checkpoint"},
    "cli": _BYTES | {"engine", "adapters", "checkpoint", "cli", "__init__"},
    "__main__": {"cli"},
}

# core is pure: no tensors, no I/O, no threads, no clock.
IMPURE = {
    "asyncio", "concurrent", "datetime", "io", "mmap", "multiprocessing", "os", "pathlib", "queue", "random", "secrets", "shutil",
    "socket", "subprocess", "tempfile", "threading", "time", "torch", "uuid",
}  # fmt: skip


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Absolute dotted names of all that a module imports, also inside functions."""
    parts = ("reshard_ckpt", *path.relative_to(PACKAGE).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: -node.level]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def uses_torch_distributed(path: Path) -> bool:
    if any(name.startswith("torch.distributed") for name in imports(path)):
        return True
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "distributed"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
        for node in ast.walk(ast.parse(path.read_text()))
    )


def test_every_room_is_known():
    assert {room(path) for path in MODULES} <= set(ALLOWED)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path):
    rooms = {name.split(".")[1] for name in imports(path) if name.startswith("reshard_ckpt.")}
    known = {name if name in ALLOWED else "__init__" for name in rooms}
    assert known <= ALLOWED[room(path)], f"{room(path)} may not import {sorted(known - ALLOWED[room(path)])}"


@pytest.mark.parametrize("path", [p for p in MODULES if room(p) == "core"], ids=lambda path: path.name)
def test_core_is_pure(path: Path):
    assert not {name.split(".")[0] for name in imports(path)} & IMPURE


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_torch_distributed_is_where_ranks_meet_alone(path: Path):
    assert room(path) in {"comm", "adapters", "dcp"} or not uses_torch_distributed(path)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_extra_for_pictures_is_for_plotting_alone(path: Path):
    assert room(path) == "plotting" or not {name.split(".")[0] for name in imports(path)} & {"matplotlib", "squarify"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_imports_pickle(path: Path):
    assert not {name.split(".")[0] for name in imports(path)} & {"pickle", "dill", "cloudpickle", "shelve", "marshal"}
