"""The fixed cost of a load: CPU seconds of 4 ranks that load 176 small tensors: ``python -m benchmarks.fixed_load``.

Beside it, as the floor, a session of as many messages that says nothing. Each figure is the sum over ranks of the least CPU
seconds of a rank, because other work on the machine delays one rank or another in most rounds.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from reshard_ckpt import checkpoint
from reshard_ckpt.comm import open_session

from .ranks import Ranks, cpu_s, launch
from .state import Layout, Weight, build

RANKS, LAYERS, DIM = 4, 7, 32


def weights() -> list[Weight]:
    """Return 44 parameters; each has three tensors of an optimizer."""
    of_layer = {
        "norm1": (DIM,),
        "qkv": (3 * DIM, DIM),
        "proj": (DIM, DIM),
        "norm2": (DIM,),
        "up": (4 * DIM, DIM),
        "down": (DIM, DIM),
    }
    found = [Weight("embed.weight", (64, DIM), 0), Weight("norm.weight", (DIM,), None)]
    for i in range(LAYERS):
        found += [Weight(f"layers.{i}.{n}.weight", shape, None if len(shape) == 1 else 0) for n, shape in of_layer.items()]
    return found


def work(folder: Path, rounds: int) -> None:
    ranks = Ranks()
    state = build(weights(), Layout(dp=2, tp=RANKS // 2), ranks.rank)
    state.fill()
    checkpoint.save(folder, state.modules)

    def session() -> None:
        with open_session("nothing", "") as comm:
            for _ in range(2):
                comm.broadcast(b"" if comm.rank == 0 else None)
                comm.gather(b"")

    operations: dict[str, Callable[[], Any]] = {"load": lambda: checkpoint.load(folder, state.modules), "session": session}
    least = dict.fromkeys(operations, 1e9)
    for number in range(rounds + 1):
        for name, operation in operations.items():
            dist.barrier()
            began = cpu_s()
            operation()
            if number:
                least[name] = min(least[name], cpu_s() - began)
    of_ranks = ranks.gather(least)
    if ranks.rank == 0:
        for name in operations:
            print(f"{name}: {sum(one[name] for one in of_ranks) * 1e3:.1f} ms of CPU", flush=True)
    ranks.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.folder, options.rounds)
        return
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="reshard_ckpt_fixed_"))
    try:
        launch("benchmarks.fixed_load", RANKS, ["--folder", str(folder), "--rounds", str(options.rounds)], timeout_s=600)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
