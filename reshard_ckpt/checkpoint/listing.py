"""The checkpoints below the root of a run, one line for each: its steps, and folders of other names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from ..engine.common.lineage import LINEAGE, Lineage
from ..engine.common.reader_notes import removed_within
from ..engine.common.step_folders import STEP_NAMES, StepNames, find_steps, names_at
from ..errors import CheckpointNotFound, CorruptError
from ..format.files import CATALOG_KEY
from ..formats.source import Path, open_source
from ..storage import open_storage, path_text

METRIC = "metric"
"""The key of the metadata under which a manager stores the metric."""


def metric_of(metadata: Any) -> float | None:
    """Return the metric that was passed to the manager with a checkpoint, from the checkpoint's metadata; None without one."""
    metric = metadata.get(METRIC) if isinstance(metadata, Mapping) else None
    return float(metric) if isinstance(metric, int | float) else None


@dataclass(frozen=True, slots=True)
class StepLine:
    """One checkpoint of a run, as ``reshard-ckpt inspect`` lists it. If `problem` is set, all but path and step is unknown.

    `step` is the number in the name of its folder; None for a folder of another name. `superseded` says that the run went back
    to an older step: this checkpoint does not count for a manager.
    """

    step: int | None
    path: str
    format: str | None = None
    created_s: float | None = None
    save_id: str | None = None
    num_tensors: int | None = None
    num_bytes: int | None = None
    metric: float | None = None
    problem: str | None = None
    superseded: bool = False


def list_run(path: Path) -> list[StepLine]:
    """List the steps below the root of a run, in order, of any format; then this library's checkpoints under other names.

    If the run's lineage is damaged, the last line says so, and no step is known to be superseded.
    """
    superseded: Collection[str] = ()
    problems = []
    with open_storage(path) as root:
        url = path_text(path).rstrip("/")
        try:
            names = names_at(root)
        except CorruptError as error:
            names = StepNames()
            problems.append(StepLine(None, f"{url}/{STEP_NAMES.key}", problem=str(error)))
        committed, begun = find_steps(root, names)
        steps = sorted([*committed.items(), *begun.items()])
        known = {folder for _, folder in steps}
        try:
            superseded = (LINEAGE.read(root) or Lineage()).superseded
        except CorruptError as error:
            problems.append(StepLine(None, f"{url}/{LINEAGE.key}", problem=str(error)))
        gone = () if root.hints.has_locks else removed_within(root, begun.values(), inf)[0]
        others = [name for name in root.folders() if name not in known and root.size(f"{name}/{CATALOG_KEY}") is not None]
    lines = [
        StepLine(step, f"{url}/{folder}", problem="removed; its files stay for readers until a later save")
        if folder in gone
        else _line(step, f"{url}/{folder}", superseded, names)
        for step, folder in steps
    ]
    named = [_line(None, f"{url}/{name}", (), names) for name in others]
    return [*lines, *sorted(named, key=lambda line: (line.created_s or 0.0, line.path)), *problems]


def _line(step: int | None, path: str, superseded: Collection[str], names: StepNames) -> StepLine:
    """Open the checkpoint at a path, and return its `StepLine`. If it is missing or damaged, the line has a `problem`."""
    try:
        with open_source(path) as source:
            catalog, form = source.catalog, source.format
    except CheckpointNotFound:
        return StepLine(step, path, problem="not committed")
    except CorruptError as error:
        return StepLine(step, path, problem=str(error))
    if step is not None and names.is_copy(step, catalog.folder):
        return StepLine(step, path, problem=f"saved as {catalog.folder}, and then copied or renamed; a manager passes it over")
    num_bytes = sum(file.size for file in catalog.files if not file.checkpoint)
    created_s = catalog.created_s if catalog.created_s > 0 else None
    # A lineage names a checkpoint of another library by its folder.
    known_as = catalog.lineage_id if form == "reshard_ckpt" or step is None else path.rpartition("/")[2]
    return StepLine(
        step,
        path,
        form,
        created_s,
        catalog.save_id,
        len(catalog.names),
        num_bytes,
        metric=metric_of(catalog.metadata),
        superseded=known_as in superseded,
    )
