"""Live resharding beside its limits and its alternative; all figures are ratios from one run.

``python -m benchmarks.live --mb 235 --out bench_out/live.json``

Weights of a transformer go from dp 2 × tp 2 to tp 4, on 4 ranks over gloo. In each round, one after the other:

1. ``copy``: each rank copies as many bytes as it receives from memory to memory.
2. ``raw``: one all-to-all of as many bytes between each two ranks as the reshard sends, from and to memory that is there already.
3. ``live``: a run of a kept `LiveReshard`.
4. ``once``: `reshard_live`, which compares replicas, and finds the plan and the memory of the last one.
5. ``disk``: a save to /dev/shm and a load from it.

The limits: bytes crossed at most 1.01 × those that ranks want and do not hold; ``live`` at most 1.3 × (``raw`` + ``copy``), and
0.6 × ``disk``; ``once`` at most 0.6 × ``disk``, and 2 × ``live``.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from reshard_ckpt import LocalShard, checkpoint

from .ranks import run_in_rounds, times_by_turns

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


def peak_bytes() -> int:
    """Read the most resident memory of this process so far, or since it was last reset."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def measure(num_bytes: int, rounds: int) -> dict[str, Any]:
    """Measure the reshard and its limits on this rank, and return the figures of all."""
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
    times = times_by_turns(steps, rounds)
    median = {name: statistics.median(values) for name, values in times.items()}
    if rank == 0:
        shutil.rmtree(FOLDER, ignore_errors=True)
    return {
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


if __name__ == "__main__":
    run_in_rounds("benchmarks.live", __doc__, RANKS, measure, rounds=7)
