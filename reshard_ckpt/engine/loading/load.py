"""The steps of a load on one rank: open, resolve, vote, verify, read.

1. `open_same`: rank 0 reads the catalog and broadcasts its digest. One rank of each other machine reads it too, and compares. The
   other ranks of a machine decode it from that rank's memory; on other machines than rank 0's, that takes a broadcast there.
2. `resolve`: match wanted tensors with saved ones, and plan the reads. Not collective; no tensor changes yet.
3. `vote` (in `vote.py`): a gather and a broadcast of the problems of all ranks. Either all ranks go on, or all raise the same
   error.
4. `verify_ties`: check that targets that share memory get the same bytes; a gather and a broadcast. It is called on all ranks if
   any rank has such targets. Either all ranks go on, or all raise.
5. `fetch`: check the files, then read and verify every byte. Collective only with ``read_once``, and if a rank verifies first:
   then a gather before any rank changes a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from ...comm.protocol import Comm, merge_of_all, union
from ...core.catalog.model import Catalog
from ...core.catalog.specs import CODES, TensorSpec, piece_columns
from ...core.geometry.runs import I64
from ...core.planning.load_plan import LoadPlan, plan_load
from ...core.planning.match import Match, fault_text, faults_of, match, uncovered
from ...core.planning.scales import Quantized
from ...core.report import check_patterns, summarize
from ...errors import CorruptError, MismatchError, UsageError
from ...format.dtypes import TORCH_DTYPES
from ...format.files import Digests
from ...storage.protocol import DISK, Storage
from ..common.files import FileDigests, open_files
from ..common.progress import OnProgress, silent
from ..common.tensor_bytes import has_streams
from .read import REQUEST_BYTES, ReadTarget, ReadTask, execute
from .ties import Tie, conflicts, find_ties

ALL_CURES = ("allow_missing", "ignore", "cast", "allow_resize", "strict")
"""The options of a load that let it pass over a kind of mismatch between checkpoint and state."""


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
    read_once: bool | str = False
    tied_under_one_name: bool = False
    """Whether the checkpoint may hold tied tensors under one of their names alone, as some foreign formats do."""
    may_lack: bool = False
    """Whether the source may lack regions of tensors, as a live state of some of a job's ranks does. These regions of the targets
    keep their value."""
    offered: Collection[str] = ALL_CURES
    """The options that an error may advise: options among `ALL_CURES` that the public function called by the user takes."""
    sides: tuple[str, str] = ("the checkpoint", "the state passed")
    """The names, in messages, of the source and of the state that is filled."""
    quantized: Quantized | None = None
    """The quantized tensors of the checkpoint, which a load with `cast` dequantizes; None without `cast`."""

    def __post_init__(self) -> None:
        for option in ("strict", "verify", "verify_first", "read_once"):
            value = getattr(self, option)
            if type(value) is not bool and (option, value) != ("read_once", "auto"):
                others = ', or "auto"' if option == "read_once" else ""
                raise UsageError(f"{option}={value!r}: pass True or False{others}")
        for option in ("cast", "allow_resize", "allow_missing", "ignore"):
            check_patterns(option, getattr(self, option))

    @property
    def may_keep(self) -> bool:
        """Whether tensors or values that the checkpoint lacks may keep their contents, wholly or in part."""
        return not self.strict or bool(self.allow_missing) or bool(self.allow_resize)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The tensors that this rank will read, and the problems with the others, by kind.

    ``specs[i]``, ``targets[i]`` and ``source[i]`` belong to one tensor: its spec, the memory to fill, and its index in the
    catalog. `plan` has the reads from files. `ties` are targets that may share memory.
    """

    specs: tuple[TensorSpec, ...]
    targets: tuple[ReadTarget, ...]
    source: I64
    plan: LoadPlan
    ties: tuple[Tie, ...]
    problems: dict[str, tuple[str, ...]]
    kept: tuple[str, ...]
    """One line of text for each tensor that keeps its value, because the checkpoint lacks it and ``allow_missing`` permits
    that."""
    saved_as: Mapping[str, str]
    """``saved_as[wanted name]``: the name in the checkpoint, if it differs because the module was saved with other wrappers."""
    named: frozenset[int]
    """Indices in the catalog of the tensors whose names this rank wants, also of tensors that it cannot load."""
    refused: frozenset[int]
    """Indices in the catalog of tensors that this rank cannot load whole, because no saved shard holds some part that it
    wants."""
    window_bytes: int
    """Size in bytes of one window, the part of a file that is read at once."""


def resolve(
    catalog: Catalog,
    tensors: Sequence[tuple[TensorSpec, torch.Tensor]],
    options: LoadOptions,
    *,
    window_bytes: int = DISK.read_bytes,
) -> Resolved:
    """Match wanted tensors with saved ones, and plan the reads. Mismatches are collected in the result, not raised.

    Raise `CorruptError` if saved shards of a wanted tensor overlap, so the catalog is not one that a save made.

    Parameters
    ----------
    window_bytes
        Size of a window: the bytes of one read that suit the store, as in its `Hints`.
    """
    specs = [spec for spec, _ in tensors]
    found = match(
        specs,
        catalog,
        cast=options.cast,
        allow_resize=options.allow_resize,
        allow_missing=options.allow_missing,
        tied_under_one_name=options.tied_under_one_name,
        quantized=options.quantized,
    )
    chosen, source = _without_shared(specs, found, catalog)
    kept = tuple([specs[i] for i in chosen])
    dtypes = [TORCH_DTYPES[CODES[code]] for code in catalog.tensors_table.dtype[source].tolist()]
    targets = tuple([ReadTarget(specs[i].name, tensors[i][1], dtype) for i, dtype in zip(chosen, dtypes, strict=True)])
    wanted = piece_columns(kept)
    # Windows that ranks exchange, and windows for a device, which cross the link one at a time, gain nothing from being in the
    # processor's cache. Of half the size, three messages with a whole window fit into one round of an exchange.
    devices = {target.tensor.device for target in targets}
    if options.read_once or any(map(has_streams, devices)):
        window_bytes = max(REQUEST_BYTES // (2 if options.read_once else 1), window_bytes)
    plan = plan_load(catalog, source, wanted, window_bytes)
    faults = faults_of(catalog, source)
    for fault in faults:
        if fault.rows:
            raise CorruptError(f"{fault_text(catalog, fault)}; use another checkpoint")
    gaps = uncovered(catalog, kept, source, wanted, plan, faults)
    return Resolved(
        specs=kept,
        targets=targets,
        source=source,
        plan=plan,
        ties=find_ties(kept, targets, source, wanted),
        problems={"missing": found.missing, "shape": found.shape, "dtype": found.dtype, "uncovered": tuple(gaps.values())},
        kept=found.kept,
        saved_as=found.saved_as,
        named=found.named,
        refused=frozenset(() if options.may_lack else gaps),
        window_bytes=window_bytes,
    )


def _without_shared(specs: Sequence[TensorSpec], found: Match, catalog: Catalog) -> tuple[list[int], I64]:
    """Return the indices of the specs to load, and for each the index of its source in the catalog.

    Of several targets that share memory and have the same source (tied weights), only the first is loaded.
    """
    # origin[i]: the tensor that holds the bytes of the source of found spec i
    origin = dict(zip(found.specs, catalog.sources(found.source).tolist(), strict=True))
    of_name = {specs[i].name: i for i in reversed(found.specs)}
    first = [None if (alias_of := specs[i].alias_of) is None else of_name.get(alias_of) for i in found.specs]
    is_new = np.array([k is None or origin[k] != origin[i] for i, k in zip(found.specs, first, strict=True)], bool)
    return np.array(found.specs, np.int64)[is_new].tolist(), found.source[is_new]


def drop_refused(catalog: Catalog, resolved: Resolved, refused: frozenset[int]) -> Resolved:
    """Return `resolved` without the tensors in `refused`, which some rank cannot load whole, and with a new plan.

    So with ``strict=False`` a tensor is loaded on all ranks or on none.
    """
    if not refused:
        return resolved
    keep = [i for i, index in enumerate(resolved.source.tolist()) if index not in refused]
    specs = tuple(resolved.specs[i] for i in keep)
    source = resolved.source[keep]
    return replace(
        resolved,
        specs=specs,
        targets=tuple(resolved.targets[i] for i in keep),
        source=source,
        plan=plan_load(catalog, source, piece_columns(specs), resolved.window_bytes),
        ties=tuple(tie._replace(members=tuple(m for m in tie.members if m.source not in refused)) for tie in resolved.ties),
    )


def verify_ties(comm: Comm, storage: Storage, catalog: Catalog, ties: Sequence[Tie], options: LoadOptions) -> None:
    """Check that targets that share memory would get the same bytes.

    Collective: a gather and a broadcast of conflicts. Call it on all ranks if any rank has such targets. Raise `MismatchError` if
    targets on some rank would get different bytes. It is raised on all ranks; no target has changed.
    """
    lines = conflicts(storage, catalog, ties, verify=options.verify, quantized=options.quantized)
    refuse_conflicts(merge_of_all(comm, lines, union))


def refuse_conflicts(lines: Sequence[str]) -> None:
    """Raise a `MismatchError` with the lines that `conflicts` returned, if there are any."""
    if lines:
        advice = "untie them, or rename= one away; if a scheduler holds them, save and load it as checkpoint.Value(scheduler)"
        raise MismatchError(summarize(lines, advice), lines)


def check_whole(storage: Storage, catalog: Catalog, tensors: Sequence[int], *, with_digests: bool = False) -> dict[int, Digests]:
    """Check, by sizes alone, that tensors of the catalog are saved whole, before memory is allocated for them.

    Return the block digests of the files that hold them, by file index: of all these files if `with_digests`, else only of files
    in other checkpoints. Raise `CorruptError` if the rows of a tensor have fewer elements than the tensor, or a file has another
    size than the catalog says.
    """
    table, rows = catalog.tensors_table, catalog.rows
    sources = catalog.sources(np.array(tensors, np.int64))
    files = [np.zeros(0, np.int64)]
    for index, begin, end in zip(sources, table.row_start[sources], table.row_start[sources + 1], strict=True):
        shape = catalog.shape(index)
        num_saved = int(rows.count[begin:end].sum())
        if num_saved < prod(shape):
            raise CorruptError(
                f"{table.names[index]}: no saved shard holds some of it, {num_saved} of {prod(shape)} elements are saved, "
                f"global shape {shape}; use another checkpoint"
            )
        files.append(rows.file[begin:end])
    used = np.unique(np.concatenate(files)).tolist()
    return open_files(storage, catalog, used, used if with_digests else ())


class Fetched(NamedTuple):
    """The number of bytes that a load read from storage, and the number of its wanted bytes that no checksum has verified."""

    bytes_read: int
    bytes_unverified: int


Execute = Callable[[ReadTask, OnProgress], int]
"""A function that reads the items of a load plan and returns the bytes read: `read.execute`, or `read_once.execute_once`."""


def fetch(
    storage: Storage,
    catalog: Catalog,
    resolved: Resolved,
    options: LoadOptions,
    *,
    report: OnProgress = silent,
    run: Execute = execute,
    meet: Callable[[], object] | None = None,
) -> Fetched:
    """Check the files, then read all items of the plan by `run` (an `Execute`). Call `verify_ties` before.

    With ``verify_first`` and ``verify``, every block is read and verified once before any target changes, and then all is read
    again. If given, `meet` is called between the two: it waits until the other ranks have verified too, or raises their error.
    Raise `CorruptError` if a file or a block is damaged, and `StorageError` if a file without checksums was changed while it was
    read.
    """
    files = np.unique(resolved.plan.file).tolist()
    is_foreign = bool(files) and not catalog.files[files[0]].digests_key
    foreign = FileDigests(storage, catalog, verify=options.verify) if is_foreign else None
    blocks = foreign.of(files) if foreign else open_files(storage, catalog, files, files if options.verify else ())
    task = ReadTask(storage, catalog, resolved.plan, resolved.targets, blocks)
    bytes_read = 0
    if options.verify_first and options.verify:
        bytes_read += run(task._replace(copy=False), report)
    if meet is not None:
        meet()
    bytes_read += run(task, report)
    if foreign:
        foreign.refuse_changed()
    verified = list(blocks) if options.verify else []
    return Fetched(bytes_read, resolved.plan.num_bytes_outside(verified))
