"""The arrows of the architecture: which room may import which, read from the source without importing it.

`docs/architecture.md` draws the same arrows for people. A room is a folder of the package; `core` and `engine` have inner ones.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "reshard_ckpt"
MODULES = sorted(PACKAGE.rglob("*.py"))
NAMES = {path.relative_to(PACKAGE).with_suffix("").parts for path in MODULES}
FOLDERS = {path.relative_to(PACKAGE).parts[:-1] for path in MODULES}

_CORE = {"core/geometry", "core/catalog", "core/planning", "core"}
_BYTES = _CORE | {"comm", "format", "storage"}
_ENGINE = {"engine/common", "engine/saving", "engine/loading", "engine/resharding", "engine/checking"}
_FORMATS = _BYTES | _ENGINE | {"state", "torchfile", "formats"}

# Every room may import itself and `errors`.
ALLOWED = {
    "errors": set(),
    "core/geometry": set(),
    "core/catalog": {"core/geometry"},
    "core": {"core/geometry", "core/catalog"},
    "core/planning": _CORE,
    "format": _CORE,
    "storage": set(),
    "comm": set(),
    "engine": set(),
    "engine/common": _BYTES,
    "engine/saving": _BYTES | {"engine/common"},
    "engine/loading": _BYTES | {"engine/common"},
    "engine/checking": _BYTES | {"engine/common", "engine/loading"},
    "engine/resharding": _BYTES | {"engine/common", "engine/loading", "engine/saving"},
    "state": _BYTES | {"engine/common"},
    "torchfile": {"core/geometry", "core/catalog", "core", "format", "storage"},
    "formats": _FORMATS,
    "plotting": _CORE | {"engine/common"},
    "checkpoint": _FORMATS | {"plotting"},
    "memory": _FORMATS | {"checkpoint"},
    "manager": _FORMATS | {"checkpoint", "memory"},
    "dcp": _FORMATS | {"checkpoint"},
    "plugins": _FORMATS | {"checkpoint", "manager"},
    "nebula": {"checkpoint", "core", "format", "manager"},
    # Nor another family, nor anything that `plugins` does not list: see the tests of families below.
    "families": {"plugins"},
    "megatron": {"families"},
    "integrations": {"families"},
    "vescale": {"families"},
    "cli": _CORE | {"comm", "engine/common", "engine/checking", "checkpoint", "memory", "__init__"},
    "__init__": {"state", "checkpoint"},
    "__main__": {"cli"},
}

# The face of a package hands names on: that of `checkpoint` those of the rooms above it too.
FACES = {"checkpoint/__init__.py": _FORMATS | {"plotting", "memory", "manager"}}

# core is pure: no tensors, no I/O, no threads, no clock.
IMPURE = {
    "asyncio", "concurrent", "datetime", "io", "mmap", "multiprocessing", "os", "pathlib", "queue", "random", "secrets", "shutil",
    "socket", "subprocess", "tempfile", "threading", "time", "torch", "uuid",
}  # fmt: skip

MAX_ARROWS = 63
"""Between rooms of the top level; more than that is a sign that a room is drawn wrong."""

LEAVES = {"dcp", "families", "integrations", "megatron", "nebula", "plugins", "vescale"}
"""Other systems and their calls, which no other room imports: their arrows all go down, and are not counted."""


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module, given by its path from the package."""
    if parts[0] in ("core", "engine") and len(parts) > 2:
        return "/".join(parts[:2])
    return parts[0].removesuffix(".py")


@cache
def statements_of(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """The imports of a module, also inside functions. Expressions, which hold none, are most of a tree, and are passed over."""
    found, left = [], [ast.parse(path.read_text())]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            left += getattr(node, name, ())
    return tuple(found)


def imports(path: Path) -> Iterator[str]:
    """Absolute dotted names of all that a module imports."""
    parts = ("reshard_ckpt", *path.relative_to(PACKAGE).with_suffix("").parts)
    for node in statements_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            base = ".".join(parts[: -node.level]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            yield from (f"{module}.{alias.name}" for alias in node.names)


@cache
def imported_rooms(path: Path) -> set[str]:
    """The rooms of this package that a module imports."""
    found = set()
    for name in imports(path):
        if name.startswith("reshard_ckpt."):
            parts = tuple(name.split(".")[1:])
            while parts and parts not in FOLDERS and parts not in NAMES:
                parts = parts[:-1]  # what is imported from a module
            found.add(room_of((*parts, "__init__.py") if parts in FOLDERS else parts) if parts else "__init__")
    return found


def uses_torch_distributed(path: Path) -> bool:
    if any(name.startswith("torch.distributed") for name in imports(path)):
        return True
    return re.search(r"\btorch\.distributed\b", path.read_text()) is not None and any(
        isinstance(node, ast.Attribute)
        and node.attr == "distributed"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
        for node in ast.walk(ast.parse(path.read_text()))
    )


def wrong_ones(wrong: dict[str, set[str]]) -> dict[str, set[str]]:
    return {path: found for path, found in wrong.items() if found}


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_imports_point_one_way():
    wrong = {}
    for path in MODULES:
        room = room_of(path.relative_to(PACKAGE).parts)
        allowed = FACES.get(relative(path), ALLOWED[room]) | {room, "errors"}
        wrong[relative(path)] = imported_rooms(path) - allowed
    assert wrong_ones(wrong) == {}


def test_rooms_of_the_top_level_stay_few_arrows_apart():
    arrows = set()
    for path in MODULES:
        if path.name != "__init__.py":
            here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
            arrows |= {(here, room.split("/")[0]) for room in imported_rooms(path)}
    assert not {(here, there) for here, there in arrows if there in LEAVES and here not in LEAVES}
    arrows = {(here, there) for here, there in arrows if here != there and here not in LEAVES}
    assert len(arrows) <= MAX_ARROWS, sorted(arrows)


def test_no_family_imports_another():
    wrong = {}
    for path in MODULES:
        parts = path.relative_to(PACKAGE).parts
        if parts[0] == "families" and len(parts) > 2:
            named = {tuple(name.split(".")[1:3]) for name in imports(path)}
            wrong[relative(path)] = {name[1] for name in named if len(name) == 2 and name[0] == "families"} - {parts[1]}
    assert wrong
    assert wrong_ones(wrong) == {}


def test_families_import_plugins_alone():
    wrong = {}
    for path in MODULES:
        parts = path.relative_to(PACKAGE).parts
        if parts[0] == "families" and len(parts) > 2:
            own = f"reshard_ckpt.families.{parts[1]}."
            ours = {name for name in imports(path) if name.startswith("reshard_ckpt.") and not name.startswith(own)}
            wrong[relative(path)] = {name for name in ours if not is_name_of_plugins(name)}
    assert wrong
    assert wrong_ones(wrong) == {}


def is_name_of_plugins(name: str) -> bool:
    """Whether an import is of `reshard_ckpt.plugins`, and of a name that it, or one of its modules, lists."""
    package, *below = name.removeprefix("reshard_ckpt.").split(".")
    if package != "plugins" or not 0 < len(below) < 3:
        return False
    module = importlib.import_module(".".join(["reshard_ckpt.plugins", *below[:-1]]))
    return below[-1] in module.__all__


def test_core_is_pure():
    pure = [path for path in MODULES if relative(path).startswith("core/")]
    assert pure
    assert wrong_ones({relative(path): {name.split(".")[0] for name in imports(path)} & IMPURE for path in pure}) == {}


def test_torch_distributed_is_where_ranks_meet_alone():
    users = {path.relative_to(PACKAGE).parts[0] for path in MODULES if uses_torch_distributed(path)}
    assert users <= {"comm", "state", "dcp", "families"}


def test_the_extra_for_pictures_is_for_plotting_alone():
    users = {path.relative_to(PACKAGE).parts[0] for path in MODULES if "matplotlib" in {n.split(".")[0] for n in imports(path)}}
    assert users == {"plotting"}


def test_nothing_imports_pickle():
    banned = {"pickle", "dill", "cloudpickle", "shelve", "marshal"}
    assert wrong_ones({relative(path): {name.split(".")[0] for name in imports(path)} & banned for path in MODULES}) == {}


def test_the_face_of_checkpoint_imports_a_function_when_it_is_used():
    program = (
        "import sys; from reshard_ckpt import checkpoint; "
        "before = {n for n in sys.modules if n.startswith('reshard_ckpt.')}; checkpoint.goodput; "
        "assert before == {'reshard_ckpt.checkpoint', 'reshard_ckpt.errors'}, before; "
        "assert 'reshard_ckpt.checkpoint.intervals' in sys.modules; "
        "assert 'reshard_ckpt.manager' not in sys.modules; "
        "[getattr(checkpoint, name) for name in checkpoint.__all__]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_face_of_checkpoint_imports_the_modules_of_saves_if_torch_is_there():
    program = (
        "import sys, torch; from reshard_ckpt import checkpoint; "
        "assert 'reshard_ckpt.checkpoint.saving' in sys.modules; "
        "assert 'reshard_ckpt.manager' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
