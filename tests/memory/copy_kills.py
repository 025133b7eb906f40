"""Kill one of two nodes at every instant of saves to memory, of which each has a copy on the other, and look at what is left.

``python -m tests.memory.copy_kills --out FILE`` forks each job from this process, so that torch is imported once.

1. Two ranks save steps 1 to 3, each on a node of its own, for which a folder stands. One rank is followed, and killed after each
   of its system calls below the folder of all, or at each step of filling a slot and of copying one; the other one with it.
2. The other node alone, on one rank, must load the newest checkpoint bit for bit: no older one than the last whose save had
   returned on any rank; and where one had, from memory.
3. So must both nodes, on two ranks, where the memory of the first is still there; and the next save must have its copy again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from reshard_ckpt import LocalShard
from reshard_ckpt.checkpoint import Manager, Memory
from reshard_ckpt.comm import links
from reshard_ckpt.memory.node import run_path
from tests.layouts import values_of
from tests.memory import kills
from tests.reliability.kills import end
from tests.reliability.points import main, sweep
from tests.reliability.tracer import Traced, fork

STEPS = 3
SHAPE = (1400, 1024)
CHUNK_BYTES = 1 << 20
NODES = "AB"
TIMEOUT_S = 400
"""A job takes seconds; on a busy machine, minutes."""


@cache
def whole(number: int) -> torch.Tensor:
    """The whole tensor of a step, which nothing changes."""
    return values_of(SHAPE, "I32", number)


def rows(number: int, rank: int, size: int) -> torch.Tensor:
    each = SHAPE[0] // size
    return whole(number)[rank * each : (rank + 1) * each]


def state(number: int, rank: int, size: int) -> dict[str, Any]:
    """The rows of one of so many ranks."""
    part = rows(number, rank, size).clone()
    return {"w": LocalShard(part, SHAPE, (rank * len(part), 0)), "extra": {"step": number}}


def is_state(held: dict[str, Any], number: int, rank: int, size: int) -> bool:
    return bool(held["w"].tensor.equal(rows(number, rank, size))) and held["extra"]["step"] == number


def manager_of(base: Path, node: str) -> Manager:
    return Manager(base / "run", memory=Memory(folder=str(base / node)), persist_every=2, timeout_s=TIMEOUT_S)


def on_two_ranks(function: Callable[[int], None], followed: int = 0, traced: Traced | None = None) -> int:
    """Run a function on two ranks; once the followed one has ended by a signal, or is killed, end the other one as well.

    Returns
    -------
    int
        The wait status of the followed one. That of the other must be 0, unless it was ended.
    """

    def rank_of(rank: int, listener: socket.socket) -> Callable[[], None]:
        def run() -> None:
            wait_s, fd = timedelta(seconds=TIMEOUT_S), listener.fileno() if rank == 0 else None
            store = dist.TCPStore("127.0.0.1", listener.getsockname()[1], 2, rank == 0, wait_s, master_listen_fd=fd)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=wait_s)
            links.CHUNK_BYTES = CHUNK_BYTES
            function(rank)
            dist.barrier()  # rank 0 has the store

        return run

    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        other = fork(rank_of(1 - followed, listener), timeout_s=TIMEOUT_S)
        if traced is not None:
            traced.start(rank_of(followed, listener))
            traced.finish(when_killed=lambda: end({other} - traced.others.keys()))
            assert traced.status is not None
            assert traced.status or not any(traced.others.values())
            return traced.status
        _, status = os.waitpid(fork(rank_of(followed, listener), timeout_s=TIMEOUT_S), 0)
        if status:
            end([other])
        _, others = os.waitpid(other, 0)
        assert status or not others
        return status


def job(base: Path, rank: int) -> None:
    """Save, and say after each save that it has returned."""
    with manager_of(base, NODES[rank]) as manager:
        for step in range(1, STEPS + 1):
            handle = manager.async_save(step, state(step, rank, 2))
            handle.result()
            assert handle.copies == 1
            (base.parent / f"returned-{rank}").write_text(str(step))  # not below the folder that is followed
            handle.persisted()


def look_alone(base: Path, victim: int, least: int) -> str:
    """Load on one rank, on the node that is left; returns the tier."""
    node = NODES[1 - victim]
    with manager_of(base, node) as manager:
        into = state(0, 0, 1)
        found = manager.load_latest(into)
        step = 0 if found is None else found.step
        assert least <= step <= least + 1, f"step {step} loaded, {least} had returned"
        assert found is None or is_state(into, step, 0, 1)
        assert not least or (found is not None and found.tier == "memory"), found
        manager.async_save(step + 1, state(step + 1, 0, 1)).result()
    return "" if found is None else found.tier


def look_together(base: Path, least: int, rank: int) -> None:
    """Load on two ranks, in the other order, and save once more."""
    with manager_of(base, NODES[rank]) as manager:
        into = state(0, 1 - rank, 2)
        found = manager.load_latest(into)
        step = 0 if found is None else found.step
        assert least <= step <= least + 1, f"step {step} loaded, {least} had returned"
        assert found is None or is_state(into, step, 1 - rank, 2)
        assert not least or (found is not None and found.tier != "store"), found
        handle = manager.async_save(step + 1, state(step + 1, rank, 2))
        handle.result()
        assert handle.copies == 1
        again = manager.load_latest(into)
        assert (again.step, is_state(into, step + 1, 1 - rank, 2)) == (step + 1, True)
    folder = run_path(str(base / NODES[rank]), str(base / "run"))
    assert len(list(folder.glob("*.slot"))) <= 6, list(folder.iterdir())
    assert not list(folder.glob(".*")), list(folder.iterdir())


def look(base: Path, victim: int) -> str:
    """Look at what is left, without the node of the one that was killed and with it; returns the tier."""
    least = max((int(path.read_text()) for path in base.parent.glob("returned-*")), default=0)
    aside = base.with_name("aside")
    shutil.copytree(base, aside, symlinks=True)
    shutil.rmtree(base / NODES[victim], ignore_errors=True)
    tier = look_alone(base, victim, least)
    shutil.rmtree(base)
    aside.rename(base)
    assert on_two_ranks(partial(look_together, base, least)) == 0
    return tier


@contextmanager
def killed_while_copying(point: int) -> Iterator[list[str]]:
    """As `kills.killed_at`, and also before each chunk of a copy and after the last."""
    swap = links.Links.swap
    with kills.killed_at(point) as names:
        step = kills.step_of(names, point)

        def parts(self: links.Links, outgoing: Any, incoming: Any, ends: float) -> None:
            longest = max(len(data) for data in (*outgoing.values(), *incoming.values()))
            for at in range(0, longest, CHUNK_BYTES):
                step("a part of a copy")
                out, into = ({r: data[at : at + CHUNK_BYTES] for r, data in some.items()} for some in (outgoing, incoming))
                swap(self, out, into, ends)
            step("a copy")

        links.Links.swap = parts  # type: ignore[method-assign]
        try:
            yield names
        finally:
            links.Links.swap = swap  # type: ignore[method-assign]


def after_calls(parent: Path, victim: int, every: int) -> dict[str, Any]:
    """Kill after each system call of one rank, or some."""

    def traced(kill_after: int | None = None) -> tuple[Traced, int]:
        base = kills.fresh(parent)
        child = Traced(str(base), kill_after, timeout_s=TIMEOUT_S)
        return child, on_two_ranks(partial(job, base), victim, child)

    dry, status = traced()
    assert status == 0
    tiers = sweep(dry.calls, lambda n: look(Path(traced(n)[0].base), victim), every, 1 + victim % every)
    return {"points": len(dry.calls), "tried": len(tiers), "tiers": {tier: tiers.count(tier) for tier in sorted(set(tiers))}}


def while_copying(parent: Path, victim: int, every: int) -> dict[str, Any]:
    """Kill one rank at each step of filling slots and of copying them, or some."""
    base = kills.fresh(parent)

    def dry(rank: int) -> None:
        with killed_while_copying(0) as names:
            job(base, rank)
        if rank == victim:
            (base.parent / "names").write_text(json.dumps(names))

    assert on_two_ranks(dry, victim) == 0
    points = json.loads((base.parent / "names").read_text())

    def attempt(point: int) -> tuple[str, str]:
        base = kills.fresh(parent)

        def main(rank: int) -> None:
            with killed_while_copying(point if rank == victim else 0):
                job(base, rank)

        assert os.WIFSIGNALED(on_two_ranks(main, victim))
        return points[point - 1], look(base, victim)

    found = sweep(points, attempt, every, 1 + victim % every)
    steps, tiers = sorted({step for step, _ in found}), [tier for _, tier in found]
    return {"points": len(points), "tried": len(found), "steps": steps, "memory": tiers.count("memory")}


def run(folder: Path, args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    for number in range(STEPS + 2):
        whole(number)  # once for all processes, which are forks of this one
    for victim in args.victims:
        yield f"copying {victim}", while_copying(folder / "job", victim, args.every)
    for victim in args.victims:
        yield f"calls {victim}", after_calls(folder / "job", victim, args.every)


if __name__ == "__main__":
    which = {"type": int, "nargs": "+", "default": [0, 1], "help": "which ranks to kill, one after the other"}
    sys.exit(main(__doc__, run, "/dev/shm", victims=which))
