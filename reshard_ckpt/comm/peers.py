"""The processes of the ranks on this machine: whether one has ended, so that nobody waits for it until a deadline.

A rank says once, under the name of its machine, which process it is. Every rank looks after those of its own machine; whoever
sees that one has ended tells all, so a job learns of it from any machine of which one rank is left. What cannot be known
(another operating system, processes that do not see each other) counts as alive.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .payloads import KeyValueStore

Ended = Callable[[], frozenset[int]]
"""Returns the ranks whose processes are known to have ended."""


class Peers:
    """The ranks of a group that run on this machine.

    Parameters
    ----------
    store
        The group's own keys, as each call is given them: over a connection of now.
    """

    def __init__(self, store: KeyValueStore, rank: int, size: int) -> None:
        self._size = size
        self._key = f"on/{_machine()}"
        self._is_complete = False
        self._processes: list[list[str]] = []
        store.append(self._key, f"{rank}:{os.getpid()}:{_began(os.getpid())} ".encode())
        self.num_here: int = store.add("here", 1)
        """How many ranks have said so, this one included."""

    def ended(self, store: KeyValueStore) -> frozenset[int]:
        """Return the ranks of this machine whose processes have ended, as far as that is known."""
        if not self._is_complete:
            self._is_complete = store.add("here", 0) >= self._size
            self._processes = [line.split(":") for line in store.get(self._key).decode().split()]
        return frozenset(int(rank) for rank, pid, began in self._processes if began and _began(int(pid)) != began)


def _machine() -> str:
    """Name this machine, and of it the part in which processes see each other's numbers; where unknown, this process alone."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    return uuid.uuid4().hex


def _began(pid: int) -> str:
    """Return when a process began, in ticks since the machine did; "" if it has ended: its number may be another's by now."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    # State Z: it was killed, and its parent has not asked for it yet.
    return "" if fields[0] in "ZX" else fields[19]
