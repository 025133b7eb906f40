"""``reshard-ckpt reshard``: write a checkpoint for another topology, without a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..engine.common.progress import size_text
from .app import as_plain, command, print_json, print_note, print_text, together
from .columns import Columns
from .formatting import placement, plural
from .options import AsJson, Cast, Exclude, Rename, Select, Src, TimeoutS, parse_mesh, parse_numbers, parse_pairs, refuse_memory

if TYPE_CHECKING:
    from ..checkpoint import ReshardReport

MAX_RANKS = 64
"""The most ranks that the report of ``reshard-ckpt reshard`` lists."""


@command(
    "reshard-ckpt reshard ckpt/step_100 ckpt/step_100_tp4 --mesh dp=2,tp=4,pp=1",
    "reshard-ckpt reshard ckpt/step_100 serving --mesh tp=8 --drop optimizer --cast 'model.*=bfloat16'",
    "torchrun --nproc-per-node=4 -m reshard_ckpt reshard ckpt/step_100 ckpt/step_100_tp4 --mesh tp=4",
)
def reshard(
    src: Src,
    dst: Annotated[str, typer.Argument(metavar="DST", help="Where to write; a checkpoint there is replaced in the last step.")],
    mesh: Annotated[str, typer.Option(metavar="AXES", help="Axes and sizes of the new topology, outermost first: dp=2,tp=4.")],
    rules: Annotated[str | None, typer.Option(metavar="FILE", help="A YAML file: name patterns with placements.")] = None,
    stages: Annotated[
        str | None,
        typer.Option(
            metavar="LAYERS",
            help="The first layer of each pipeline stage except stage 0: 8,16,24. By default layers are divided evenly.",
        ),
    ] = None,
    select: Select = None,
    exclude: Exclude = None,
    drop: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Leave out a whole part of the state: optimizer.")
    ] = None,
    rename: Rename = None,
    cast: Cast = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the bytes that would be read and written; write nothing.")
    ] = False,
    verify: Annotated[
        bool, typer.Option(help="Verify the bytes that are read, and read back the bytes that were written.")
    ] = True,
    timeout_s: TimeoutS = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as a job of another topology would have saved it. If it was killed, run it again to continue.

    Under torchrun all processes share the work.
    """
    from ..checkpoint import reshard as reshard_checkpoint

    refuse_memory(dst)
    axes = parse_mesh("--mesh", mesh)
    with together(timeout_s) as shared:
        report = reshard_checkpoint(
            src,
            dst,
            mesh=axes,
            rules=rules,
            stages=None if stages is None else parse_numbers("--stages", stages),
            select=select,
            exclude=exclude,
            drop=drop,
            rename=parse_pairs("--rename", rename),
            cast=parse_pairs("--cast", cast),
            dry_run=dry_run,
            verify=verify,
            **shared,
        )
    for axis in report.idle_axes:
        print_note(
            f"--mesh {mesh}: the checkpoint knows no axis {axis}, so all ranks along it hold the same; --rules divides tensors"
        )
    if as_json:
        print_json({**as_plain(report), "placements": {name: placement(where) for name, where in report.placements.items()}})
        return
    print_text(*_text(report, dst))
    if len(report.ranks) > MAX_RANKS:
        print_note(f"{len(report.ranks) - MAX_RANKS:,} more ranks; --json lists all")


def _text(report: ReshardReport, dst: str) -> list[str | Columns]:
    """Make the text and the table that ``reshard-ckpt reshard`` prints of its report."""
    would = "would write" if report.dry_run else "wrote"
    kept = f", {size_text(report.bytes_kept)} of it by an earlier attempt" if report.bytes_kept else ""
    tensors = plural(len(report.placements), "tensor")
    head = f"{dst}: {would} {tensors} and {plural(report.num_values, 'value')}, {size_text(report.bytes_written)}{kept}"
    made_of = f"made of {size_text(report.bytes_wanted)}" + ("" if report.dry_run else f", {size_text(report.bytes_read)} read")
    rows = [
        [
            str(of.rank),
            str(of.num_files),
            size_text(of.bytes_written),
            size_text(of.bytes_wanted),
            ", ".join(map(str, of.sources)),
        ]
        for of in report.ranks[:MAX_RANKS]
    ]
    return [head, made_of, Columns([">rank", ">files", ">writes", ">made of", "in the files of ranks"], rows)]
