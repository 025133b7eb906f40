"""How do the ranks of one save or load agree? In a session, in which an error of one rank is raised on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from ..errors import PeerError
from .exchange import Exchange, open_exchange
from .group import Turns, current_group, launched_group
from .protocol import ALONE, Comm, SoloComm
from .stopping import AgreedStop, LoneStop, Stop
from .store import StoreComm, call_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "ALONE",
    "Comm",
    "Exchange",
    "SoloComm",
    "Stop",
    "StoreComm",
    "launched_group",
    "open_exchange",
    "open_session",
    "open_stop",
]


def open_session(
    kind: str, subject: str, *, process_group: ProcessGroup | None = None, timeout_s: float = 600
) -> AbstractContextManager[Comm]:
    """A session of all ranks of a process group, to be used in a ``with`` block by one thread.

    Which session it is, is settled by the order of these calls on each rank, not by when or in which thread the block is entered.
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
    group = current_group(process_group)
    if group is None:
        return nullcontext(SoloComm())

    def comm_of(number: int) -> StoreComm:
        return StoreComm(
            group.session(number),
            group.rank,
            group.size,
            title=f"{kind} {subject!r}",
            timeout_s=timeout_s,
            elsewhere=group.elsewhere(number),
        )

    return _session(comm_of, group.turns, group.turns.take(), kind, subject)


def open_stop(
    name: str, wanted: Callable[[], bool], *, process_group: ProcessGroup | None = None, timeout_s: float = 600
) -> AbstractContextManager[Stop]:
    """What tells all ranks of a process group to stop at the same step, once one of them is told to; for a ``with`` block.

    Parameters
    ----------
    name
        The same on all ranks, and no other stop's.
    wanted
        Whether this rank has been told to stop; called in another thread, now and then.
    process_group, timeout_s
        As for `open_session`.
    """
    group = current_group(process_group)
    if group is None:
        return nullcontext(LoneStop(wanted))
    return AgreedStop(group.named(name), group.rank, group.size, wanted, timeout_s=timeout_s)


@contextmanager
def _session(comm_of: Callable[[int], StoreComm], turns: Turns, turn: int, kind: str, subject: str) -> Iterator[Comm]:
    comm = comm_of(turns.number(turn))
    before, turns.unopened, call = turns.unopened, call_of(kind, subject), call_of(kind, subject)
    try:
        while not comm.open(kind, subject, before=before):
            comm.leave()
            turns.pass_over()
            comm, before = comm_of(turns.number(turn)), b""  # once: two ranks that call things crosswise must not go on for ever
        turns.unopened = turns.late = b""
        yield comm
        comm.gather(b"")  # the vote: everyone has come through
    except BaseException as error:
        comm.abort(error)
        if comm.late:
            _fall_in(comm_of, turns, turn, call)
        raise
    finally:
        comm.leave()
        comm.undo()


def _fall_in(comm_of: Callable[[int], StoreComm], turns: Turns, turn: int, call: bytes) -> None:
    """Do not stay behind for ever, after coming too late for a call that is made again and again, as to save to one path.

    Was this rank slow, so that its next call is the others' next? Or has it left one out, so that they will wait for it in vain
    once more? At first it passes for slow. The second time in a row, it gives up the next session for all, and is in step.
    """
    again, turns.late = turns.late == call, call
    if not again:
        return
    turns.late = b""
    with suppress(PeerError):  # the store is gone, and the error at hand says more
        declined = False
        while not declined:
            declined = comm_of(turns.number(turn + 1)).decline(call)
            turns.pass_over()
