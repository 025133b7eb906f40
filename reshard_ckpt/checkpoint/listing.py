"""The steps below the root of a run, one line for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..core.catalog.model import Catalog
from ..engine.common.step_folders import find_steps
from ..engine.loading.load import open_catalog
from ..errors import CheckpointNotFound, CorruptError
from ..format.keys import step_name
from ..formats.source import Path
from ..storage import open_storage

METRIC = "metric"
"""Of the metadata: where a manager keeps the metric."""


def metric_of(catalog: Catalog) -> float | None:
    """Return the metric that was passed to the manager with this checkpoint."""
    metric = catalog.metadata.get(METRIC) if isinstance(catalog.metadata, Mapping) else None
    return float(metric) if isinstance(metric, int | float) else None


@dataclass(frozen=True, slots=True)
class StepLine:
    """One step of a run, for people; where `problem` is set, nothing else is known of the step."""

    step: int
    path: str
    created_s: float | None = None
    save_id: str | None = None
    num_tensors: int | None = None
    num_bytes: int | None = None
    metric: float | None = None
    problem: str | None = None


def list_run(path: Path) -> list[StepLine]:
    """List the steps below the root of a run, in order."""
    with open_storage(path) as root:
        committed, begun = find_steps(root)
        url = root.url
    lines = [_line(step, f"{url}/{step_name(step)}") for step in committed]
    lines += [StepLine(step, f"{url}/{step_name(step)}", problem="not committed") for step in begun]
    return sorted(lines, key=lambda line: line.step)


def _line(step: int, path: str) -> StepLine:
    try:
        with open_storage(path) as storage:
            catalog = open_catalog(storage)
    except (CheckpointNotFound, CorruptError) as error:
        return StepLine(step, path, problem=str(error))
    num_bytes = sum(file.size for file in catalog.files if not file.checkpoint)
    return StepLine(step, path, catalog.created_s, catalog.save_id, len(catalog.names), num_bytes, metric=metric_of(catalog))
