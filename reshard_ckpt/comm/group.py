"""The ranks of a process group, and the key-value stores in which they meet.

1. Rank 0 of a group hosts a store of this package on a free port, from the group's first session on (`Home`). It holds the keys
   of this group alone, begins empty, and ends with rank 0's process.
2. Rank 0 writes the address of that store and a nonce into the job's own store; all keys of the group begin with the nonce. Under
   ``torchrun --max-restarts`` the job's store outlives the workers, so the address may be that of a dead attempt. A rank accepts
   an address only if a store answers there that knows the nonce; else it waits for the address of the living rank 0.
3. No collective runs, with one exception: if the job has no store, or one that cannot append (`FileStore`), rank 0 hosts one in
   its place, and broadcasts the address as one small tensor.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import DistError

from ..errors import PeerError, UsageError
from .bounded import BoundedStore, StoreConnection, bounded, holding, named_failure
from .home import REPLY_S, Home, own_address

_ADDRESS_BYTES = 256

_STORES: Any = dist  # the stubs of torch.distributed leave out its stores

_LOCK = threading.Lock()
_GROUPS: WeakKeyDictionary[dist.ProcessGroup, Group] = WeakKeyDictionary()
_CONNECTIONS: WeakKeyDictionary[dist.ProcessGroup, StoreConnection | None] = WeakKeyDictionary()

_INHERITED: list[Any] = []
"""In a forked child: the parent's process group and stores, kept alive here because freeing them would hang."""


def _after_fork() -> None:
    """Set the parent's process group aside in a forked child: a second process on its connections would break them.

    The group and the stores are never freed: closing them would wait for threads that exist only in the parent.
    """
    global _LOCK
    _LOCK = threading.Lock()
    if dist.is_available() and dist.is_initialized():
        _INHERITED[:] = [dist.group.WORLD, *_GROUPS.values(), *_CONNECTIONS.values()]


os.register_at_fork(after_in_child=_after_fork)


class Missed(NamedTuple):
    """A session that this rank gave up before it reached rank 0, which is told later: its number, call and reason."""

    number: int
    call: bytes
    reason: PeerError


class SessionCounter:
    """The number of this rank's next session: the calls it has made, plus the sessions of other ranks that it skipped.

    `prefix` stands before the number in the name of each session.
    """

    def __init__(self, prefix: str = "") -> None:
        self._calls, self.prefix = count(), prefix
        self._lock = threading.Lock()
        self._skipped = 0
        self.unopened = b""
        """The last call of this rank if its session did not open, else empty."""
        self.refused = b""
        """The same, if another rank refused that session without coming to it, else empty."""
        self.late = b""
        """The last call of this rank if its session did not open because this rank came too late, else empty."""
        self.missed: deque[Missed] = deque()
        """Sessions that this rank gave up before the store existed. Rank 0 is told once it exists."""

    def take(self) -> int:
        """Return the number of a new call of this rank. Calls of all threads are numbered in one order."""
        return next(self._calls)

    def number(self, turn: int) -> int:
        """Return the session that this rank's call number `turn` belongs to: `turn` plus the sessions skipped so far."""
        return turn + self._skipped

    def skip(self) -> None:
        """Skip a session of the other ranks, so that each later call of this rank belongs to a session one number higher."""
        with self._lock:
            self._skipped += 1


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as this package uses it: rank, size, the job's own store, and the store for its sessions (`home`)."""

    rank: int
    size: int
    connection: StoreConnection
    """The connection to the job's own store, which lasts as long as the job."""
    prefix: str
    home: Home
    sessions: SessionCounter = field(default_factory=SessionCounter)

    def named(self, name: str, timeout_s: float) -> BoundedStore:
        """Return the part of the job's store below `name`. No earlier attempt of the job may have used this name.

        Raise `PeerError` if the store does not answer.
        """
        with named_failure("the ranks did not reach the job's key-value store"):
            return self.connection.open(timeout_s).below(f"{self.prefix}/{name}")


def group_of_ranks(group: dist.ProcessGroup, timeout_s: float) -> Group:
    """Return the cached `Group` of a process group; make it in the first call. This process must be a member.

    Raise `UsageError` if this process was forked from the one that joined the job, and `PeerError` if the job's store did not
    answer in time; or, if the job has none, another rank.
    """
    if _INHERITED and dist.group.WORLD is _INHERITED[0]:
        raise UsageError(
            f"this process was forked from rank {dist.get_rank()} of the job and cannot speak for it; do this in the "
            "process that joined the job (checkpoint.read and checkpoint.catalog need no process group, and work here)"
        )
    if (cached := _GROUPS.get(group)) is None:
        with named_failure("the ranks did not meet"):
            cached = holding(_LOCK, lambda: _kept_group(group, timeout_s), timeout_s, "the ranks did not meet")
    return cached


def _kept_group(group: dist.ProcessGroup, timeout_s: float) -> Group:
    if (cached := _GROUPS.get(group)) is not None:
        return cached  # another thread was faster
    rank, size, prefix = dist.get_rank(group), dist.get_world_size(group), _prefix(group)
    connection, store = _shared_connection(), _default_store()
    if connection is None:
        device = torch.empty(0, device=device_of(group)).device  # with its index: another thread may have another current device
        begin = partial(_own_store, group, device)
        own = store = bounded(begin, timeout_s, "the ranks did not spread the address of their key-value store")
        connection = StoreConnection(lambda _: own)
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = store.host if isinstance(store, _STORES.TCPStore) else _usual_host()
    cached = _GROUPS[group] = Group(rank, size, connection, prefix, Home(connection, f"{prefix}/home", rank, size, host))
    return cached


def _usual_host() -> str:
    return os.environ.get("MASTER_ADDR") or socket.gethostname()


def _prefix(group: dist.ProcessGroup) -> str:
    """Return a key prefix that no other process group uses.

    It has a hash of the ranks, as torch gives split groups the same name.
    """
    ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
    return f"reshard_ckpt/{group.group_name}/{hashlib.blake2s(ranks.encode(), digest_size=8).hexdigest()}"


def _shared_connection() -> StoreConnection | None:
    """Return the `StoreConnection` to the job's own store, which all groups share; None without a store that can append."""
    world = dist.group.WORLD
    assert world is not None
    if world not in _CONNECTIONS:
        store = _default_store()
        can_append = store is not None and store.has_extended_api()
        _CONNECTIONS[world] = StoreConnection(_connection) if can_append else None
    return _CONNECTIONS[world]


def _default_store() -> Any:
    """Return the store that the job was started with."""
    with suppress(ImportError, ValueError, RuntimeError):
        # Private: torch has no public function for the store of a job that it initialized from the environment.
        from torch.distributed.distributed_c10d import _get_default_store

        return _get_default_store()
    return None


def _connection(timeout_s: float) -> Any:
    """Open a new connection to the job's store. It ends with the process group if rank 0 hosts the store, so it is not cached."""
    store = _default_store()
    # A connection has one lock: while another thread of the job waits for a key, no other thread can use it. Before torch 2.8
    # stores have no `clone`, and the job's connection is shared.
    if store is None:
        raise DistError("the process group that it belongs to was destroyed")
    if not hasattr(store, "clone"):
        return store

    def connect() -> Any:
        client = store.clone()
        client.set_timeout(timedelta(seconds=REPLY_S))
        return client

    return bounded(connect, timeout_s, "the job's key-value store, which the launcher or rank 0 hosts, did not answer")


def _own_store(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Start a store in the process of the group's rank 0, and connect every rank to it. Collective; called once for a group."""
    hosts = dist.get_rank(group) == 0
    timeout = timedelta(seconds=REPLY_S)
    address, store = "", None
    if hosts:
        host = own_address(_usual_host())
        store = _STORES.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        address = f"{host} {store.port}"
    message = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8, device="cpu")
    message[: len(address)] = torch.tensor(list(address.encode()), dtype=torch.uint8, device="cpu")
    message = message.to(device)
    dist.broadcast(message, src=dist.get_global_rank(group, 0), group=group)
    if store is not None:
        return store
    host, port = bytes(message.cpu().tolist()).rstrip(b"\0").decode().split(" ")
    return _STORES.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device on which the group's backend takes tensors."""
    if any(name in dist.get_backend(group) for name in ("gloo", "mpi")):
        return torch.device("cpu")
    return current_accelerator() or torch.device("cpu")


def current_accelerator() -> torch.device | None:
    """Return the accelerator of this process, without an index; None if it has none."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises where there is none
        return None
