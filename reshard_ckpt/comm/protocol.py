"""The interface for messages between ranks (`Comm`): short messages from all ranks to rank 0, and from rank 0 to all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import msgpack


class _Alone:
    """The type of the constant `ALONE`."""

    def __repr__(self) -> str:
        return "ALONE"


ALONE: Final = _Alone()
"""Pass it as `process_group` to let this process act alone, even in a job of several ranks."""


class Comm(Protocol):
    """The messages of one session of several ranks.

    All ranks make the same calls in the same order, and each rank makes them from one thread at a time.

    If a rank of the session raises an error, every call on every rank raises it soon.
    """

    @property
    def rank(self) -> int:
        """This rank's number within the group."""

    @property
    def size(self) -> int:
        """The number of ranks in the group."""

    def gather(self, payload: bytes) -> list[bytes] | None:
        """Send a payload to rank 0. Rank 0 returns the payloads of all ranks, by rank.

        The others return None once all have arrived.
        """

    def undo_unless_gathered(self, undo: Callable[[], None]) -> None:
        """Register `undo`, to be called when the session ends if the next call, a gather, is sure to have failed on all ranks.

        A process that is alone never calls it.
        """

    def broadcast(self, payload: bytes | None) -> bytes:
        """Send rank 0's payload to every rank, and return it. The argument of other ranks is ignored."""

    def scatter(self, payloads: Sequence[bytes] | None) -> bytes:
        """Send ``payloads[r]`` from rank 0 to each rank r, and return this rank's payload. Ranks other than 0 pass None."""

    def count(self, amount: int) -> int:
        """Add `amount` to a counter that all ranks of the session share, and return its new value.

        Not collective; one thread at a time.
        """

    def neighbours(self) -> Sequence[int]:
        """Return the ranks on this machine, ascending. They can open each other's shared memory."""

    def broadcast_near(self, payload: bytes | None) -> bytes:
        """Send a short payload from the first rank of this machine to the others on it, and return it. The others pass None.

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
    """Gather a plain value of each rank, merge them on rank 0, and return the merged value on every rank. Collective.

    Parameters
    ----------
    value
        This rank's value, of types that msgpack has; tuples arrive as lists.
    merge
        Called on rank 0 with the list of all values, by rank; by default it returns that list. Equal values may be one object, so
        `merge` must not change them. If it raises, all ranks raise its error.
    """
    gathered = comm.gather(_packed(value))
    if gathered is None:
        return _unpacked(comm.broadcast(None))
    values = {data: _unpacked(data) for data in dict.fromkeys(gathered)}  # replicas often send the same
    return _unpacked(comm.broadcast(_packed(merge([values[data] for data in gathered]))))


def value_of_first(comm: Comm, make: Callable[[], Any]) -> Any:
    """Call `make` on rank 0 alone, and return its result, a plain value, on every rank. Collective: a broadcast."""
    return _unpacked(comm.broadcast(_packed(make()) if comm.rank == 0 else None))


def union(lists: list[list[Any]]) -> list[Any]:
    """Return the items of several lists, each once, in order of first occurrence: a `merge` for `merge_of_all`."""
    return list(dict.fromkeys(item for items in lists for item in items))


# Texts may be paths that are not UTF-8, as `os.fsdecode` returns them.
_packed: Callable[[Any], bytes] = partial(msgpack.packb, unicode_errors="surrogateescape")
_unpacked: Callable[[bytes], Any] = partial(msgpack.unpackb, strict_map_key=False, unicode_errors="surrogateescape")
