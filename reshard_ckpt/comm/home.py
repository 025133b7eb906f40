"""The store in which the sessions of a group are held: hosted by rank 0, found by the others, and never another group's.

1. Rank 0 starts it, draws a nonce, and puts both its address and the nonce into the job's store (`HostedHome`).
2. The others look there until they find an address at which a store answers that knows the nonce. What a dead attempt has left
   has no store behind it any more, or another one; they look on.
3. Whoever is the last to come in removes the address: nobody needs it any more.
4. Every key begins with the nonce. Each rank also says there which process it is, so that those on its machine see when it ends.
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import DistError

from ..errors import PeerError
from .bounded import BoundedStore, Line, bounded, held, named_failure
from .calls import did_not_arrive
from .peers import Ended, Peers

REPLY_S = 120.0
"""What torch itself is told of how long a reply may take; nobody waits for one longer than its own time (`BoundedStore`)."""

_PROBE_S = 10.0
"""How long a store at an address that may be stale has to answer; one that was too slow is asked again."""
_LEAST_PROBE_S = 1.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0005, 0.25

_STORES: Any = dist  # the stubs of torch.distributed leave out its stores


class Home(Protocol):
    """Where the sessions of a group are."""

    def session(self, name: str, *, title: str, timeout_s: float) -> tuple[BoundedStore, Ended]:
        """Return the keys of a session, and the function that tells which ranks have ended.

        Raises
        ------
        PeerError
            Rank 0 has not come within `timeout_s`; or the job's store is gone.
        """


class SettledHome:
    """A home in a store that rank 0 has started for this group, and that all ranks know already."""

    def __init__(self, line: Line, rank: int, size: int, timeout_s: float) -> None:
        self._line = line
        self._peers = Peers(line.open(timeout_s).below("home"), rank, size)

    def session(self, name: str, *, title: str, timeout_s: float) -> tuple[BoundedStore, Ended]:
        with named_failure(f"{title}: the job's key-value store does not answer"):
            root = self._line.open(timeout_s).below("home")
        return root.below(name), partial(self._peers.ended, root)


class HostedHome:
    """A home whose address the ranks tell each other in the job's store.

    Parameters
    ----------
    meeting, key
        The job's store, and the key for the address.
    host
        By what name this rank reaches the job's store.
    """

    def __init__(self, meeting: Line, key: str, rank: int, size: int, host: str) -> None:
        self._meeting, self._key, self._rank, self._size, self._host = meeting, key, rank, size, host
        self._lock = threading.Lock()
        self._line, self._record = Line(self._connect), b""
        self._server: Any = None
        self._peers: Peers | None = None

    def session(self, name: str, *, title: str, timeout_s: float) -> tuple[BoundedStore, Ended]:
        with named_failure(f"{title}: the job's key-value store does not answer"):
            with held(self._lock, timeout_s, f"{title}: the ranks did not meet"):
                peers = self._peers = self._peers or self._meet(title, timeout_s)
            root = self._line.open(timeout_s).below(self._nonce())
        return root.below(name), partial(peers.ended, root)

    def _nonce(self) -> str:
        return self._record.partition(b" ")[0].decode()

    def _connect(self, timeout_s: float) -> Any:
        """Connect once more to the store of rank 0, which did not reply before."""
        client = self._reach(self._record, timeout_s)
        if client is None:
            raise DistError(f"nobody replies at its address within {timeout_s:g} s")
        return client

    def _meet(self, title: str, timeout_s: float) -> Peers:
        meeting = self._meeting.open(timeout_s)
        meeting.allow(timeout_s)
        if self._rank == 0:
            client, self._record = bounded(self._start, timeout_s, f"{title}: rank 0 did not start its key-value store")
        else:
            client, self._record = self._find(meeting, title, timeout_s)
        self._line = Line(self._connect, client)
        root = self._line.open(timeout_s).below(self._nonce())
        root.allow(timeout_s)
        peers = Peers(root, self._rank, self._size)
        if self._rank == 0:
            meeting.set(self._key, self._record)
        elif peers.num_here == self._size and meeting.check([self._key]) and meeting.get(self._key) == self._record:
            meeting.delete_key(self._key)
        return peers

    def _start(self) -> tuple[Any, bytes]:
        host, nonce = own_address(self._host), uuid.uuid4().hex
        # Kept as long as this home, also where a reply of it was missed.
        self._server = _STORES.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=REPLY_S))
        # Where the job's store is on this machine, others reach it by a name of their own.
        return self._server, f"{nonce} {self._server.port} {'' if is_loopback(host) else host}".encode()

    def _find(self, meeting: BoundedStore, title: str, timeout_s: float) -> tuple[Any, bytes]:
        """Wait for the address of the living rank 0, and connect to its store."""
        began, tried, tried_at = time.monotonic(), b"", 0.0
        while True:
            waited = time.monotonic() - began
            if meeting.check([self._key]):
                record = meeting.get(self._key)
                # The same one again, too, though seldom: it may be right, and the network slow.
                if record != tried or waited > 2 * tried_at + 1:
                    if (client := self._reach(record, timeout_s - waited)) is not None:
                        return client, record
                    tried, tried_at = record, time.monotonic() - began
            if waited >= timeout_s:
                raise PeerError(f"{title}: {did_not_arrive((0,), timeout_s)}", ranks=(0,))
            time.sleep(min(max(waited / 10, _FIRST_PAUSE_S), _LAST_PAUSE_S, timeout_s - waited))

    def _reach(self, record: bytes, timeout_s: float) -> Any:
        """Connect to the store at an address that somebody has put down; None where there is none, or another one."""
        probe_s = min(_PROBE_S, max(timeout_s, _LEAST_PROBE_S))
        try:
            nonce, port, host = record.decode().split(" ")
            host, number = host or self._host, int(port)
            return bounded(partial(_client_at, nonce, host, number, probe_s), probe_s, "the store did not reply")
        except (OSError, ValueError, OverflowError, DistError, PeerError):
            return None


def _client_at(nonce: str, host: str, port: int, probe_s: float) -> Any:
    """Connect to a store that knows the nonce; None where another one is there."""
    # Asked first, as a store's client tries a closed port again and again.
    socket.create_connection((host, port), probe_s).close()
    limit = timedelta(seconds=probe_s)
    client = _STORES.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    if not client.check([f"{nonce}/here"]):
        return None
    client.set_timeout(timedelta(seconds=REPLY_S))
    return client


def own_address(towards: str) -> str:
    """Find this machine's address on the way to another: the one by which the others can reach it. No packet is sent."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def is_loopback(host: str) -> bool:
    """Tell whether an address is that of the machine it is used on."""
    return host == "::1" or host.startswith("127.")
