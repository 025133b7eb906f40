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

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from reshard_ckpt import checkpoint

from .live import RANKS, boxes, state, timed
from .ranks import launch

FOLDER = Path("/dev/shm/reshard_ckpt_bench_recover")


def worker(num_bytes: int, rounds: int, out: Path | None) -> None:
    dist.init_process_group("gloo")
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
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            times[name].append(timed(step))
    if rank == 0:
        figures = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
            "lost_bytes": lost.numel(),
            "bytes_from": sources,
            "seconds": {name: statistics.median(values[1:]) for name, values in times.items()},  # the first round warms up
            "times": times,
        }
        shutil.rmtree(FOLDER, ignore_errors=True)
        text = json.dumps(figures, indent=1)
        print(text, flush=True)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=235)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.mb * 10**6, options.rounds, options.json)
    else:
        launch("benchmarks.recover", RANKS, [arg for arg in sys.argv[1:] if arg != "--worker"], timeout_s=600)


if __name__ == "__main__":
    main()
