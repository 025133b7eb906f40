"""``reshard-ckpt plot``: pictures of a checkpoint."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ..errors import UsageError
from .app import command, print_json, print_note
from .options import AsJson, Path, parse_mesh

Name = Annotated[str | None, typer.Argument(metavar="NAME", help="A tensor; without one, the whole checkpoint.")]
Output = Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="The file to write: .html, .svg, .png or .json.")]


@command(
    "reshard-ckpt plot ckpt/step_100 -o report.html",
    "reshard-ckpt plot ckpt/step_100 model.layers.0.attn.wq.weight --to dp=2,tp=4 -o wq.png",
    "reshard-ckpt plot ckpt/step_100 --timeline -o save.svg",
)
def plot(
    path: Path,
    output: Output,
    name: Name = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="AXES", help="Another mesh, as dp=2,tp=4: also draw which saved shard feeds which of its ranks."),
    ] = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Draw the times of the save; .json is for Perfetto and chrome://tracing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Draw one tensor's cut over ranks, a save's timeline, or a page of the whole checkpoint that needs no network.

    All but .json needs the extra reshard-ckpt[plot].
    """
    from ..checkpoint import plot as plot_checkpoint

    # Every rank of a job would write the same file.
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1":
        raise UsageError(f"plot is the work of one process, and WORLD_SIZE is {size}; start it without torchrun, or unset that")
    file = plot_checkpoint(path, name, to=None if to is None else parse_mesh("--to", to), output=output, timeline=timeline)
    if as_json:
        print_json({"output": str(file), "bytes": file.stat().st_size})
    else:
        print_note(f"{file}: {file.stat().st_size:,} bytes")
