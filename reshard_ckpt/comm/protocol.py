"""The protocol of control messages between ranks: short ones to rank 0, and from rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol


class _Alone:
    """The class of `ALONE`."""

    def __repr__(self) -> str:
        return "ALONE"


ALONE: Final = _Alone()
"""Stands for a process group: this process on its own, whatever job it belongs to."""


class Comm(Protocol):
    """The ranks of one session, which all make the same calls in the same order.

    Every call raises, on every rank and soon, what any rank of the session raised. A call belongs to one thread.
    """

    @property
    def rank(self) -> int:
        """This rank's number within the group."""

    @property
    def size(self) -> int:
        """How many ranks the group has."""

    def gather(self, payload: bytes, *, undo: Callable[[], None] | None = None) -> list[bytes] | None:
        """Send a payload to rank 0. Returns all payloads by rank on rank 0, and None on the others, also once all have arrived.

        Parameters
        ----------
        undo
            Called at the end of the session if this gather took place on no rank; not called where that is not known.
        """

    def broadcast(self, payload: bytes | None) -> bytes:
        """Send rank 0's payload to every rank, and return it; what the others pass is ignored."""

    def scatter(self, payloads: Sequence[bytes] | None) -> bytes:
        """Send payload r of those that rank 0 passes to rank r, and return it; what the others pass is ignored."""


class SoloComm:
    """The `Comm` of a process on its own.

    >>> SoloComm().gather(b"plan")
    [b'plan']
    """

    rank = 0
    size = 1

    def gather(self, payload: bytes, *, undo: Callable[[], None] | None = None) -> list[bytes] | None:
        return [bytes(payload)]

    def broadcast(self, payload: bytes | None) -> bytes:
        assert payload is not None
        return bytes(payload)

    def scatter(self, payloads: Sequence[bytes] | None) -> bytes:
        assert payloads is not None
        assert len(payloads) == 1
        return bytes(payloads[0])
