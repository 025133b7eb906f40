"""Matching: pairs each wanted tensor with its source in the checkpoint, or names what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from ..catalog.model import Catalog
from ..catalog.specs import TensorSpec
from ..catalog.wrappers import bare
from ..geometry.runs import I64, decompose, pad_left, volumes
from ..geometry.tiling import Fault, describe_region, find_faults
from .load_plan import LoadPlan
from .local_metadata import PieceColumns

MISSING = "not in the checkpoint"


@dataclass(frozen=True, slots=True)
class Match:
    """Indices of the specs that can load, the source of each in the catalog, and what is wrong with the others, by kind."""

    specs: tuple[int, ...]
    source: I64
    missing: tuple[str, ...]
    shape: tuple[str, ...]
    dtype: tuple[str, ...]
    kept: tuple[str, ...]
    """What the checkpoint lacks, and may lack."""
    saved_as: Mapping[str, str]
    """The saved names of those that were saved under another one, with or without what wrappers put into it."""


def matches(name: str, patterns: Sequence[str] | bool) -> bool:
    """Whether a name fits any of the patterns: a name, which stands also for all below it, or a shell-style one.

    A bool stands for all or none.

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
) -> Match:
    """Find each spec's source; specs that have none, or one of another shape or dtype, are left out and named.

    With `tied_under_one_name`, what shares its memory with a spec that has a source is not missing.
    """
    saved_as = _without_wrappers(specs, catalog)
    found: list[int] = []
    missing: dict[str, TensorSpec] = {}
    shape: list[str] = []
    dtype: list[str] = []
    for i, spec in enumerate(specs):
        name = saved_as.get(spec.name, spec.name)
        if name not in catalog:
            missing[f"{spec.name}: {MISSING}"] = spec
            continue
        index = catalog.index(name)
        saved, code = catalog.shape(index), catalog.dtype(index)
        resizable = len(saved) == len(spec.shape) and matches(spec.name, allow_resize)
        if saved != spec.shape and not resizable:
            shape.append(f"{spec.name}: saved with global shape {saved}, wanted {spec.shape}")
        elif code != spec.dtype and not matches(spec.name, cast):
            dtype.append(f"{spec.name}: saved as {code}, wanted {spec.dtype}")
        else:
            found.append(i)
    source = np.array([catalog.index(saved_as.get(specs[i].name, specs[i].name)) for i in found], np.int64)
    has_source = {specs[i].first_name for i in found} if tied_under_one_name else set()
    lines = {line: spec for line, spec in missing.items() if spec.first_name not in has_source}
    kept = {line: None for line, spec in lines.items() if matches(spec.name, allow_missing)}
    return Match(
        tuple(found),
        source,
        tuple(line for line in lines if line not in kept),
        tuple(dict.fromkeys(shape)),
        tuple(dict.fromkeys(dtype)),
        tuple(kept),
        saved_as,
    )


def _without_wrappers(specs: Sequence[TensorSpec], catalog: Catalog) -> dict[str, str]:
    """For specs without a source: the one saved name that no spec has and that differs only in what wrappers put into it."""
    wanted = {spec.name for spec in specs}
    lacking = _by_bare_name(name for name in wanted if name not in catalog)
    if not lacking:
        return {}
    left = _by_bare_name(name for name in catalog.names if name not in wanted)
    return {names[0]: left[bare][0] for bare, names in lacking.items() if len(names) == len(left.get(bare, ())) == 1}


def _by_bare_name(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(bare(name), []).append(name)
    return found


def expected_counts(catalog: Catalog, source: I64, wanted: PieceColumns) -> I64:
    """Elements of each wanted piece that lie inside the saved tensor: all of them, unless it was resized."""
    width = max(catalog.boxes.offsets.shape[1], wanted.offsets.shape[1])
    saved = pad_left(catalog.tensors_table.shape, width, 1)[source][wanted.tensor]
    cut = decompose(wanted.lengths, wanted.start, wanted.count)
    low = pad_left(wanted.offsets, width, 0)[cut.parent] + pad_left(cut.offsets, width, 0)
    high = np.minimum(low + pad_left(cut.lengths, width, 1), saved[cut.parent])
    inside = volumes(np.maximum(high - low, 0))
    return np.bincount(cut.parent, weights=inside, minlength=len(wanted.start)).astype(np.int64)


def faults_of(catalog: Catalog, source: I64) -> list[Fault]:
    """Tensors among the sources whose rows do not tile them."""
    table, rows = catalog.tensors_table, catalog.rows
    origin = np.unique(np.where(table.alias[source] >= 0, table.alias[source], source))
    shape = np.zeros_like(table.shape)
    shape[origin] = table.shape[origin]
    chosen = np.zeros(len(table.names), bool)
    chosen[origin] = True
    owner = np.repeat(np.arange(len(table.names)), np.diff(table.row_start))
    row = np.flatnonzero(chosen[owner])
    boxes = catalog.boxes
    return list(find_faults(shape, boxes.offsets, boxes.lengths, owner[row], rows.box[row], rows.start[row], rows.count[row]))


def fault_text(catalog: Catalog, fault: Fault) -> str:
    """What is wrong with the rows of which tensor, in words."""
    table = catalog.tensors_table
    what = "saved shards overlap at" if fault.rows else "no saved shard holds"
    return f"{table.names[fault.tensor]}: {what} {describe_region(fault.low, fault.high, int(table.ndim[fault.tensor]))}"


def uncovered(
    catalog: Catalog, specs: Sequence[TensorSpec], source: I64, wanted: PieceColumns, plan: LoadPlan, faults: Sequence[Fault]
) -> dict[int, str]:
    """A line for each tensor of the catalog of which no saved shard covers a part that is wanted."""
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
