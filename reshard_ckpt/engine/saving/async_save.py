"""Saving while training goes on: copy the state into host memory (stage it), then write and commit it in a thread.

1. The caller's thread agrees with all ranks, as in every save, and then copies the tensors that cannot wait.
2. With *eager* staging these are all tensors. With *lazy* staging, tensors that only the optimizers change are copied by a
   thread, while forward and backward run. A guard holds back the next step of each optimizer until the copies are made, or are
   queued on the device ahead of the step. With ``hold="caller"`` nothing changes the state meanwhile, so a thread copies all.
3. Another thread writes, sends the receipt and commits. It speaks to other ranks over the session that the caller opened, never
   by collectives of the job's process groups.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any

import torch

from ...core.report import SaveReport
from ...errors import CheckpointError, UsageError
from ..common.host_memory import POOL
from .commit import write_and_commit
from .handle import SAVES, RunningSave, SaveHandle
from .options import SaveJob, Written
from .staged_copy import StagedCopy, take_ring, without_unchanged
from .step_guard import ChangeDetector, GuardedState, StepGuard
from .write import FileLayout, lay_out


class SaveTarget:
    """Where an asynchronous save puts the images of its files: the store. A subclass puts them into the memory of nodes."""

    def take_ring(self, job: SaveJob, layouts: Sequence[FileLayout]) -> torch.Tensor:
        """Return the ring: host memory that the images are staged in, 1-D uint8."""
        return take_ring(job.local_shards, layouts, job.options.host_buffer_bytes)

    def finish(self, job: SaveJob, copy: StagedCopy) -> Written:
        """Take the file images from the ring, front to back, and commit; return the save's figures.

        Called in the saving thread.
        """
        is_whole = job.base is not None and job.unchanged is None
        return write_and_commit(job, copy.changed(job) if is_whole else nullcontext(copy.chunks))

    def give_back(self, ring: torch.Tensor) -> None:
        """Take the ring back from a save. Called once nothing reads or writes it any more, also after an error."""
        POOL.give_back(ring)


class SaveThread:
    """The thread that writes and commits one asynchronous save, during or after its staging.

    Ctrl-C may come while a thread is being started, so that nobody knows whether it runs. So a lock decides whether the thread
    does its work, or `give_up` in its place: the first of the two that takes the lock (`_writes` or `_copies`), which is never
    released.
    """

    def __init__(self, save: RunningSave, job: SaveJob, copy: StagedCopy, target: SaveTarget) -> None:
        self._save, self._job, self._copy, self._target = save, job, copy, target
        self.session: AbstractContextManager[Any] = nullcontext()
        """The session with the other ranks, which is left once the save is over."""
        self._staging = copy.staging
        self._may_begin, self._writes, self._copies = threading.Event(), threading.Lock(), threading.Lock()

    def start(self) -> None:
        """Start the thread. After `let_begin` it writes and commits the save, leaves the session, and gives back the ring.

        Raise `UsageError` if no thread can be started, or the interpreter is about to end.
        """
        try:
            # Not a daemon thread: when the job ends, the interpreter waits for the last save.
            self._save.threads.append(_thread("reshard-ckpt-save", self._run))
        except RuntimeError as error:
            raise UsageError(f"no thread to save in can be started ({error}): call checkpoint.save, which needs none") from error

    def let_begin(self) -> None:
        """Let the save's threads begin. It is called last in the public call, which they would have slowed down."""
        self._may_begin.set()

    def stage(self, fill: Callable[[], object], *, in_background: bool) -> None:
        """Call `fill`, which stages tensors, here or in a thread that waits for `let_begin`; after it, the state may change.

        An error of `fill` fails the save. An interrupt (Ctrl-C) in `fill`, if it runs here, is also raised.
        """
        if in_background:
            with suppress(RuntimeError):  # if no thread can be started, `fill` runs here
                self._save.threads.append(_thread("reshard-ckpt-stage", lambda: self._may_begin.wait() and self._stage(fill)))
                return
        try:
            error = self._stage(fill)
        except BaseException:  # Ctrl-C between two lines of `_stage`
            self._save.finish_staging()
            raise
        if error is not None and not isinstance(error, Exception):
            raise error

    def _stage(self, fill: Callable[[], object]) -> BaseException | None:
        if not self._copies.acquire(blocking=False):
            return None  # given up
        try:
            return self._copy.fill_all(fill)
        finally:
            self._save.finish_staging()

    def give_up(self, error: BaseException) -> None:
        """Fail the save with this error, which the caller raises, and wait until it is over."""
        self._staging.fail(error)
        self.let_begin()
        if self._copies.acquire(blocking=False):  # nothing is being copied
            self._save.finish_staging()
        self._run()
        self._save.wait()
        for thread in self._save.threads:
            thread.join()
        self._save.take_error()

    def _run(self) -> None:
        self._may_begin.wait()
        if not self._writes.acquire(blocking=False):
            return
        recorder = self._job.recorder
        outcome: SaveReport | BaseException
        try:
            with self.session:
                try:
                    self._staging.refuse_failed()
                    written = self._target.finish(self._job, self._copy)
                except BaseException as error:
                    self._staging.fail(error)
                    raise
            # Only after the session has ended: there every rank learns whether rank 0 has published.
            outcome = self._job.report(written)
        except BaseException as error:
            outcome, path, reason = error, self._save.path, str(error)
            if not isinstance(error, CheckpointError):
                reason = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
                outcome = CheckpointError(f"the save to {path} failed: {reason}; what the path held before is still there")
                outcome.__cause__ = error
            recorder.log.error("the save to %s failed: %s", path, reason)
        # The filling thread may still copy into the ring: wait for it before the ring goes back.
        self._save.staged.result()
        try:
            self._copy.close()
            self._target.give_back(self._copy.ring)
        finally:
            self._save.finish(outcome)


def _thread(name: str, target: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=False)
    thread.start()
    return thread


def launch(job: SaveJob, session: ExitStack, guarded: GuardedState, target: SaveTarget | None = None) -> SaveHandle:
    """Stage the part of the state that this rank writes, start the threads that write and commit it, and return the handle.

    Parameters
    ----------
    session
        The session with the other ranks, entered by the caller. The saving thread takes it over and leaves it; if this raises
        before that, the caller leaves it.
    guarded
        The optimizers whose steps can be held back, and the tensors that only they change; empty for eager staging.
    target
        Where the bytes of the files go; the store by default.
    """
    recorder = job.recorder
    if job.base is not None and job.options.host_buffer_bytes is not None:
        # A ring that streams is drained once, so the bytes to write must be found beforehand.
        job = without_unchanged(job)
    layouts = lay_out(job.local_shards, job.assignment, job.comm.rank)
    target = target or SaveTarget()
    ring = target.take_ring(job, layouts)
    # On a device, work runs in the order in which it is queued: the detector must queue its samples before the copies.
    detector = ChangeDetector(guarded.tensors) if guarded.optimizers else None
    copy = StagedCopy(job, layouts, ring)
    save = RunningSave(job.path, job.save_id)
    thread, guard = SaveThread(save, job, copy, target), None
    try:
        thread.session = session.pop_all()
        # A guard needs a ring that holds all images. A ring that streams is filled before this returns.
        if detector is not None and copy.staging.holds_all:
            guard = StepGuard(guarded.optimizers, detector, lambda: save.wait_for(save.queued))
        thread.start()
        if copy.staging.copy_streams or not copy.staging.holds_all:
            thread.let_begin()  # a device copies by itself, and a ring that streams must be drained meanwhile
        if guard is None:
            thread.stage(copy.fill, in_background=job.options.caller_holds)
        else:
            _stage_lazily(thread, save, copy, guard, guarded.tensors)
        handle = SaveHandle(save)
        SAVES.begun.append(handle)
        save.add_stall(recorder.now() - recorder.began)
        thread.let_begin()
    except BaseException as error:  # Ctrl-C, which may come at any moment
        thread.give_up(error)
        if guard is not None:
            guard.release()
        raise
    return handle


def _stage_lazily(
    thread: SaveThread, save: RunningSave, copy: StagedCopy, guard: StepGuard, guarded: Sequence[torch.Tensor]
) -> None:
    """Copy the tensors that a forward pass may change (buffers, averaged weights) now, and the `guarded` tensors in a thread.

    `guard` holds back optimizer steps until the second copy is made or queued.
    """
    copy_streams = copy.staging.copy_streams
    addresses = {tensor.untyped_storage().data_ptr() for tensor in guarded}
    # others: the ids of tensors that forward may change
    tensors = copy.staging.tensors
    others = {id(tensor) for tensor in tensors if tensor.untyped_storage().data_ptr() not in addresses}

    def is_guarded(tensor: torch.Tensor) -> bool:
        return id(tensor) not in others

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

    # An interrupt during the first copy must reach the caller, but only after the thread has closed the guard.
    interrupt: BaseException | None = None
    try:
        if others:
            copy.fill(lambda tensor: id(tensor) in others, last=False)
    except BaseException as error:
        copy.staging.fail(error)
        interrupt = None if isinstance(error, Exception) else error
    thread.stage(copy_guarded, in_background=True)
    if interrupt is not None:
        raise interrupt
