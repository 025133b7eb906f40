"""Sessions: the ranks of one save or load exchange messages, and an error of one rank is raised on all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from ..errors import CheckpointError, PeerError, UsageError
from .bounded import BoundedStore, bounded, named_failure
from .calls import call_of
from .group import Group, Missed, SessionCounter, group_of_ranks
from .node import NodeComm
from .peers import Ended
from .protocol import ALONE, Comm, SoloComm, merge_of_all
from .store import StoreComm
from .turns import Meeting, Turn

AnyComm = TypeVar("AnyComm", bound=StoreComm)
AnyNodeComm = TypeVar("AnyNodeComm", bound=NodeComm)

MAX_TIMEOUT_S = 100_000_000
"""Seconds, three years: the largest `timeout_s`. Clocks and locks overflow at some hundred years."""


def open_session(
    kind: str, subject: str, *, process_group: dist.ProcessGroup | None = None, timeout_s: float = 600
) -> AbstractContextManager[Comm]:
    """Open a session of all ranks of a process group, to be used in a ``with`` block by one thread.

    The n-th call of one rank meets the n-th call of the others, whenever and in whichever thread the block is entered. So open
    the session in the thread that calls save or load, and do everything that may fail inside the block: if a rank raises before
    this call, the others wait for their deadline.

    If an exception leaves the block on one rank, every rank raises it, at the latest when it leaves its own block: the same class
    if it is a `CheckpointError`, else a `PeerError`. The message begins with the number of the rank within the group.

    Parameters
    ----------
    kind, subject
        The operation and its object ("save", "/ckpt/step_100"). If ranks pass different ones, a `PeerError` names them.
    process_group
        The ranks that take part; by default all. `ALONE` stands for this process on its own.
    timeout_s
        Seconds to wait for the other ranks in each step.

    Raises
    ------
    UsageError
        ``WORLD_SIZE`` is above 1 without a process group, or this rank is not in the group.
    PeerError
        Another rank did not arrive in time, called something else, or failed.
    """
    group = current_group(process_group, timeout_s)
    if group is None:
        return nullcontext(SoloComm())

    return _place(group, kind, subject, timeout_s, NodeComm).session()


@dataclass
class ArgumentCheck(AbstractContextManager["ArgumentCheck", None]):
    """Raises an error of its ``with`` block on the other ranks too: it refuses the session that they open next for this call.

    A call checks its arguments in such a block, before its session. Otherwise the others would wait for this rank, also in their
    next calls. If they cannot be reached with `process_group` and `timeout_s`, nothing is done. The refused session counts as a
    call of this rank. Rank 0 waits up to a minute until the others have come to it, because they need the store that its process
    hosts.

    Parameters
    ----------
    kind, subject, process_group, timeout_s
        As for `open_session`; `subject` may be any object.
    """

    kind: str
    subject: object
    process_group: dist.ProcessGroup | None = None
    timeout_s: float = 600

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, CheckpointError):
            return
        with suppress(CheckpointError):
            group = current_group(self.process_group, self.timeout_s)
            if group is not None:
                _place(group, self.kind, str(self.subject), self.timeout_s, NodeComm).refuse(error)


def open_session_by_name(
    kind: str, subject: str, *, process_group: dist.ProcessGroup | None = None, timeout_s: float = 600
) -> Callable[[str], AbstractContextManager[Comm]]:
    """Return a function that opens a session with a given name.

    Ranks meet in a session by its name, so they may open such sessions in any order, and a save that does not take a step opens
    no session for it. No two sessions may have the same name. The process group is looked up now; the returned function may be
    called later, in any thread.
    """
    group = current_group(process_group, timeout_s)
    if group is None:
        return lambda name: nullcontext(SoloComm())

    def opened(name: str) -> AbstractContextManager[Comm]:
        return _place(replace(group, sessions=SessionCounter(f"{name} ")), kind, subject, timeout_s, NodeComm).session()

    return opened


def values_of_all(
    kind: str, subject: str, own: Any, *, process_group: dist.ProcessGroup | None = None, timeout_s: float = 600
) -> list[Any]:
    """Return the small values that all ranks pass, by rank; opens and closes a session.

    Values go through msgpack: tuples become lists.
    """
    with open_session(kind, subject, process_group=process_group, timeout_s=timeout_s) as comm:
        values: list[Any] = merge_of_all(comm, own)
    return values


def open_turn(kind: str, subject: str, *, process_group: dist.ProcessGroup | None = None, timeout_s: float = 600) -> Turn:
    """Return a `Turn`: it counts as a session of this rank, as `open_session` does, but ranks open its session only if needed."""
    group = current_group(process_group, timeout_s)
    return Turn(None if group is None else _place(group, kind, subject, timeout_s, Meeting))


def current_group(process_group: Any, timeout_s: float = 600) -> Group | None:
    """Return the `Group` of a process group; None if this process is on its own.

    Raise `UsageError` if `timeout_s` is not a positive number of seconds, or this process is not in the group. Raise `PeerError`
    if the job's store did not answer in time; or, if the job has none, another rank.
    """
    _refuse_no_time(timeout_s)
    if process_group is ALONE:
        return None
    if not dist.is_available() or not dist.is_initialized():
        _refuse_forgotten_init(process_group)
        return None
    group = dist.group.WORLD if process_group is None else process_group
    assert group is not None
    try:
        rank = dist.get_rank(group)
    except (ValueError, TypeError):  # of torch, which looks the group up in a dict
        raise UsageError(
            f"process_group: this {type(group).__name__} is not a process group of this job, or was destroyed; pass what "
            "new_group() or the get_group() of a DeviceMesh returns"
        ) from None
    if rank < 0:
        raise UsageError(f"rank {dist.get_rank()} is not a member of the process group passed; call this on its members only")
    if dist.get_world_size(group) == 1:
        return None
    return group_of_ranks(group, timeout_s)


def _refuse_no_time(timeout_s: Any) -> None:
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise UsageError(f"timeout_s={timeout_s!r}: pass seconds, more than 0 and at most {MAX_TIMEOUT_S:,}")


@contextmanager
def launched_group(timeout_s: float = 600) -> Iterator[None]:
    """In the ``with`` block, have a process group of all processes that ``torchrun`` started.

    Do nothing for one process, or if there is a group. Raise `UsageError` if `timeout_s` is not a positive number of seconds, and
    `PeerError` if not all processes came in time.
    """
    _refuse_no_time(timeout_s)
    size = os.environ.get("WORLD_SIZE", "")
    if not dist.is_available() or dist.is_initialized() or not size.isdecimal() or int(size) <= 1:
        yield
        return
    join = partial(dist.init_process_group, "gloo", timeout=timedelta(seconds=timeout_s))
    what = f"the {size} processes of WORLD_SIZE did not meet"
    with named_failure(what):
        bounded(join, timeout_s, what)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _refuse_forgotten_init(process_group: object) -> None:
    world_size = os.environ.get("WORLD_SIZE", "")
    if process_group is not None:
        raise UsageError("a process_group was passed, but torch.distributed is not initialized: call init_process_group first")
    if world_size.isdecimal() and int(world_size) > 1:
        raise UsageError(
            f"WORLD_SIZE is {world_size}, but torch.distributed is not initialized, so {world_size} processes would write to one "
            "path: call torch.distributed.init_process_group first, or unset WORLD_SIZE if this process is on its own"
        )


def _place(group: Group, kind: str, subject: str, timeout_s: float, made: type[AnyNodeComm]) -> Place[AnyNodeComm]:
    title = f"{kind} {subject!r}"

    def comm_of(number: int) -> AnyNodeComm:
        name = f"{group.sessions.prefix}{number}"
        store, near = group.home.session(name, title=title, timeout_s=timeout_s)
        return made(store, group.rank, group.size, title=title, timeout_s=timeout_s, near=near, name=name)

    return Place(comm_of, group.sessions, call_of(kind, subject))


def shared_store(
    name: str, process_group: dist.ProcessGroup | None = None, timeout_s: float = 600
) -> tuple[BoundedStore, Ended] | None:
    """Return the part of the job's store below `name`, which must be new, and a function that tells which ranks have ended.

    A rank has ended if its process has. The ranks must have met in a session before. Return None if this process is on its own.
    """
    group = current_group(process_group, timeout_s)
    if group is None:
        return None
    _, near = group.home.session(name, title=f"open {name}", timeout_s=timeout_s)
    return group.named(name, timeout_s), near.ended


class Place(Generic[AnyComm]):
    """The place of one call of this rank in the order of all its sessions. A new place takes the next number.

    `comm_of` makes the `Comm` of the session with a given number, and `sessions` numbers the calls of this rank.
    """

    def __init__(self, comm_of: Callable[[int], AnyComm], sessions: SessionCounter, call: bytes) -> None:
        self._comm_of, self._sessions, self.call = comm_of, sessions, call
        self._turn = sessions.take()

    def comm(self, after: int = 0) -> AnyComm:
        """Make the `Comm` of the session that this call belongs to now, or that the call `after` places later belongs to."""
        return self._comm_of(self._sessions.number(self._turn + after))

    @contextmanager
    def session(self) -> Iterator[Comm]:
        """Open the session for the ``with`` block, once; see `open_session`."""
        comm = self._arrive()
        before, self._sessions.unopened = self._sessions.unopened, self.call
        refused, self._sessions.refused = self._sessions.refused, b""
        try:
            while not comm.open(self.call, before=before, refused=refused):
                comm.leave()
                self._sessions.skip()
                comm = self.comm()
                before = refused = b""  # once: two ranks that make their calls in opposite orders must not go on for ever
            self._sessions.unopened = self._sessions.late = b""
            yield comm
            comm.gather(b"")  # the vote: everyone has come through
        except BaseException as error:
            comm.abort(error)
            if comm.is_refused:
                self._sessions.refused = self.call
            if comm.came_late:
                self._resynchronize()
            raise
        finally:
            comm.leave()
            comm.undo()

    def refuse(self, error: BaseException) -> None:
        """Refuse the session, without opening it, because of an error of this rank, which all other ranks raise there."""
        comm = self._arrive()
        try:
            comm.abort(error)
        finally:
            comm.leave()

    def _arrive(self) -> AnyComm:
        """Make the `Comm` of the session.

        If rank 0 cannot be reached in time, or an interrupt comes first, remember that; a later call tells rank 0 of the failure.
        """
        missed, number = self._sessions.missed, self._sessions.number(self._turn)
        try:
            comm = self._comm_of(number)
        except BaseException as error:
            # Not an interrupt itself: its traceback would keep all frames alive.
            reason = error if isinstance(error, PeerError) else PeerError(type(error).__name__)
            missed.append(Missed(number, self.call, reason))
            raise
        while missed:
            session = missed.popleft()
            self._comm_of(session.number).give_up_unmet(session.call, session.reason)
        return comm

    def _resynchronize(self) -> None:
        """Correct this rank's session number after it came too late for a call that is repeated, such as a save to one path.

        Either this rank was slow, and its next call meets the next call of the others. Or it left a call out; then the others
        will wait for it again. After a first lateness, assume that the rank was slow. After a second one in a row, this rank
        refuses the next session for all ranks, and skips it.
        """
        again, self._sessions.late = self._sessions.late == self.call, self.call
        if not again:
            return
        self._sessions.late = b""
        with suppress(PeerError):  # the store is gone, and the error at hand says more
            declined = False
            while not declined:
                declined = self.comm(after=1).decline(self.call)
                self._sessions.skip()
