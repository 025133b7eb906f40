"""How does a rank load? Find what it wants in the catalog, hear that all ranks can, read, and prove.

1. `open_alike`: rank 0 reads the catalog and tells its digest, so that all ranks load the same save.
2. `resolve`: match wanted tensors with saved ones, and plan; no tensor changes yet.
3. `vote`: problems of all ranks come together; either all ranks go on, or all raise the same error.
4. `fetch`: check the files, then read and prove every byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Generic, Protocol, TypeVar

import msgpack
import numpy as np
import torch

from ...comm.protocol import Comm
from ...core.catalog.model import Catalog, TensorKind
from ...core.catalog.specs import TensorSpec, flat_run
from ...core.geometry.runs import I64
from ...core.geometry.tiling import describe_region
from ...core.planning.load_plan import LoadPlan, plan_load
from ...core.planning.local_metadata import PieceColumns, piece_columns, width_of
from ...core.planning.match import Match, faults_of, match, uncovered
from ...core.report import LoadReport, summarize
from ...errors import CheckpointNotFound, CorruptError, MismatchError, UsageError
from ...format.catalog import MAX_CATALOG_BYTES, decode_catalog
from ...format.checksums import digest128
from ...format.keys import CATALOG_KEY, SAVE_ID
from ...format.shard_file import opaque_name
from ...format.torch_dtypes import TORCH_DTYPES
from ...storage.protocol import Storage
from ..common.progress import OnProgress, silent
from ..common.step_folders import describe_run
from .read import REQUEST_BYTES, WINDOW_BYTES, BlockDigests, ReadTarget, check_files, execute, open_blocks

T = TypeVar("T")

_OPAQUE = (
    "saved by DCP as an object that is no plain value, which is not unpickled here; load it with torch's own dcp.load and "
    "storage_reader=reshard_ckpt.dcp.ReshardReader(path)"
)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the caller of `load` allows; see there."""

    strict: bool = True
    verify: bool = True
    verify_first: bool = False
    cast: Sequence[str] | bool = False
    allow_resize: Sequence[str] | bool = False
    read_once: bool = False
    tied_under_one_name: bool = False
    """Whether the checkpoint may hold tied tensors under one of their names alone, as some foreign formats do."""

    def __post_init__(self) -> None:
        for option, patterns in (("cast", self.cast), ("allow_resize", self.allow_resize)):
            if isinstance(patterns, str):  # taken letter by letter, "model.*" would be the pattern "*" among others
                raise UsageError(
                    f"{option}={patterns!r}: pass a list of patterns, as in {option}=[{patterns!r}], or True for all"
                )


@dataclass(frozen=True, slots=True)
class Tie:
    """A target tensor that shares its memory with an earlier one, but has another source: both must be equal."""

    spec: TensorSpec
    first: int
    second: int


@dataclass(frozen=True, slots=True)
class Resolved:
    """What this rank will read: specs that have a source, their destinations and pieces, and what stands in the way, by kind."""

    specs: tuple[TensorSpec, ...]
    dests: tuple[ReadTarget, ...]
    source: I64
    wanted: PieceColumns
    plan: LoadPlan
    ties: tuple[Tie, ...]
    problems: dict[str, tuple[str, ...]]
    named: frozenset[int]
    """Tensors of the catalog that this rank wants by name, also those that it cannot load."""
    refused: frozenset[int]
    """Tensors of the catalog of which a part that this rank wants is covered by no saved shard."""
    window_bytes: int
    """Of the plan."""


@dataclass(frozen=True, slots=True)
class Identified(Generic[T]):
    """Something that was opened, and bytes that are equal wherever the same was opened."""

    what: T
    identity: bytes


def read_catalog_bytes(storage: Storage) -> bytes:
    """The bytes of the catalog.

    Raises
    ------
    CheckpointNotFound
        There is none; the message says what is there instead.
    """
    if storage.size(CATALOG_KEY) is None:
        raise CheckpointNotFound(f"{storage.url}: no committed checkpoint: {_what_is_there(storage)}")
    return storage.read(CATALOG_KEY, limit=MAX_CATALOG_BYTES)


def _what_is_there(storage: Storage) -> str:
    # First, as to list all files of a run may take long.
    if (run := describe_run(storage)) is not None:
        return run
    keys = [key for key, _ in storage.list()]
    if not keys:
        return f"nothing is there, in particular no {CATALOG_KEY}; check the path"
    if any(SAVE_ID.fullmatch(key.split("/", 1)[0]) for key in keys):
        return f"a save began there, but never committed ({CATALOG_KEY} is missing); load another one"
    return f"{len(keys)} files ({', '.join(keys[:3])}{', …' if len(keys) > 3 else ''}), but no {CATALOG_KEY}; check the path"


def open_catalog(storage: Storage) -> Catalog:
    """Read and check the catalog, in one process."""
    return identified_catalog(storage).what


def identified_catalog(storage: Storage) -> Identified[Catalog]:
    """The catalog, and the digest of its bytes."""
    data = read_catalog_bytes(storage)
    return Identified(_decoded(storage, data), digest128(data))


def _decoded(storage: Storage, data: bytes) -> Catalog:
    try:
        return decode_catalog(data)
    except CorruptError as error:
        raise CorruptError(f"{storage.url}: {error}") from error


def open_alike(comm: Comm, where: str, read: Callable[[], Identified[T]]) -> T:
    """Open a checkpoint on every rank, and make sure that it is the same one; rank 0 first.

    Parameters
    ----------
    where
        What it is called in messages.
    read
        Opens it, and gives its identity.

    Raises
    ------
    CheckpointNotFound, CorruptError
        What `read` raises; or another save replaced the checkpoint meanwhile.
    """
    if comm.rank == 0:
        opened = read()
        comm.broadcast(opened.identity)
        return opened.what
    wanted = comm.broadcast(None)
    opened = read()
    if opened.identity != wanted:
        raise CorruptError(
            f"{where}: rank {comm.rank} reads another catalog than rank 0; load from a path that all ranks share, "
            "and not while a save replaces it"
        )
    return opened.what


def resolve(
    catalog: Catalog,
    tensors: Sequence[tuple[TensorSpec, torch.Tensor]],
    options: LoadOptions,
) -> Resolved:
    """Match and plan what this rank wants; problems are collected, not raised.

    Raises
    ------
    CorruptError
        Saved shards of a wanted tensor overlap, so the catalog is not one that a save made.
    """
    specs = [spec for spec, _ in tensors]
    tied = options.tied_under_one_name
    found = match(specs, catalog, cast=options.cast, allow_resize=options.allow_resize, tied_under_one_name=tied)
    chosen, source, ties = _without_shared(specs, found, catalog)
    kept = tuple(specs[i] for i in chosen)
    dests = [
        ReadTarget(specs[i].name, tensors[i][1], TORCH_DTYPES[catalog.dtype(int(s))]) for i, s in zip(chosen, source, strict=True)
    ]
    wanted = piece_columns(kept, width_of(kept))
    # Windows that ranks exchange do not join, so that each is a request to storage.
    window_bytes = REQUEST_BYTES if options.read_once else WINDOW_BYTES
    plan = plan_load(catalog, source, wanted, window_bytes)
    faults = faults_of(catalog, source)
    for fault in faults:
        if fault.rows:
            name, ndim = catalog.tensors_table.names[fault.tensor], int(catalog.tensors_table.ndim[fault.tensor])
            raise CorruptError(
                f"{name}: saved shards overlap at {describe_region(fault.low, fault.high, ndim)}; use another checkpoint"
            )
    gaps = uncovered(catalog, kept, source, wanted, plan, faults)
    return Resolved(
        specs=kept,
        dests=tuple(dests),
        source=source,
        wanted=wanted,
        plan=plan,
        ties=ties,
        problems={
            "missing": found.missing,
            "shape": found.shape,
            "dtype": found.dtype,
            "uncovered": tuple(gaps.values()),
        },
        named=frozenset(catalog.index(spec.name) for spec in specs if spec.name in catalog),
        refused=frozenset(gaps),
        window_bytes=window_bytes,
    )


def _without_shared(specs: Sequence[TensorSpec], found: Match, catalog: Catalog) -> tuple[list[int], I64, tuple[Tie, ...]]:
    """Leave out targets that share memory with another that loads; those with another source are ties to be proved."""
    source_of = dict(zip(found.specs, found.source.tolist(), strict=True))
    by_name = {specs[i].name: i for i in reversed(found.specs)}
    chosen: list[int] = []
    ties: list[Tie] = []
    for i in found.specs:
        first = by_name.get(specs[i].alias_of or "")
        if first is None:
            chosen.append(i)
        elif catalog.source(source_of[first]) != catalog.source(source_of[i]):
            ties.append(Tie(specs[i], source_of[first], source_of[i]))
    return chosen, np.array([source_of[i] for i in chosen], np.int64), tuple(ties)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks together found, and the tensors of the catalog that none of them shall load."""

    report: LoadReport
    refused: frozenset[int]


def vote(
    comm: Comm,
    catalog: Catalog,
    resolved: Resolved,
    prefixes: Sequence[str],
    *,
    values: Sequence[str] = (),
    unplaced: Sequence[str] = (),
    strict: bool,
    hints: Sequence[str] = (),
) -> Verdict:
    """Bring the problems of all ranks together; `values` are those that this rank has with values.

    Tensors that are `unplaced` on this rank are among those problems already, and not unexpected. `hints` say what else may help.

    Raises
    ------
    MismatchError
        There is a problem, on any rank, and ``strict``.
    """
    problems = {**resolved.problems, "values": tuple(values)}
    named = resolved.named.union(catalog.index(name) for name in unplaced)
    gathered = comm.gather(msgpack.packb([problems, sorted(named), sorted(resolved.refused)]))
    verdict = None if gathered is None else msgpack.packb(_merge_votes(catalog, gathered, prefixes))
    said, refused = msgpack.unpackb(comm.broadcast(verdict), use_list=False)
    report = LoadReport(**said)
    if strict and report.problems:
        advice = "load with strict=False to load what fits and leave the rest as it is"
        if report.dtype:
            advice += ", with cast=[patterns] to convert dtypes"
        if report.shape:
            advice += ", with allow_resize=[patterns] to load what overlaps"
        advice += "".join(f"; {hint}" for hint in hints)
        raise MismatchError(summarize(report.problems, advice + _other_keys(catalog, prefixes)), report.problems)
    return Verdict(report, frozenset(refused))


def _other_keys(catalog: Catalog, prefixes: Sequence[str]) -> str:
    """Advice where the state has a top-level key that the checkpoint has not: often it was saved under another one."""
    saved = sorted({name.split(".", 1)[0] for name in (*catalog.names, *catalog.value_names)})
    absent = [prefix for prefix in prefixes if prefix.split(".", 1)[0] not in saved]
    if not absent:
        return ""
    return f" (the checkpoint has nothing under {_few(absent)}; its top-level keys are {_few(saved)}, which rename= can map)"


def _few(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _merge_votes(
    catalog: Catalog, gathered: Sequence[bytes], prefixes: Sequence[str]
) -> tuple[dict[str, tuple[str, ...]], list[int]]:
    votes = [msgpack.unpackb(data, use_list=False) for data in gathered]
    kinds = ("missing", "shape", "dtype", "uncovered", "values")
    merged = {kind: tuple(dict.fromkeys(line for problems, _, _ in votes for line in problems[kind])) for kind in kinds}
    named = {index for _, mine, _ in votes for index in mine}
    table = catalog.tensors_table
    below = tuple(f"{prefix}." for prefix in prefixes)
    merged["unexpected"] = tuple(
        f"{name}: in the checkpoint, but not in the state passed"
        for i, name in enumerate(table.names)
        if table.kind[i] == TensorKind.TENSOR
        and i not in named
        and (name in prefixes or name.startswith(below))
        # A second name of a tensor that is loaded holds nothing of its own.
        and (table.alias[i] < 0 or int(table.alias[i]) not in named)
    )
    return merged, sorted({index for _, _, refused in votes for index in refused})


def missing_values(catalog: Catalog, names: Iterable[str]) -> list[str]:
    """A line for each value that is wanted but not saved."""
    known = set(catalog.value_names)
    absent = [name for name in names if name not in known]
    blobs = set(catalog.tensors_table.names) if absent else set()
    return [f"{name}: {_OPAQUE if opaque_name(name) in blobs else 'not in the checkpoint'}" for name in absent]


def unreadable(catalog: Catalog, prefixes: Iterable[str], *, strict: bool) -> list[str]:
    """A line for each thing at or below these names that the checkpoint has, but that cannot be read.

    Raises
    ------
    CheckpointError
        There is one, and ``strict``: the error says why.
    """
    at = tuple(prefixes)
    found = {n: why for n, why in catalog.unreadable.items() if n in at or n.startswith(tuple(f"{prefix}." for prefix in at))}
    if strict:
        for error in found.values():
            raise error
    return [f"{name}: {why}" for name, why in found.items()]


def drop_refused(catalog: Catalog, resolved: Resolved, refused: frozenset[int]) -> Resolved:
    """Without the tensors that some rank cannot load whole, so that with ``strict=False`` none loads on some ranks alone."""
    if not refused:
        return resolved
    keep = [i for i, index in enumerate(resolved.source.tolist()) if index not in refused]
    specs = tuple(resolved.specs[i] for i in keep)
    source, wanted = resolved.source[keep], piece_columns(specs, width_of(specs))
    return replace(
        resolved,
        specs=specs,
        dests=tuple(resolved.dests[i] for i in keep),
        source=source,
        wanted=wanted,
        plan=plan_load(catalog, source, wanted, resolved.window_bytes),
    )


def verify_held(storage: Storage, catalog: Catalog, tensors: Sequence[int]) -> None:
    """Whole tensors of the catalog are there, as far as sizes tell; asked before any memory is taken for them.

    Raises
    ------
    CorruptError
        Their rows have fewer elements than they, or a file has another size than the catalog says.
    """
    table, rows = catalog.tensors_table, catalog.rows
    sources = np.array([catalog.source(index) for index in tensors], np.int64)
    files = [np.zeros(0, np.int64)]
    for index, begin, end in zip(sources, table.row_start[sources], table.row_start[sources + 1], strict=True):
        shape, held = catalog.shape(index), int(rows.count[begin:end].sum())
        if held < prod(shape):
            raise CorruptError(
                f"{table.names[index]}: no saved shard holds some of it, {held} of {prod(shape)} elements in all, global shape "
                f"{shape}; use another checkpoint"
            )
        files.append(rows.file[begin:end])
    check_files(storage, catalog, np.unique(np.concatenate(files)).tolist())


class Execute(Protocol):
    """How the items of a plan are read: `read.execute`, or together with other ranks."""

    def __call__(
        self,
        storage: Storage,
        catalog: Catalog,
        plan: LoadPlan,
        dests: Sequence[ReadTarget],
        *,
        blocks: BlockDigests,
        copy: bool = True,
        report: OnProgress = silent,
    ) -> int: ...


def fetch(
    storage: Storage,
    catalog: Catalog,
    resolved: Resolved,
    options: LoadOptions,
    *,
    report: OnProgress = silent,
    run: Execute = execute,
) -> int:
    """Check the files, prove ties, then read all, by `run`; returns the bytes read.

    Raises
    ------
    CorruptError
        A file or a block is damaged.
    MismatchError
        Two saved tensors that the target ties are not equal.
    """
    files = np.unique(resolved.plan.file).tolist()
    check_files(storage, catalog, files)
    blocks = open_blocks(storage, catalog, files if options.verify else [])
    for tie in resolved.ties:
        verify_tie(storage, catalog, tie, options)
    bytes_read = 0
    if options.verify_first and options.verify:
        bytes_read += run(storage, catalog, resolved.plan, resolved.dests, blocks=blocks, copy=False, report=report)
    return bytes_read + run(storage, catalog, resolved.plan, resolved.dests, blocks=blocks, report=report)


def verify_tie(storage: Storage, catalog: Catalog, tie: Tie, options: LoadOptions, step_bytes: int = WINDOW_BYTES) -> None:
    """Compare two saved tensors where a target ties them, a bounded part at a time."""
    dtypes = [TORCH_DTYPES[catalog.dtype(index)] for index in (tie.first, tie.second)]
    names = [catalog.tensors_table.names[index] for index in (tie.first, tie.second)]
    for piece in tie.spec.pieces:
        step = max(step_bytes // max(dtype.itemsize for dtype in dtypes), 1)
        for start in range(piece.start, piece.start + piece.count, step):
            count = min(step, piece.start + piece.count - start)
            part = flat_run(piece, start, count)
            spec = replace(tie.spec, pieces=(part,))
            both = [torch.empty(count, dtype=dtype) for dtype in dtypes]
            dests = [ReadTarget(name, t, dtype) for name, t, dtype in zip(names, both, dtypes, strict=True)]
            source = np.array([tie.first, tie.second], np.int64)
            plan = plan_load(catalog, source, piece_columns([spec, spec], width_of([spec])), WINDOW_BYTES)
            files = np.unique(plan.file).tolist()
            check_files(storage, catalog, files)
            execute(storage, catalog, plan, dests, blocks=open_blocks(storage, catalog, files if options.verify else []))
            if dtypes[0] != dtypes[1] or not torch.equal(both[0].view(torch.uint8), both[1].view(torch.uint8)):
                line = f"{names[1]}: tied to {names[0]} in the state passed, but the checkpoint holds different values for them"
                raise MismatchError(f"{line}; untie them, or rename= one away", [line])
