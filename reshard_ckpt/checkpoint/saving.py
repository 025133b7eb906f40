"""The public functions that save: `save` blocks, `async_save` saves while training goes on, `prepare` allocates its memory.

`run_save` is the story of each save. All ranks go through its steps, and so through the same collectives, in this order:

1. Meet: open the session, a `Comm` for this call alone (a gather). Ranks that call another function, or with another `replicas`,
   are told so. An incremental save opens its base (a gather and a broadcast) once the state is captured; before that, rank 0 of a
   `Manager` broadcasts the path of the base.
2. Wait for the previous save of this process.
3. Capture the state on this rank. With `exclude`, compare its unused patterns (a gather and a broadcast). With `first_metadata`,
   rank 0 broadcasts the metadata that it made.
4. Agree (`agreement`: a gather and a broadcast, then a gather and a scatter if rank 0 asks for them). With `compare_first`,
   compare replicas (a gather and a broadcast), and if some differ, capture and agree again. With `rows`, choose the table rows
   to write (`touched`: a gather and a broadcast, and an exchange).
5. Write this rank's files: from the tensors, or from a copy that a thread makes (`async_save`). A save to memory has collectives
   of its own here (`memory.tier`).
6. Commit (a gather of receipts), and leave the session (a gather).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ..comm import ArgumentCheck, open_session
from ..comm.protocol import Comm, merge_of_all, value_of_first
from ..core.catalog.model import ValueEntry
from ..core.report import SaveReport, duration_s
from ..engine.common.host_memory import POOL
from ..engine.common.progress import OnProgress, RankLog, Recorder, TimedComm, reporter
from ..engine.common.tensor_bytes import public_call
from ..engine.saving.agreement import agree
from ..engine.saving.async_save import SaveTarget, launch
from ..engine.saving.commit import check_free_space, chunks_of, read_previous, write_and_commit
from ..engine.saving.handle import SAVES, SaveHandle
from ..engine.saving.local_shards import LocalShards, describe_local
from ..engine.saving.options import Hold, SaveJob, SaveOptions
from ..engine.saving.replicas import all_fingerprints, differing_names
from ..engine.saving.staged_copy import take_ring
from ..engine.saving.step_guard import GuardedState
from ..engine.saving.touched import Table, choose, lossy_tensors, pick
from ..engine.saving.unchanged import MIN_LIVE, Base, base_beside
from ..engine.saving.write import lay_out
from ..errors import UsageError
from ..formats.source import NATIVE, Path, open_shared_source
from ..state.capture import Captured, capture
from ..state.optimizers import held_back
from ..state.state_builder import CLAIM_PATH
from ..state.touched_rows import TouchedRows
from ..storage import Storage, open_storage, unlinked_path

Capture = Callable[..., Captured]
"""A function that describes the tensors and values that this rank saves. With ``compare_first``, if replicas differ, it is called
again with the names of the tensors whose replicas do."""

Result = TypeVar("Result")
Write = Callable[[SaveJob, ExitStack], Result]


def save(
    path: Path,
    state: Mapping[str, Any],
    *,
    exclude: Sequence[str] = (),
    mesh: Any = None,
    process_group: Any = None,
    metadata: Any = None,
    timeline: bool = True,
    sha256: bool = False,
    replicas: str = "verify",
    base: Path | None = None,
    verify_base: bool = False,
    rows: TouchedRows | None = None,
    grace: str | float = "10min",
    progress: bool | OnProgress = False,
    timeout_s: float = 600.0,
) -> SaveReport:
    """Save a state as one checkpoint, from all ranks of a job together.

    The path holds the old checkpoint, if there was one, until the commit, and the whole new one from then on.

    Parameters
    ----------
    path
        A folder that all ranks share, or ``memory://name``.
    state
        Modules, optimizers, objects with ``state_dict``, tensors, shards and plain values, by name; see the guide.
    exclude
        Names and shell-style patterns to leave out. A name also stands for everything below it. The same on all ranks. A
        pattern that fits no name on any rank gives a warning.
    mesh
        A ``DeviceMesh``, or axis names and sizes, outermost first; needed if the state alone does not show the job's mesh.
    process_group
        The ranks that save together; by default all.
    metadata
        Plain values to keep in the catalog, the same on all ranks.
    timeline
        Store beside the checkpoint how long each step of each rank took, for `timeline`.
    sha256
        Also write a manifest: the SHA-256 of every file, as text that ``sha256sum -c`` and `verify` check and any tool can sign.
    replicas
        How ranks that hold the same bytes are compared; the same on all ranks. ``"verify"``: each rank hashes all of its bytes,
        and the ranks share the writing. ``"sample"``: of a replica above 1 MiB each rank hashes 16 blocks of 64 KiB, other blocks
        in each save; one of the ranks writes the whole replica, so that ranks may write unequal numbers of bytes.
    base
        An earlier checkpoint in the same folder, or the one at this path, for an incremental save: a block of 128 KiB that has
        not changed since is not written, and the new checkpoint refers to the old file. Whatever deletes or replaces a checkpoint
        keeps files that another one beside it refers to. The same on all ranks.
    verify_base
        With `base`, also compare the bytes of blocks whose digests are equal, which reads them; with `rows`, the rows too.
    rows
        A `TouchedRows`: of the tables that it tracks, write only the rows that its policy chooses, and refer to `base` for the
        others. Pass it to every save, also to full ones. Every rank passes a tracker of its own.
    grace
        In an object store, which has no locks: how long the files of a replaced checkpoint stay for jobs that are reading it, in
        seconds or as text (``"10min"``). A later save there removes them. 0 removes them at once.
    progress
        True: rank 0 shows how much of its own part is written, as a line on stderr. A function is called on rank 0 instead, with
        the name of the step ("save"), the bytes done and the bytes in all; if it raises, the save fails with its error.
    timeout_s
        Seconds to wait for another rank before giving up.

    Returns
    -------
    SaveReport
        Bytes and seconds, for metrics.

    Raises
    ------
    UsageError
        The state cannot be saved as it is; the message says what to change.
    StorageError
        The store refused; the checkpoint that the path held before is still there.
    PeerError
        Another rank failed or did not arrive.
    """
    with ArgumentCheck("save", path, process_group=process_group, timeout_s=timeout_s):
        options = SaveOptions(
            mesh, process_group, metadata, timeline, sha256, progress, timeout_s,
            replicas=replicas, exclude=exclude, base=base, verify_base=verify_base, rows=rows,
            grace_s=duration_s(grace, option="grace", or_zero=True),
        )  # fmt: skip
    return _save(path, _capture_of(state, options), options)


def run_save(
    path: Path, capture: Capture, options: SaveOptions, write: Write[Result], *, into: str = ""
) -> tuple[SaveJob, Result]:
    """Save the state that `capture` describes, by the steps in this module's docstring. Return the job and the result of `write`.

    `write` is called with the job and the open session. It writes and commits, or starts a thread that takes the session over and
    does so. `into` is added to the name of the call, which must be the same on all ranks: a save into memory exchanges other
    messages than a save into a store.
    """
    recorder = Recorder()
    # Ranks that differ in these options get an error that says so.
    shown = ["replicas='sample'"] if options.samples_replicas else []
    shown += [f"exclude={list(options.exclude)}"] if options.exclude else []
    shown += ["base="] if options.base is not None else []
    shown += ["rows="] if options.rows is not None else []
    call = f"save{into}({', '.join(shown)})" if shown else f"save{into}"
    with public_call(), ExitStack() as session:
        # 1. Meet.
        opened = open_session(call, str(path), process_group=options.process_group, timeout_s=options.timeout_s)
        comm = TimedComm(session.enter_context(opened), recorder)
        recorder.add("meet", recorder.began)
        recorder.log = RankLog(comm.rank, None)
        recorder.report = reporter(options.progress if comm.rank == 0 else False)
        # 2. Wait for the previous save.
        with recorder.step("turn"):
            SAVES.wait_turn(when_busy=options.when_busy)
        # 3. Capture.
        local_shards, captured = _captured(capture, comm.rank, recorder)
        tables = () if options.rows is None else options.rows.begin(captured.tensors)
        if options.exclude:
            unused_everywhere = merge_of_all(comm, captured.unused, lambda lists: sorted(set(lists[0]).intersection(*lists)))
            for pattern in unused_everywhere if comm.rank == 0 else ():
                warnings.warn(f"exclude=[{pattern!r}] fits no name of the state, so correct it", stacklevel=4)
        storage = session.enter_context(open_storage(unlinked_path(path), timeout_s=options.timeout_s))
        if callable(options.base):
            options = replace(options, base=value_of_first(comm, options.base))
        if options.first_metadata:
            options = replace(options, metadata=value_of_first(comm, options.first_metadata))
        base = None if options.base is None else _open_base(session, comm, storage, options)
        folder = storage.url.rpartition("/")[2]
        # 4. Agree. Rank 0 looks at the path before any rank can make a file.
        with recorder.step("agree"):
            agree_on = partial(
                agree,
                comm,
                splits=not options.samples_replicas,
                metadata=options.metadata,
                before=read_previous(storage) if comm.rank == 0 else None,
                base_files=None if base is None else base.files,
                folder=folder if folder.isprintable() else "",  # a name that is no UTF-8 has surrogates
                accept=partial(check_free_space, storage) if base is None else lambda plan: None,
                checked=partial(_without_claims, options.check_names),
            )
            job = SaveJob(str(path), comm, storage, recorder, options, local_shards, *agree_on(local_shards), base=base)
        if options.compare_first:
            with recorder.step("compare"):
                fingerprints = all_fingerprints(local_shards, job.assignment.checks, job.shift)
                differ = differing_names(comm, job.contents.plan if job.contents else None, fingerprints)
            if not differ:
                job = replace(job, fingerprints=fingerprints)
            else:  # tensors whose replicas differ are captured as tensors of each rank's own
                local_shards, _ = _captured(partial(capture, differ), comm.rank, recorder)
                with recorder.step("agree"):
                    job = SaveJob(str(path), comm, storage, recorder, options, local_shards, *agree_on(local_shards))
        if options.rows is not None:
            with recorder.step("choose rows"):
                job = _with_chosen_rows(job, tables)
        # 5. Write, and 6. commit.
        return job, write(job, session)


def _with_chosen_rows(job: SaveJob, tables: Sequence[Table]) -> SaveJob:
    """Choose the rows to save of the tables that ``rows=`` tracks; return a `SaveJob` that writes only these rows of the tables.

    Collective: `touched` lists the calls.
    """
    options, base = job.options, job.base
    assert options.rows is not None
    rows = choose(
        job.comm, options.rows, tables, base, job.save_id, process_group=options.process_group, timeout_s=options.timeout_s
    )
    if rows is None or base is None:
        return job
    local_shards, items, picked = pick(base, job.local_shards, job.assignment.items, rows, options.rows.bits)
    contents = job.contents
    if contents is not None:
        contents = replace(contents, lossy=lossy_tensors(contents.plan.tables, rows, options.rows))
    assignment = replace(job.assignment, items=items, bits=picked.bits)
    return replace(job, local_shards=local_shards, assignment=assignment, contents=contents, picked=picked)


def _open_base(session: ExitStack, comm: Comm, storage: Storage, options: SaveOptions) -> Base:
    """Open the checkpoint that an incremental save refers to, and protect it from removal until the session ends. Collective."""
    assert options.base is not None
    assert not callable(options.base)
    source = session.enter_context(open_shared_source(comm, unlinked_path(options.base), timeout_s=options.timeout_s))
    if source.format != NATIVE:
        raise UsageError(
            f"base={options.base}: is a {source.format} checkpoint; the first save must be a full one, without base="
        )
    # A policy that leaves old rows in the checkpoint must choose all new rows: rows of a file that holds few stay there.
    is_lossy = options.rows is not None and options.rows.policy != "touched"
    min_live = 0.0 if is_lossy else MIN_LIVE
    return base_beside(storage.url, source.storage, source.catalog, verify=options.verify_base, min_live=min_live)


def _captured(capture: Callable[[], Captured], rank: int, recorder: Recorder) -> tuple[LocalShards, Captured]:
    """Call `capture` for the part of the state that this rank saves. Return it as columns, and the `Captured` itself.

    From here on, log lines name the rank's place on the mesh.
    """
    with recorder.step("capture"):
        captured = capture()
        for text in captured.warnings if rank == 0 else ():
            warnings.warn(text, stacklevel=4)
        recorder.log = RankLog(rank, captured.mesh)
        return describe_local(captured.tensors, captured.values, captured.mesh, rank), captured


def _without_claims(
    check_names: Callable[[list[str], list[str]], None], values: tuple[ValueEntry, ...]
) -> tuple[ValueEntry, ...]:
    """Split values from claims, which only say that other ranks hold an object (`StateBuilder.claim`); return the values.

    `check_names` is called with the names of the values and of the claims, and raises if they do not fit.
    """
    claims = [value.name for value in values if value.path == CLAIM_PATH]
    values = tuple(value for value in values if value.path != CLAIM_PATH)
    check_names([value.name for value in values], claims)
    return values


def _capture_of(state: Mapping[str, Any], options: SaveOptions) -> Capture:
    return partial(capture, state, mesh=options.mesh, process_group=options.process_group, exclude=options.exclude)


def _save(path: Path, capture: Capture, options: SaveOptions) -> SaveReport:
    """Save the tensors and values that `capture` describes; return the report after the commit."""
    job, written = run_save(path, capture, options, lambda job, session: write_and_commit(job, chunks_of(job)))
    return job.report(written)  # after the session has ended, so that its end counts


def async_save(
    path: Path,
    state: Mapping[str, Any],
    *,
    exclude: Sequence[str] = (),
    staging: str = "eager",
    hold: Hold = "optimizers",
    host_buffer_bytes: int | None = None,
    when_busy: str = "wait",
    mesh: Any = None,
    process_group: Any = None,
    metadata: Any = None,
    timeline: bool = True,
    sha256: bool = False,
    replicas: str = "verify",
    base: Path | None = None,
    verify_base: bool = False,
    rows: TouchedRows | None = None,
    grace: str | float = "10min",
    progress: bool | OnProgress = False,
    timeout_s: float = 600.0,
) -> SaveHandle:
    """Save a state while training goes on; returns as soon as the state may change, or before (`staging`).

    Parameters
    ----------
    path, state, exclude, mesh, process_group, metadata, timeline, sha256, replicas, base, verify_base, rows, grace, timeout_s
        As for `save`.
    progress
        As for `save`; a function is called in the thread that writes.
    staging
        ``"eager"``: the state may change as soon as this returns. ``"lazy"``: this returns sooner, and the state may change once
        ``staged()`` of the handle returns. The steps of the optimizers in the state wait for that by themselves, so a training
        loop needs no change. Everything else that may change meanwhile (buffers, other objects) is copied before this returns.
        Your own code that changes parameters must wait for ``staged()``: if such a change is detected, the save fails. After
        copying, the copies are compared with the memory they were made from; docs/reliability.md lists the changes that this
        detects. If the steps of an optimizer cannot be held back (compiled, ``capturable=True``), lazy is eager.
    hold
        The objects that hold changes back while a lazy save copies. ``"optimizers"``: the optimizers in the state, as above. An
        optimizer, or a list: these too, whether or not they are in the state; tensors that they own need not be copied before
        this returns. ``"caller"``: nothing is copied before this returns, and nothing is held back or checked; the caller must
        not change anything of the state before ``staged()`` returns.
    host_buffer_bytes
        Upper bound of the host memory for staging, at least 16 MiB. If it is less than this rank writes, staging is eager, and
        waits for the disk.
    when_busy
        If another save of this process is still running: ``"wait"`` for it, or ``"error"``.

    Returns
    -------
    SaveHandle
        Its ``result()`` returns a `SaveReport` once the checkpoint is committed, or raises the error of the save. If nobody calls
        ``result()``, the next save raises that error.

    Raises
    ------
    CheckpointError
        As for `save`, for errors that occur before this returns; or the previous save failed in the background.
    """
    with ArgumentCheck("save", path, process_group=process_group, timeout_s=timeout_s):
        options = SaveOptions(
            mesh, process_group, metadata, timeline, sha256, progress, timeout_s,
            staging=staging, host_buffer_bytes=host_buffer_bytes, when_busy=when_busy, hold=hold,
            replicas=replicas, exclude=exclude, base=base, verify_base=verify_base, rows=rows,
            grace_s=duration_s(grace, option="grace", or_zero=True),
        )  # fmt: skip
    return begin_save(path, state, options)


ChooseTarget = Callable[[SaveJob], SaveTarget | None]


def begin_save(
    path: Path, state: Mapping[str, Any], options: SaveOptions, choose_target: ChooseTarget | None = None
) -> SaveHandle:
    """Begin a save as `async_save` does. If given, `choose_target` returns the target of the file images, such as memory."""
    guards = options.staging == "lazy" and not options.caller_holds
    guarded = (lambda: GuardedState(*held_back([state, *options.more_held]))) if guards else GuardedState
    return _begin(path, _capture_of(state, options), options, guarded, choose_target)


def _begin(
    path: Path,
    capture: Capture,
    options: SaveOptions,
    guarded: Callable[[], GuardedState] = GuardedState,
    choose_target: ChooseTarget | None = None,
) -> SaveHandle:
    """Begin a save and return its handle. By then the state may change, except with lazy staging, which copies it later."""

    def begin(job: SaveJob, session: ExitStack) -> SaveHandle:
        target = None if choose_target is None else choose_target(job)
        return launch(job, session, guarded(), target)

    return run_save(path, capture, options, begin, into="" if choose_target is None else " to memory")[1]


def save_captured(path: Path, capture: Capture, **options: Any) -> SaveReport:
    """Save the tensors and values that `capture` describes, and compare replicas first. Options are fields of `SaveOptions`."""
    return _save(path, capture, SaveOptions(compare_first=True, **options))


def begin_captured(path: Path, capture: Capture, **options: Any) -> SaveHandle:
    """Begin a save of the tensors and values that `capture` describes, and compare replicas first.

    They are copied before this returns its handle, except with ``staging="lazy"``. Options are fields of `SaveOptions`.
    """
    return _begin(path, capture, SaveOptions(compare_first=True, **options))


def prepare(
    state: Mapping[str, Any],
    *,
    mesh: Any = None,
    process_group: Any = None,
    host_buffer_bytes: int | None = None,
    replicas: str = "verify",
    timeout_s: float = 600.0,
) -> None:
    """Allocate the staging memory for a state, and agree on its layout, before the first `async_save` needs both.

    Call it on all ranks. State that an optimizer creates in its first step is not counted if it does not exist yet.

    Parameters
    ----------
    state, mesh, process_group, host_buffer_bytes, replicas, timeout_s
        The same as `async_save` will get.
    """
    session = open_session("prepare", "", process_group=process_group, timeout_s=timeout_s)
    with public_call(), session as comm:
        options = SaveOptions(replicas=replicas, host_buffer_bytes=host_buffer_bytes)
        local_shards, _ = _captured(lambda: capture(state, mesh=mesh, process_group=process_group), comm.rank, Recorder())
        assignment, _ = agree(comm, local_shards, splits=not options.samples_replicas)
        ring = take_ring(local_shards, lay_out(local_shards, assignment, comm.rank), host_buffer_bytes)
        POOL.give_back(ring.fill_(0))
