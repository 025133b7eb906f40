"""The protocol of control messages: short messages from all ranks to rank 0, and from rank 0 to all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgpack


class _Alone:
    """The class of `ALONE`."""

    def __repr__(self) -> str:
        return "ALONE"


ALONE: Final = _Alone()
"""Stands for a process group of this process alone, also within a job of several ranks."""


class Comm(Protocol):
    """One session of several ranks. All ranks make the same calls in the same order, each from one thread at a time.

    If a rank of the session raises an error, every call on every rank raises it soon.
    """

    @property
    def rank(self) -> int:
        """This rank's number within the group."""

    @property
    def size(self) -> int:
        """The number of ranks in the group."""

    def gather(self, payload: bytes) -> list[bytes] | None:
        """Send a payload to rank 0. Rank 0 gets all payloads, by rank; the others get None, once all payloads have arrived."""

    def undo_unless_gathered(self, undo: Callable[[], None]) -> None:
        """Have `undo` called at the end of the session if the next call, a gather, has certainly failed on all ranks.

        A process that is alone never calls it.
        """

    def broadcast(self, payload: bytes | None) -> bytes:
        """Send rank 0's payload to every rank, and return it. The argument of other ranks is ignored."""

    def scatter(self, payloads: Sequence[bytes] | None) -> bytes:
        """Send ``payloads[r]`` of rank 0 to rank r, and return this rank's. The argument of other ranks is ignored."""

    def count(self, amount: int) -> int:
        """Add to a number that all ranks of the session share, and return it. Not collective; call it in one thread at a time."""

    def neighbours(self) -> Sequence[int]:
        """Return the ranks on this machine, ascending. They can open each other's shared memory."""

    def broadcast_near(self, payload: bytes | None) -> bytes:
        """Send a short payload of the first of `neighbours` to the others, and return it. The argument of others is ignored.

        Collective among the ranks of one machine; the ranks of other machines need not call it.
        """


class SoloComm:
    """The `Comm` of a process on its own.

    >>> SoloComm().gather(b"plan")
    [b'plan']
    """

    rank = 0
    size = 1

    def __init__(self) -> None:
        self._counted = 0

    def gather(self, payload: bytes) -> list[bytes] | None:
        return [bytes(payload)]

    def undo_unless_gathered(self, undo: Callable[[], None]) -> None:
        pass

    def broadcast(self, payload: bytes | None) -> bytes:
        assert payload is not None
        return bytes(payload)

    def scatter(self, payloads: Sequence[bytes] | None) -> bytes:
        assert payloads is not None
        assert len(payloads) == 1
        return bytes(payloads[0])

    def count(self, amount: int) -> int:
        self._counted += amount
        return self._counted

    def neighbours(self) -> Sequence[int]:
        return (0,)

    def broadcast_near(self, payload: bytes | None) -> bytes:
        return self.broadcast(payload)


def merge_of_all(comm: Comm, value: Any, merge: Callable[[list[Any]], Any] = list) -> Any:
    """Merge a plain value of each rank on rank 0, and return the result on every rank. Collective: a gather and a broadcast.

    Parameters
    ----------
    value
        This rank's value, of types that msgpack has; tuples arrive as lists.
    merge
        Called on rank 0 with the values of all ranks, by rank; by default it returns them as they are. Equal values are one
        object, which it must not change. All ranks raise its error.
    """
    gathered = comm.gather(msgpack.packb(value))
    if gathered is None:
        return _unpacked(comm.broadcast(None))
    values = {data: _unpacked(data) for data in dict.fromkeys(gathered)}  # replicas often send the same
    return _unpacked(comm.broadcast(msgpack.packb(merge([values[data] for data in gathered]))))


def value_of_first(comm: Comm, make: Callable[[], Any]) -> Any:
    """Return on every rank a plain value that `make` returns on rank 0; it is called there alone. Collective: a broadcast."""
    return _unpacked(comm.broadcast(msgpack.packb(make()) if comm.rank == 0 else None))


def union(lists: list[list[Any]]) -> list[Any]:
    """Return the items of several lists, each once, in order of first occurrence: a `merge` for `merge_of_all`."""
    return list(dict.fromkeys(item for items in lists for item in items))


def _unpacked(data: bytes) -> Any:
    return msgpack.unpackb(data, strict_map_key=False)
