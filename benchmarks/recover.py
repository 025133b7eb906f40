"""A recovery beside a load of everything; all figures are from one run.

``python -m benchmarks.recover --mb 235 --json bench_out/recover.json``

Weights of a transformer lie as dp 2 × tp 2 on 4 ranks over gloo, and rank 3 has lost its part. Each round has these steps:

1. ``copy``: rank 3 copies as many bytes as it lost from memory to memory.
2. ``raw``: rank 1, which has the same part, sends as many bytes to rank 3 over gloo.
3. ``recover``: `recover` from the ranks that are alive, with the comparison of all replicas.
4. ``lost part``: ranks 1 and 3 have both lost the part; `recover` reads it alone from a checkpoint on /dev/shm.
5. ``load``: all ranks load everything from that checkpoint, as after a restart.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from reshard_ckpt import checkpoint

from .live import RANKS, boxes, state
from .ranks import run_in_rounds, times_by_turns

FOLDER = Path("/dev/shm/reshard_ckpt_bench_recover")


def measure(num_bytes: int, rounds: int) -> dict[str, Any]:
    """Measure recoveries and their limits on this rank, and return the figures of all."""
    rank = dist.get_rank()
    own = state(boxes(num_bytes, 2, rank % 2), 1.0) | {"step": 5}
    lost = torch.ones(sum(shard.tensor.nbytes for shard in own["model"].values()), dtype=torch.uint8)
    place = torch.ones_like(lost)
    checkpoint.save(FOLDER, own)

    def raw() -> None:
        if rank == 1:
            dist.send(lost, 3)
        elif rank == 3:
            dist.recv(lost, 1)

    def recover(dead: tuple[int, ...]) -> dict[str, int]:
        path = FOLDER if len(dead) > 1 else None
        return dict(checkpoint.recover(own, alive=rank not in dead, step=5, path=path).bytes_from)

    steps: dict[str, Callable[[], Any]] = {
        "copy": lambda: place.copy_(lost) if rank == 3 else None,
        "raw": raw,
        "recover": lambda: recover((3,)),
        "lost part": lambda: recover((1, 3)),
        "load": lambda: checkpoint.load(FOLDER, own),
    }
    sources = {"recover": recover((3,)), "lost part": recover((1, 3))}
    times = times_by_turns(steps, rounds)
    if rank == 0:
        shutil.rmtree(FOLDER, ignore_errors=True)
    return {
        "lost_bytes": lost.numel(),
        "bytes_from": sources,
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "times": times,
    }


if __name__ == "__main__":
    run_in_rounds("benchmarks.recover", __doc__, RANKS, measure, rounds=5)
