"""Several ranks as threads of one process, each of which makes the public calls that a real rank would make.

Every thread is told that it is a rank of one group over one store, and has what a process has once: its line of saves and its
kept plans. So sessions, deadlines and agreement are the real ones; nothing of torch.distributed is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

import reshard_ckpt.comm.sessions as comm_module
from reshard_ckpt.checkpoint import loading, saving
from reshard_ckpt.comm.bounded import BoundedStore, StoreConnection
from reshard_ckpt.comm.group import Group
from reshard_ckpt.comm.node import Neighbours
from reshard_ckpt.comm.peers import Machine
from reshard_ckpt.comm.sessions import current_group
from reshard_ckpt.engine.saving import agreement, async_save
from reshard_ckpt.engine.saving.handle import SaveQueue
from tests.comm.threads import run_together

LOCAL = threading.local()


class OfRank:
    """Stands for one object of each rank."""

    def __init__(self, name: str, alone: Any) -> None:
        self._name, self._alone = name, alone

    def __getattr__(self, attribute: str) -> Any:
        return getattr(getattr(LOCAL, self._name, self._alone), attribute)


class SettledHome:
    """A home in a store that all ranks have already."""

    def __init__(self, connection: StoreConnection, rank: int, size: int) -> None:
        self._connection, self._machine = connection, Machine(rank, size)
        self._machine.arrive(connection.open(600).below("home"))

    def session(self, name: str, *, title: str, timeout_s: float) -> tuple[BoundedStore, Neighbours]:
        root = self._connection.open(timeout_s).below("home")
        return root.below(name), Neighbours(self._machine, root)


class Job:
    """Ranks that live as long as this: each remembers its calls."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.store = dist.HashStore()
        connections = [StoreConnection(lambda _: self.store) for _ in range(size)]
        self._groups = [
            Group(rank, size, connection, "job", SettledHome(connection, rank, size))
            for rank, connection in enumerate(connections)
        ]
        self._keys_of_group = int(self.store.num_keys())  # who is there, as long as it lasts
        self._saves = [SaveQueue() for _ in range(size)]
        self._plans = [agreement.PlanCache() for _ in range(size)]

    def run(self, call: Callable[[int], Any], only: Sequence[int] | None = None) -> list[Any]:
        """What the call returns or raises on each rank, given its number; None on ranks that do not make it."""
        outcomes: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            LOCAL.rank = rank
            LOCAL.group, LOCAL.saves, LOCAL.plans = self._groups[rank], self._saves[rank], self._plans[rank]
            try:
                outcomes[rank] = call(rank)
            except BaseException as error:
                outcomes[rank] = error

        ranks = range(self.size) if only is None else only
        run_together(one, ranks)
        return outcomes

    def num_keys(self) -> int:
        return int(self.store.num_keys()) - self._keys_of_group


@contextmanager
def jobs() -> Iterator[type[Job]]:
    """Within it, threads of a `Job` are its ranks."""
    saves = OfRank("saves", saving.SAVES)

    def group_of_thread(process_group: Any, timeout_s: float) -> Any:
        return getattr(LOCAL, "group", None) or current_group(process_group, timeout_s)

    with (
        mock.patch.object(comm_module, "current_group", group_of_thread),
        mock.patch.object(saving, "SAVES", saves),
        mock.patch.object(async_save, "SAVES", saves),
        mock.patch.object(loading, "SAVES", saves),
        mock.patch.object(agreement.agree, "__defaults__", (OfRank("plans", agreement.PLANS),)),
    ):
        yield Job
