"""`plot`: pictures of a checkpoint: one tensor's cut over ranks, a save's timeline, or one page about all of it."""

from __future__ import annotations

import json
import os
import pathlib
import uuid
from collections.abc import Mapping
from types import ModuleType

from ..core.report import hint_of
from ..core.timeline import Timeline
from ..errors import CheckpointNotFound, MismatchError, StorageError, UsageError
from ..formats.source import Path, open_source
from ..storage import path_text
from .inspecting import TensorLine, inspect
from .reading import timeline as read_timeline
from .resharding import orders_of_groups
from .topology_options import mesh_of

PICTURES = (".png", ".svg", ".html")


def plot(
    path: Path, name: str | None = None, *, to: Mapping[str, int] | None = None, output: Path, timeline: bool = False
) -> pathlib.Path:
    """Draw a checkpoint into a file. No tensor data are read.

    Parameters
    ----------
    path
        A checkpoint, possibly of another format.
    name
        A tensor: draw how it is cut over ranks. Without a name, make a page of the whole checkpoint: the bytes of each rank, the
        mesh, the tensors by size, and the timeline of the save if the checkpoint has one.
    to
        Axis names and sizes of another mesh, outermost first: also draw which saved shard feeds which rank of that mesh, placed
        as by `reshard`. Only with `name`.
    output
        The file to write; an existing one is replaced. The suffix chooses the type: ``.png``, ``.svg`` or ``.html``; the
        page of a whole checkpoint is ``.html``; a timeline may also be ``.json``, for ``chrome://tracing`` and Perfetto.
    timeline
        Draw the times of the save: a row for each rank, time from left to right.

    Returns
    -------
    pathlib.Path
        The file that was written.

    Raises
    ------
    UsageError
        The suffix does not fit the picture, options contradict each other, or the extra ``plot`` is not installed, which
        every type but ``.json`` needs.
    MismatchError
        The checkpoint has no tensor of that name.
    CheckpointNotFound
        The path holds no checkpoint, or it keeps no timeline.
    """
    file = pathlib.Path(path_text(output))
    if to is not None and (name is None or timeline):
        raise UsageError(f"to={dict(to)}: says how one tensor would be cut; pass the name of one, and no timeline=True")
    if to is not None and not to:
        raise UsageError("to={}: pass axes and their sizes, outermost first, as in {'dp': 2, 'tp': 4}")
    if timeline and name is not None:
        raise UsageError(f"timeline=True and name={name!r}: draw one of them at a time")
    if timeline:
        check_suffix(file, (*PICTURES, ".json"), "a timeline")
        saved = read_timeline(path)
        if file.suffix == ".json":
            data = json.dumps(saved.chrome_trace()).encode()
        else:
            plotting = load_plotting()
            data = plotting.rendered(plotting.draw_timeline(saved), plotting.timeline_title(saved), file.suffix)
    elif name is None:
        check_suffix(file, (".html",), "the page of a whole checkpoint", " or pass the name of one tensor")
        data = _report(path)
    else:
        check_suffix(file, PICTURES, "a tensor's picture")
        data = _cuts(path, name, to, file.suffix)
    write_picture(file, data)
    return file


def check_suffix(file: pathlib.Path, suffixes: tuple[str, ...], noun: str, instead: str = "") -> None:
    """Raise UsageError unless a file ends in one of these suffixes.

    In the message, `noun` is the name of the picture, and `instead` further advice.
    """
    if file.suffix not in suffixes:
        raise UsageError(f"{file}: {noun} is written as {' or '.join(suffixes)}; name the output so{instead and ','}{instead}")


def _report(path: Path) -> bytes:
    """Make the HTML page of a whole checkpoint: bytes of each rank, mesh, tensors by size, timeline."""
    found, plotting = inspect(path), load_plotting()
    try:
        saved: Timeline | None = read_timeline(path)
    except CheckpointNotFound:
        saved = None
    # An alias has no bytes of its own, so it counts as 0.
    sizes = [line.num_bytes if isinstance(line, TensorLine) and line.alias_of is None else 0 for line in found.lines]
    title = os.path.normpath(path_text(path))
    page: str = plotting.report_page(title, found.catalog, found.summary, found.tree, sizes, saved)
    return page.encode()


def _cuts(path: Path, name: str, to: Mapping[str, int] | None, suffix: str) -> bytes:
    """Draw how one tensor is cut over the ranks that saved it; with `to`, also over the ranks of another mesh."""
    with open_source(path) as source:
        saved = source.catalog
        if name not in saved:
            hint = hint_of(name, saved.names)
            raise MismatchError(f"{name}: no tensor of the checkpoint{hint}; inspect lists them", [name])
        mesh = None if to is None else mesh_of("to", to)
        plotting, wanted = load_plotting(), []
        if mesh is not None:
            wanted = plotting.wanted_on(saved, name, mesh, orders_of_groups(source, saved, saved.value_names))
        figure = plotting.draw_cuts(saved, name, wanted, mesh)
        data: bytes = plotting.rendered(figure, f"How {name} is cut over ranks", suffix)
        return data


def load_plotting() -> ModuleType:
    """Import the package that draws, only when something is drawn: it needs the extra ``plot``, and takes time to load."""
    try:
        from .. import plotting
    except ImportError as error:
        raise UsageError(f"pictures need {error.name}, which is not installed: pip install 'reshard-ckpt[plot]'") from error
    return plotting


def write_picture(file: pathlib.Path, data: bytes) -> None:
    """Write a file as a whole: into a temporary file first, so that a failure leaves the old one."""
    beside = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
    try:
        try:
            beside.write_bytes(data)
            os.replace(beside, file)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{file}: {error.strerror}; choose another output") from error
