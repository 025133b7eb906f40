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
from typing import Any, Protocol

import torch

from ...core.report import SaveReport
from ...errors import CheckpointError, UsageError
from ..common.host_memory import POOL
from .commit import commit
from .handle import RunningSave, SaveHandle
from .options import SaveJob
from .staged_copy import StagedCopy, take_ring
from .step_guard import ChangeDetector, GuardedState, StepGuard
from .write import FileLayout, lay_out, write_files


class SaveTarget(Protocol):
    """Where the images of an asynchronous save go."""

    def take_ring(self, job: SaveJob, layouts: Sequence[FileLayout]) -> torch.Tensor:
        """Return the memory to stage in: 1-D uint8, on the host."""

    def finish(self, job: SaveJob, copy: StagedCopy) -> SaveReport:
        """Take the images from the ring, front to back, and commit; called in the saving thread."""

    def give_back(self, ring: torch.Tensor) -> None:
        """Take the ring back; called once nobody reads it any more, also after an error."""


class StoreTarget:
    """Writes the images to the store of the save."""

    def take_ring(self, job: SaveJob, layouts: Sequence[FileLayout]) -> torch.Tensor:
        return take_ring(job.local_shards, layouts, job.options.host_buffer_bytes)

    def finish(self, job: SaveJob, copy: StagedCopy) -> SaveReport:
        staging, fingerprints, sha256 = copy.staging, copy.fingerprints.taken, job.options.sha256
        receipt = write_files(job.storage, copy.layouts, staging.drain, fingerprints, job.recorder, sha256=sha256)
        # A rank with no file to write drains nothing, and its fingerprints may not be there yet.
        total = commit(job, receipt, ready=staging.wait_finished)
        return job.report(receipt.num_bytes, total)

    def give_back(self, ring: torch.Tensor) -> None:
        POOL.give_back(ring)


class SaveThread:
    """Carries one save through, once its state is staged or while it is."""

    def __init__(
        self, save: RunningSave, session: AbstractContextManager[Any], job: SaveJob, copy: StagedCopy, target: SaveTarget
    ) -> None:
        self._save, self._session, self._job, self._copy, self._target = save, session, job, copy, target
        self._staging = copy.staging
        self._stages = False

    def start(self) -> None:
        """Write and commit in the session, and then give the ring back; where no thread can be started, leave the session.

        Raises
        ------
        UsageError
            The system, or an interpreter that is about to end, gives no thread.
        """
        try:
            # No daemon: when the job ends, the interpreter waits for the last save.
            self._save.threads.append(_thread("reshard-ckpt-save", self._run))
        except RuntimeError as error:
            self._save.finish_staging()
            self._close()
            with self._session:
                raise UsageError(
                    f"no thread to save in can be started ({error}): call checkpoint.save, which needs none"
                ) from error

    def stage(self, fill: Callable[[], object], *, in_background: bool) -> None:
        """Run `fill`, after which the state may change; an error of it fails the save. An interrupt is also the caller's."""
        self._stages = True
        if in_background:
            with suppress(RuntimeError):  # no thread can be started, so it is done here
                self._save.threads.append(_thread("reshard-ckpt-stage", lambda: self._stage(fill)))
                return
        error = self._stage(fill)
        if error is not None and not isinstance(error, Exception):
            raise error

    def _stage(self, fill: Callable[[], object]) -> BaseException | None:
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

    def _run(self) -> None:
        recorder = self._job.recorder
        outcome: SaveReport | BaseException
        try:
            with self._session:
                try:
                    report = self._target.finish(self._job, self._copy)
                except BaseException as error:
                    self._staging.fail(error)
                    raise
            # After the vote at the session's end: a rank that has nothing to publish is told there that rank 0 has.
            outcome = replace(report, duration_s=recorder.now() - recorder.began)
        except BaseException as error:
            outcome = error if isinstance(error, CheckpointError) else _wrapped(self._save, error)
            recorder.log.error("the save to %s failed: %s", self._save.path, _reason(error))
        self._save.staged.result()
        try:
            self._close()
        finally:
            self._save.finish(outcome)

    def _close(self) -> None:
        self._copy.close()
        self._target.give_back(self._copy.ring)


def _thread(name: str, target: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=False)
    thread.start()
    return thread


def _wrapped(save: RunningSave, error: BaseException) -> CheckpointError:
    wrapped = CheckpointError(f"the save to {save.path} failed: {_reason(error)}; what the path held before is still there")
    wrapped.__cause__ = error
    return wrapped


def _reason(error: BaseException) -> str:
    """Say what failed; the class alone of an error without a text, such as an interrupt."""
    text = str(error)
    if isinstance(error, CheckpointError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


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
    recorder = job.recorder
    layouts = lay_out(job.local_shards, job.agreed.assignment, job.comm.rank)
    target = target or StoreTarget()
    ring = target.take_ring(job, layouts)
    # On a device, what staging does comes after all that was queued before: so this comes first.
    detector = ChangeDetector(guarded.tensors) if guarded.optimizers else None
    copy = StagedCopy(job, layouts, ring)
    save = RunningSave(job.path, job.save_id)
    thread = SaveThread(save, session.pop_all(), job, copy, target)
    # Where the ring streams, all is copied before this returns.
    guard = None
    if detector is not None and copy.staging.holds_all:
        guard = StepGuard(guarded.optimizers, detector, lambda: save.wait_for(save.queued))
    try:
        thread.start()
    except BaseException:
        if guard is not None:
            guard.release()
        raise
    try:
        if guard is None:
            thread.stage(copy.fill, in_background=job.options.caller_holds)
        else:
            _stage_lazily(thread, save, copy, guard, guarded.tensors)
    except BaseException as error:  # Ctrl-C, which may come at any moment
        thread.give_up(error)
        raise
    save.add_stall(recorder.now() - recorder.began)
    return SaveHandle(save)


def _stage_lazily(
    thread: SaveThread, save: RunningSave, copy: StagedCopy, guard: StepGuard, guarded: Sequence[torch.Tensor]
) -> None:
    """Copy now what forward changes as well (buffers, an average of the weights), and in a thread what optimizers own."""
    copy_streams = copy.staging.copy_streams
    addresses = {tensor.untyped_storage().data_ptr() for tensor in guarded}

    def is_guarded(tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in addresses

    def let_steps_through() -> None:
        queued = copy_streams.record()
        guard.let_through(lambda: copy_streams.follow(queued))
        save.let_steps_through()

    def copy_guarded() -> None:
        has_changed = False
        try:
            has_changed = copy.fill(is_guarded, queued=let_steps_through, looks_again=True)
        finally:
            with copy_streams.entered():
                guard.close(has_changed=has_changed)

    interrupt: BaseException | None = None
    try:
        copy.fill(lambda tensor: not is_guarded(tensor), last=False)
    except BaseException as error:
        copy.staging.fail(error)
        interrupt = None if isinstance(error, Exception) else error
    thread.stage(copy_guarded, in_background=True)
    if interrupt is not None:
        raise interrupt
