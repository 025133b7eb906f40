"""Turns: sessions that ranks open only if needed; usually they only meet, by adding to one shared counter.

1. A turn takes a number among the sessions of all ranks, opened or not. So a rank that makes another call instead opens the
   session with this number. A waiting rank checks for that about twice a second, and then opens the session too. That raises the
   error about different calls on all ranks.
2. To meet, each rank adds 1 and its flags to one counter. The last rank writes the verdict: the flags of all. A rank that has
   waited too long, or sees that a missing rank has ended, writes a refusal. The first writer wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from torch.distributed import DistError

from ..errors import CheckpointError, PeerError
from .calls import did_not_arrive
from .interrupts import interrupt_waits
from .node import NodeComm
from .payloads import KeyValueStore
from .protocol import Comm, SoloComm
from .wire import Refusal, name_ranks, refusal_of

if TYPE_CHECKING:
    from .sessions import Place

FAILED, CHANGED = 1, 2
"""Flags that a rank passes to `Meeting.meet`; every rank gets the flags of all ranks, or-ed."""

_BITS = 20
_LIMIT = 1 << _BITS
"""Bound of each number packed in a meeting's counter: the ranks that have come, and how many of them came with each flag."""


class Meeting(NodeComm):
    """Lets the ranks of a turn meet, by adding to one counter; they open the turn's session afterwards only if needed."""

    def meet(self, flags: int, look: Callable[[], None]) -> int:
        """Wait until all ranks have come, and return the flags of all ranks, or-ed. `look` is called about twice a second.

        Raise `PeerError` if a rank has ended, or did not come in time.
        """
        word = 1 + sum((flags & flag > 0) << _BITS * i for i, flag in enumerate((FAILED, CHANGED), 1))
        with self._reachable():
            total = self._store.add("count", word)
            is_last = total % _LIMIT == self.size
            if is_last:
                joined = sum(flag for i, flag in enumerate((FAILED, CHANGED), 1) if (total >> _BITS * i) % _LIMIT)
                verdict = self._store.compare_set("verdict", b"", b"%d" % joined)
            # Last: a rank that is killed before this line counts as missing.
            self._store.append("here", b"%d " % self.rank)
            if not is_last:
                self._may_look()  # in half a second: mostly all are here by then
                try:
                    verdict = self._wait_for("verdict", self._timeout_s, self._miss_late, lambda: self._miss_ended(look))
                except BaseException as error:
                    with suppress(DistError):
                        self._store.compare_set("verdict", b"", refusal_of(error, self.rank).encode())
                    raise
        if not verdict.isdigit():
            raise Refusal.decode(verdict).error()
        return int(verdict)

    def forget(self) -> None:
        """Delete the keys of this meeting. Call it once all ranks have come to a later turn."""
        with suppress(PeerError), self._reachable():
            self._store.on_worker(_forget)

    def _delete_all(self, store: KeyValueStore) -> None:
        """Delete every key of the session and of the meeting: after a refusal, no later turn may come to `forget` them."""
        super()._delete_all(store)
        _forget(store)

    def _missing(self) -> list[int]:
        here = {int(rank) for rank in self._store.get("here").split()}
        return [rank for rank in range(self.size) if rank not in here]

    def _miss_ended(self, look: Callable[[], None]) -> bool:
        if interrupt_waits():
            self._miss([self.rank], f"rank {self.rank} was interrupted")
        if self._may_look():
            look()
            if ended := sorted(self._ended() & {*self._missing()}):
                self._miss(ended, f"{name_ranks(ended)} ended before this began; their own logs say why")
        return False

    def _miss_late(self) -> None:
        self._stop_if_given_up()
        missing = self._missing()
        self._miss(missing, did_not_arrive(missing, self._timeout_s))

    def _miss(self, ranks: list[int], what: str) -> None:
        if ranks:  # else the last rank has come, and the verdict is there
            refusal = Refusal("PeerError", f"{self._title}: {what}", tuple(ranks))
            self._store.compare_set("verdict", b"", refusal.encode())


class Turn:
    """One turn of this rank: it meets the other ranks, and all open a session (send messages) only if one of them needs it.

    `place` is the turn's place in the order of all sessions; None if this process is on its own.
    """

    def __init__(self, place: Place[Meeting] | None) -> None:
        self._place, self._is_opened = place, False
        self._meeting: Meeting | None = None

    def meet(self, flags: int, before: Turn | None) -> int:
        """Wait until all ranks have come to this turn, and return the flags of all ranks, or-ed. Collective.

        Raise `PeerError` if a rank did not come in time, has ended, or called something else.

        Parameters
        ----------
        before
            An earlier turn, whose keys rank 0 deletes: once all ranks have come here, none uses them.
        """
        if self._place is None:
            return flags
        self._meeting = self._place.comm()
        joined = self._meeting.meet(flags, self.look)
        if before is not None and before._meeting is not None and self._meeting.rank == 0:
            before._meeting.forget()
        return joined

    def opened(self) -> AbstractContextManager[Comm]:
        """Return the session of this turn. If one rank enters it, all ranks must, once."""
        self._is_opened = True
        return nullcontext(SoloComm()) if self._place is None else self._place.session()

    def look(self) -> None:
        """Check whether another rank has failed or made another call instead of coming to this turn, and raise its error.

        Raise `CheckpointError` if the other rank gave up because of this error, and `PeerError` if it made another call.
        """
        if self._place is not None and self._place.comm().is_for_others(self._place.call):
            with self.opened():
                pass

    @contextmanager
    def argument_check(self) -> Iterator[None]:
        """Raise an error of the ``with`` block, which checks the arguments of a call, on the other ranks too."""
        try:
            yield
        except CheckpointError as error:
            self.give_up(error)
            raise

    def give_up(self, error: BaseException) -> None:
        """Tell the other ranks of an error of this rank, which will not open the session.

        Does nothing if it was opened before.
        """
        if self._place is None or self._is_opened:
            return
        with suppress(PeerError):  # the store is gone, and `error` says more
            comm = self._place.comm()
            comm.abort(error)
            comm.leave(waits=False)


def _forget(store: KeyValueStore) -> None:
    for key in ("here", "count", "verdict"):
        store.delete_key(key)
