"""`load`: load a checkpoint in place, into any layout; each rank reads the bytes that its shards need."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields, replace
from functools import partial
from logging import INFO, WARNING
from typing import Any

from ..comm import ArgumentCheck, Comm, Exchange, open_exchange, open_session
from ..core.catalog.model import Catalog
from ..core.catalog.specs import ValueKind
from ..core.planning.match import matches
from ..core.planning.scales import may_be_quantized
from ..core.report import LoadReport
from ..engine.common.progress import OnProgress, RankLog, reporter, size_text
from ..engine.common.rename import renamed, without
from ..engine.common.tensor_bytes import public_call
from ..engine.loading.load import LoadOptions as LoadOptions  # with `load_target`, for the rooms above
from ..engine.loading.load import Resolved, drop_refused, fetch, resolve, verify_ties
from ..engine.loading.read import execute
from ..engine.loading.read_once import execute_once, pays_off
from ..engine.loading.saved_values import SavedValue, blob_reader, open_values
from ..engine.loading.scales import Dequantizer, advice, multiply, parts_of_load, read_quantized
from ..engine.loading.vote import Wanted, missing_values, unreadable, vote
from ..engine.saving.handle import SAVES
from ..formats.source import NATIVE, SAFETENSORS, Formats, Path, Source, known_formats, open_shared_source, with_options
from ..state.capture import Target, prepare_load
from ..state.shards import PerRankValues
from ..storage import path_text

Patterns = Sequence[str] | bool

LOAD_OPTIONS = frozenset(field.name for field in fields(LoadOptions))
"""Names of those options of `load` that are fields of `LoadOptions`."""


def load(
    path: Path,
    state: Mapping[str, Any],
    *,
    strict: bool = True,
    verify: bool = True,
    verify_first: bool = False,
    cast: Patterns = False,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    allow_resize: Patterns = False,
    allow_missing: Patterns = False,
    ignore: Sequence[str] = (),
    read_once: bool | str = "auto",
    progress: bool | OnProgress = False,
    process_group: Any = None,
    timeout_s: float = 600.0,
) -> LoadReport:
    """Load a checkpoint, saved from any layout, into a state in place.

    Each rank reads only the bytes that its own shards need. Nothing changes before all ranks know that everything fits.

    Parameters
    ----------
    path
        A checkpoint that `save` committed.
    state
        As for `save`. Its tensors are overwritten, values in dicts are replaced, and objects get their state back.
    strict
        False: load everything that fits, and report the rest.
    verify
        Verify the checksum of every block that is read.
    verify_first
        Verify the blocks of all tensors before any tensor changes on any rank, at the price of reading twice.
    cast
        Tensors that are converted if their saved dtype differs: True for all, or a list of names and shell-style patterns. A
        name also stands for everything below it. FP8 weights of a Hugging Face folder are multiplied by their scales.
    rename
        Saved names, or dotted prefixes of them, mapped to the names of this state; or a function of a saved name.
    allow_resize
        Tensors whose global shape may differ, given as for `cast`: the overlap loads, the rest keeps its value.
    allow_missing
        Names that the state wants and the checkpoint may lack, given as for `cast`: they keep their value, and the report lists
        them.
    ignore
        Names to skip on both sides, given as names or patterns: in the state they keep their value, in the checkpoint they are
        left out.
    read_once
        If several ranks want the same bytes, read them from storage on one rank only, and exchange them over a process group of
        the ranks that need the same files. This pays if the network between ranks is faster than storage. It takes up to 200 MiB
        of host memory on each rank. ``"auto"`` does so for checkpoints of more than 128 MiB in object stores,
        such as ``s3://``.
    progress
        True: rank 0 shows the bytes that it reads itself, as a line on stderr. A function is called on rank 0 instead, with
        the name of the step ("load", "verify"), the bytes done and the bytes in all.
    process_group, timeout_s
        As for `save`.

    Returns
    -------
    LoadReport
        The tensors and bytes that loaded and, with ``strict=False``, the names that did not.

    Raises
    ------
    CheckpointNotFound
        The path holds no committed checkpoint.
    MismatchError
        Checkpoint and state disagree; nothing was changed.
    CorruptError
        Bytes are damaged; the message lists the tensors that had been overwritten.
    PeerError
        Another rank failed or did not arrive.
    """
    with ArgumentCheck("load", path, process_group=process_group, timeout_s=timeout_s):
        options = LoadOptions(strict, verify, verify_first, cast, allow_resize, allow_missing, ignore=ignore, read_once=read_once)
    return load_target(
        path,
        target_of(state),
        options,
        rename=rename,
        progress=progress,
        process_group=process_group,
        timeout_s=timeout_s,
    )[0]


Prepare = Callable[[Catalog, Comm], Target]
"""A function that says which tensors and values of a catalog this rank loads, and where they go."""


def target_of(state: Mapping[str, Any], *, adds: bool = True) -> Prepare:
    """Return a `Prepare` function that wants the whole of a state: given a catalog and a `Comm`, it returns the load target.

    With `adds`, saved values that the dicts of the state lack are added to them; without, they are ignored.
    """
    return lambda saved, comm: prepare_load(state, saved, rank=comm.rank, size=comm.size, adds=adds)


def load_wanted(
    path: Path,
    wanted: Mapping[str, Any] | Prepare,
    *,
    as_saved: Collection[str] | None = None,
    rename: Callable[[Catalog], Callable[[str], str]] | None = None,
    verify_first: bool = False,
    read_once: bool = False,
    process_group: Any = None,
) -> LoadReport:
    """Load into a state, or load only the tensors and values that a function (`Prepare`) selects from the catalog.

    With a function, dtypes are converted, and a tensor may have been saved with another global shape if the target's `check`
    permits it.

    Parameters
    ----------
    as_saved
        Names of the formats to open with their option ``as_saved``, so that tensors keep the names of the other library; by
        default all formats that have this option.
    rename
        Takes the open catalog, and returns a function from a saved name to the name in the target.
    verify_first, read_once, process_group
        As for `load`.
    """
    selects = not isinstance(wanted, Mapping)
    return load_target(
        path,
        target_of(wanted) if isinstance(wanted, Mapping) else wanted,
        LoadOptions(cast=selects, allow_resize=selects, verify_first=verify_first, read_once=read_once, offered=()),
        only_wanted=selects,
        formats=with_options({"as_saved": True}, as_saved),
        rename_of=rename,
        process_group=process_group,
    )[0]


def load_given(
    path: Path,
    wanted: Mapping[str, Any] | Prepare,
    options: Mapping[str, Any],
    *,
    opened: Callable[[Comm], AbstractContextManager[Source]] | None = None,
) -> LoadReport:
    """Load as `load` does with `options`: into a state, or only the tensors and values that a function (`Prepare`) selects.

    `opened` opens the source in place of `path`.
    """
    inspect.signature(load).bind(path, {}, **options)  # a wrong option is a TypeError, as in `load`
    prepare = target_of(wanted) if isinstance(wanted, Mapping) else wanted
    others = {name: value for name, value in options.items() if name not in LOAD_OPTIONS}
    return load_target(path, prepare, options_of(options), only_wanted=prepare is wanted, opened=opened, **others)[0]


def options_of(options: Mapping[str, Any]) -> LoadOptions:
    """Make `LoadOptions` from the keyword options of `load`; options that are no fields of it are left out."""
    return LoadOptions(**{name: value for name, value in options.items() if name in LOAD_OPTIONS})


def load_target(
    path: Path,
    prepare: Prepare,
    options: LoadOptions,
    *,
    only_wanted: bool = False,
    formats: Formats = known_formats,
    opened: Callable[[Comm], AbstractContextManager[Source]] | None = None,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    rename_of: Callable[[Catalog], Callable[[str], str]] | None = None,
    progress: bool | OnProgress = False,
    process_group: Any = None,
    timeout_s: float = 600.0,
) -> tuple[LoadReport, Catalog]:
    """Load the tensors and values that `prepare` wants, as `load` does; return the report and the catalog.

    With `only_wanted`, saved names that nobody wants are ignored, not reported. `opened` opens the source in place of `path`.
    `rename_of` makes the `rename` for an open catalog.

    All ranks go through the same collectives, in this order: open the session, open the source, `vote`, `verify_ties` if the
    verdict has ties, the reads (with `read_once`, those of `execute_once`; else a gather if a rank verifies first), the final
    gather.
    """
    began = time.monotonic()
    session = open_session("load", str(path), process_group=process_group, timeout_s=timeout_s)
    with public_call(), ExitStack() as held, session as comm:
        # The source stays open until all ranks have left the session: it is entered before the session, so it closes after it.
        source = held.enter_context(opened(comm) if opened else open_shared_source(comm, path, formats, timeout_s=timeout_s))
        scaled_folder = source.format == SAFETENSORS and may_be_quantized(source.catalog)
        quantized = read_quantized(source.storage, source.catalog, apply=scaled_folder) if options.cast or scaled_folder else None
        once = comm.size > 1 and pays_off(source.storage, source.catalog) if options.read_once == "auto" else options.read_once
        options = replace(options, tied_under_one_name=source.format != NATIVE, quantized=quantized, read_once=once)
        for save in list(SAVES.begun):  # memory that a save of this process still copies must not change
            save.staged()
        storage, saved = source.storage, source.catalog
        rename = rename if rename_of is None else rename_of(saved)
        if rename is not None:
            saved = renamed(saved, rename, read=blob_reader(storage, source.catalog, verify=options.verify))
        target, saved, ignored = without_ignored(prepare(saved, comm), saved, options.ignore)
        values = _plain_values(open_values(storage, saved, target.prefixes, verify=options.verify))
        resolved = resolve(saved, target.tensors, options, window_bytes=storage.hints.read_bytes)
        if quantized is not None:  # scales that are applied are used, so the state need not have a place for them
            used = [part.scale.index for part in parts_of_load(saved, resolved, quantized)]
            resolved = replace(resolved, named=resolved.named.union(used))
        # A name below a wanted one is wanted too, because some ranks may have no tensor there.
        prefixes = wanted_names(target) if only_wanted else target.prefixes
        unfit = unreadable(saved, prefixes, strict=options.strict) + missing_values(saved, target.values) + target.check(values)
        # Every rank gets the same verdict: either all go on, or all raise the same error here.
        wanted = Wanted(
            () if only_wanted else prefixes, (*wanted_names(target), *ignored), unfit, target.unplaced, target.holders
        )
        hints = (*source.hints(target.prefixes), *target.hints(values), *(advice(quantized) if quantized else ()))
        verdict = vote(comm, saved, resolved, wanted, options, hints=hints)
        resolved = drop_refused(saved, resolved, verdict.refused)
        if verdict.has_ties:
            verify_ties(comm, storage, saved, resolved.ties, options)
        together = options.read_once and comm.size > 1
        parts = parts_of_load(saved, resolved, quantized) if quantized else []
        scaled = Dequantizer(storage, source.catalog, quantized, options.verify).read(parts) if quantized and parts else []
        if together and scaled_folder:
            comm.gather(b"")  # a rank that could not read a scale raises here: the exchange that follows needs all ranks
        alone = partial(execute, is_alone=comm.size == 1)
        run = partial(execute_once, comm, partial(_open_exchange_among, process_group, timeout_s)) if together else alone
        report = reporter(progress if comm.rank == 0 else False)
        # With `read_once`, the ranks meet in the exchange.
        meet = partial(comm.gather, b"") if verdict.verifies_first and not together else None
        try:
            fetched = fetch(storage, saved, resolved, options, report=report, run=run, meet=meet)
            if scaled:
                multiply(scaled)
            # Also after a failed read: tensors that were overwritten by then must count as changed for autograd.
        finally:
            target.count_up([spec.name for spec in resolved.specs])
        # Wait for all ranks: no object gets its values before every rank has read and verified its bytes.
        comm.gather(b"")
        target.finish(values, not_loaded(target, resolved))
        log, where = RankLog(comm.rank, target.mesh), path_text(path)
        log.info(
            "loaded %d tensors from %s in %.2f s, having read %s",
            len(resolved.targets),
            where,
            time.monotonic() - began,
            size_text(fetched.bytes_read),
        )
        if fetched.bytes_unverified:
            why = "as verify=False says" if source.format == NATIVE else f"as {source.format} has no checksums"
            level = WARNING if options.verify else INFO
            log.log(level, "%s of %s were loaded unverified, %s", size_text(fetched.bytes_unverified), where, why)
    converted = [
        f"{d.name}: saved as {d.dtype}, loaded as {d.tensor.dtype}" for d in resolved.targets if d.dtype != d.tensor.dtype
    ]
    # from_peers: the indices of the files that lie in the memory of other nodes.
    from_peers = {index for index, file in enumerate(source.catalog.files) if file.key in source.on_peers}
    done = replace(
        verdict.report,
        num_tensors=len(resolved.targets),
        num_bytes=resolved.plan.num_bytes,
        bytes_read=fetched.bytes_read,
        converted=tuple(converted),
        saved_as=tuple(f"{name}: saved as {other}" for name, other in resolved.saved_as.items()),
        bytes_unverified=fetched.bytes_unverified,
        bytes_from_peers=resolved.plan.num_bytes - resolved.plan.num_bytes_outside(sorted(from_peers)),
    )
    return done, saved


def _open_exchange_among(process_group: Any, timeout_s: float, members: Sequence[int]) -> Exchange:
    """Open an exchange for the ranks `members` of the load; one of them reads bytes and sends them to the others. Collective."""
    exchange = open_exchange(process_group, timeout_s=timeout_s, members=members)
    assert exchange is not None
    return exchange


def wanted_names(target: Target) -> tuple[str, ...]:
    """List the names of the values and tensors that a load target wants."""
    return (*target.values, *[spec.name for spec, _ in target.tensors])


def without_ignored(target: Target, saved: Catalog, ignore: Sequence[str]) -> tuple[Target, Catalog, tuple[str, ...]]:
    """Remove the names that match `ignore` from a target and a catalog. Return both, and all names that they had before.

    The `finish` of the new target skips the ignored tensors. If `ignore` is empty, no names are returned.
    """
    if not ignore:
        return target, saved, ()
    names = (*wanted_names(target), *target.removed, *saved.names, *saved.value_names)
    of_tensors = (*[spec.name for spec, _ in target.tensors], *target.removed)
    ignored = {name: None for name in of_tensors if matches(name, ignore)}
    kept = replace(
        target,
        tensors=tuple(e for e in target.tensors if e.spec.name not in ignored),
        values=tuple(name for name in target.values if not matches(name, ignore)),
        unplaced=tuple(name for name in target.unplaced if not matches(name, ignore)),
        finish=lambda values, skipped: target.finish(values, [*skipped, *ignored]),
    )
    return kept, without(saved, ignore), names


def not_loaded(target: Target, resolved: Resolved) -> list[str]:
    """Name the tensors of a target that were not loaded. A tied tensor counts as loaded if any of its names was."""
    if len(resolved.specs) == len(target.tensors):
        return []
    loaded = {spec.first_name for spec in resolved.specs}
    return [e.spec.name for e in target.tensors if e.spec.first_name not in loaded]


def _plain_values(values: Mapping[str, SavedValue]) -> dict[str, Any]:
    return {name: PerRankValues(v.value) if v.kind is ValueKind.PER_RANK else v.value for name, v in values.items()}
