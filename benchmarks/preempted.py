"""The cost of a read of `manager.preempted`: ``python -m benchmarks.preempted --ranks 4``.

Every rank reads it in a loop with nothing else, before anybody is told to stop; then one rank gets SIGTERM, and the time of the
one read that waits for the agreement is taken too. Without collectives between the reads, ranks are as far apart as they can be.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time

import torch.distributed as dist

from reshard_ckpt.checkpoint import Manager
from tests.launch import run_ranks


def reads(root: str, num_reads: int) -> tuple[float, float, float, int]:
    """Measure reads: seconds on average and at most, of the longest after the signal, and the read at which this rank stops."""
    with Manager(root) as manager:
        _ = manager.preempted
        dist.barrier()
        times = []
        for _ in range(num_reads):
            began = time.perf_counter()
            _ = manager.preempted
            times.append(time.perf_counter() - began)
        dist.barrier()
        if dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        longest, count, stops = 0.0, num_reads + 1, False
        while not stops:
            began = time.perf_counter()
            stops = manager.preempted
            longest, count = max(longest, time.perf_counter() - began), count + 1
    return sum(times) / len(times), max(times), longest, count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--reads", type=int, default=100_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        from benchmarks import preempted  # ranks find the function by the name of its module, which here is __main__

        found = run_ranks(preempted.reads, options.ranks, root, options.reads)
    print(f"{options.ranks} ranks on {os.cpu_count()} cores, {options.reads:,} reads each")
    for rank, (mean, most, longest, count) in enumerate(found):
        print(f"rank {rank}: {mean * 1e6:.2f} µs a read, {most * 1e3:.2f} ms at most; the agreeing one {longest * 1e3:.1f} ms")
        assert count == found[0][3], "all ranks stop at the same read"
    return 0


if __name__ == "__main__":
    sys.exit(main())
