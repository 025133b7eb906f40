"""``reshard-ckpt memory``: the checkpoints that jobs keep, and leave behind, in this node's memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.report import duration_text
from ..engine.common.progress import size_text
from ..errors import UsageError
from .app import command, print_json, print_note, print_text
from .columns import Columns
from .formatting import plural
from .options import AsJson

if TYPE_CHECKING:
    from ..memory.offline import HeldRun


class Action(str, Enum):
    """The actions of ``reshard-ckpt memory``: list runs, persist a checkpoint to the store, or drop all of a run."""

    list = "list"
    persist = "persist"
    drop = "drop"


@command("reshard-ckpt memory list", "reshard-ckpt memory persist ckpt/run", "reshard-ckpt memory drop ckpt/run")
def memory(
    action: Annotated[Action, typer.Argument(help="list runs; persist a checkpoint to the store; drop all of a run.")],
    root: Annotated[str | None, typer.Argument(metavar="[ROOT]", help="The root of a run.")] = None,
    folder: Annotated[str, typer.Option(help="The folder of Memory(folder=…).")] = "/dev/shm",
    step: Annotated[int | None, typer.Option(help="persist: this step, not the newest.")] = None,
    as_json: AsJson = False,
) -> int:
    """List the checkpoints in this node's memory; once a job has ended, write one to the store, or drop all of a run.

    Run persist on every node of the job: each node writes the files that it holds, and the one that finds them complete
    publishes.
    """
    from ..memory.offline import drop_held, held_runs, persist_held

    if step is not None and action is not Action.persist:
        why = "is for memory persist, and this action is for all steps of a run; leave it out"
        raise UsageError(f"memory {action.value} step={step}: {why}")
    if action is Action.list:
        found = held_runs(root, folder)
        if as_json:
            print_json(found)
            return 0
        if not found:
            print_text(f"{folder}: no checkpoint of a run {'' if root is None else f'at {root} '}is in this node's memory")
            return 0
        print_text(Columns(["root", "run", "job", ">memory", ">step", ">age", ">files here"], list(_rows(found))))
        return 0
    if root is None:
        raise UsageError(f"memory {action.value}: pass the root of the run; reshard-ckpt memory list names them")
    if action is Action.drop:
        num_bytes = drop_held(root, folder)
        if as_json:
            print_json({"root": root, "num_bytes": num_bytes})
        else:
            print_text(f"{root}: dropped {size_text(num_bytes)} of this node's memory")
        return 0
    report = persist_held(root, folder, step=step)
    if as_json:
        print_json(report)
    else:
        print_text(
            f"{report.path}: {size_text(report.num_bytes)} written, {'published' if report.is_published else 'not published'}"
        )
    for line in report.passed_over:
        print_note(f"passed over: {line}")
    if not report.is_published:
        print_note(
            f"files of {plural(len(report.missing), 'node')} are missing: {', '.join(report.missing)}; run this there, or choose "
            "an older step by --step"
        )
    return 0 if report.is_published else 1


def _rows(found: Sequence[HeldRun]) -> Iterator[list[str]]:
    """Yield table rows for the runs in this node's memory: one for each checkpoint, one for a run without checkpoints."""
    now = time.time()
    for run in found:
        alive = "alive" if run.is_alive else ""
        if not run.steps:
            yield [run.root, "", alive, size_text(run.num_bytes), "none", "", ""]
        for generation in run.steps:
            age = "damaged" if generation.saved_s is None else duration_text(max(now - generation.saved_s, 0.0))
            files = "" if generation.saved_s is None else f"{generation.files_here} of {generation.files}"
            yield [
                run.root,
                generation.run[:8],
                alive,
                size_text(run.num_bytes),
                f"{generation.step} (superseded)" if generation.superseded else str(generation.step),
                age,
                files,
            ]
