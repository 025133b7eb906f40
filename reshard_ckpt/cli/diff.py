"""``reshard-ckpt diff``: the differences between two checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.catalog.name_tree import shorten
from .app import PROBLEM, as_plain, command, print_json, print_text, together
from .columns import Columns
from .formatting import placement, plural, shape, short
from .options import AsJson, TimeoutS

if TYPE_CHECKING:
    from ..checkpoint import Diff
    from ..checkpoint.comparing import Change, ValueChange
    from ..engine.checking.compare import TensorDifference

A = Annotated[str, typer.Argument(metavar="A", help="A checkpoint.")]
B = Annotated[str, typer.Argument(metavar="B", help="Another one, of any layout or format.")]


@command("reshard-ckpt diff ckpt/step_100 ckpt/step_200", "reshard-ckpt diff ckpt/step_100 resharded/step_100 --values")
def diff(
    a: A,
    b: B,
    values: Annotated[bool, typer.Option("--values", help="Compare every tensor bit by bit, and every value.")] = False,
    timeout_s: TimeoutS = 3600.0,
    as_json: AsJson = False,
) -> int:
    """Compare two checkpoints: names, shapes, dtypes, placements and small values; with --values all of their contents.

    The exit code is 1 if they differ. Different placements are listed, but do not count: equal values in other layouts are equal.
    Under torchrun all processes share the tensors.
    """
    from ..checkpoint import diff as diff_checkpoints

    with together(timeout_s) as shared:
        found = diff_checkpoints(a, b, values=values, **shared)
    if as_json:
        print_json({"equal": found.equal, **as_plain(found)})
    else:
        _print(found, values)
    return 0 if found.equal else PROBLEM


def _print(found: Diff, values: bool) -> None:
    """Print a `Diff`: the changes, the tensors that differ, and the verdict."""
    rows = [
        *_names("only in A", found.removed),
        *_names("only in B", found.added),
        *_changed("kind", found.kind, str),
        *_changed("shape", found.shape, shape),
        *_changed("dtype", found.dtype, str),
        *(("value", f"{of.name}{of.where}", short(of.a), "→", short(of.b), _by(of), _relative(of)) for of in found.values),
        *_changed("placement", found.placement, _placement),
    ]
    if rows:
        headings = ["", "name", "A", "", "B", ">by", ">rel"]
        width = len(headings) if any(row[5] for row in rows) else 5
        print_text(Columns(headings[:width], [row[:width] for row in rows]))
    if found.tensors:
        headings = ["differs", ">elements", ">of", ">max abs", ">max rel", ">NaN in one"]
        print_text(*([""] if rows else []), Columns(headings, _differences(found.tensors)))
    print_text(*([""] if rows or found.tensors else []), _verdict(found, values))


def _differences(tensors: Sequence[TensorDifference]) -> list[tuple[str, ...]]:
    """Make a table row for each tensor that differs; equal layers share a row, with summed counts and the largest differences."""
    lines: list[tuple[str, ...]] = []
    for label, leaves in shorten([d.name for d in tensors], [d.num_elements for d in tensors]):
        group = [tensors[i] for i in leaves]
        different, of, num_nan = (sum(getattr(d, field) for d in group) for field in ("num_different", "num_elements", "num_nan"))
        apart, relative = max(d.max_abs for d in group), max(d.max_rel for d in group)
        numbers = f"{different:,}", f"{of:,}", f"{apart:.3g}", f"{relative:.3g}", f"{num_nan:,}"
        lines.append((f"{label}{_count_suffix(leaves)}", *numbers))
    return lines


def _names(what: str, names: Sequence[str], cells: Sequence[tuple[str, ...]] | None = None) -> list[tuple[str, ...]]:
    """Make a table row for each name: the kind `what` of the difference, the name, and `cells` (both checkpoints) if given.

    Equal layers with equal cells share a row.
    """
    looks = [("", "", "")] * len(names) if cells is None else cells
    return [(what, f"{label}{_count_suffix(leaves)}", *looks[leaves[0]], "", "") for label, leaves in shorten(names, looks)]


def _changed(what: str, changes: Sequence[Change], words: Callable[[Any], str]) -> list[tuple[str, ...]]:
    """Make a table row for each `Change`; layers with the same change share a row."""
    return _names(what, [change.name for change in changes], [(words(change.a), "→", words(change.b)) for change in changes])


def _by(of: ValueChange) -> str:
    return "" if of.by is None else f"{of.by:+,}" if isinstance(of.by, int) else f"{of.by:+.3g}"


def _relative(of: ValueChange) -> str:
    return "" if of.relative is None else f"{of.relative:.3g}"


def _count_suffix(leaves: Sequence[int]) -> str:
    """Return ``×`` and the number of names that share a table row; empty for a single name."""
    return f" ×{len(leaves):,}" if len(leaves) > 1 else ""


def _placement(of: Any) -> str:
    if of is None or isinstance(of, str):
        return of or "unknown"
    return placement(of) or "one rank"


def _verdict(found: Diff, values: bool) -> str:
    """Return the last line of a diff: the checkpoints are equal, or how many names differ in shape, dtype and so on."""
    if found.equal:
        layout = " under different layouts" if found.placement else ""
        if values:
            return f"equal{layout}: {plural(found.num_compared, 'tensor')} bit by bit, and all values"
        return f"the same names, shapes, dtypes and small values{layout}; --values compares all that is in them"
    counts = {
        "only in A": len(found.removed),
        "only in B": len(found.added),
        "of another kind": len(found.kind),
        "of another shape": len(found.shape),
        "of another dtype": len(found.dtype),
        "with other numbers": len(found.tensors),
        "with another value": len({change.name for change in found.values}),
    }
    return "different: " + ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
