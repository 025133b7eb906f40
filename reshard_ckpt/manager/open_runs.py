"""The runs (managers with a memory tier) that this process has open, for `reshard_ckpt.nebula` and DeepSpeed's engines."""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Mapping
from typing import Any

from ..comm import open_session, value_of_first
from ..errors import CorruptError
from ..memory.node import real_root
from ..memory.options import Memory
from .manager import Manager

TAG = "nebula_tag"
"""The key in a checkpoint's metadata under which its Nebula tag is saved."""

RUNS: list[Manager] = []
"""The managers with memory that are open in this process, in order of opening."""


def memory_from_environment() -> Memory:
    """Return the `Memory` of a run, as the environment configures it.

    It has one copy if there is another node, and at most ``NEBULA_MEMORY_BUFFER_SIZE`` bytes on each node.
    """
    limit, nodes = os.environ.get("NEBULA_MEMORY_BUFFER_SIZE"), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    return Memory(copies=min(1, nodes - 1), max_bytes=int(limit) if limit else None)


def open_run(path: str, interval_s: float, num_versions: int, memory: Memory | None = None) -> Manager:
    """Open the run at a storage path: a save goes there every `interval_s` seconds, and `num_versions` are kept. Collective."""
    memory = memory or memory_from_environment()
    RUNS.append(Manager(path, memory=memory, persist_every=f"{interval_s}s", keep_last=num_versions))
    return RUNS[-1]


def run_at(path: str) -> Manager | None:
    """Return the open run at a storage path; None if this process has none open there."""
    root = real_root(path)
    return next((run for run in RUNS if real_root(run.path(0).rpartition("/")[0]) == root), None)


def tags_of(run: Manager) -> dict[int, str]:
    """Map the steps of a run to the tags of their checkpoints. A step whose catalog is damaged is left out."""
    return {step: tag for step in run.steps() if (tag := _tag_of(run, step)) is not None}


def _tag_of(run: Manager, step: int) -> str | None:
    try:
        metadata = run.metadata(step)
    except CorruptError:
        return None
    return str(metadata.get(TAG, step) if isinstance(metadata, Mapping) else step)


def step_for(run: Manager, tag: str, begun: Mapping[int, str]) -> tuple[int, bool]:
    """Choose the step for a new tag: the number at its end, or the next step if there is no number or another tag has it.

    Collective. Rank 0 chooses, because nodes know different steps.

    Parameters
    ----------
    begun
        Steps, mapped to the tags of the saves that this process has begun.

    Returns
    -------
    tuple
        The step, and whether it is greater than all steps of the run.
    """
    with open_session("choose a step for", f"{run.path(0)} {tag}") as comm:
        step, newest = value_of_first(comm, lambda: (_free_step(run, tag, begun), max(run.steps(), default=-1)))
    return step, step > newest


def load_without_going_back(run: Manager, step: int, state: Mapping[str, Any]) -> None:
    """Load the checkpoint of a step into a state, with ``strict=False``; later steps of the run still count. Collective."""
    run._load(step, state, {"strict": False}, goes_on=False)


def _free_step(run: Manager, tag: str, begun: Mapping[int, str]) -> int:
    digits = re.search(r"\d+$", tag)
    number, taken = int(digits[0]) if digits else -1, {*run.steps(), *begun}
    if number in taken and tag not in (begun.get(number), _tag_of(run, number)):
        number = -1
    return number if number >= 0 else max([-1, *taken]) + 1


def close_run(run: Manager) -> None:
    """Write the newest checkpoint of a run to its storage path, and close the run. Collective."""
    if run in RUNS:
        RUNS.remove(run)
        run.close()


@atexit.register
def close_runs() -> None:
    """Close all open runs. It is also called at the end of the process."""
    while RUNS:
        RUNS.pop().close()
