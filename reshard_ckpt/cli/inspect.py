"""``reshard-ckpt inspect``: the contents of a checkpoint, or the steps of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.catalog.model import Catalog, ShardView, TensorView
from ..core.catalog.name_tree import walk
from ..core.timeline import rank_label
from ..engine.common.progress import size_text
from ..errors import CheckpointNotFound
from .app import as_plain, command, print_json, print_text, progress
from .columns import Columns, Preview
from .formatting import mesh, placement, plural, shape, short
from .options import AsJson, Path

if TYPE_CHECKING:
    from ..checkpoint import Inspection
    from ..checkpoint.inspecting import TensorLine, ValueLine
    from ..checkpoint.listing import StepLine

MAX_SHARDS = 64
"""The most shards of one tensor that are listed without ``--all``."""

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME", help="Tensors or values, a name that they are below, or patterns such as '*.bias'."),
]


@command(
    "reshard-ckpt inspect ckpt",
    "reshard-ckpt inspect ckpt/step_100",
    "reshard-ckpt inspect ckpt/step_100 model.layers.0.attn.wq.weight",
    "reshard-ckpt inspect ckpt/step_100 model --stats",
)
def inspect(
    path: Path,
    names: Names = None,
    stats: Annotated[bool, typer.Option("--stats", help="Read the tensors: min, max, mean, NaN and Inf counts.")] = False,
    all_shards: Annotated[
        bool, typer.Option("--all", help=f"List every shard of a tensor, also if there are more than {MAX_SHARDS}.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the contents of a checkpoint: a summary, a tree of names that folds equal layers, or single tensors in detail.

    No tensor is read, unless --stats asks for it; then in bounded memory. For a folder of several checkpoints, list them.
    """
    from ..checkpoint import inspect as inspect_checkpoint
    from ..checkpoint.listing import list_run

    try:
        with progress() as on_progress:
            found = inspect_checkpoint(path, names, stats=stats, progress=on_progress)
    except CheckpointNotFound:
        steps = [] if names or stats else list_run(path)
        if not steps:
            raise
        print_json({"path": path, "format": "run", "steps": steps}) if as_json else print_text(_steps(steps))
        return
    if as_json:
        print_json(_as_json(found))
        return
    for i, paragraph in enumerate(paragraphs(found, whole=not names, all_shards=all_shards)):
        print_text(*([""] if i else []), *paragraph)


def _steps(lines: Sequence[StepLine]) -> Columns:
    """Make the table that lists the checkpoints of a run."""
    rows = [
        (
            "" if line.step is None else str(line.step),
            "" if line.created_s is None else _when(line.created_s),
            "" if line.num_bytes is None else size_text(line.num_bytes),
            "" if line.metric is None else f"{line.metric:.6g}",
            line.problem or (f"{line.path} (superseded)" if line.superseded else line.path),
        )
        for line in lines
    ]
    return Columns([">step", "saved", ">size", ">metric", "path"], rows)


def paragraphs(found: Inspection, *, whole: bool = True, all_shards: bool = False) -> list[list[str | Columns]]:
    """Turn an `Inspection` into paragraphs to print: summary, tree, single tensors, values, statistics."""
    detailed = {tensor.name for tensor in found.tensors} | set(found.values)
    chosen: list[list[str | Columns]] = [
        [_summary(found)] if whole else [],
        [_tree(found)] if any(line.name not in detailed for line in found.lines) else [],
        *(_tensor(found.catalog, tensor, all_shards) for tensor in found.tensors),
        [f"{name} = {value!r}" for name, value in found.values.items()],
        [_stats(found)] if found.stats else [],
    ]
    return [paragraph for paragraph in chosen if paragraph]


def _summary(found: Inspection) -> Columns:
    """Make the table of a checkpoint's summary."""
    of = found.summary
    aliases = f" ({plural(of.num_aliases, 'of them a second name', 'of them second names')})" if of.num_aliases else ""
    by = "" if of.num_ranks <= 1 else f", written by {plural(of.num_ranks, 'rank')}"
    lines = {
        "path": found.path,
        "format": found.format,
        "saved": f"{_when(of.created_s)} as {of.save_id}" if of.created_s > 0 else None,
        "step": None if of.step is None else str(of.step),
        "mesh": mesh(of.mesh),
        "tensors": f"{of.num_tensors:,}{aliases} in {plural(of.num_shards, 'shard')}",
        "parameters": f"{of.num_parameters:,}",
        "bytes": size_text(of.num_bytes),
        "dtypes": ", ".join(f"{code} {size_text(share.num_bytes)}" for code, share in of.dtypes.items()),
        "below": ", ".join(f"{root} {size_text(share.num_bytes)}" for root, share in of.roots.items()),
        "values": f"{of.num_values:,}",
        "files": f"{of.num_files:,} with {size_text(of.file_bytes)}{by}",
        "refers to": f"{size_text(of.bytes_referred)} in {', '.join(of.checkpoints)}" if of.checkpoints else None,
        "lossy": "; ".join(f"{name}: {what}" for name, what in found.catalog.lossy.items()),
        "metadata": None if found.catalog.metadata is None else short(found.catalog.metadata, 200),
    }
    return Columns(["", ""], [(name, line) for name, line in lines.items() if line])


def _when(seconds: float) -> str:
    """Return a time, given in seconds since 1970, as text."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _tree(found: Inspection) -> Columns:
    """Make the table of a checkpoint's tree of names."""
    rows: list[tuple[str, ...]] = []
    for guide, node in walk(found.tree):
        leaves = [found.lines[i] for i in node.leaves]
        times = f" ×{node.count:,}" if node.count > 1 else ""
        rows.append((f"{guide}{node.label}{times}", *_cells(leaves, found.catalog)))
    return Columns(["name", "dtype", "shape", "placement", ">shards", ">size"], rows)


def _cells(leaves: Sequence[TensorLine | ValueLine], catalog: Catalog) -> tuple[str, ...]:
    """Make the cells of one table row: dtype, shape, placement, shards, size. `leaves` are equal layers that share this row."""
    from ..checkpoint.inspecting import ValueLine

    if not leaves:
        return ("",) * 5
    first, size = leaves[0], size_text(sum(line.num_bytes for line in leaves))
    if isinstance(first, ValueLine):
        ranks = plural(first.num_ranks, "rank") if first.num_ranks else ""
        value = Preview(short(first.value, 36)) if first.in_catalog else ranks
        return first.kind.replace("_", " "), value, "", "", size
    shards = [line.num_shards for line in leaves if not isinstance(line, ValueLine)]
    low, high = min(shards), max(shards)
    where = placement(None if first.placement < 0 else catalog.placements[first.placement])
    if first.alias_of is not None:
        return first.dtype, shape(first.shape), f"= {first.alias_of}", "", ""
    return first.dtype, shape(first.shape), where, f"{low:,}" if low == high else f"{low:,}-{high:,}", size


def _tensor(catalog: Catalog, tensor: TensorView, all_shards: bool) -> list[str | Columns]:
    """Make the paragraph that ``inspect`` prints of a single tensor, with a table of its shards."""
    head = f"{tensor.name}: {tensor.dtype} {shape(tensor.shape)}, {size_text(tensor.num_bytes)}"
    where = placement(tensor.placement)
    head += f", {where}" if where else ""
    head += f", the same bytes as {tensor.alias_of}" if tensor.alias_of is not None else ""
    listed = tensor.shards if all_shards else tensor.shards[:MAX_SHARDS]
    headings = ["offsets", "lengths", "elements of that box", "rank", "file", ">at byte", ">bytes", "file digest"]
    rows = [_shard(catalog, shard) for shard in listed]
    if not any(map(_is_flat, listed)):
        headings, rows = headings[:2] + headings[3:], [row[:2] + row[3:] for row in rows]
    more = len(tensor.shards) - len(listed)
    return [head, Columns(headings, rows), *([f"… and {plural(more, 'shard')} more; --all lists them"] if more else [])]


def _shard(catalog: Catalog, shard: ShardView) -> tuple[str, ...]:
    """Return the cells of one shard's row in a tensor's table of shards."""
    return (
        str(list(shard.offsets)),
        str(list(shard.lengths)),
        f"{shard.start:,} to {shard.start + shard.count:,}" if _is_flat(shard) else "all",
        rank_label(shard.file.rank, catalog.mesh).removeprefix("rank "),
        shard.file.key,
        f"{shard.offset:,}",
        f"{shard.num_bytes:,}",
        shard.file.digest.hex() or "none",
    )


def _is_flat(shard: ShardView) -> bool:
    """Tell whether a shard is only a run of its box's elements, and not the whole box."""
    return (shard.start, shard.count) != (0, prod(shard.lengths))


def _stats(found: Inspection) -> Columns:
    """Make the table of the statistics of tensors."""
    rows = []
    for of in found.stats:
        numbers = ("" if n is None else f"{n:.6g}" for n in (of.min, of.max, of.mean))
        rows.append((of.name, f"{of.num_elements:,}", *numbers, f"{of.num_nan:,}", f"{of.num_inf:,}"))
    return Columns(["name", ">elements", ">min", ">max", ">mean", ">NaN", ">Inf"], rows)


def _as_json(found: Inspection) -> dict[str, Any]:
    """Convert an `Inspection` to plain data, for JSON; only tensors given by their full name have `shards`."""
    from ..checkpoint.inspecting import ValueLine

    of = found.summary
    mesh = None if of.mesh is None else of.mesh.by_axis
    summary = {**as_plain(of), "mesh": mesh, "lossy": dict(found.catalog.lossy), "metadata": as_plain(found.catalog.metadata)}
    tensors = [line for line in found.lines if not isinstance(line, ValueLine)]
    values = [line for line in found.lines if isinstance(line, ValueLine)]
    placements = [as_plain(axes) for axes in found.catalog.placements]
    detail = {tensor.name: [_shard_json(found.catalog, shard) for shard in tensor.shards] for tensor in found.tensors}
    stats = {of.name: as_plain(of) for of in found.stats}
    return {
        "path": found.path,
        "format": found.format,
        "summary": summary,
        "tensors": [
            {
                **as_plain(line),
                "placement": None if line.placement < 0 else placements[line.placement],
                **({"shards": detail[line.name]} if line.name in detail else {}),
                **({"stats": stats[line.name]} if line.name in stats else {}),
            }
            for line in tensors
        ],
        "values": [{**as_plain(line), "value": as_plain(found.values.get(line.name, line.value))} for line in values],
    }


def _shard_json(catalog: Catalog, shard: ShardView) -> dict[str, Any]:
    """Convert one shard of a tensor to plain data, for JSON."""
    mesh, rank = catalog.mesh, shard.file.rank
    coordinates = None if mesh is None or rank >= mesh.size else dict(zip(mesh.axes, mesh.coordinates(rank), strict=True))
    return {
        "offsets": shard.offsets,
        "lengths": shard.lengths,
        "start": shard.start,
        "count": shard.count,
        "rank": rank,
        "coordinates": coordinates,
        "file": shard.file.key,
        "offset": shard.offset,
        "num_bytes": shard.num_bytes,
        "digest": shard.file.digest.hex(),
    }
