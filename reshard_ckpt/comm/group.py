"""The ranks of a process group and the key-value store that they share; all that this package asks of torch.distributed.

1. Ranks meet in the store that the job already has, so no collective runs. Only a job without a fit one (`FileStore` cannot
   append) gets another: rank 0 of the group starts it, and its address is spread once, by a broadcast of one small tensor.
2. Under torchrun that store is the launcher's, and outlives every rank. Anywhere else (``env://``, ``tcp://``, so srun and
   mpirun too) it goes with the process group of the rank that hosts it; a save in the background must not. To keep the job's
   store alive would be worse: a process group that is made anew at the same port would find the old one's keys in it. So rank 0
   of the group hosts a store of this package's own (`OwnStore`), to which a session goes over as soon as its ranks have met
   (`StoreComm`).
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..errors import UsageError
from .protocol import ALONE
from .store import KeyValueStore, NextStore

# No call of ours waits in the store, so a reply that takes this long means that nobody is there.
_REPLY_S = 120.0
_ADDRESS_BYTES = 256

_STORES: Any = dist  # the stubs of torch.distributed leave out its stores

_LOCK = threading.Lock()
_GROUPS: WeakKeyDictionary[dist.ProcessGroup, Group] = WeakKeyDictionary()
_CONNECTIONS: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()

_INHERITED: list[Any] = []
"""In a forked child: the parent's process group, and what belongs to it."""


def _after_fork() -> None:
    """Put away the parent's process group in a forked child: a second process on its connections would break them.

    It is kept for ever, and so are the stores: to close what the parent's threads serve would wait for threads that are not here.
    """
    global _LOCK
    _LOCK = threading.Lock()
    if dist.is_available() and dist.is_initialized():
        _INHERITED[:] = [dist.group.WORLD, *_GROUPS.values(), *_CONNECTIONS.values()]


os.register_at_fork(after_in_child=_after_fork)


class SessionCounter:
    """The number of this rank's next session: its own calls so far, and the sessions of the others that it skipped."""

    def __init__(self) -> None:
        self._calls = count()
        self._lock = threading.Lock()
        self._skipped = 0
        self.unopened = b""
        """What this rank called last, where that did not open."""
        self.late = b""
        """The same, where it did not because this rank came too late."""

    def take(self) -> int:
        """Take the turn of a call: the calls of this rank are numbered in order, whatever their threads."""
        return next(self._calls)

    def number(self, turn: int) -> int:
        """Return the session that a turn belongs to, as far as is known by now."""
        return turn + self._skipped

    def skip(self) -> None:
        """Skip a session of the others that this rank does not join: all its turns come one session later."""
        with self._lock:
            self._skipped += 1


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as this package sees it."""

    rank: int
    size: int
    store: Any
    prefix: str
    sessions: SessionCounter = field(default_factory=SessionCounter)
    own: OwnStore | None = None

    def session(self, number: int) -> KeyValueStore:
        """Return the store of a session: of the same number on every rank."""
        return self.named(str(number))

    def named(self, name: str) -> KeyValueStore:
        """Return a store of the keys below a name."""
        return cast(KeyValueStore, _STORES.PrefixStore(f"{self.prefix}/{name}", self.store))

    def next_store(self, number: int) -> NextStore | None:
        """Return where a session goes on once its ranks have met; None where it stays."""
        return None if self.own is None else _InOwnStore(self.own, f"{self.prefix}/{number}")


class OwnStore:
    """A store that rank 0 of a group hosts, from its first session on until nobody uses it any more.

    Parameters
    ----------
    host
        By what name this rank reached the job's store.
    """

    def __init__(self, host: str) -> None:
        self._host, self._lock = host, threading.Lock()
        self._stores: dict[bytes, Any] = {}
        self._address = b""

    def address(self) -> bytes:
        """Return where the store is, started if need be, on rank 0. An address without a host is on that of the job's store."""
        with self._lock:
            if not self._address:
                host = _own_address(self._host)
                store = _STORES.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_REPLY_S))
                # Where the job's store is on this machine, others reach it by a name of their own.
                self._address = f"{'' if _is_loopback(host) else host} {store.port}".encode()
                self._stores[self._address] = store
            return self._address

    def connect(self, address: bytes) -> Any:
        """Connect to the store at the address that rank 0 gave."""
        with self._lock:
            if address not in self._stores:
                host, port = address.decode().split(" ")
                self._stores[address] = _STORES.TCPStore(
                    host or self._host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_REPLY_S)
                )
            return self._stores[address]


@dataclass(frozen=True, slots=True)
class _InOwnStore:
    """One session's keys in a group's own store. The session keeps the store alive: the group itself may be gone by then."""

    own: OwnStore
    prefix: str

    def address(self) -> bytes:
        return self.own.address()

    def connect(self, where: bytes) -> KeyValueStore:
        return cast(KeyValueStore, _STORES.PrefixStore(self.prefix, self.own.connect(where)))


def current_group(process_group: Any) -> Group | None:
    """Return the group to talk to; None where this process is on its own."""
    if process_group is ALONE:
        return None
    if not dist.is_available() or not dist.is_initialized():
        _refuse_forgotten_init(process_group)
        return None
    group = dist.group.WORLD if process_group is None else process_group
    assert group is not None
    rank = dist.get_rank(group)
    if rank < 0:
        raise UsageError(f"rank {dist.get_rank()} is no member of the process group passed; call this on its members only")
    if dist.get_world_size(group) == 1:
        return None
    if _INHERITED and dist.group.WORLD is _INHERITED[0]:
        raise UsageError(
            f"this process was forked from rank {dist.get_rank()} of the job and cannot speak for it; do this in the "
            "process that joined the job (checkpoint.read and checkpoint.catalog need no process group, and work here)"
        )
    with _LOCK:
        if (known := _GROUPS.get(group)) is None:
            store = _shared_store()
            own = None if store is None else _own_beside(store)
            store = _own_store(group) if store is None else store
            known = _GROUPS[group] = Group(rank, dist.get_world_size(group), store, _prefix(group), own=own)
        return known


@contextmanager
def launched_group() -> Iterator[None]:
    """Join a process group of all processes that ``torchrun`` started; nothing where this one is alone, or is in one already."""
    size = os.environ.get("WORLD_SIZE", "")
    if not dist.is_available() or dist.is_initialized() or not size.isdecimal() or int(size) <= 1:
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _refuse_forgotten_init(process_group: object) -> None:
    world_size = os.environ.get("WORLD_SIZE", "")
    if process_group is not None:
        raise UsageError("a process_group was passed, but torch.distributed is not initialized: call init_process_group first")
    if world_size.isdecimal() and int(world_size) > 1:
        raise UsageError(
            f"WORLD_SIZE is {world_size}, but torch.distributed is not initialized, so {world_size} processes would write to one "
            "path: call torch.distributed.init_process_group first, or unset WORLD_SIZE if this process is on its own"
        )


def _prefix(group: dist.ProcessGroup) -> str:
    """Make a prefix of keys for this group alone: torch gives disjoint groups that are split off together the same name."""
    ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
    return f"reshard_ckpt/{group.group_name}/{hashlib.blake2s(ranks.encode(), digest_size=8).hexdigest()}"


def _shared_store() -> Any:
    """Return the job's own store, None where it cannot append; one connection for all groups, as no call of ours waits in it."""
    world = dist.group.WORLD
    assert world is not None
    if world not in _CONNECTIONS:
        _CONNECTIONS[world] = _connection()
    return _CONNECTIONS[world]


def _connection() -> Any:
    """Open a connection of our own to the store that the job was started with; None where that cannot append."""
    store: Any = None
    with suppress(ImportError, ValueError, RuntimeError):
        # Private: torch has no public way to the store of a job that it started from the environment.
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
    if store is None or not store.has_extended_api():
        return None
    # A connection has one lock: while some other thread of the job waits for a key, nobody else can use it. Before torch 2.8
    # there is no `clone`, and to share the job's connection is the lesser evil.
    if hasattr(store, "clone"):
        store = store.clone()
        store.set_timeout(timedelta(seconds=_REPLY_S))
    return store


def _own_beside(store: Any) -> OwnStore | None:
    """Make a store of the group's own beside the job's, where that may end with a rank's process group; else None."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not isinstance(store, _STORES.TCPStore):
        return None
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("MASTER_PORT") == str(store.port)
    return None if launched else OwnStore(store.host)


def _own_store(group: dist.ProcessGroup) -> Any:
    """Start a store that rank 0 of the group hosts, and connect to it. Collective, once in the life of the group."""
    hosts = dist.get_rank(group) == 0
    timeout = timedelta(seconds=_REPLY_S)
    address, store = "", None
    if hosts:
        host = _own_address(os.environ.get("MASTER_ADDR") or socket.gethostname())
        store = _STORES.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        address = f"{host} {store.port}"
    message = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8)
    message[: len(address)] = torch.tensor(list(address.encode()), dtype=torch.uint8)
    message = message.to(device_of(group))
    dist.broadcast(message, src=dist.get_global_rank(group, 0), group=group)
    if store is not None:
        return store
    host, port = bytes(message.cpu().tolist()).rstrip(b"\0").decode().split(" ")
    return _STORES.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return where the group's backend wants its tensors."""
    if any(name in dist.get_backend(group) for name in ("gloo", "mpi")):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def _own_address(towards: str) -> str:
    """Find this machine's address on the way to another: the one by which the others can reach it. No packet is sent."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")
