"""A training job that saves every step, is killed, and goes on: a script for ``torchrun --max-restarts``.

Each attempt prints where it begins, and what is committed, in brackets: what others print may stand on the same line. Workers are
killed by themselves, in the middle of a save, each time once: a file says that it has happened.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.storage.local import LocalWriter

ROWS = 8
ALONE_S = 900


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


def die_while_writing() -> None:
    """Let this process be killed in the middle of its next shard file."""

    def die(writer: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    LocalWriter.finish = die  # type: ignore[method-assign]


def main(folder: str, num_steps: int, kills: dict[int, int], num_ranks: int) -> None:
    """Train for some steps more than the last attempt that was not killed.

    Parameters
    ----------
    kills
        At which steps which ranks are killed, once each.
    num_ranks
        A job of fewer ranks goes on, and counts no step: until more have joined, which restarts it, or for `ALONE_S`.
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
            print(f"<begins after {counted} on {size}>", flush=True)
        give_up_at = time.monotonic() + ALONE_S
        while counted < num_steps:
            assert time.monotonic() < give_up_at, "nobody joined"
            step, counted = step + 1, counted + (size == num_ranks)
            if rank == kills.get(counted) and once(root / f"killed-{counted}"):
                die_while_writing()
            manager.async_save(step, {"w": share(rank, size, step), "step": step, "counted": counted}).result()
            if rank == 0:
                print(f"<saved {counted} on {size}>", flush=True)
    dist.destroy_process_group()
    if rank == 0:
        print("<done>", flush=True)


if __name__ == "__main__":
    pairs = (pair.split(":") for pair in sys.argv[3].split(","))
    main(sys.argv[1], int(sys.argv[2]), {int(step): int(rank) for step, rank in pairs}, int(sys.argv[4]))
