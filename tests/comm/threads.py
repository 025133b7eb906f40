"""Sessions among threads of one process: each a rank with its own view of one store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch.distributed as dist

from reshard_ckpt.comm import StoreComm
from reshard_ckpt.comm.bounded import BoundedStore
from reshard_ckpt.comm.calls import call_of
from reshard_ckpt.comm.group import SessionCounter
from reshard_ckpt.comm.node import Neighbours, NodeComm
from reshard_ckpt.comm.peers import Machine
from reshard_ckpt.comm.sessions import Place

Body = Callable[[StoreComm], Any]


def run_together(function: Callable[[Any], object], items: Collection[Any]) -> None:
    """Call a function with each item in a thread of its own, named after it, and wait for all."""
    threads = [threading.Thread(target=function, args=(item,), name=f"rank {item}") for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class LastingMachine(Machine):
    """The ranks of one machine, which do not end."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(ranks[0], len(ranks))
        self._ranks = tuple(ranks)

    def ranks(self, store: Any) -> tuple[int, ...]:
        return self._ranks

    def ended(self, store: Any) -> frozenset[int]:
        return frozenset()


def nodes_of(*machines: Sequence[int]) -> list[Machine]:
    """Return the machine of each rank, given the ranks of each machine."""
    by_rank = {rank: LastingMachine(ranks) for ranks in machines for rank in ranks}
    return [by_rank[rank] for rank in sorted(by_rank)]


class Server:
    """A store for all ranks: they share one connection, beside those in which they wait."""

    def __init__(self, kind: str = "hash") -> None:
        tcp = kind == "tcp"
        self.store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if tcp else dist.HashStore()

    def num_keys(self) -> int:
        return int(self.store.num_keys())


def run_session(
    server: Server,
    size: int,
    body: Body,
    *,
    timeout_s: float = 600,
    name: str = "session",
    call: Callable[[int], tuple[str, str]] = lambda rank: ("save", "/ckpt"),
    only: Collection[int] | None = None,
    wrap: Callable[[Any, int], Any] = lambda store, rank: store,
    nodes: Sequence[Machine | None] = (None,) * 99,
) -> list[Any]:
    """What `body` returns or raises on each rank; None on those that do not take part (not in `only`)."""
    outcomes: list[Any] = [None] * size
    ranks: Sequence[int] = sorted(range(size) if only is None else only)
    start = threading.Barrier(len(ranks))

    def run(rank: int) -> None:
        def comm_of(number: int) -> StoreComm:
            store = wrap(dist.PrefixStore(f"{name}+{number}" if number else name, server.store), rank)
            near = None if nodes[rank] is None else Neighbours(nodes[rank], BoundedStore.of(server.store, timeout_s))
            return NodeComm(store, rank, size, title="save '/ckpt'", timeout_s=timeout_s, near=near, name=f"{name}+{number}")

        start.wait()
        try:
            with Place(comm_of, SessionCounter(), call_of(*call(rank))).session() as comm:
                outcomes[rank] = body(comm)
        except BaseException as error:
            outcomes[rank] = error

    run_together(run, ranks)
    return outcomes
