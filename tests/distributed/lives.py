"""Jobs whose processes outlive a failure: a killed one is replaced by a spare, or left out, and the others go on as they are.

`run_lives(live, groups, *args)` forks all processes from a warm one, and then forms one process group after the other, as a
launcher that restarts training in place does. `groups[g]` lists the processes of group g by rank. Each process of a group calls
``live(life, g, *args)``. A process may be killed in it, and the call of another one may then raise: both leave the group.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from tests.distributed.outcomes import Outcome
from tests.launch import run_ranks

KILLED = "killed"


@dataclass
class Life:
    """One process. `kept` is the memory that it keeps from group to group."""

    number: int
    kept: dict[str, Any] = field(default_factory=dict)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def run_lives(live: Callable[..., Any], groups: Sequence[Sequence[int]], *args: Any, timeout_s: float = 600) -> list[list[Any]]:
    """Return for each group the result of each rank: the value, the error as an `Outcome`, or `KILLED`."""
    (answers,) = run_ranks(_supervise, 1, live, groups, args, init=False, timeout_s=timeout_s)
    return answers


def _supervise(live: Callable[..., Any], groups: Sequence[Sequence[int]], args: tuple[Any, ...]) -> list[list[Any]]:
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe() for _ in range(1 + max(number for group in groups for number in group))]
    # All are forked before there is a store: its threads must not be copied.
    processes = [fork.Process(target=_be, args=(number, pipes, live, args)) for number in range(len(pipes))]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers: list[list[Any]] = []
    for group, numbers in enumerate(groups):
        for rank, number in enumerate(numbers):
            pipes[number][0].send((group, rank, len(numbers), store.port))
        answers.append([_answer(pipes[number][0]) for number in numbers])
    for process in processes:
        process.kill()
        process.join()
    return answers


def _answer(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return KILLED


def _be(number: int, pipes: Sequence[tuple[Any, Any]], live: Callable[..., Any], args: tuple[Any, ...]) -> None:
    for other, (theirs, mine) in enumerate(pipes):
        theirs.close()
        if other != number:
            mine.close()
    # The environment of the warm process says that it is a job of one rank.
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")] + ["RANK", "WORLD_SIZE", "LOCAL_RANK"]:
        os.environ.pop(name, None)
    pipe, life = pipes[number][1], Life(number)
    while True:
        group, rank, size, port = pipe.recv()
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=dist.PrefixStore(f"group {group}", store), rank=rank, world_size=size)
        try:
            answer = live(life, group, *args)
        except Exception as error:
            answer = Outcome(type(error).__name__, str(error))
            _hang_up(port)
        dist.destroy_process_group()
        pipe.send(answer)


def _hang_up(store_port: int) -> None:
    """End all connections to other ranks, but the ones to the store, so that nobody waits for this one.

    While something holds a group of gloo, as modules of FSDP do, destroying it ends none of them.
    """
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername()[1] != store_port:
                one.shutdown(socket.SHUT_RDWR)
