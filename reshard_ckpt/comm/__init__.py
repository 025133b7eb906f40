"""Sessions, in which the ranks of one save or load exchange messages, and an error of one rank is raised on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import PeerError
from .bounded import BoundedStore
from .calls import call_of
from .exchange import Exchange, open_exchange
from .group import Group, Missed, SessionCounter, current_group, launched_group
from .node import NodeComm
from .peers import Ended
from .protocol import ALONE, Comm, SoloComm, merge_of_all, union, value_of_first
from .stopping import AgreedStop, SoloStop, Stop
from .store import StoreComm, give_up_sessions
from .turns import CHANGED, FAILED, Meeting, Turn

AnyComm = TypeVar("AnyComm", bound=NodeComm)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "ALONE",
    "CHANGED",
    "FAILED",
    "Comm",
    "Exchange",
    "SoloComm",
    "Stop",
    "StoreComm",
    "Turn",
    "give_up_sessions",
    "launched_group",
    "merge_of_all",
    "open_exchange",
    "open_session",
    "open_session_by_name",
    "open_stop",
    "open_turn",
    "shared_store",
    "union",
    "value_of_first",
    "values_of_all",
]


def open_session(
    kind: str, subject: str, *, process_group: ProcessGroup | None = None, timeout_s: float = 600
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

    return _opened(group, group.sessions, "", kind, subject, timeout_s)


def open_session_by_name(
    kind: str, subject: str, *, process_group: ProcessGroup | None = None, timeout_s: float = 600
) -> Callable[[str], AbstractContextManager[Comm]]:
    """Return a function that opens a session by its name, which no other session may have; so the order of calls does not matter.

    For steps that only some saves take. The process group is looked up now; the function may be called later, in any thread.
    """
    group = current_group(process_group, timeout_s)
    if group is None:
        return lambda name: nullcontext(SoloComm())
    return lambda name: _opened(group, SessionCounter(), f"{name} ", kind, subject, timeout_s)


def values_of_all(
    kind: str, subject: str, own: Any, *, process_group: ProcessGroup | None = None, timeout_s: float = 600
) -> list[Any]:
    """Return the small values of all ranks, by rank, in a session of its own. They travel as msgpack: tuples become lists."""
    with open_session(kind, subject, process_group=process_group, timeout_s=timeout_s) as comm:
        values: list[Any] = merge_of_all(comm, own)
    return values


def open_turn(kind: str, subject: str, *, process_group: ProcessGroup | None = None, timeout_s: float = 600) -> Turn:
    """Return a `Turn`: it takes a number among the sessions, as `open_session` does, but its session need not be opened."""
    group = current_group(process_group, timeout_s)
    if group is None:
        return Turn(nullcontext(SoloComm()))
    sessions, turn = group.sessions, group.sessions.take()
    comm_of = _comm_of(group, "", kind, subject, timeout_s, Meeting)
    session = _session(comm_of, sessions, turn, kind, subject)
    return Turn(session, lambda: comm_of(sessions.number(turn)), call_of(kind, subject))


def _opened(
    group: Group, sessions: SessionCounter, prefix: str, kind: str, subject: str, timeout_s: float
) -> AbstractContextManager[Comm]:
    return _session(_comm_of(group, prefix, kind, subject, timeout_s, NodeComm), sessions, sessions.take(), kind, subject)


def _comm_of(
    group: Group, prefix: str, kind: str, subject: str, timeout_s: float, made: type[AnyComm]
) -> Callable[[int], AnyComm]:
    title = f"{kind} {subject!r}"

    def comm_of(number: int) -> AnyComm:
        name = f"{prefix}{number}"
        store, near = group.home.session(name, title=title, timeout_s=timeout_s)
        return made(store, group.rank, group.size, title=title, timeout_s=timeout_s, near=near, name=name, hosts=True)

    return comm_of


def shared_store(
    name: str, process_group: ProcessGroup | None = None, timeout_s: float = 600
) -> tuple[BoundedStore, Ended] | None:
    """Return the part of the job's store below a name that was never used before, and a function that returns the ended ranks.

    The ranks must have met in a session before. Return None if this process is on its own.
    """
    group = current_group(process_group, timeout_s)
    if group is None:
        return None
    _, near = group.home.session(name, title=f"open {name}", timeout_s=timeout_s)
    return group.named(name, timeout_s), near.ended


def open_stop(
    name: str, wanted: Callable[[], bool], *, process_group: ProcessGroup | None = None, timeout_s: float = 600
) -> AbstractContextManager[Stop]:
    """Open a `Stop` for a ``with`` block: once one rank of a process group is told to stop, all ranks stop at the same step.

    Parameters
    ----------
    name
        The same on all ranks; no other stop may have it.
    wanted
        Returns whether this rank has been told to stop; called again and again in another thread.
    process_group, timeout_s
        As for `open_session`.
    """
    group = current_group(process_group, timeout_s)
    if group is None:
        return nullcontext(SoloStop(wanted))
    return AgreedStop(group.named(name, timeout_s), group.rank, group.size, wanted, timeout_s=timeout_s)


@contextmanager
def _session(comm_of: Callable[[int], StoreComm], sessions: SessionCounter, turn: int, kind: str, subject: str) -> Iterator[Comm]:
    call = call_of(kind, subject)
    comm = _come(comm_of, sessions, turn, call)
    before, sessions.unopened = sessions.unopened, call
    try:
        while not comm.open(kind, subject, before=before):
            comm.leave()
            sessions.skip()
            comm, before = (
                comm_of(sessions.number(turn)),
                b"",
            )  # once: two ranks that call things crosswise must not go on for ever
        sessions.unopened = sessions.late = b""
        yield comm
        comm.gather(b"")  # the vote: everyone has come through
    except BaseException as error:
        comm.abort(error)
        if comm.late:
            _resynchronize(comm_of, sessions, turn, call)
        raise
    finally:
        comm.leave()
        comm.undo()


def _come(comm_of: Callable[[int], StoreComm], sessions: SessionCounter, turn: int, call: bytes) -> StoreComm:
    """Return the `Comm` of a session. If rank 0 has not come, note the session as missed, and tell rank 0 as soon as it comes."""
    number = sessions.number(turn)
    try:
        comm = comm_of(number)
    except PeerError as reason:
        sessions.missed.append(Missed(number, call, reason))
        raise
    while sessions.missed:
        missed = sessions.missed.popleft()
        comm_of(missed.number).miss(missed.call, missed.reason)
    return comm


def _resynchronize(comm_of: Callable[[int], StoreComm], sessions: SessionCounter, turn: int, call: bytes) -> None:
    """Get back in step with the others after this rank came too late for a call that is repeated, such as a save to one path.

    Either this rank was slow, and its next call meets the next one of the others. Or it left a call out; then the others will
    wait for it again. The first lateness counts as slow. After the second one in a row, this rank gives up the next session for
    all ranks, and is in step.
    """
    again, sessions.late = sessions.late == call, call
    if not again:
        return
    sessions.late = b""
    with suppress(PeerError):  # the store is gone, and the error at hand says more
        declined = False
        while not declined:
            declined = comm_of(sessions.number(turn + 1)).decline(call)
            sessions.skip()
