"""Sessions, in which the ranks of one save or load exchange messages, and an error of one rank is raised on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack

from ..errors import PeerError
from .bounded import BoundedStore
from .calls import call_of
from .exchange import Exchange, open_exchange
from .group import Group, Missed, SessionCounter, current_group, launched_group
from .protocol import ALONE, Comm, SoloComm
from .stopping import AgreedStop, SoloStop, Stop
from .store import StoreComm, give_up_sessions
from .turns import CHANGED, FAILED, Meeting, Turn

AnyComm = TypeVar("AnyComm", bound=StoreComm)

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
    "open_exchange",
    "open_session",
    "open_session_by_name",
    "open_stop",
    "open_turn",
    "shared_store",
    "values_of_all",
]


def open_session(
    kind: str, subject: str, *, process_group: ProcessGroup | None = None, timeout_s: float = 600
) -> AbstractContextManager[Comm]:
    """Open a session of all ranks of a process group, to be used in a ``with`` block by one thread.

    The order of these calls on each rank decides which session each is, not when or in which thread the block is entered.
    So open it in the thread that calls save or load, and do all that may fail inside of it: a rank that raises before this
    call leaves the others waiting for their deadline.

    An exception that leaves the block on one rank is raised on every rank: of the same class if it is a `CheckpointError`
    (otherwise a `PeerError`) with the message prefixed by the rank, at the latest where the others leave their blocks. Ranks
    are numbers within the group.

    Parameters
    ----------
    kind, subject
        What is being done to what ("save", "/ckpt/step_100"): the same on all ranks, or a `PeerError` names who differs.
    process_group
        The ranks that take part; by default all. `ALONE` for this process on its own.
    timeout_s
        How long to wait for the others in each step.

    Raises
    ------
    UsageError
        ``WORLD_SIZE`` is above 1 but there is no process group, or this rank is not in it.
    PeerError
        Ranks did not arrive in time, called something else, or failed.
    """
    group = current_group(process_group, timeout_s)
    if group is None:
        return nullcontext(SoloComm())

    return _opened(group, group.sessions, "", kind, subject, timeout_s)


def open_session_by_name(
    kind: str, subject: str, *, process_group: ProcessGroup | None = None, timeout_s: float = 600
) -> Callable[[str], AbstractContextManager[Comm]]:
    """Return what opens a session as `open_session` does, by a name that no other has: the order of calls does not matter.

    It is for what some saves need and others do not. The process group is that of now; the rest may be in any thread, whenever.
    """
    group = current_group(process_group, timeout_s)
    if group is None:
        return lambda name: nullcontext(SoloComm())
    return lambda name: _opened(group, SessionCounter(), f"{name} ", kind, subject, timeout_s)


def values_of_all(
    kind: str, subject: str, own: Any, *, process_group: ProcessGroup | None = None, timeout_s: float = 600
) -> list[Any]:
    """Return the small values of all ranks, by rank, as msgpack has them: tuples become lists. A session of its own."""
    with open_session(kind, subject, process_group=process_group, timeout_s=timeout_s) as comm:
        gathered = comm.gather(msgpack.packb(own))
        data = comm.broadcast(None if gathered is None else msgpack.packb(gathered))
    return [msgpack.unpackb(one, strict_map_key=False) for one in msgpack.unpackb(data)]


def open_turn(kind: str, subject: str, *, process_group: ProcessGroup | None = None, timeout_s: float = 600) -> Turn:
    """Return the turn of a session, which counts as one that `open_session` opens, and may never be opened."""
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
    return _session(_comm_of(group, prefix, kind, subject, timeout_s, StoreComm), sessions, sessions.take(), kind, subject)


def _comm_of(
    group: Group, prefix: str, kind: str, subject: str, timeout_s: float, made: type[AnyComm]
) -> Callable[[int], AnyComm]:
    title = f"{kind} {subject!r}"

    def comm_of(number: int) -> AnyComm:
        store, ended = group.home.session(f"{prefix}{number}", title=title, timeout_s=timeout_s)
        return made(store, group.rank, group.size, title=title, timeout_s=timeout_s, ended=ended, hosts=True)

    return comm_of


def shared_store(name: str, process_group: ProcessGroup | None = None, timeout_s: float = 600) -> BoundedStore | None:
    """Return the keys of the job's store below a name that nobody has used before; None where this process is alone."""
    group = current_group(process_group, timeout_s)
    return None if group is None else group.named(name, timeout_s)


def open_stop(
    name: str, wanted: Callable[[], bool], *, process_group: ProcessGroup | None = None, timeout_s: float = 600
) -> AbstractContextManager[Stop]:
    """Open a `Stop` of a process group for a ``with`` block: all ranks stop at the same step, once one of them is told to.

    Parameters
    ----------
    name
        The same on all ranks, and no other stop's.
    wanted
        Whether this rank has been told to stop; called in another thread, now and then.
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
    """Come to a session; where rank 0 has not come at all, it is told so later, as it must not wait for this rank in vain."""
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
    """Get back in step with the others, after coming too late for a call that is made again and again, as to save to one path.

    Either this rank was slow, and its next call is the others' next; or it left a call out, and they will wait for it in vain
    once more. The first time it counts as slow. The second time in a row, it gives up the next session for all, and is in step.
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
