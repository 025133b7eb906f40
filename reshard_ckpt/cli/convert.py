"""``reshard-ckpt convert``: a checkpoint in another format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from ..errors import UsageError
from .app import AsJson, command, emit, note, progress, say
from .words import plural

Src = Annotated[str, typer.Argument(help="A checkpoint of any format that can be opened.", show_default=False)]
Dst = Annotated[str, typer.Argument(help="Where to write: a folder, or for --to torch a file.", show_default=False)]
To = Annotated[str, typer.Option("--to", help="safetensors (as Hugging Face lays it out), torch, dcp or reshard.")]
Optimizer = Annotated[
    str | None,
    typer.Option("--optimizer", help="For --to dcp, the form of optimizers: nested (by default) or flat.", show_default=False),
]
Root = Annotated[
    str | None,
    typer.Option(
        "--root",
        help="Take what is below this name, and leave the name out. By default 'model' for safetensors, else everything.",
        show_default=False,
    ),
]
Select = Annotated[list[str], typer.Option("--select", help="A name, what is below it, or a pattern: what to take.")]
Exclude = Annotated[list[str], typer.Option("--exclude", help="What not to take.")]
Rename = Annotated[list[str], typer.Option("--rename", metavar="OLD=NEW", help="Another name, also for what is below it.")]
Cast = Annotated[list[str], typer.Option("--cast", metavar="PATTERN=DTYPE", help="Convert floating-point tensors.")]


@command(
    "reshard-ckpt convert ckpt/step_100 llama-hf --max-shard-size 5GB --cast 'model.*=bfloat16'",
    "reshard-ckpt convert llama-hf llama.pt --to torch",
)
def convert(
    src: Src,
    dst: Dst,
    to: To = "safetensors",
    max_shard_size: Annotated[str, typer.Option(help="Of a safetensors file.")] = "5GB",
    optimizer: Optimizer = None,
    root: Root = None,
    select: Select = [],  # noqa: B006
    exclude: Exclude = [],  # noqa: B006
    rename: Rename = [],  # noqa: B006
    cast: Cast = [],  # noqa: B006
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that is at DST.")] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not prove the checksums of what is read.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in another format, in bounded memory. DST appears whole, or not at all."""
    from ..checkpoint import convert as convert_checkpoint
    from ..engine.progress import size_text

    with progress() as on_progress:
        report = convert_checkpoint(
            src,
            dst,
            to=to,
            max_shard_size=max_shard_size,
            optimizer=optimizer,
            root=root,
            select=select or None,
            exclude=exclude or None,
            rename=_pairs("rename", rename) or None,
            cast=_pairs("cast", cast) or None,
            overwrite=overwrite,
            verify=not no_verify,
            progress=on_progress,
        )
    if as_json:
        emit(report)
        return
    what = f"{plural(report.num_tensors, 'tensor')}, {plural(report.num_values, 'value')}, {size_text(report.num_bytes)}"
    say(f"{dst}: {report.format}, {plural(len(report.files), 'file')}, {what}")
    if report.left_out:
        note(f"left out: {_few(report.left_out)}")


def _pairs(option: str, given: Sequence[str]) -> Mapping[str, str]:
    pairs = {}
    for text in given:
        old, sign, new = text.partition("=")
        if not (old and sign and new):
            raise UsageError(f"--{option} {text}: wanted two parts with = between them")
        pairs[old] = new
    return pairs


def _few(names: Sequence[str], limit: int = 8) -> str:
    """What was left out, by its top-level keys where it is much."""
    if len(names) <= limit:
        return ", ".join(names)
    tops: dict[str, int] = {}
    for name in names:
        top = name.partition(".")[0]
        tops[top] = tops.get(top, 0) + 1
    return ", ".join(f"{plural(count, 'name')} of {top}" for top, count in sorted(tops.items()))
