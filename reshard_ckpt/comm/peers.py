"""The processes of the ranks on this machine. If one has ended, no rank needs to wait for it until a deadline.

Each rank writes its process number into the store, under the name of its machine. Every rank watches the processes of its own
machine, and tells all ranks if one has ended; so one living rank on a machine is enough. A process counts as alive if nothing can
be known of it (another operating system, containers that do not see each other's processes).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .bounded import BoundedStore
from .payloads import KeyValueStore

Ended = Callable[[], frozenset[int]]
"""A function that returns the ranks whose processes are known to have ended."""


class Machine:
    """The machine of this rank: the ranks of the process group on it, and whether their processes still live.

    Each method takes the store with the group's keys, because the connection may have been replaced since the last call.

    Attributes
    ----------
    store
        The machine's own store, once this rank has joined it; see `comm.node`. After it was lost, each of its calls fails.
    is_known
        Whether it is known if the machine has a store of its own.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.store: BoundedStore | None = None
        self.is_known = False
        self._rank, self._size = rank, size
        self._key = f"on/{_machine()}"
        self._is_counted = self._is_complete = False
        self._processes: list[list[str]] = []

    def arrive(self, store: KeyValueStore) -> int:
        """Register this rank's process in the store; return how many ranks of all machines have registered.

        A failed call may be repeated.
        """
        pid = os.getpid()
        store.append(self._key, f"{self._rank}:{pid}:{_began(pid) or ''} ".encode())
        # Counted once, as a call whose reply was lost may have counted. One rank too few does less harm than one too many.
        amount, self._is_counted = int(not self._is_counted), True
        return store.add("here", amount)

    def ranks(self, store: KeyValueStore) -> tuple[int, ...]:
        """Return the registered ranks of this machine, ascending.

        They are complete once all ranks of the group have met in a session.
        """
        self._look(store)
        return tuple(sorted({int(rank) for rank, _, _ in self._processes}))

    def ended(self, store: KeyValueStore) -> frozenset[int]:
        """Return the ranks of this machine whose processes are known to have ended."""
        self._look(store)
        return frozenset(int(rank) for rank, pid, began in self._processes if began and _began(int(pid)) not in (began, None))

    def _look(self, store: KeyValueStore) -> None:
        if not self._is_complete:
            self._is_complete = store.add("here", 0) >= self._size
            self._processes = [line.split(":") for line in store.get(self._key).decode().split()]


def machine_id() -> str:
    """Return the same id in all processes of this machine: the boot id, which is new at each start, or else the host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def _machine() -> str:
    """Return a name for the processes that can see each other's process numbers. If that is unknown, the name is unique."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    return uuid.uuid4().hex


def _began(pid: int) -> str | None:
    """Return the start time of a process, in ticks since the boot. It tells a reused process number apart.

    Return "" if the process has ended, and None if that is unknown.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:  # such as too many open files in this process
        return None
    # State Z: it was killed, and its parent has not asked for it yet.
    return "" if fields[0] in "ZX" else fields[19]
