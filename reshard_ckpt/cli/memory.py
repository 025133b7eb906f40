"""``reshard-ckpt memory``: what the memory of this node holds of runs whose jobs are gone."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from ..engine.common.progress import size_text
from ..errors import UsageError
from .app import command, print_json, print_note, print_text
from .columns import Columns
from .formatting import plural
from .options import AsJson


class Action(str, Enum):
    """What to do."""

    list = "list"
    persist = "persist"
    drop = "drop"


@command("reshard-ckpt memory list", "reshard-ckpt memory persist ckpt/run", "reshard-ckpt memory drop ckpt/run")
def memory(
    action: Annotated[Action, typer.Argument(help="list runs; persist a checkpoint to the store; drop all of a run.")],
    root: Annotated[str | None, typer.Argument(metavar="[ROOT]", help="The root of a run.", show_default=False)] = None,
    folder: Annotated[str, typer.Option("--folder", help="The folder of Memory(folder=…).")] = "/dev/shm",
    step: Annotated[int | None, typer.Option("--step", help="persist: this step, not the newest.", show_default=False)] = None,
    as_json: AsJson = False,
) -> int:
    """List what this node's memory holds of runs whose jobs are gone, write it to the store, or drop it.

    Run persist on every node of the job: each writes the files that it holds, and whoever finds all of them there publishes.
    """
    from ..memory.offline import drop_held, held_runs, persist_held

    if action is Action.list:
        found = held_runs(root, folder)
        if as_json:
            print_json(found)
            return 0
        rows = [
            [
                run.root,
                "alive" if run.is_alive else "",
                size_text(run.num_bytes),
                str(one.step),
                f"{one.files_here} of {one.files}",
            ]
            for run in found
            for one in run.steps
        ]
        print_text(Columns(["root", "job", ">memory", ">step", ">files here"], rows))
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
    if not report.is_published:
        print_note(
            f"files of {plural(len(report.missing), 'node')} are missing: {', '.join(report.missing)}; run this there, or choose "
            "an older step by --step"
        )
    return 0 if report.is_published else 1
