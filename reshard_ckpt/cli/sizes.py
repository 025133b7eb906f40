"""``reshard-ckpt sizes``: the disk space and host memory that the checkpoints of a job take."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from ..engine.common.progress import size_text
from .app import command, print_json, print_text
from .columns import Columns
from .options import AsJson


@command("reshard-ckpt sizes --parameters 7e9 --ranks 64 --nodes 8 --keep-last 3 --copies 1")
def sizes(
    parameters: Annotated[float, typer.Option(help="Number of parameters of the model: 7e9.")],
    dtype: Annotated[str, typer.Option(help="Dtype of the parameters that are saved: float32, bfloat16.")] = "float32",
    optimizer: Annotated[str, typer.Option(help="adamw, adam, lion, momentum, sgd or none.")] = "adamw",
    optimizer_dtype: Annotated[
        str | None, typer.Option(help="Dtype of the optimizer's tensors; by default that of the parameters.")
    ] = None,
    masters: Annotated[bool, typer.Option("--masters", help="The optimizer holds float32 copies of the parameters.")] = False,
    ranks: Annotated[int, typer.Option(help="Processes of the job.")] = 1,
    nodes: Annotated[int, typer.Option(help="Machines of the job.")] = 1,
    keep_last: Annotated[int, typer.Option(help="As for Manager: number of newest checkpoints to keep.")] = 1,
    keep_every: Annotated[int | None, typer.Option(help="As for Manager: also keep multiples of this step.")] = None,
    keep_best: Annotated[int, typer.Option(help="As for Manager: number of best checkpoints to keep.")] = 0,
    steps: Annotated[int, typer.Option(help="Steps of the run, for --keep-every.")] = 0,
    save_every: Annotated[int, typer.Option(help="Steps between saves, for --keep-every.")] = 1,
    host_buffer_bytes: Annotated[int | None, typer.Option(help="Limit of async_save's host memory on a rank, in bytes.")] = None,
    copies: Annotated[
        int | None,
        typer.Option(help="Number of other nodes that hold a node's checkpoints in memory. By default no memory tier."),
    ] = None,
    generations: Annotated[int, typer.Option(help="Number of saves that the memory tier keeps.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Compute the disk space and host memory that the checkpoints of a job take."""
    from ..checkpoint import Memory
    from ..checkpoint import sizes as compute

    found = compute(
        parameters,
        dtype=dtype,
        optimizer=optimizer,
        optimizer_dtype=optimizer_dtype,
        masters=masters,
        ranks=ranks,
        nodes=nodes,
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=keep_best,
        steps=steps,
        save_every=save_every,
        host_buffer_bytes=host_buffer_bytes,
        memory=None if copies is None else Memory(copies=copies, generations=generations),
    )
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    rows = [
        ["disk", "one checkpoint", size_text(found.checkpoint_bytes)],
        ["disk", f"the {found.num_kept} that are kept", size_text(found.run_bytes)],
        ["disk", "while one more is saved", size_text(found.peak_bytes)],
        ["rank", "its part of a checkpoint", size_text(found.rank_bytes)],
    ]
    if copies is None:
        rows.append(["rank", "memory of async_save", size_text(found.staging_rank_bytes)])
        rows.append(["node", "memory of async_save", size_text(found.staging_node_bytes)])
    else:
        rows.append(["node", "memory tier", size_text(found.memory_node_bytes)])
    print_text(Columns(["where", "what", ">bytes"], rows))
