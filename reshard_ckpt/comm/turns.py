"""The turn of a session that ranks open only where they need one: else they meet in the collectives of an exchange alone.

It has its number among the sessions of all ranks, opened or not. So a rank that calls something else instead opens the very
session of this turn, and who waits for it in a collective sees it there: `look` then opens the session too, which raises on all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

from ..errors import PeerError
from .protocol import Comm
from .store import StoreComm


class Turn:
    """One turn on one rank.

    Parameters
    ----------
    session
        That of this turn, which has not been entered.
    comm
        Makes its `StoreComm`; None where this process is on its own.
    call
        What the session is for.
    """

    def __init__(
        self, session: AbstractContextManager[Comm], comm: Callable[[], StoreComm] | None = None, call: bytes = b""
    ) -> None:
        self._session, self._comm, self._call = session, comm, call
        self._is_opened = False

    def opened(self) -> AbstractContextManager[Comm]:
        """Return the session, to be entered by all ranks, once."""
        self._is_opened = True
        return self._session

    def look(self) -> None:
        """Raise what another rank has put down in place of coming, if one has.

        Raises
        ------
        PeerError
            It has given up, or called something else; other errors of this package where it gave up for them.
        """
        if self._comm is not None and self._comm().is_for_others(self._call):
            with self.opened():
                pass

    def give_up(self, error: BaseException) -> None:
        """Tell whoever opens the session, or looks, of an error of this rank, which does not open it any more."""
        if self._comm is None or self._is_opened:
            return
        with suppress(PeerError):  # the store is gone, and `error` says more
            comm = self._comm()
            comm.abort(error)
            comm.leave(waits=False)
