"""A training job that saves every step, is killed, and goes on: a script for ``torchrun --max-restarts``.

Each attempt prints where it begins, and what is committed. Workers are killed by themselves, in the middle of a save, each time
once: a file says that it has happened.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.storage.local import LocalWriter

ROWS = 8


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


def die_while_writing(root: Path) -> None:
    """Let this process be killed once its next shard file is written."""

    def die(writer: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    LocalWriter.finish = die  # type: ignore[method-assign]


def main(folder: str, num_steps: int, kills: dict[int, int], until_more: bool) -> None:
    """Train up to a step.

    Parameters
    ----------
    kills
        At which steps which ranks are killed, once each.
    until_more
        A job of fewer than four ranks goes on for ever: until more have joined, which restarts it.
    """
    root = Path(folder)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    with checkpoint.Manager(root / "run", finish_on_sigterm=True) as manager:
        state = {"w": share(rank, size, 0), "step": 0}
        loaded = manager.load_latest(state)
        step = 0 if loaded is None else loaded.step
        assert state["step"] == step
        assert torch.equal(state["w"].tensor, share(rank, size, step).tensor)
        if rank == 0:
            print(f"begins after {step} on {size}", flush=True)
        while step < num_steps or (until_more and size < 4):
            step += 1
            if rank == kills.get(step) and (size == 4 or not until_more) and once(root / f"killed-{step}"):
                die_while_writing(root)
            manager.async_save(step, {"w": share(rank, size, step), "step": step}).result()
            if rank == 0:
                print(f"saved {step} on {size}", flush=True)
    dist.destroy_process_group()
    print("done", flush=True)


if __name__ == "__main__":
    pairs = (pair.split(":") for pair in sys.argv[3].split(","))
    main(sys.argv[1], int(sys.argv[2]), {int(step): int(rank) for step, rank in pairs}, sys.argv[4:] == ["until-more"])
