"""Saving while training goes on: stage the state, then write and commit it in a thread.

1. In the caller: agree, as every save does. What cannot wait is copied before the call returns.
2. *Eager*: that is everything. *Lazy*: what only the optimizers change is copied by a thread, while forward and backward run;
   a guard holds each optimizer's next step back until it is done, or queued to be done before the step on its device. Where the
   caller holds all changes back, a thread copies everything.
3. Another thread writes, sends the receipt and commits, over the session that the caller opened: never by the job's collectives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.report import SaveReport
from ...errors import CheckpointError, UsageError
from ..common.host_memory import POOL
from ..common.lanes import has_lane, on_device
from ..common.recorder import Recorder
from .commit import commit
from .handle import RunningSave, SaveHandle
from .local_shards import LocalShards
from .options import SaveJob
from .staged_fingerprints import StagedFingerprints
from .staging import MIN_RING_BYTES, Staging, ring_bytes
from .step_guard import ChangeDetector, GuardedState, StepGuard
from .write import FileLayout, lay_out, write_files


class SaveTarget(Protocol):
    """Where the images of an asynchronous save go."""

    def take_ring(self, job: SaveJob, layouts: Sequence[FileLayout]) -> torch.Tensor:
        """Return the memory to stage in: 1-D uint8, on the host."""

    def finish(self, job: SaveJob, layouts: Sequence[FileLayout], staging: Staging, marks: NDArray[np.uint64]) -> SaveReport:
        """Take the images from the ring, front to back, and commit; called in the saving thread."""

    def give_back(self, ring: torch.Tensor) -> None:
        """Take the ring back; called once nobody reads it any more, also after an error."""


class StoreTarget:
    """Writes the images to the store of the save."""

    def take_ring(self, job: SaveJob, layouts: Sequence[FileLayout]) -> torch.Tensor:
        return take_ring(job.local_shards, layouts, job.options.host_buffer_bytes)

    def finish(self, job: SaveJob, layouts: Sequence[FileLayout], staging: Staging, marks: NDArray[np.uint64]) -> SaveReport:
        receipt = write_files(job.storage, layouts, staging.drain, marks, job.recorder, sha256=job.options.sha256)
        # A rank with no file to write drains nothing, and its fingerprints may not be there yet.
        total = commit(job, receipt, ready=staging.wait_finished)
        return SaveReport(job.path, job.save_id, receipt.num_bytes, total, 0.0, 0.0)

    def give_back(self, ring: torch.Tensor) -> None:
        POOL.give_back(ring)


class SaveThread:
    """Carries one save through, once its state is staged or while it is."""

    def __init__(self, save: RunningSave, session: AbstractContextManager[Any], staging: Staging, recorder: Recorder) -> None:
        self._save, self._session, self._staging, self._recorder = save, session, staging, recorder
        self._stages = False

    def start(self, write: Callable[[], SaveReport], *, finally_: Callable[[], None]) -> None:
        """Run `write` in the session, and then, in any case, `finally_`; where no thread can be started, leave the session.

        Raises
        ------
        UsageError
            The system, or an interpreter that is about to end, gives no thread.
        """
        try:
            # No daemon: when the job ends, the interpreter waits for the last save.
            self._save.threads.append(_thread("reshard-ckpt-save", lambda: self._run(write, finally_)))
        except RuntimeError as error:
            self._save.finish_staging()
            finally_()
            with self._session:
                raise UsageError(
                    f"no thread to save in can be started ({error}): call checkpoint.save, which needs none"
                ) from error

    def stage(self, fill: Callable[[], None], *, in_background: bool) -> None:
        """Run `fill`, after which the state may change; an error of it fails the save. An interrupt is also the caller's."""
        self._stages = True
        if in_background:
            with suppress(RuntimeError):  # no thread can be started, so it is done here
                self._save.threads.append(_thread("reshard-ckpt-stage", lambda: self._stage(fill)))
                return
        error = self._stage(fill)
        if error is not None and not isinstance(error, Exception):
            raise error

    def _stage(self, fill: Callable[[], None]) -> BaseException | None:
        try:
            fill()
            self._staging.finish()
        except BaseException as error:  # whatever it is, the writer must not wait for ever
            self._staging.fail(error)
            return error
        finally:
            self._save.finish_staging()
        return None

    def give_up(self, error: BaseException) -> None:
        """Fail the save, and wait until its thread is through."""
        self._staging.fail(error)
        if not self._stages:  # nor will it ever, and the thread must not wait for that
            self._save.finish_staging()
        self._save.wait()

    def _run(self, write: Callable[[], SaveReport], finally_: Callable[[], None]) -> None:
        outcome: SaveReport | BaseException
        try:
            with self._session:
                try:
                    report = write()
                except BaseException as error:
                    self._staging.fail(error)
                    raise
            # After the vote at the session's end: a rank that has nothing to publish is told there that rank 0 has.
            outcome = replace(report, duration_s=self._recorder.now() - self._recorder.began)
        except BaseException as error:
            outcome = error if isinstance(error, CheckpointError) else _wrapped(self._save, error)
            self._recorder.log.error("the save to %s failed: %s", self._save.path, error)
        self._save.staged.result()
        try:
            finally_()
        finally:
            self._save.finish(outcome)


def _thread(name: str, target: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=False)
    thread.start()
    return thread


def _wrapped(save: RunningSave, error: BaseException) -> CheckpointError:
    wrapped = CheckpointError(
        f"the save to {save.path} failed: {type(error).__name__}: {error}; what the path held before is still there"
    )
    wrapped.__cause__ = error
    return wrapped


def launch(job: SaveJob, session: ExitStack, guarded: GuardedState, target: SaveTarget | None = None) -> SaveHandle:
    """Stage the agreed part of the state and let threads do the rest.

    Parameters
    ----------
    session
        Entered by the caller, who leaves it if this raises; once the saving thread runs, that has taken it over.
    guarded
        The optimizers whose steps can be held back, and what only they change; empty for eager staging.
    target
        Where the images go; the store by default.
    """
    local_shards, assignment, recorder, options = job.local_shards, job.agreed.assignment, job.recorder, job.options
    layouts = lay_out(local_shards, assignment, job.comm.rank)
    target = target or StoreTarget()
    ring = target.take_ring(job, layouts)
    addresses = {tensor.untyped_storage().data_ptr() for tensor in guarded.tensors}
    # On a device, what staging does comes after all that was queued before: so this comes first.
    detector = ChangeDetector(guarded.tensors) if guarded.optimizers else None
    staging = Staging(local_shards, assignment, layouts, ring)
    marks = StagedFingerprints(staging.lanes, local_shards, assignment.checks, job.fingerprints)

    def copy(chosen: Callable[[int], bool], *, last: bool = True, queued: Callable[[], None] = lambda: None) -> None:
        began = recorder.now()
        num_bytes = staging.fill(chosen, last=last)
        if not staging.is_under_way:
            recorder.add("stage", began, num_bytes)
        with recorder.step("compare"):
            marks.queue(chosen)
        if staging.is_under_way or marks.is_under_way:
            queued()
            staging.settle()
            recorder.add("stage", began, num_bytes)
        marks.finish()

    def is_guarded(row: int) -> bool:
        return local_shards.rows[row][1].tensor.untyped_storage().data_ptr() in addresses

    def write() -> SaveReport:
        return target.finish(job, layouts, staging, marks.marks)

    save = RunningSave(job.path, job.save_id)
    handle = SaveHandle(save)
    thread = SaveThread(save, session.pop_all(), staging, recorder)
    # Where the ring streams, all is copied before this returns.
    guard = None
    if detector is not None and staging.holds_all:
        guard = StepGuard(guarded.optimizers, detector, lambda: save.wait_for(save.queued))

    def finally_() -> None:
        staging.close()
        marks.close()
        target.give_back(ring)

    def let_steps_through() -> None:
        if guard is not None:
            queued = staging.lanes.record()
            guard.let_through(lambda: staging.lanes.follow(queued))
            save.let_steps_through()

    try:
        thread.start(write, finally_=finally_)
    except BaseException:
        if guard is not None:
            guard.release()
        raise
    try:
        if guard is None:
            thread.stage(lambda: copy(lambda _: True), in_background=options.caller_holds)
        else:
            now = partial(copy, lambda row: not is_guarded(row), last=False)
            _stage_lazily(thread, staging, guard, now, partial(copy, is_guarded, queued=let_steps_through))
    except BaseException as error:  # Ctrl-C, which may come at any moment
        thread.give_up(error)
        raise
    save.add_stall(recorder.now() - recorder.began)
    return handle


def _stage_lazily(
    thread: SaveThread, staging: Staging, guard: StepGuard, copy_now: Callable[[], None], copy_guarded: Callable[[], None]
) -> None:
    """Copy now what forward changes as well (buffers, an average of the weights), and in a thread what optimizers own."""

    def copy_later() -> None:
        try:
            copy_guarded()
        finally:
            with staging.lanes.entered():
                guard.close()

    interrupt: BaseException | None = None
    try:
        copy_now()
    except BaseException as error:
        staging.fail(error)
        interrupt = None if isinstance(error, Exception) else error
    thread.stage(copy_later, in_background=True)
    if interrupt is not None:
        raise interrupt


def take_ring(local_shards: LocalShards, layouts: Sequence[FileLayout], host_buffer_bytes: int | None) -> torch.Tensor:
    """Take memory for the images of these files, or as much of it as the caller allows; pinned for what lies on a device."""
    wanted = ring_bytes(layouts)
    if host_buffer_bytes is not None:
        wanted = min(wanted, max(host_buffer_bytes, MIN_RING_BYTES))
    device = device_to_pin_for(local_shards)
    with on_device(device):
        return POOL.take(wanted, pinned=device is not None)[:wanted]


def device_to_pin_for(local_shards: LocalShards) -> torch.device | None:
    """Return a device that something of the state lies on, and that copies faster into pinned memory, if there is one."""
    return next((local.tensor.device for _, local in local_shards.rows if has_lane(local.tensor.device)), None)
