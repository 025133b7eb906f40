"""``reshard-ckpt convert``: write a checkpoint in another format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from ..engine.common.progress import size_text
from .app import command, print_json, print_note, print_text, together
from .formatting import plural
from .options import AsJson, Cast, Exclude, Rename, Select, Src, TimeoutS, parse_pairs, refuse_memory

Dst = Annotated[str, typer.Argument(metavar="DST", help="Where to write: a folder, or for torch a file.")]
To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="FORMAT",
        help="safetensors (as Hugging Face lays it out), torch, dcp, megatron or reshard. By default torch if DST ends in .pt or "
        ".pth, else safetensors.",
    ),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        metavar="FORM",
        help="For --to dcp: nested (by default), flat or numbered. For --to megatron: fully_reshardable, which names buckets.",
    ),
]
Root = Annotated[
    str | None,
    typer.Option(
        "--root",
        metavar="NAME",
        help="Take only names below this one, and drop it from them. By default 'model' for safetensors, else everything.",
    ),
]


@command(
    "reshard-ckpt convert ckpt/step_100 llama-hf --max-shard-size 5GB --cast 'model.*=bfloat16'",
    "reshard-ckpt convert llama-hf llama.pt",
    "torchrun --nproc-per-node=4 -m reshard_ckpt convert ckpt/step_100 llama-hf",
)
def convert(
    src: Src,
    dst: Dst,
    to: To = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest size of a safetensors file.")] = "5GB",
    optimizer: Optimizer = None,
    unstack: Annotated[
        bool,
        typer.Option("--unstack", help="For --to safetensors: write layers that are stacked in one tensor as one tensor each."),
    ] = False,
    root: Root = None,
    select: Select = None,
    exclude: Exclude = None,
    rename: Rename = None,
    cast: Cast = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that is at DST.")] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not verify the checksums of the bytes that are read.")
    ] = False,
    timeout_s: TimeoutS = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in another format, in bounded memory. DST appears whole, or not at all.

    Run again after a kill, it keeps the files that were finished. Under torchrun all processes share the work.
    """
    from ..checkpoint import convert as convert_checkpoint

    refuse_memory(dst)
    with together(timeout_s) as shared:
        report = convert_checkpoint(
            src,
            dst,
            to=to,
            max_shard_size=max_shard_size,
            optimizer=optimizer,
            unstack=unstack,
            root=root,
            select=select,
            exclude=exclude,
            rename=parse_pairs("--rename", rename),
            cast=parse_pairs("--cast", cast),
            overwrite=overwrite,
            verify=not no_verify,
            **shared,
        )
    if as_json:
        print_json(report)
        return
    what = f"{plural(report.num_tensors, 'tensor')}, {plural(report.num_values, 'value')}, {size_text(report.num_bytes)}"
    kept = f", {size_text(report.bytes_kept)} of it by an earlier attempt" if report.bytes_kept else ""
    print_text(f"{dst}: {report.format}, {plural(len(report.files), 'file')}, {what}{kept}")
    if report.left_out:
        print_note(f"left out: {_left_out_text(report.left_out)}")


def _left_out_text(names: Sequence[str]) -> str:
    """List, as text, the names that a conversion left out; many names are counted by top-level key."""
    if len(names) <= 8:
        return ", ".join(names)
    tops: dict[str, int] = {}
    for name in names:
        top = name.partition(".")[0]
        tops[top] = tops.get(top, 0) + 1
    return ", ".join(f"{plural(count, 'name')} of {top}" for top, count in sorted(tops.items()))
