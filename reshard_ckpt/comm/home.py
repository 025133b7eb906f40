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
from typing import Any, Protocol, cast

import torch.distributed as dist
from torch.distributed import DistError

from ..errors import PeerError
from .payloads import KeyValueStore
from .peers import Ended, Peers

# No call of ours waits in the store, so a reply that takes this long means that nobody is there.
REPLY_S = 120.0

_PROBE_S = 10.0
"""How long a store at an address that may be stale has to answer; one that was too slow is asked again."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0005, 0.25

_STORES: Any = dist  # the stubs of torch.distributed leave out its stores


class Home(Protocol):
    """Where the sessions of a group are."""

    def session(self, name: str, *, title: str, timeout_s: float) -> tuple[KeyValueStore, Ended]:
        """Return the keys of a session, and what tells which ranks have ended.

        Raises
        ------
        PeerError
            Rank 0 has not come within `timeout_s`; or the job's store is gone.
        """


class SettledHome:
    """A home in a store that rank 0 has started for this group, and that all ranks know already."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = _STORES.PrefixStore("home", store)
        self._peers = Peers(self._store, rank, size)

    def session(self, name: str, *, title: str, timeout_s: float) -> tuple[KeyValueStore, Ended]:
        return _below(self._store, name), self._peers.ended


class HostedHome:
    """A home of which the ranks tell each other in the job's store.

    Parameters
    ----------
    meeting, key
        The job's store, and the key for the address.
    host
        By what name this rank reaches the job's store.
    """

    def __init__(self, meeting: Any, key: str, rank: int, size: int, host: str) -> None:
        self._meeting, self._key, self._rank, self._size, self._host = meeting, key, rank, size, host
        self._lock = threading.Lock()
        self._store: Any = None

    def session(self, name: str, *, title: str, timeout_s: float) -> tuple[KeyValueStore, Ended]:
        with self._lock:
            if self._store is None:
                try:
                    self._open(title, timeout_s)
                except DistError as error:
                    raise PeerError(
                        f"{title}: the job's key-value store does not answer ({error}), so the ranks cannot find each other; the "
                        "process that hosts it has probably ended: its log says why"
                    ) from error
            return _below(self._store, name), self._peers.ended

    def _open(self, title: str, timeout_s: float) -> None:
        if self._rank == 0:
            self._store, own_record = self._start()
            self._peers = Peers(self._store, self._rank, self._size)
            self._meeting.set(self._key, own_record)
            return
        store, record = self._find(title, timeout_s)
        self._peers = Peers(store, self._rank, self._size)
        self._store = store
        if self._peers.num_here == self._size and self._meeting.check([self._key]) and self._meeting.get(self._key) == record:
            self._meeting.delete_key(self._key)

    def _start(self) -> tuple[Any, str]:
        host, nonce = own_address(self._host), uuid.uuid4().hex
        server = _STORES.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=REPLY_S))
        # Where the job's store is on this machine, others reach it by a name of their own.
        return _STORES.PrefixStore(nonce, server), f"{nonce} {server.port} {'' if is_loopback(host) else host}"

    def _find(self, title: str, timeout_s: float) -> tuple[Any, bytes]:
        """Wait for the address of the living rank 0, and connect to its store."""
        began, tried, tried_at = time.monotonic(), b"", 0.0
        while True:
            waited = time.monotonic() - began
            if self._meeting.check([self._key]):
                record = self._meeting.get(self._key)
                # The same one again, too, though seldom: it may be right, and the network slow.
                if record != tried or waited > 2 * tried_at + 1:
                    if (store := self._reach(record)) is not None:
                        return store, record
                    tried, tried_at = record, time.monotonic() - began
            if waited >= timeout_s:
                raise PeerError(
                    f"{title}: rank 0 did not arrive within {timeout_s:g} s; its own log says why, and timeout_s= allows slower "
                    "ones more time",
                    ranks=(0,),
                )
            time.sleep(min(max(waited / 10, _FIRST_PAUSE_S), _LAST_PAUSE_S, timeout_s - waited))

    def _reach(self, record: bytes) -> Any:
        """Connect to a store at an address that somebody has put down; None where it is not, or no longer, that one."""
        try:
            nonce, port, host = record.decode().split(" ")
            host, number = host or self._host, int(port)
            # Asked first, as a store's client tries a closed port again and again.
            socket.create_connection((host, number), _PROBE_S).close()
            limit = timedelta(seconds=_PROBE_S)
            client = _STORES.TCPStore(host, number, is_master=False, wait_for_workers=False, timeout=limit)
            store = _STORES.PrefixStore(nonce, client)
            if not store.check(["here"]):
                return None
            client.set_timeout(timedelta(seconds=REPLY_S))
            return store
        except (OSError, ValueError, OverflowError, DistError):
            return None


def _below(store: Any, name: str) -> KeyValueStore:
    return cast(KeyValueStore, _STORES.PrefixStore(name, store))


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
