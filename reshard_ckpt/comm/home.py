"""The key-value store for the sessions of one process group: rank 0 hosts it, the other ranks find its address.

1. Rank 0 starts the store, draws a nonce, and writes the store's address and the nonce into the job's store.
2. The others read the address again and again, until a store that knows the nonce answers there. An address written by an earlier
   attempt of the job leads to no store, or to a store with another nonce.
3. The last rank to come removes the address.
4. Every key begins with the nonce. Each rank also registers its process there, so that ranks on its machine see when it ends.
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError

from ..errors import PeerError
from .bounded import BoundedStore, PollingWait, StoreConnection, bounded, holding, named_failure
from .calls import did_not_arrive
from .node import Neighbours
from .peers import Machine

REPLY_S = 120.0
"""Seconds: the limit for a reply that torch's client gets. Callers wait at most for their own `timeout_s` (`BoundedStore`)."""

_PROBE_S = 10.0
"""Seconds to try a written address, which an earlier attempt of the job may have left. If no store answers, it is tried again
later."""
_LEAST_PROBE_S = 1.0
_LAST_PAUSE_S = 0.25

_STORES: Any = dist  # the stubs of torch.distributed leave out its stores


class Home:
    """Finds or hosts the key-value store for a group's sessions. Rank 0 hosts it, and writes its address into the job's store.

    Parameters
    ----------
    meeting, key
        The job's store, and the key of the address in it.
    host
        The host name by which this rank reaches the job's store.
    """

    def __init__(self, meeting: StoreConnection, key: str, rank: int, size: int, host: str) -> None:
        self._meeting, self._key, self._rank, self._size, self._host = meeting, key, rank, size, host
        self._lock = threading.Lock()
        self._connection, self._record = StoreConnection(self._connect), b""
        self._started: tuple[Any, bytes] | None = None
        self._machine = Machine(rank, size)
        self._has_met = False

    def session(self, name: str, *, title: str, timeout_s: float) -> tuple[BoundedStore, Neighbours]:
        """Return the part of the store that belongs to the session `name`, and the ranks of this machine.

        Raise `PeerError` if rank 0 has not come within `timeout_s`, or the job's store is gone.
        """
        with named_failure(f"{title}: the job's key-value store does not answer"):
            holding(self._lock, lambda: self._meet(title, timeout_s), timeout_s, f"{title}: the ranks did not meet")
            root = self._connection.open(timeout_s).below(self._nonce())
        return root.below(name), Neighbours(self._machine, root)

    def _nonce(self) -> str:
        return self._record.partition(b" ")[0].decode()

    def _connect(self, timeout_s: float) -> Any:
        """Connect to rank 0's store again, after it failed to reply in time.

        Try until `timeout_s` is over, because a network that has just come back has no route to other hosts for a moment. Stop
        at once if rank 0's machine answers that the store is gone.
        """
        began, found = time.monotonic(), []

        def reached() -> bool:
            if (client := self._reach(self._record, timeout_s - (time.monotonic() - began))) is not None:
                found.append(client)
            return bool(found)

        try:
            if PollingWait(reached, last_s=_LAST_PAUSE_S).ends(timeout_s):
                return found[0]
        except ConnectionRefusedError:
            raise DistError("rank 0's machine answers that no process has it any more") from None
        raise DistError(f"nobody replies at its address within {timeout_s:g} s")

    def _meet(self, title: str, timeout_s: float) -> None:
        """Find rank 0's store (on rank 0: start it), connect, and register this process there, once.

        A failed call may be repeated.
        """
        if self._has_met:
            return
        meeting = self._meeting.open(timeout_s)
        meeting.allow(timeout_s)
        if self._rank == 0:
            client, record = bounded(self._start, timeout_s, f"{title}: rank 0 did not start its key-value store")
        else:
            client, record = self._find(meeting, title, timeout_s)
        if record != self._record:
            self._record, self._machine = record, Machine(self._rank, self._size)
        self._connection = StoreConnection(self._connect, client)
        root = self._connection.open(timeout_s).below(self._nonce())
        root.allow(timeout_s)
        num_here = self._machine.arrive(root)
        if self._rank == 0:
            meeting.set(self._key, self._record)
        elif num_here == self._size and meeting.check([self._key]) and meeting.get(self._key) == self._record:
            meeting.delete_key(self._key)
        self._has_met = True

    def _start(self) -> tuple[Any, bytes]:
        """Start rank 0's store, or return the one that was started before: other ranks may have read its address already."""
        if self._started is None:
            host, nonce = own_address(self._host), uuid.uuid4().hex
            server = _STORES.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=REPLY_S))
            # If the job's store is on this machine, ranks on other machines reach it by another name than this one does.
            is_loopback = host == "::1" or host.startswith("127.")
            record = f"{nonce} {server.port} {'' if is_loopback else host}".encode()
            self._started = self._started or (server, record)
        return self._started

    def _find(self, meeting: BoundedStore, title: str, timeout_s: float) -> tuple[Any, bytes]:
        """Wait until rank 0 has written an address at which its store answers, and connect to the store.

        Return the client and the record of the address.
        """
        began, tried, tried_at = time.monotonic(), b"", 0.0
        found: list[tuple[Any, bytes]] = []

        def reached() -> bool:
            nonlocal tried, tried_at
            waited = time.monotonic() - began
            if meeting.check([self._key]):
                record = meeting.get(self._key)
                # The same address is tried again, though seldom: it may be right, and the network slow.
                if record != tried or waited > 2 * tried_at + 1:
                    with suppress(ConnectionRefusedError):  # of an earlier attempt
                        if (client := self._reach(record, timeout_s - waited)) is not None:
                            found.append((client, record))
                    tried, tried_at = record, time.monotonic() - began
            return bool(found)

        if not PollingWait(reached, last_s=_LAST_PAUSE_S).ends(timeout_s):
            raise PeerError(f"{title}: {did_not_arrive((0,), timeout_s)}", ranks=(0,))
        return found[0]

    def _reach(self, record: bytes, timeout_s: float) -> Any:
        """Connect to the store at an address that was read; None if no store answers.

        Raise `ConnectionRefusedError` if no process listens at the address, or the store there is that of another job or attempt.
        """
        probe_s = min(_PROBE_S, max(timeout_s, _LEAST_PROBE_S))
        try:
            nonce, port, host = record.decode().split(" ")
            host, number = host or self._host, int(port)
            return bounded(partial(_client_at, nonce, host, number, probe_s), probe_s, "the store did not reply")
        except ConnectionRefusedError:
            raise
        except (OSError, ValueError, OverflowError, DistError, PeerError):
            return None


def _client_at(nonce: str, host: str, port: int, probe_s: float) -> Any:
    """Connect to the store at this address. Refuse it if it lacks the nonce: it then belongs to another job or attempt."""
    # A plain connection first: the client of a store would try a closed port again and again.
    socket.create_connection((host, port), probe_s).close()
    limit = timedelta(seconds=probe_s)
    client = _STORES.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    if not client.check([f"{nonce}/here"]):
        raise ConnectionRefusedError
    client.set_timeout(timedelta(seconds=REPLY_S))
    return client


def own_address(towards: str) -> str:
    """Return the address of the network interface that leads to the host `towards`. No packet is sent."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
