"""How does a save go on while training does? Stage, hand over, and let a thread write and commit.

1. In the caller: agree, as every save does. What cannot wait is copied before the call returns.
2. *Eager*: that is everything. *Lazy*: what only the optimizers change is copied by a thread, while forward and backward run;
   a guard holds each optimizer's next step back until it is done.
3. Another thread writes, sends the receipt and commits, over the session that the caller opened: never by the job's collectives.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch.optim import Optimizer

from ...comm.protocol import Comm
from ...core.report import SaveReport
from ...errors import CheckpointError, UsageError
from ...storage.protocol import Storage
from ..common.host_memory import POOL
from ..common.logs import LOGGER
from ..common.recorder import Recorder
from .agreement import PLANS, AgreedPlan
from .commit import commit
from .staging import MIN_RING_BYTES, Staging, ring_bytes
from .step_guard import Evidence, StepGuard
from .write import FileLayout, LocalShards, fingerprints, lay_out, write_files


class Moment:
    """Something that comes once: it can be waited for, or tell those who ask."""

    def __init__(self) -> None:
        self._event, self._lock = threading.Event(), threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def set(self) -> None:
        """It has come. What was asked to be called is called in this thread."""
        with self._lock:
            self._event.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        return self._event.wait(timeout)

    def then(self, callback: Callable[[], None]) -> None:
        """Call this when it comes, or now, if it has come; the callback must not raise."""
        with self._lock:
            if not self._event.is_set():
                self._callbacks.append(callback)
                return
        callback()


_HANDLES: WeakSet[SaveHandle] = WeakSet()
"""For a forked child, which has to know of all."""


class SaveHandle:
    """A save that is under way.

    Every method may be called from any thread, any number of times. In a ``with`` block, the save is over when the block is left:
    its error is raised there. Where the block itself raises, the save is waited for as well, as it may be the last; then the
    block's error goes on, and that of the save, if it failed too, is for the next save.
    """

    def __init__(self, path: str, save_id: str) -> None:
        self._path, self._save_id = path, save_id
        self._staged = Moment()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._report: SaveReport | None = None
        self._stall_s = 0.0
        self._told = False
        self._callbacks: list[Callable[[SaveHandle], object]] = []
        self._lock = threading.Lock()
        _HANDLES.add(self)

    def staged(self) -> None:
        """Wait until the state may change: all of it is copied, or the save has failed (`result` says how)."""
        if self._staged.is_set():
            return
        began = time.monotonic()
        self._staged.wait()
        self._held_up(time.monotonic() - began)

    def _held_up(self, stall_s: float) -> None:
        """Count the seconds that a caller was held up."""
        with self._lock:
            self._stall_s += stall_s

    def done(self) -> bool:
        """Whether the save has been committed or has failed."""
        return self._done.is_set()

    def failed(self) -> bool:
        """Whether the save has failed; `result` says how."""
        return self._done.is_set() and self._error is not None

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the checkpoint is committed; what the save did, for metrics.

        Parameters
        ----------
        timeout
            Seconds to wait; None is for ever.

        Raises
        ------
        TimeoutError
            The save is still under way.
        CheckpointError
            The save failed, and why; what the path held before is still there.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"the save to {self._path} is not committed after {timeout} s; it goes on")
        self._told = True
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return replace(self._report, stall_s=min(self._stall_s, self._report.duration_s))

    def __enter__(self) -> SaveHandle:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.result()
        self._done.wait()

    def __repr__(self) -> str:
        if not self._done.is_set():
            state = "staged, being written" if self._staged.is_set() else "being staged"
        else:
            state = "committed" if self._error is None else f"failed: {type(self._error).__name__}"
        return f"<{type(self).__name__} {self._path!r}: {state}>"

    def add_done_callback(self, callback: Callable[[SaveHandle], object]) -> None:
        """Call a function with this handle once the save has been committed or has failed, or at once if it has.

        It is called in the thread that saves; what it raises is logged.
        """
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def _forked(self) -> None:
        """In a forked child: no thread carries this save on here, and one that is gone may hold any of the locks."""
        over = self._done.is_set()
        self._lock, self._staged, self._done, self._callbacks = threading.Lock(), Moment(), threading.Event(), []
        self._staged.set()
        self._done.set()
        if not over:
            self._error = UsageError(
                f"this process was forked while the save to {self._path} was under way: that goes on in the process that began "
                "it, so ask there for its result"
            )

    def _finish(self) -> None:
        with self._lock:
            self._done.set()
        for callback in self._callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[SaveHandle], object]) -> None:
        try:
            callback(self)
        except Exception:
            LOGGER.exception("a function to be called after the save to %s failed", self._path)

    def untold(self) -> BaseException | None:
        """The error that nobody has been told of yet; whoever asks is told by this."""
        error = None if self._told else self._error
        self._told = True
        return error


def tell(handle: SaveHandle, *, staged: Callable[[], None], done: Callable[[str, BaseException | None], None]) -> None:
    """Have functions called, in some thread, when the state may change, and when the save is over: with its id and its error."""
    handle._staged.then(staged)
    handle.add_done_callback(lambda _: done(handle._save_id, handle._error))


class SaveThread:
    """Carries one save through, once its state is staged or while it is."""

    def __init__(self, handle: SaveHandle, session: AbstractContextManager[Any], staging: Staging, recorder: Recorder) -> None:
        self._handle, self._session, self._staging, self._recorder = handle, session, staging, recorder
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
            _thread("reshard-ckpt-save", lambda: self._run(write, finally_))
        except RuntimeError as error:
            self._handle._staged.set()
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
                _thread("reshard-ckpt-stage", lambda: self._stage(fill))
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
            self._handle._staged.set()
        return None

    def give_up(self, error: BaseException) -> None:
        """Fail the save, and wait until its thread is through."""
        self._staging.fail(error)
        if not self._stages:  # nor will it ever, and the thread must not wait for that
            self._handle._staged.set()
        self._handle._done.wait()

    def _run(self, write: Callable[[], SaveReport], finally_: Callable[[], None]) -> None:
        handle, recorder = self._handle, self._recorder
        try:
            with self._session:
                try:
                    report = write()
                except BaseException as error:
                    self._staging.fail(error)
                    raise
            # After the vote at the session's end: a rank that has nothing to publish is told there that rank 0 has.
            handle._report = replace(report, duration_s=recorder.now() - recorder.began)
        except BaseException as error:
            handle._error = error if isinstance(error, CheckpointError) else _wrapped(handle, error)
            self._recorder.log.error("the save to %s failed: %s", handle._path, error)
        finally:
            handle._staged.wait()
            try:
                finally_()
            finally:
                handle._finish()


def _thread(name: str, target: Callable[[], object]) -> None:
    threading.Thread(target=target, name=name, daemon=False).start()


def _wrapped(handle: SaveHandle, error: BaseException) -> CheckpointError:
    wrapped = CheckpointError(
        f"the save to {handle._path} failed: {type(error).__name__}: {error}; what the path held before is still there"
    )
    wrapped.__cause__ = error
    return wrapped


class SaveQueue:
    """The saves of this process, one after the other: each needs the staging memory, and its error must be heard."""

    def __init__(self) -> None:
        self._last: SaveHandle | None = None

    def wait_turn(self, *, when_busy: str) -> None:
        """Wait for the save before this one, and raise its error if nobody has heard it.

        Called inside the new save's session, so that what one rank raises here, all ranks raise.

        Raises
        ------
        UsageError
            A save is under way and ``when_busy`` is ``"error"``.
        CheckpointError
            The save before failed in the background.
        """
        last = self._last
        if last is None:
            return
        if when_busy == "error" and not last.done():
            raise UsageError(f"the save to {last._path} is still under way; wait for its result(), or pass when_busy='wait'")
        last._done.wait()
        self._last = None
        error = last.untold()
        if error is not None:
            raise CheckpointError(f"the save before this one failed in the background: {error}") from error

    def wait_staged(self) -> None:
        """Wait until the state of the save before may change."""
        if self._last is not None:
            self._last.staged()

    def join(self, handle: SaveHandle) -> None:
        """This save is the last one now."""
        self._last = handle

    def forget(self) -> None:
        """There was none before."""
        self._last = None


SAVES = SaveQueue()


def _after_fork() -> None:
    """In a forked child (a data loader's worker): the saves under way are the parent's, and their threads are not here."""
    for handle in _HANDLES:
        handle._forked()
    SAVES.forget()
    POOL.forked()
    PLANS.forked()


os.register_at_fork(after_in_child=_after_fork)


def launch(
    handle: SaveHandle,
    session: ExitStack,
    comm: Comm,
    storage: Storage,
    local_shards: LocalShards,
    agreed: AgreedPlan,
    metadata: bytes,
    *,
    host_buffer_bytes: int | None,
    guarded: Sequence[Optimizer],
    owned: Sequence[torch.Tensor],
    recorder: Recorder,
    timeline: bool,
    sha256: bool = False,
    promised: bool = False,
) -> None:
    """Stage the agreed part of the state and let threads do the rest.

    Parameters
    ----------
    session
        Entered by the caller, who leaves it if this raises; once the saving thread runs, that has taken it over.
    host_buffer_bytes
        Upper bound of the memory for staging; below the size of what this rank writes, staging waits for the disk.
    guarded
        Optimizers whose steps can be held back; empty for eager staging.
    owned
        The local tensors that only these optimizers change.
    recorder, timeline, sha256
        As for `save.commit`.
    promised
        The caller changes nothing before all is staged, so that nothing need be copied before this returns.
    """
    layouts = lay_out(local_shards, agreed.assignment, comm.rank)
    ring = take_ring(local_shards, layouts, host_buffer_bytes)
    addresses = {tensor.untyped_storage().data_ptr() for tensor in owned}
    # On a device, what staging does comes after all that was queued before: so this comes first.
    evidence = Evidence(owned) if guarded else None
    staging = Staging(local_shards, agreed.assignment, layouts, ring)
    checks = agreed.assignment.checks
    marks = np.zeros(len(checks.local), np.uint64)

    def copy(mine: Callable[[int], bool]) -> None:
        began = recorder.now()
        recorder.add("stage", began, staging.fill(mine))
        with recorder.step("compare"), staging.copying():
            fingerprints(local_shards, checks, mine, marks)

    def is_owned(row: int) -> bool:
        return local_shards.rows[row][1].tensor.untyped_storage().data_ptr() in addresses

    def write() -> SaveReport:
        receipt = write_files(storage, agreed.assignment, layouts, staging.drain, marks, recorder, sha256=sha256)
        # A rank with no file to write drains nothing, and its fingerprints may not be there yet.
        ready = staging.wait_finished
        total = commit(comm, storage, agreed, receipt, metadata, recorder, timeline=timeline, sha256=sha256, ready=ready)
        return SaveReport(handle._path, agreed.assignment.save_id, receipt.num_bytes, total, 0.0, 0.0)

    thread = SaveThread(handle, session.pop_all(), staging, recorder)
    # Where the ring streams, all is copied before this returns.
    guard = StepGuard(guarded, evidence, handle.staged) if evidence and staging.holds_all else None
    try:
        thread.start(write, finally_=lambda: POOL.give_back(ring))
    except BaseException:
        if guard is not None:
            guard.release()
        raise
    try:
        if guard is None:
            thread.stage(lambda: copy(lambda _: True), in_background=promised)
        else:
            _stage_lazily(thread, staging, guard, copy, is_owned)
    except BaseException as error:  # Ctrl-C, which may come at any moment
        thread.give_up(error)
        raise
    handle._held_up(recorder.now() - recorder.began)


def _stage_lazily(
    thread: SaveThread,
    staging: Staging,
    guard: StepGuard,
    copy: Callable[[Callable[[int], bool]], None],
    is_owned: Callable[[int], bool],
) -> None:
    """Copy now what forward changes as well (buffers, an average of the weights), and in a thread what optimizers own."""

    def copy_owned() -> None:
        try:
            copy(is_owned)
        finally:
            guard.close()

    interrupt: BaseException | None = None
    try:
        copy(lambda row: not is_owned(row))
    except BaseException as error:
        staging.fail(error)
        interrupt = None if isinstance(error, Exception) else error
    thread.stage(copy_owned, in_background=True)
    if interrupt is not None:
        raise interrupt


def take_ring(local_shards: LocalShards, layouts: Sequence[FileLayout], host_buffer_bytes: int | None) -> torch.Tensor:
    """Memory for the images of these files, or as much of it as the caller allows."""
    wanted = ring_bytes(layouts)
    if host_buffer_bytes is not None:
        wanted = min(wanted, max(host_buffer_bytes, MIN_RING_BYTES))
    pinned = any(held.tensor.device.type == "cuda" for _, held in local_shards.rows)
    return POOL.take(wanted, pinned=pinned)
