"""A training job that saves every step, is killed, and goes on: a script for ``torchrun --max-restarts``.

Each attempt notes in the file ``said`` where it begins, and what is committed. Workers are killed by themselves, in the middle of
a save, each time once: a file says that it has happened. So is a whole node: the agent of this worker, whose process is named in
``AGENT``, and the worker. The other agents miss it at once: their rendezvous, whose port is in ``RENDEZVOUS``, is told.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.comm import peers
from reshard_ckpt.storage.local import LocalWriter

ROWS = 8
ALONE_S = 900
"""After which a job ends that its test has left behind."""


def expected(step: int) -> torch.Tensor:
    """Return the whole tensor as of a step: each value depends on both its place and the step."""
    return torch.arange(ROWS * 5.0).reshape(ROWS, 5) + 1000 * step


def share(rank: int, size: int, step: int) -> LocalShard:
    """Return this rank's rows as of a step."""
    first, end = ROWS * rank // size, ROWS * (rank + 1) // size
    return LocalShard(expected(step)[first:end].clone(), (ROWS, 5), (first, 0))


def once(mark: Path) -> bool:
    """Return whether this is the first time that anybody asks."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def die_while_writing(agent: int | None = None) -> None:
    """Let this process be killed in the middle of its next shard file; before it, its agent."""

    def die(writer: Any) -> None:
        if agent is not None:
            os.kill(agent, signal.SIGKILL)
            with suppress(Exception):  # then the others miss the node later
                be_missed()
        os.kill(os.getpid(), signal.SIGKILL)

    LocalWriter.finish = die  # type: ignore[method-assign]


def be_missed() -> None:
    """Make this node's last sign of life an old one, once its agent is gone.

    The other agents look for signs of minutes, as they must on a machine that is busy. What they look at is private to torch.
    """
    store = dist.TCPStore("127.0.0.1", int(os.environ["RENDEZVOUS"]), is_master=False)
    rendezvous = C10dRendezvousBackend(store, os.environ["TORCHELASTIC_RUN_ID"])
    is_told = False
    while not is_told:
        data, token = rendezvous.get_state()  # type: ignore[misc]
        state = pickle.loads(data)
        node = next(node for node, rank in state.participants.items() if rank == int(os.environ["GROUP_RANK"]))
        while peers._began(node.pid):  # it may still say that it lives
            time.sleep(0.01)
        state.last_heartbeats[node] -= timedelta(days=1)
        _, _, is_told = rendezvous.set_state(pickle.dumps(state), token)  # type: ignore[misc]


def say(root: Path, line: str) -> None:
    """Note a line, after the time, in one write, so that it is whole whoever else writes."""
    fd = os.open(root / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, f"{time.time()} {line}\n".encode())
    os.close(fd)


def see_nobody() -> None:
    """Be as on a machine of one's own: not to see when the processes of other ranks end."""
    peers._machine = lambda: str(os.getpid())


def main(folder: str, num_steps: int, kills: dict[int, int], num_ranks: int, leaves: int) -> None:
    """Train for some steps more than the last attempt that was not killed.

    Parameters
    ----------
    kills
        At which steps which ranks are killed, once each.
    num_ranks
        A job of another size counts no step, and goes on until others have joined, which restarts it; or until a node has left.
    leaves
        At which step the node leaves that is told to; 0 for none.
    """
    root = Path(folder)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    with checkpoint.Manager(root / "run", finish_on_sigterm=True) as manager:
        state = {"w": share(rank, size, 0), "step": 0, "counted": 0}
        loaded = manager.load_latest(state)
        step, counted = state["step"], state["counted"]
        assert step == (0 if loaded is None else loaded.step)
        assert torch.equal(state["w"].tensor, share(rank, size, step).tensor)
        if rank == 0:
            say(root, f"begins after {counted} on {size}")
        give_up_at = time.monotonic() + ALONE_S
        while counted < num_steps:
            assert time.monotonic() < give_up_at, "nobody joined"
            step, counted = step + 1, counted + (size == num_ranks or (root / "left").exists())
            if rank == kills.get(counted) and once(root / f"killed-{counted}"):
                die_while_writing()
            if leaves and counted == leaves and "AGENT" in os.environ and once(root / "left"):
                die_while_writing(int(os.environ["AGENT"]))
            manager.async_save(step, {"w": share(rank, size, step), "step": step, "counted": counted}).result()
            if rank == 0:
                say(root, f"saved {counted} on {size}")
    dist.destroy_process_group()
    if rank == 0:
        say(root, "done")


if __name__ == "__main__":
    if "APART" in os.environ:
        see_nobody()
    pairs = (pair.split(":") for pair in sys.argv[3].split(","))
    main(sys.argv[1], int(sys.argv[2]), {int(step): int(rank) for step, rank in pairs}, *map(int, sys.argv[4:6]))
