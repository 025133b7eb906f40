"""``reshard-ckpt goodput``: the best intervals between saves, the time lost with them, and the gain from a faster tier."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ..core.planning.interval import MAX_OVERHEAD, Goodput, LostShares
from ..core.report import duration_text
from .app import command, print_json, print_note, print_text
from .columns import Columns
from .options import AsJson


@command("reshard-ckpt goodput --state-gb 2000 --write-gbps 20 --stall 5 --mtbf 3h --nodes 64 --copies 1 -o lost.svg")
def goodput(
    state_gb: Annotated[float, typer.Option(help="Size of a checkpoint in GB, over all nodes.")],
    write_gbps: Annotated[float, typer.Option(help="GB/s at which all nodes together write to the store.")],
    mtbf: Annotated[str, typer.Option(help="Mean time between failures of the whole job: 6h, 40min.")],
    stall: Annotated[float, typer.Option(help="Seconds of training that one save loses.")] = 1.0,
    read_gbps: Annotated[
        float | None, typer.Option(help="GB/s at which they read from it; by default as fast as they write.")
    ] = None,
    copy_gbps: Annotated[float, typer.Option(help="GB/s from one node to another.")] = 5.0,
    restart: Annotated[str, typer.Option(help="Time from a failure until the new processes load the state.")] = "5min",
    nodes: Annotated[int, typer.Option(help="Nodes of the job.")] = 1,
    copies: Annotated[
        int | None,
        typer.Option(help="Number of other nodes that hold a node's checkpoints in memory. By default no memory tier."),
    ] = None,
    node_share: Annotated[float, typer.Option(help="Share of the failures that take a node with its memory.")] = 1.0,
    double_share: Annotated[float, typer.Option(help="Share of those failures that take a second node at the same time.")] = 0.0,
    max_overhead: Annotated[float, typer.Option(help="Share of time that saves may cost at most.")] = MAX_OVERHEAD,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Draw it: .png, .svg or .html.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compute how often to save, and the time that is lost to saves, repeated steps and restarts."""
    from ..checkpoint import goodput as compute

    report = compute(
        state_gb=state_gb,
        write_gbps=write_gbps,
        mtbf=mtbf,
        stall=stall,
        read_gbps=read_gbps,
        copy_gbps=copy_gbps,
        restart=restart,
        nodes=nodes,
        copies=copies,
        node_share=node_share,
        double_share=double_share,
        max_overhead=max_overhead,
        output=output,
    )
    best = report.best
    if as_json:
        print_json({**_plain(best), "alternatives": {k: _plain(v) for k, v in report.alternatives.items()}})
        return
    rows = [] if best.memory_s is None else [_row("memory", best.memory_s, best.memory)]
    rows.append(_row("store", best.store_s, best.store))
    rows.append(["", "all", *_shares(best.lost)])
    print_text(Columns(["tier", ">save every", ">saving", ">steps again", ">restoring", ">lost"], rows), "")
    if copies is not None:
        print_text(f"memory survives {best.memory_survives:.2%} of the failures")
    print_text(f"goodput {best.goodput:.2%}: {duration_text(86400 * best.lost.total)} of each day are lost", "")
    changes = [
        [what, f"{other.goodput:.2%}", f"{(other.goodput - best.goodput) * 1440:+.1f} min"]
        for what, other in report.alternatives.items()
    ]
    print_text(Columns(["with", ">goodput", ">a day"], changes))
    if output is not None:
        print_note(f"{output}: {os.path.getsize(output):,} bytes")


def _row(tier: str, interval_s: float, lost: LostShares) -> list[str]:
    """Make the table row of one storage tier: its name, the interval between saves, and the shares of time lost."""
    return [tier, duration_text(interval_s), *_shares(lost)]


def _shares(lost: LostShares) -> list[str]:
    return [f"{share:.2%}" for share in (lost.saving, lost.repeating, lost.restoring, lost.total)]


def _plain(best: Goodput) -> dict[str, object]:
    """Convert a `Goodput` to a dict for JSON: intervals in seconds, and shares of time lost by cause."""
    lost = best.lost
    return {
        "goodput": best.goodput,
        "memory_interval_s": best.memory_s,
        "store_interval_s": best.store_s,
        "memory_survives": best.memory_survives,
        "lost": {"saving": lost.saving, "repeating": lost.repeating, "restoring": lost.restoring},
    }
