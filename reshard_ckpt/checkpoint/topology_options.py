"""The options that describe a new topology and new names: a mesh, placement rules, stage boundaries, ``rename=``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.catalog.model import Catalog
from ..core.catalog.names import optimizer_of, state_name
from ..core.catalog.specs import AxisPlacement, Mesh
from ..core.report import check_text
from ..engine.common.rename import check_rename, renamed
from ..engine.loading.saved_values import blob_reader
from ..errors import UsageError
from ..formats.source import Source

MAX_RANKS = 1 << 17
"""The most ranks of a new topology; the plan of each rank takes memory."""

MAX_RULES_BYTES = 16 << 20


def mesh_of(option: str, mesh: Mapping[str, int]) -> Mesh:
    """Make a mesh from axes and their sizes; without axes it is a single rank. `option` is the option's name, for errors.

    >>> mesh_of("mesh", {"dp": 2, "tp": 4})
    Mesh(axes=('dp', 'tp'), sizes=(2, 4))
    """
    good = isinstance(mesh, Mapping) and all(isinstance(axis, str) and axis for axis in mesh)
    if not good or not all(type(size) is int and size >= 1 for size in mesh.values()):
        raise UsageError(f"{option}={mesh!r}: wanted axes and their sizes, 1 or more, as in {option}={{'dp': 2, 'tp': 4}}")
    made = Mesh(tuple(mesh), tuple(mesh.values()))
    for axis in made.axes:
        check_text(axis, f"an axis of {option}=")
    if made.size > MAX_RANKS:
        raise UsageError(f"{option}={dict(mesh)!r}: {made.size:,} ranks, over the {MAX_RANKS:,} that are planned for; name fewer")
    return made


def stage_boundaries(stages: Sequence[int] | None, mesh: Mesh) -> tuple[int, ...] | None:
    """Return the first layer of each pipeline stage except stage 0; None if layers are to be divided evenly."""
    if stages is None:
        return None
    if not isinstance(stages, Sequence):
        raise UsageError(f"stages={stages!r:.200}: pass a list: the first layer of each pipeline stage but the first")
    if "pp" not in mesh.axes:
        raise UsageError(f"stages={list(stages)}: the mesh {mesh.by_axis} has no axis pp; add it")
    size = mesh.sizes[mesh.axes.index("pp")]
    if not all(type(n) is int for n in stages) or len(stages) != size - 1:
        raise UsageError(
            f"stages={stages!r}: {size} pipeline stages have {size - 1} boundaries: the first layer of each stage but the first, "
            "as in stages=[8, 16, 24] for 4"
        )
    return tuple(stages)


def read_rules(rules: Any) -> Any:
    """Return rules as plain data; a path is read as a YAML file.

    Raise `UsageError` if the file cannot be read, or has a key twice.
    """
    if not isinstance(rules, str | os.PathLike):
        return rules
    where = f"rules: {os.fspath(rules)}"
    try:
        with open(os.path.expanduser(rules), "rb") as file:  # may be a pipe, whose size nobody knows
            data = file.read(MAX_RULES_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise UsageError(f"{where}: cannot be read: {error.strerror}; pass a YAML file") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: cannot be read as YAML: {error}; save it as UTF-8") from error
    except ValueError as error:  # a text that cannot be a path
        raise UsageError(f"rules: {rules!r:.200}: is not a path: {error}; pass a YAML file") from error
    if len(data) > MAX_RULES_BYTES:
        raise UsageError(f"{where}: has over {MAX_RULES_BYTES} bytes; pass a YAML file of rules")
    return _parsed(text, where)


def _parsed(text: str, where: str) -> Any:
    try:
        import yaml
    except ImportError:
        advice = "install PyYAML (pip install 'reshard-ckpt[cli]'), or pass the rules as a dict"
        raise UsageError(f"{where}: reading YAML needs PyYAML; {advice}") from None
    try:
        _refuse_duplicate_keys(yaml.compose(text, yaml.SafeLoader), where)
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        hint = (
            "put quotes round a pattern that begins with *"
            if "alias" in f"{error.context}{error.problem}"
            else "correct the file"
        )
        raise UsageError(f"{where}: {at}{error.problem}: not YAML; {hint}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: text that looks like a date, but is not valid
        raise UsageError(f"{where}: cannot be read as YAML: {error}; correct the file") from error


def _refuse_duplicate_keys(root: Any, where: str) -> None:
    """Raise UsageError if a mapping in a YAML file has a key twice; YAML's own reader silently takes the last one."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if node.id == "sequence":
            waiting += node.value
        elif node.id == "mapping":
            keys = [key.value for key, _ in node.value if key.id == "scalar"]
            twice = next((key for n, key in enumerate(keys) if key in keys[:n]), None)
            if twice is not None:
                raise UsageError(f"{where}: line {node.start_mark.line + 1}: {twice!r} is given twice; write one of them")
            waiting += [child for _, child in node.value]


def renamed_catalog(source: Source, rename: Mapping[str, str] | Callable[[str], str] | None, *, verify: bool) -> Catalog:
    """Return the catalog of a source with the names that the option ``rename=`` gives.

    Raise `UsageError` if an old name of the mapping matches nothing in the checkpoint, which is surely a mistake.
    """
    catalog = source.catalog
    if rename is None:
        return catalog
    check_rename(rename)
    if isinstance(rename, Mapping):
        saved_names = {*catalog.names, *catalog.value_names, *catalog.unreadable}
        saved_names |= {".".join(parts[:i]) for parts in (name.split(".") for name in saved_names) for i in range(1, len(parts))}
        # A name may also be that of a parameter in an optimizer's groups, even if that parameter has no state.
        optimizers = tuple(state_name(optimizer) for name in catalog.value_names if (optimizer := optimizer_of(name)) is not None)
        for old in rename:
            if old not in saved_names and not old.startswith(optimizers):
                raise UsageError(f"rename={{{old!r}: …}}: the checkpoint has no such name, nor any below it; correct it")
    return renamed(catalog, rename, read=blob_reader(source.storage, catalog, verify=verify))


def idle_axes(saved: Catalog, mesh: Mesh, placements: Mapping[str, Sequence[AxisPlacement]]) -> tuple[str, ...]:
    """List the axes of a new mesh that the saved mesh lacks and that divide no tensor, as in `ReshardReport.idle_axes`."""
    saved_axes = set() if saved.mesh is None else set(saved.mesh.axes)
    dividing = {of.axis for where in placements.values() for of in where if of.kind != "replicate"}
    several = [axis for axis, size in mesh.by_axis.items() if size > 1]
    return tuple(axis for axis in several if axis not in saved_axes and axis not in dividing)
