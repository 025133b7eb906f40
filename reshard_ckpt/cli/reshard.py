"""``reshard-ckpt reshard``: a checkpoint for another topology, without a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from .app import AsJson, Path, as_plain, command, emit, note, progress, say
from .columns import Columns
from .words import placement, plural

if TYPE_CHECKING:
    from ..checkpoint import ReshardReport

MAX_RANKS = 64
"""Ranks that are listed."""


@command(
    "reshard-ckpt reshard ckpt/step_100 ckpt/step_100_tp4 --mesh dp=2,tp=4,pp=1",
    "reshard-ckpt reshard ckpt/step_100 serving --mesh tp=8 --drop optimizer --cast 'model.*=bfloat16'",
    "torchrun --nproc-per-node=4 -m reshard_ckpt reshard ckpt/step_100 ckpt/step_100_tp4 --mesh tp=4",
)
def reshard(
    src: Path,
    dst: Annotated[str, typer.Argument(help="Where to write; what is there is replaced in the last step.", show_default=False)],
    mesh: Annotated[
        str, typer.Option(help="Axes and sizes of the new topology, outermost first: dp=2,tp=4.", show_default=False)
    ],
    rules: Annotated[str | None, typer.Option(help="A YAML file: name patterns with placements.", show_default=False)] = None,
    stages: Annotated[
        str | None,
        typer.Option(
            help="The first layer of each pipeline stage but the first: 8,16,24. Evenly by default.", show_default=False
        ),
    ] = None,
    select: Annotated[list[str] | None, typer.Option(help="Take only such names.", show_default=False)] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Leave such names out.", show_default=False)] = None,
    drop: Annotated[list[str] | None, typer.Option(help="Leave a whole part out: optimizer.", show_default=False)] = None,
    rename: Annotated[
        list[str] | None, typer.Option(help="Another name, or prefix of names: old=new.", show_default=False)
    ] = None,
    cast: Annotated[
        list[str] | None, typer.Option(help="Convert floating-point tensors: 'model.*=bfloat16'.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be read and written; write nothing.")] = False,
    verify: Annotated[bool, typer.Option(help="Prove what is read, and read back what was written.")] = True,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as a job of another topology would have saved it. Run again after a kill, it goes on.

    Under torchrun all processes share the work.
    """
    from ..checkpoint import reshard as reshard_checkpoint
    from ..comm import launched_group

    axes = {axis: _number("--mesh", mesh, size) for axis, size in _pairs("--mesh", mesh.split(","))}
    with launched_group(), progress() as on_progress:
        report = reshard_checkpoint(
            src,
            dst,
            mesh=axes,
            rules=rules,
            stages=None if stages is None else [_number("--stages", stages, n) for n in stages.split(",")],
            select=select or None,
            exclude=exclude or None,
            drop=drop or None,
            rename=dict(_pairs("--rename", rename)) if rename else None,
            cast=dict(_pairs("--cast", cast)) if cast else None,
            dry_run=dry_run,
            verify=verify,
            progress=on_progress,
        )
    if as_json:
        emit(_as_json(report))
        return
    say(*_text(report, dst))
    if len(report.ranks) > MAX_RANKS:
        note(f"{len(report.ranks) - MAX_RANKS:,} more ranks; --json lists all")


def _pairs(option: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """``a=b`` as pairs; of several equals signs the last one counts, as names may hold some."""
    out: list[tuple[str, str]] = []
    for text in texts:
        left, sign, right = text.strip().rpartition("=")
        if not sign or not left or not right:
            raise UsageError(f"{option} {text!r}: wanted the form name=value")
        if left in dict(out):
            raise UsageError(f"{option}: {left!r} is given twice")
        out.append((left, right))
    return out


def _number(option: str, whole: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise UsageError(f"{option} {whole!r}: {text!r} is no number")
    return int(text)


def _text(report: ReshardReport, dst: str) -> list[str | Columns]:
    from ..engine.progress import size_text

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


def _as_json(report: ReshardReport) -> Any:
    plain = as_plain(report)
    plain["placements"] = {name: placement(where) for name, where in report.placements.items()}
    return plain
