"""Matching: find the saved tensor that each wanted tensor loads from, or the reason why it cannot load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np

from ..catalog.model import Catalog
from ..catalog.names import bare
from ..catalog.problems import Problem, not_saved
from ..catalog.specs import PieceColumns, TensorSpec
from ..geometry.runs import I64, decompose, pad_left, volumes
from ..geometry.tiling import Fault, find_faults
from ..report import describe_region
from .load_plan import LoadPlan
from .scales import Quantized


class Match(NamedTuple):
    """The outcome of matching: specs that can load, the catalog index that each loads from (`source`), and messages.

    The messages about other specs are in one tuple for each reason: `missing`, `shape`, `dtype`.
    """

    specs: tuple[int, ...]
    source: I64
    named: frozenset[int]
    """The catalog indices of all wanted tensors whose names the catalog has, including tensors that cannot load."""
    missing: tuple[Problem, ...]
    shape: tuple[Problem, ...]
    dtype: tuple[Problem, ...]
    kept: tuple[Problem, ...]
    """Messages about tensors that the checkpoint lacks, and that keep their value because of `allow_missing`."""
    saved_as: Mapping[str, str]
    """For specs that were saved under another name, that name. The two differ only in parts that module wrappers add."""


def matches(name: str, patterns: Sequence[str] | bool) -> bool:
    """Tell whether a name matches any of the patterns; a bool in place of patterns means all names or none.

    A pattern is a name, which also matches all names below it, or has wildcards as in a shell.

    >>> matches("model.emb.weight", ["*.emb.*"]), matches("model.emb.weight", ["model.emb"]), matches("x", False)
    (True, True, False)
    """
    if isinstance(patterns, bool):
        return patterns
    return any(name == p or name.startswith(f"{p}.") or fnmatchcase(name, p) for p in patterns)


def match(
    specs: Sequence[TensorSpec],
    catalog: Catalog,
    *,
    cast: Sequence[str] | bool,
    allow_resize: Sequence[str] | bool,
    allow_missing: Sequence[str] | bool = False,
    tied_under_one_name: bool = False,
    quantized: Quantized | None = None,
) -> Match:
    """Find the tensor of the catalog that each spec loads from, and describe each spec that cannot load.

    `cast`, `allow_resize` and `allow_missing` are patterns of names whose dtype or shape may differ, or that may be missing; True
    means all names. A tensor of `quantized` may be cast if its scale can be applied. With `tied_under_one_name`, a missing tensor
    is ignored if another name of the same memory can load.
    """
    saved_as = _without_wrappers(specs, catalog)
    found: dict[int, int] = {}  # the catalog index of each spec that can load, by the spec's own
    missing: dict[Problem, TensorSpec] = {}
    shape: list[Problem] = []
    dtype: list[Problem] = []
    entries = catalog.found([saved_as.get(spec.name, spec.name) if saved_as else spec.name for spec in specs])
    for i, (spec, entry) in enumerate(zip(specs, entries, strict=True)):
        if entry is None:
            missing[not_saved(spec.name)] = spec
            continue
        index, code, saved = entry
        # A spec that fails both tests is listed once, by its shape.
        if saved != spec.shape and not (len(saved) == len(spec.shape) and matches(spec.name, allow_resize)):
            what = f"saved with global shape {saved}, wanted {spec.shape}"
            if len(saved) == len(spec.shape):
                shape.append(Problem(spec.name, what, "allow_resize"))
            else:
                shape.append(Problem(spec.name, f"{what}, of another number of dims"))
        elif code != spec.dtype and not matches(spec.name, cast):
            dtype.append(Problem(spec.name, f"saved as {code}, wanted {spec.dtype}", "cast"))
        elif code != spec.dtype and quantized is not None and (why := quantized.refusal(catalog, index, spec.dtype)):
            dtype.append(Problem(spec.name, f"wanted {spec.dtype}, {why}"))
        else:
            found[i] = index
    # A foreign checkpoint may have saved tied tensors under one of their names, so the others are not missing.
    has_source = {specs[i].first_name for i in found} if tied_under_one_name else set()
    lines = {line: spec for line, spec in missing.items() if spec.first_name not in has_source}
    kept = {line: None for line, spec in lines.items() if matches(spec.name, allow_missing)}
    return Match(
        tuple(found),
        np.array(list(found.values()), np.int64),
        frozenset([entry[0] for entry in entries if entry is not None]),
        tuple(line for line in lines if line not in kept),
        tuple(dict.fromkeys(shape)),
        tuple(dict.fromkeys(dtype)),
        tuple(kept),
        saved_as,
    )


def _without_wrappers(specs: Sequence[TensorSpec], catalog: Catalog) -> dict[str, str]:
    """Map the names of specs that the catalog lacks to saved names that differ only in the parts that wrappers add.

    A name is left out if several specs or several saved names fit. Saved names that another spec wants do not count.
    """
    wanted = {spec.name for spec in specs}
    lacking = _by_bare_name(wanted.difference(catalog.names))
    if not lacking:
        return {}
    left = _by_bare_name(name for name in catalog.names if name not in wanted)
    return {names[0]: left[bare][0] for bare, names in lacking.items() if len(names) == len(left.get(bare, ())) == 1}


def _by_bare_name(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names that are equal without the parts that wrappers add."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(bare(name), []).append(name)
    return found


def expected_counts(catalog: Catalog, source: I64, wanted: PieceColumns) -> I64:
    """Count the elements of each wanted piece that lie inside the saved shape: all of them, unless a tensor was resized."""
    width = max(catalog.boxes.offsets.shape[1], wanted.offsets.shape[1])
    saved = pad_left(catalog.tensors_table.shape, width, 1)[source][wanted.tensor]
    # low, high: the boxes of all pieces, clipped to the saved shape.
    cut = decompose(wanted.lengths, wanted.start, wanted.count)
    low = pad_left(wanted.offsets, width, 0)[cut.parent] + pad_left(cut.offsets, width, 0)
    high = np.minimum(low + pad_left(cut.lengths, width, 1), saved[cut.parent])
    inside = volumes(np.maximum(high - low, 0))
    return np.bincount(cut.parent, weights=inside, minlength=len(wanted.start)).astype(np.int64)


def faults_of(catalog: Catalog, source: I64) -> list[Fault]:
    """List an overlap or a gap for each of these tensors whose saved rows do not tile it; aliases count as their sources."""
    table = catalog.tensors_table
    # origin: the sources, each alias replaced by its tensor. All other tensors get an empty shape, which has no faults.
    origin = np.unique(catalog.sources(source))
    shape = np.zeros_like(table.shape)
    shape[origin] = table.shape[origin]
    chosen = np.zeros(len(table.names), bool)
    chosen[origin] = True
    owner = catalog.row_tensors
    row = np.flatnonzero(chosen[owner])
    rows, boxes = catalog.rows.take(row), catalog.boxes
    return list(find_faults(shape, boxes.offsets, boxes.lengths, owner[row], rows.box, rows.start, rows.count))


def fault_text(catalog: Catalog, fault: Fault) -> str:
    """Describe an overlap or a gap in saved shards as the line of a message."""
    table = catalog.tensors_table
    what = "saved shards overlap at" if fault.rows else "no saved shard holds"
    return f"{table.names[fault.tensor]}: {what} {describe_region(fault.low, fault.high, int(table.ndim[fault.tensor]))}"


def uncovered(
    catalog: Catalog, specs: Sequence[TensorSpec], source: I64, wanted: PieceColumns, plan: LoadPlan, faults: Sequence[Fault]
) -> dict[int, str]:
    """Describe each tensor with wanted elements that no saved shard covers, as the line of a message, by catalog index."""
    expected = expected_counts(catalog, source, wanted)
    gaps = {fault.tensor: fault for fault in faults if not fault.rows}
    lacking: dict[int, int] = {}
    for piece in np.flatnonzero(plan.covered < expected).tolist():
        dest = int(wanted.tensor[piece])
        lacking[dest] = lacking.get(dest, 0) + int(expected[piece] - plan.covered[piece])
    lines: dict[int, str] = {}
    for dest, count in lacking.items():
        spec, index = specs[dest], int(source[dest])
        fault = gaps.get(catalog.source(index))
        where = "" if fault is None else f", first of all {describe_region(fault.low, fault.high, len(spec.shape))}"
        what = f"no saved shard covers a part that is wanted{where}"
        lines[index] = f"{spec.name}: {what}; global shape {spec.shape}, {count} elements missing"
    return lines
