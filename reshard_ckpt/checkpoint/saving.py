"""The public functions that save: `save` blocks, `async_save` saves while training goes on, `prepare` goes before the first."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from ..comm import Comm, open_session
from ..core.report import SaveReport
from ..engine.common.host_memory import POOL
from ..engine.common.inference import outside_inference_mode
from ..engine.common.logs import RankLog
from ..engine.common.progress import OnProgress, reporter
from ..engine.common.recorder import Recorder, TimedComm
from ..engine.saving.agreement import agree
from ..engine.saving.async_save import SaveTarget, launch
from ..engine.saving.commit import check_free_space, commit, look, undoing
from ..engine.saving.handle import SAVES, SaveHandle
from ..engine.saving.local_shards import LocalShards, describe_local
from ..engine.saving.messages import Receipt
from ..engine.saving.options import Hold, SaveJob, SaveOptions
from ..engine.saving.replicas import all_fingerprints, differing_names
from ..engine.saving.staged_copy import device_to_pin_for, take_ring, write_staged
from ..engine.saving.step_guard import GuardedState
from ..engine.saving.write import lay_out, write_assignment
from ..format.values import encode_value
from ..formats.source import Path
from ..state.capture import capture
from ..state.entries import Captured
from ..state.optimizer_owned import held_back
from ..state.state_builder import CLAIM_PATH
from ..storage import open_storage


def save(
    path: Path,
    state: Mapping[str, Any],
    *,
    mesh: Any = None,
    process_group: Any = None,
    metadata: Any = None,
    timeline: bool = True,
    sha256: bool = False,
    replicas: str = "verify",
    progress: bool | OnProgress = False,
    timeout_s: float = 600.0,
) -> SaveReport:
    """Save a state as one checkpoint, from all ranks of a job together.

    Until the last step, the path holds the checkpoint that it held before; after it, it holds the whole new one.

    Parameters
    ----------
    path
        A folder that all ranks share, or ``memory://name``.
    state
        Modules, optimizers, objects with ``state_dict``, tensors, shards and plain values, by name; see the guide.
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
    progress
        True: rank 0 shows how much of its own part is written, as a line on stderr. A function is called on rank 0 instead, with
        the step ("save"), the bytes done and the bytes in all; if it raises, the save fails with its error.
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
    options = SaveOptions(mesh, process_group, metadata, timeline, sha256, progress, timeout_s, replicas=replicas)
    return _save(path, lambda: capture(state, mesh=mesh, process_group=process_group), options)


def _save(path: Path, capture: Capture, options: SaveOptions) -> SaveReport:
    """Run a whole save: agree with all ranks, write this rank's part, commit."""
    with outside_inference_mode(), ExitStack() as session:
        job = _agreed_job(session, path, capture, options)
        session.enter_context(undoing(job))
        receipt = _written(job)
        total = commit(job, receipt)
    return job.report(receipt.num_bytes, total)


def _written(job: SaveJob) -> Receipt:
    """Write this rank's part: straight from the tensors' memory, or through pinned memory if some lie on an accelerator."""
    if device_to_pin_for(job.local_shards) is not None:
        return write_staged(job)
    return write_assignment(
        job.storage,
        job.local_shards,
        job.agreed.assignment,
        job.comm.rank,
        recorder=job.recorder,
        sha256=job.options.sha256,
        fingerprints=job.fingerprints,
        shift=job.shift,
    )


def async_save(
    path: Path,
    state: Mapping[str, Any],
    *,
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
    progress: bool | OnProgress = False,
    timeout_s: float = 600.0,
) -> SaveHandle:
    """Save a state while training goes on; returns as soon as the state may change, or before (`staging`).

    Parameters
    ----------
    path, state, mesh, process_group, metadata, timeline, sha256, replicas, progress, timeout_s
        As for `save`; a `progress` function is called in the thread that writes.
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
    options = SaveOptions(
        mesh,
        process_group,
        metadata,
        timeline,
        sha256,
        progress,
        timeout_s,
        staging,
        host_buffer_bytes,
        when_busy,
        hold,
        replicas,
    )
    return begin_save(path, state, options)


ChooseTarget = Callable[[SaveJob], SaveTarget | None]


def begin_save(
    path: Path, state: Mapping[str, Any], options: SaveOptions, choose_target: ChooseTarget = lambda job: None
) -> SaveHandle:
    """Begin a save as `async_save` does, with its options as one value; `choose_target` may send the file images elsewhere."""
    guards = options.staging == "lazy" and not options.caller_holds
    guarded = (lambda: GuardedState(*held_back([state, *options.more_held]))) if guards else GuardedState

    def capture_state() -> Captured:
        return capture(state, mesh=options.mesh, process_group=options.process_group)

    return _begin(path, capture_state, options, guarded, choose_target)


def _begin(
    path: Path,
    capture: Capture,
    options: SaveOptions,
    guarded: Callable[[], GuardedState] = GuardedState,
    choose_target: ChooseTarget = lambda job: None,
) -> SaveHandle:
    with outside_inference_mode(), ExitStack() as session:
        job = _agreed_job(session, path, capture, options)
        target = choose_target(job)
        if target is None:
            session.enter_context(undoing(job))
        handle = launch(job, session, guarded(), target)
        SAVES.join(handle)
    return handle


Capture = Callable[..., Captured]
"""Describes the tensors and values that this rank has to save. With `compare_first`, it is called a second time if replicas
differ, with the names of the tensors whose replicas do."""


def save_captured(path: Path, capture: Capture, **options: Any) -> SaveReport:
    """Save the state that `capture` describes, comparing replicas first; the options are fields of `SaveOptions`."""
    return _save(path, capture, SaveOptions(compare_first=True, **options))


def begin_captured(path: Path, capture: Capture, **options: Any) -> SaveHandle:
    """Begin to save as `save_captured` does; the state is copied before this returns."""
    return _begin(path, capture, SaveOptions(compare_first=True, **options))


def _agreed_job(session: ExitStack, path: Path, capture: Capture, options: SaveOptions) -> SaveJob:
    """Meet the other ranks, capture the state, and agree on the part that each rank writes.

    All ranks go through these steps in the same order:

    1. Meet: open a session. Ranks that call another function, or with another `replicas`, are told so.
    2. Wait for the previous save of this process.
    3. Capture the state on this rank, without any collective.
    4. Agree: rank 0 looks at the path, plans the save, checks the free space, and sends each rank its assignment.
    5. With `compare_first`, compare replicas, and if some differ, capture and agree again (`_compared`).
    """
    recorder = Recorder()
    call = "save(replicas='sample')" if options.samples_replicas else "save"  # ranks that differ in it get an error that says so
    opened = open_session(call, str(path), process_group=options.process_group, timeout_s=options.timeout_s)
    comm = _observed(session.enter_context(opened), recorder, options.progress)
    with recorder.step("turn"):
        SAVES.wait_turn(when_busy=options.when_busy)
    metadata = encode_value(options.metadata, "metadata")
    local_shards = _described(capture, comm.rank, recorder)
    storage = session.enter_context(open_storage(path, timeout_s=options.timeout_s))
    with recorder.step("agree"):
        before = look(storage) if comm.rank == 0 else None
        accept = partial(check_free_space, storage)
        agreed = agree(comm, local_shards, splits=not options.samples_replicas, metadata=metadata, accept=accept)
    job = SaveJob(str(path), comm, storage, recorder, options, metadata, before, local_shards, agreed)
    return _compared(job, capture) if options.compare_first else job


def _compared(job: SaveJob, capture: Capture) -> SaveJob:
    """Compare replicas before anything is written; if some differ, capture again without them as replicas, and agree again."""
    comm, agreed, recorder = job.comm, job.agreed, job.recorder
    with recorder.step("compare"):
        claims = [value.name for value in agreed.values if value.path == CLAIM_PATH]
        agreed = replace(agreed, values=tuple(value for value in agreed.values if value.path != CLAIM_PATH))
        if comm.rank == 0:  # which alone has the values
            job.options.check_names([value.name for value in agreed.values], claims)
        fingerprints = all_fingerprints(job.local_shards, agreed.assignment.checks, job.shift)
        differ = differing_names(comm, agreed.plan, fingerprints)
    if not differ:
        return replace(job, agreed=agreed, fingerprints=fingerprints)
    local_shards = _described(partial(capture, differ), comm.rank, recorder)
    with recorder.step("agree"):
        accept = partial(check_free_space, job.storage)
        agreed = agree(comm, local_shards, splits=not job.options.samples_replicas, metadata=job.metadata, accept=accept)
    return replace(job, local_shards=local_shards, agreed=agreed)


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
    options = SaveOptions(replicas=replicas, host_buffer_bytes=host_buffer_bytes)
    session = open_session("prepare", "", process_group=process_group, timeout_s=timeout_s)
    with outside_inference_mode(), session as comm:
        local_shards = _described(lambda: capture(state, mesh=mesh, process_group=process_group), comm.rank, Recorder())
        agreed = agree(comm, local_shards, splits=not options.samples_replicas)
        ring = take_ring(local_shards, lay_out(local_shards, agreed.assignment, comm.rank), host_buffer_bytes)
        POOL.give_back(ring.fill_(0))


def _observed(session: Comm, recorder: Recorder, progress: bool | OnProgress) -> Comm:
    """Make the recorder note the calls of a session that was just opened, and rank 0 show progress."""
    recorder.add("meet", recorder.began)
    recorder.log = RankLog(session.rank, None)
    recorder.report = reporter(progress if session.rank == 0 else False)
    return TimedComm(session, recorder)


def _described(capture: Callable[[], Captured], rank: int, recorder: Recorder) -> LocalShards:
    """Capture the part of the state that this rank has to save; from here on, log lines name the rank's place on the mesh."""
    with recorder.step("capture"):
        captured = capture()
        for text in captured.warnings if rank == 0 else ():
            warnings.warn(text, stacklevel=4)
        recorder.log = RankLog(rank, captured.mesh)
        return describe_local(captured.tensors, captured.values, captured.mesh, rank)
