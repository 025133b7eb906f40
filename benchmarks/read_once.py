"""``load(read_once=True)`` beside its limits and a plain load; all figures are ratios from one run.

``python -m benchmarks.read_once --mb 235 --out bench_out/read_once.json``

Weights of a transformer that were saved as tp 4 are loaded on 4 ranks over gloo as dp 2 × tp 2, and as four copies. In each
round, one after the other, from files in /dev/shm:

1. ``read``: each rank reads a quarter of the files with the system's own calls: each byte is read once.
2. ``raw``: one all-to-all of as many bytes as ranks want and do not read themselves, from and to memory that is there already.
3. ``copy``: each rank copies as many bytes as it receives.
4. ``once``: the load, which also verifies what it reads; ``unverified`` does not.
5. ``plain``: a load in which each rank reads what it wants.

The limit: bytes crossed at most 1.05 × those that ranks want and do not read themselves.
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
from reshard_ckpt.engine.common.rounds import Rounds

from . import limits
from .live import RANKS, boxes, overlap, state
from .ranks import run_in_rounds, times_by_turns

FOLDER = Path("/dev/shm/reshard_ckpt_bench_once")
CASES = {"dp 2 × tp 2": 2, "four copies": 1}
"""How many ranks share a copy of the weights."""


def count_crossed() -> list[int]:
    """Note from now on how many bytes this rank receives in each exchange."""
    crossed: list[int] = []
    run = Rounds.run

    def counted(self: Rounds, *args: Any) -> None:
        traffic = self._traffic
        crossed.append(sum(sum(traffic.sizes(number)[1]) for number in range(traffic.num_rounds)))
        run(self, *args)

    Rounds.run = counted  # type: ignore[method-assign]
    return crossed


def measure(num_bytes: int, tp: int, rounds: int, crossed: list[int]) -> dict[str, Any]:
    """Measure loads of a layout; the same figures on all ranks."""
    rank = dist.get_rank()
    wanted = boxes(num_bytes, tp, rank % tp)
    whole = boxes(num_bytes, 1, 0)
    own = sorted(FOLDER.rglob("*.safetensors"))[rank]
    least = RANKS * overlap(wanted, wanted) - overlap(whole, whole)  # of several ranks that want a byte, one has read it
    each = least // RANKS // (RANKS - 1)
    sizes = [0 if other == rank else each for other in range(RANKS)]
    file = torch.ones(own.stat().st_size, dtype=torch.uint8)
    outgoing, incoming = torch.ones(sum(sizes), dtype=torch.uint8), torch.ones(sum(sizes), dtype=torch.uint8)
    place, into = torch.ones_like(incoming), state(wanted, 0.0)
    steps: dict[str, Callable[[], Any]] = {
        "read": lambda: limits.read([own], [limits.as_bytes(file)]),
        "raw": lambda: dist.all_to_all_single(incoming, outgoing, sizes, sizes),
        "copy": lambda: place.copy_(incoming),
        "once": lambda: checkpoint.load(FOLDER, into, read_once=True),
        "unverified": lambda: checkpoint.load(FOLDER, into, read_once=True, verify=False),
        "plain": lambda: checkpoint.load(FOLDER, into),
    }
    crossed.clear()
    times = times_by_turns(steps, rounds)
    came = torch.tensor(crossed[0])
    dist.all_reduce(came)
    median = {name: statistics.median(values) for name, values in times.items()}
    raw = median["read"] + median["raw"] + median["copy"]
    return {
        "least_bytes": least,
        "crossed_over_least": float(came / least),
        "seconds": median,
        "once_over_read_raw_and_copy": median["once"] / raw,
        "unverified_over_read_raw_and_copy": median["unverified"] / raw,
        "once_over_plain": median["once"] / median["plain"],
    }


def measure_cases(num_bytes: int, rounds: int) -> dict[str, Any]:
    """Measure the loads of each layout, and return the figures by case."""
    rank = dist.get_rank()
    crossed = count_crossed()
    checkpoint.save(FOLDER, state(boxes(num_bytes, RANKS, rank), 1.0))
    found = {name: measure(num_bytes, tp, rounds, crossed) for name, tp in CASES.items()}
    if rank == 0:
        shutil.rmtree(FOLDER, ignore_errors=True)
    return found


if __name__ == "__main__":
    run_in_rounds("benchmarks.read_once", __doc__, RANKS, measure_cases, rounds=7)
