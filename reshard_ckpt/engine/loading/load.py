"""The steps of a load on one rank: open, resolve, vote, verify, read.

1. `open_same`: rank 0 reads the catalog and sends its digest, so that all ranks load the same save.
2. `resolve`: match wanted tensors with saved ones, and plan; no tensor changes yet.
3. `vote` (in `vote.py`): problems of all ranks come together; either all ranks go on, or all raise the same error.
4. `verify_ties`: where targets share memory, check that they get the same bytes; all ranks go on, or none.
5. `fetch`: check the files, then read and verify every byte.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Generic, TypeVar

import msgpack
import numpy as np
import torch

from ...comm.protocol import Comm
from ...core.catalog.model import Catalog
from ...core.catalog.specs import TensorSpec
from ...core.geometry.runs import I64
from ...core.planning.load_plan import LoadPlan, plan_load
from ...core.planning.local_metadata import PieceColumns, piece_columns, width_of
from ...core.planning.match import Match, fault_text, faults_of, match, uncovered
from ...core.report import summarize
from ...core.words import few
from ...errors import CheckpointNotFound, CorruptError, MismatchError, UsageError
from ...format.catalog import MAX_CATALOG_BYTES, decode_catalog
from ...format.checksums import digest128
from ...format.keys import CATALOG_KEY, SAVE_ID
from ...format.torch_dtypes import TORCH_DTYPES
from ...storage import open_storage
from ...storage.protocol import MissingKey, Storage
from ..common.copy_streams import has_streams
from ..common.progress import OnProgress, silent
from ..common.step_folders import describe_run, find_steps, name_steps
from .files import open_files
from .read import REQUEST_BYTES, WINDOW_BYTES, ReadTarget, ReadTask, execute
from .ties import Tie, TiedTarget, conflicts, find_ties

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options of `checkpoint.load`, as documented there."""

    strict: bool = True
    verify: bool = True
    verify_first: bool = False
    cast: Sequence[str] | bool = False
    allow_resize: Sequence[str] | bool = False
    allow_missing: Sequence[str] | bool = False
    ignore: Sequence[str] = ()
    read_once: bool = False
    tied_under_one_name: bool = False
    """Whether the checkpoint may hold tied tensors under one of their names alone, as some foreign formats do."""

    def __post_init__(self) -> None:
        for option in ("strict", "verify", "verify_first", "read_once"):
            if type(value := getattr(self, option)) is not bool:
                raise UsageError(f"{option}={value!r}: pass True or False")
        for option in ("cast", "allow_resize", "allow_missing", "ignore"):
            patterns = getattr(self, option)
            if option == "ignore" and isinstance(patterns, bool):
                raise UsageError(f"ignore={patterns}: pass a list of patterns; strict=False loads whatever fits")
            if isinstance(patterns, str):  # taken letter by letter, "model.*" would be the pattern "*" among others
                raise UsageError(
                    f"{option}={patterns!r}: pass a list of patterns, as in {option}=[{patterns!r}], or True for all"
                )
            is_list = isinstance(patterns, Collection) and all(isinstance(pattern, str) for pattern in patterns)
            if not isinstance(patterns, bool) and not is_list:
                raise UsageError(f"{option}={patterns!r}: pass a list of patterns, each of them text")

    @property
    def may_keep(self) -> bool:
        """Whether something of the state may keep its value, wholly or in part, because the checkpoint has nothing for it."""
        return not self.strict or bool(self.allow_missing) or bool(self.allow_resize)


@dataclass(frozen=True, slots=True)
class Resolved:
    """What this rank will read: specs that have a source, their targets and pieces, and the problems, by kind."""

    specs: tuple[TensorSpec, ...]
    targets: tuple[ReadTarget, ...]
    source: I64
    wanted: PieceColumns
    plan: LoadPlan
    ties: tuple[Tie, ...]
    problems: dict[str, tuple[str, ...]]
    kept: tuple[str, ...]
    """Lines of what the checkpoint lacks and may lack."""
    saved_as: Mapping[str, str]
    """Wanted names, and the saved ones, of what was saved with other wrappers."""
    named: frozenset[int]
    """Tensors of the catalog that this rank wants by name, also those that it cannot load."""
    refused: frozenset[int]
    """Tensors of the catalog of which a part that this rank wants is covered by no saved shard."""
    window_bytes: int
    """The size of windows of the plan."""


@dataclass(frozen=True, slots=True)
class Identified(Generic[T]):
    """Something that was opened, and bytes that are equal wherever the same was opened."""

    value: T
    identity: bytes


def read_catalog_bytes(storage: Storage) -> bytes:
    """Read the bytes of the catalog.

    Raises
    ------
    CheckpointNotFound
        There is none; the message says what is there instead.
    """
    if storage.size(CATALOG_KEY) is not None:
        with suppress(MissingKey):  # it is removed at this very moment
            return storage.read(CATALOG_KEY, limit=MAX_CATALOG_BYTES)
    raise CheckpointNotFound(f"{storage.url}: no committed checkpoint: {_what_is_there(storage)}")


def _what_is_there(storage: Storage) -> str:
    # Asked first: to list all files of a run may take long.
    if (run := describe_run(storage)) is not None:
        return run
    keys = [key for key, _ in storage.list()]
    if checkpoints := sorted({key.removesuffix(f"/{CATALOG_KEY}") for key in keys if key.endswith(f"/{CATALOG_KEY}")}):
        return f"it holds the checkpoints {few(checkpoints)}; pass one of them"
    if not keys:
        return f"nothing is there; {_steps_beside(storage.url)}check the path"
    if any(SAVE_ID.fullmatch(key.split("/", 1)[0]) for key in keys):
        return f"a save began there, but never committed ({CATALOG_KEY} is missing); load another one"
    return f"{len(keys)} files ({', '.join(keys[:3])}{', …' if len(keys) > 3 else ''}), but no {CATALOG_KEY}; check the path"


def _steps_beside(url: str) -> str:
    """Name the steps of the run that a path seems to be below, for a message."""
    above = url.rpartition("/")[0]
    if not above or above.endswith("/"):
        return ""
    with open_storage(above) as root:
        committed, _ = find_steps(root)
    return f"its run holds {name_steps(committed)}; " if committed else ""


def open_catalog(storage: Storage) -> Catalog:
    """Read and check the catalog, in one process."""
    return identified_catalog(storage).value


def identified_catalog(storage: Storage) -> Identified[Catalog]:
    """Read and check the catalog; its identity is the digest of its bytes."""
    data = read_catalog_bytes(storage)
    try:
        return Identified(decode_catalog(data), digest128(data))
    except CorruptError as error:
        raise CorruptError(f"{storage.url}: {error}") from error


def open_same(comm: Comm, where: str, read: Callable[[], Identified[T]]) -> T:
    """Open a checkpoint on every rank, and make sure that it is the same one; rank 0 first.

    Parameters
    ----------
    where
        Its name in messages.
    read
        Opens it and identifies it.

    Raises
    ------
    CheckpointNotFound, CorruptError
        What `read` raises; or another save replaced the checkpoint meanwhile.
    """
    if comm.rank == 0:
        opened = read()
        comm.broadcast(opened.identity)
        return opened.value
    wanted = comm.broadcast(None)
    opened = read()
    if opened.identity != wanted:
        raise CorruptError(
            f"{where}: rank {comm.rank} reads another catalog than rank 0; load from a path that all ranks share, "
            "and not while a save replaces it"
        )
    return opened.value


def resolve(
    catalog: Catalog,
    tensors: Sequence[tuple[TensorSpec, torch.Tensor]],
    options: LoadOptions,
) -> Resolved:
    """Match wanted tensors with saved ones, and plan their reading; problems are collected, not raised.

    Raises
    ------
    CorruptError
        Saved shards of a wanted tensor overlap, so the catalog is not one that a save made.
    """
    specs = [spec for spec, _ in tensors]
    found = match(
        specs,
        catalog,
        cast=options.cast,
        allow_resize=options.allow_resize,
        allow_missing=options.allow_missing,
        tied_under_one_name=options.tied_under_one_name,
    )
    members = []
    for i, index in _without_shared(specs, found, catalog):
        spec, memory = tensors[i]
        members.append(TiedTarget(spec, ReadTarget(spec.name, memory, TORCH_DTYPES[catalog.dtype(index)]), index))
    kept = tuple(member.spec for member in members)
    source = np.array([member.source for member in members], np.int64)
    wanted = piece_columns(kept, width_of(kept))
    # Windows that ranks exchange do not join, so that each is a request to storage; those that go to a device cross the link.
    devices = {member.target.tensor.device for member in members}
    window_bytes = REQUEST_BYTES if options.read_once or any(map(has_streams, devices)) else WINDOW_BYTES
    plan = plan_load(catalog, source, wanted, window_bytes)
    faults = faults_of(catalog, source)
    for fault in faults:
        if fault.rows:
            raise CorruptError(f"{fault_text(catalog, fault)}; use another checkpoint")
    saved_names = [found.saved_as.get(spec.name, spec.name) for spec in specs]
    gaps = uncovered(catalog, kept, source, wanted, plan, faults)
    return Resolved(
        specs=kept,
        targets=tuple(member.target for member in members),
        source=source,
        wanted=wanted,
        plan=plan,
        ties=find_ties(members, wanted),
        problems={
            "missing": found.missing,
            "shape": found.shape,
            "dtype": found.dtype,
            "uncovered": tuple(gaps.values()),
        },
        kept=found.kept,
        saved_as=found.saved_as,
        named=frozenset(catalog.index(name) for name in saved_names if name in catalog),
        refused=frozenset(gaps),
        window_bytes=window_bytes,
    )


def _without_shared(specs: Sequence[TensorSpec], found: Match, catalog: Catalog) -> Iterator[tuple[int, int]]:
    """Yield the targets to load and their sources, but one alone of those that share memory and load from the same bytes."""
    source_of = dict(zip(found.specs, found.source.tolist(), strict=True))
    by_name = {specs[i].name: i for i in reversed(found.specs)}
    for i, source in source_of.items():
        alias_of = specs[i].alias_of
        first = None if alias_of is None else by_name.get(alias_of)
        if first is None or catalog.source(source_of[first]) != catalog.source(source):
            yield i, source


def drop_refused(catalog: Catalog, resolved: Resolved, refused: frozenset[int]) -> Resolved:
    """Drop the tensors that some rank cannot load whole, so that with ``strict=False`` none loads on some ranks alone."""
    if not refused:
        return resolved
    keep = [i for i, index in enumerate(resolved.source.tolist()) if index not in refused]
    specs = tuple(resolved.specs[i] for i in keep)
    source, wanted = resolved.source[keep], piece_columns(specs, width_of(specs))
    return replace(
        resolved,
        specs=specs,
        targets=tuple(resolved.targets[i] for i in keep),
        source=source,
        wanted=wanted,
        plan=plan_load(catalog, source, wanted, resolved.window_bytes),
        ties=tuple(replace(tie, members=tuple(m for m in tie.members if m.source not in refused)) for tie in resolved.ties),
    )


def verify_ties(comm: Comm, storage: Storage, catalog: Catalog, ties: Sequence[Tie], options: LoadOptions) -> None:
    """Check that targets which share memory get the same bytes; to be called on all ranks if any of them has such.

    Raises
    ------
    MismatchError
        They would not, on any rank; nothing was changed.
    """
    gathered = comm.gather(msgpack.packb(conflicts(storage, catalog, ties, verify=options.verify)))
    merged = None
    if gathered is not None:
        lines = dict.fromkeys(line for data in gathered for line in msgpack.unpackb(data))
        merged = msgpack.packb(list(lines))
    refuse_conflicts(msgpack.unpackb(comm.broadcast(merged)))


def refuse_conflicts(lines: Sequence[str]) -> None:
    """Raise what `conflicts` found, if anything."""
    if lines:
        raise MismatchError(summarize(lines, "untie them, or rename= one away"), lines)


def check_whole(storage: Storage, catalog: Catalog, tensors: Sequence[int]) -> None:
    """Check, as far as sizes show, that whole tensors are there, before any memory is allocated for them.

    Raises
    ------
    CorruptError
        Their rows have fewer elements than they, or a file has another size than the catalog says.
    """
    table, rows = catalog.tensors_table, catalog.rows
    sources = np.array([catalog.source(index) for index in tensors], np.int64)
    files = [np.zeros(0, np.int64)]
    for index, begin, end in zip(sources, table.row_start[sources], table.row_start[sources + 1], strict=True):
        shape = catalog.shape(index)
        num_saved = int(rows.count[begin:end].sum())
        if num_saved < prod(shape):
            raise CorruptError(
                f"{table.names[index]}: no saved shard holds some of it, {num_saved} of {prod(shape)} elements in all, "
                f"global shape {shape}; use another checkpoint"
            )
        files.append(rows.file[begin:end])
    open_files(storage, catalog, np.unique(np.concatenate(files)).tolist())


@dataclass(frozen=True, slots=True)
class Fetched:
    """The bytes that were read, and how many of those that were wanted no checksum has verified."""

    bytes_read: int
    bytes_unverified: int


Execute = Callable[[ReadTask, OnProgress], int]
"""Reads the items of a plan: `read.execute`, or `read_once.execute_once` together with other ranks."""


def fetch(
    storage: Storage,
    catalog: Catalog,
    resolved: Resolved,
    options: LoadOptions,
    *,
    report: OnProgress = silent,
    run: Execute = execute,
) -> Fetched:
    """Check the files, then read everything by `run`. Ties were checked before.

    Raises
    ------
    CorruptError
        A file or a block is damaged.
    """
    files = np.unique(resolved.plan.file).tolist()
    blocks = open_files(storage, catalog, files, files if options.verify else ())
    task = ReadTask(storage, catalog, resolved.plan, resolved.targets, blocks)
    bytes_read = 0
    if options.verify_first and options.verify:
        bytes_read += run(replace(task, copy=False), report)
    bytes_read += run(task, report)
    verified = list(blocks) if options.verify else []
    return Fetched(bytes_read, resolved.plan.num_bytes_but_of(verified))
