"""Sessions among threads of one process: each a rank with its own view of one store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch.distributed as dist

from reshard_ckpt.comm import StoreComm, _session
from reshard_ckpt.comm.group import SessionCounter

Body = Callable[[StoreComm], Any]


class Server:
    """A store for all ranks: they share one connection, as no call of a `StoreComm` waits in the store."""

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
    near: Callable[[int], Sequence[int]] = lambda rank: (rank,),
) -> list[Any]:
    """What `body` returns or raises on each rank; None on those that do not take part (not in `only`)."""
    outcomes: list[Any] = [None] * size
    ranks: Sequence[int] = sorted(range(size) if only is None else only)
    start = threading.Barrier(len(ranks))

    def run(rank: int) -> None:
        def comm_of(number: int) -> StoreComm:
            store = wrap(dist.PrefixStore(f"{name}+{number}" if number else name, server.store), rank)
            options = {"title": "save '/ckpt'", "timeout_s": timeout_s, "ranks_near": lambda: near(rank)}
            return StoreComm(store, rank, size, **options)

        start.wait()
        try:
            with _session(comm_of, SessionCounter(), 0, *call(rank)) as comm:
                outcomes[rank] = body(comm)
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
