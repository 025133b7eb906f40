"""Live resharding beside its limits and its alternative; all figures are ratios from one run.

``python -m benchmarks.live --mb 235 --out bench_out/live.json``

Weights of a transformer go from dp 2 × tp 2 to tp 4, on 4 ranks over gloo. In each round, one after the other:

1. ``copy``: each rank copies as many bytes as it receives from memory to memory.
2. ``raw``: one all-to-all of as many bytes between each two ranks as the reshard sends, from and to memory that is there already.
3. ``live``: a run of a kept `LiveReshard`.
4. ``once``: `reshard_live`, which plans anew, compares replicas, and finds the memory of the last one.
5. ``disk``: a save to /dev/shm and a load from it.

The limits: bytes crossed at most 1.01 × those that ranks want and do not hold; ``live`` at most 1.3 × (``raw`` + ``copy``), and
0.6 × ``disk``; ``once`` at most 0.6 × ``disk``, and 2 × ``live``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from reshard_ckpt import LocalShard, checkpoint

from .ranks import launch

RANKS, HIDDEN = 4, 1024
FOLDER = Path("/dev/shm/reshard_ckpt_bench_live")

Boxes = dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int]]]
"""Of each tensor: its shape, and the offsets and lengths of a part."""


def weights(num_bytes: int) -> list[tuple[str, tuple[int, int], int]]:
    """List names, shapes, and the dim that tensor parallelism cuts."""
    layer = 12 * HIDDEN * HIDDEN * 2
    out = []
    for i in range(max(1, round(num_bytes / layer))):
        out += [
            (f"layers.{i}.qkv.weight", (3 * HIDDEN, HIDDEN), 0),
            (f"layers.{i}.out.weight", (HIDDEN, HIDDEN), 1),
            (f"layers.{i}.up.weight", (4 * HIDDEN, HIDDEN), 0),
            (f"layers.{i}.down.weight", (HIDDEN, 4 * HIDDEN), 1),
        ]
    return out


def boxes(num_bytes: int, tp: int, at: int) -> Boxes:
    """Say which part of each weight the rank has that is number `at` of `tp`."""
    out: Boxes = {}
    for name, shape, dim in weights(num_bytes):
        lengths = tuple(size // tp if d == dim else size for d, size in enumerate(shape))
        offsets = tuple(at * size if d == dim else 0 for d, size in enumerate(lengths))
        out[name] = (shape, (offsets[0], offsets[1]), (lengths[0], lengths[1]))
    return out


def state(parts: Boxes, fill: float) -> dict[str, Any]:
    return {
        "model": {
            name: LocalShard(torch.full(lengths, fill, dtype=torch.bfloat16), shape, offsets)
            for name, (shape, offsets, lengths) in parts.items()
        }
    }


def overlap(one: Boxes, other: Boxes) -> int:
    """Count the bytes that two parts of all weights have in common."""
    total = 0
    for name, (_, offsets, lengths) in one.items():
        _, offsets_2, lengths_2 = other[name]
        low, high = np.maximum(offsets, offsets_2), np.minimum(np.add(offsets, lengths), np.add(offsets_2, lengths_2))
        total += 2 * int(np.maximum(high - low, 0).prod())
    return total


def traffic(num_bytes: int) -> list[list[int]]:
    """Bytes from each rank to each: what the second wants, and does not hold, from the holder in its own replica."""
    held = [boxes(num_bytes, 2, rank % 2) for rank in range(RANKS)]
    wanted = [boxes(num_bytes, RANKS, rank) for rank in range(RANKS)]
    sent = [[0] * RANKS for _ in range(RANKS)]
    for rank in range(RANKS):
        missing = overlap(wanted[rank], wanted[rank]) - overlap(wanted[rank], held[rank])
        # Both replicas of the other half hold it, and send a half of it each.
        for other in range(RANKS):
            if other % 2 != rank % 2:
                sent[other][rank] = missing // 2
    return sent


def timed(work: Callable[[], Any]) -> float:
    """Time an operation of all ranks: the slowest one's counts."""
    dist.barrier()
    began = time.perf_counter()
    work()
    took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def peak_bytes() -> int:
    """Read the most resident memory of this process so far, or since it was last reset."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def worker(num_bytes: int, rounds: int, out: Path | None) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    src, dst = state(boxes(num_bytes, 2, rank % 2), 1.0), state(boxes(num_bytes, RANKS, rank), 0.0)
    sent = traffic(num_bytes)
    sizes, received = sent[rank], [row[rank] for row in sent]
    outgoing, incoming = torch.ones(sum(sizes), dtype=torch.uint8), torch.ones(sum(received), dtype=torch.uint8)
    place = torch.ones_like(incoming)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    live = checkpoint.LiveReshard(src, dst)
    crossed = torch.tensor([live.run().bytes_read, sum(received), peak_bytes() - before])
    totals = crossed.clone()
    dist.all_reduce(totals)
    dist.all_reduce(crossed, dist.ReduceOp.MAX)

    def through_disk() -> None:
        checkpoint.save(FOLDER, src)
        checkpoint.load(FOLDER, dst)

    steps: dict[str, Callable[[], Any]] = {
        "copy": lambda: place.copy_(incoming),
        "raw": lambda: dist.all_to_all_single(incoming, outgoing, received, sizes),
        "live": live.run,
        "once": lambda: checkpoint.reshard_live(src, dst),
        "disk": through_disk,
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            times[name].append(timed(step))
    median = {name: statistics.median(values[1:]) for name, values in times.items()}  # the first round warms up
    if rank == 0:
        figures = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
            "state_bytes": sum(2 * shape[0] * shape[1] for _, shape, _ in weights(num_bytes)),
            "least_bytes": int(totals[1]),
            "crossed_over_least": float(totals[0] / totals[1]),
            "peak_bytes": int(crossed[2]),
            "seconds": median,
            "live_over_raw_and_copy": median["live"] / (median["raw"] + median["copy"]),
            "live_over_disk": median["live"] / median["disk"],
            "once_over_disk": median["once"] / median["disk"],
            "once_over_live": median["once"] / median["live"],
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
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.mb * 10**6, options.rounds, options.out)
    else:
        launch("benchmarks.live", RANKS, [arg for arg in sys.argv[1:] if arg != "--worker"], timeout_s=1200)


if __name__ == "__main__":
    main()
