"""The time to open a folder of DCP, and to read the metadata of a save, beside the time that DCP takes to unpickle its own.

python -m benchmarks.dcp_folder --tensors 50000
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as torch_dcp

import reshard_ckpt.dcp as dcp
from reshard_ckpt import checkpoint

from .report import machine


def best_us(call: Callable[[], object], num: int, rounds: int) -> float:
    """Return the least time of some rounds, in microseconds for each of `num`."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times) / num * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    state = {"model": {f"layers.{i // 100}.block.{i % 100}.weight": torch.ones(2, 3) for i in range(args.tensors)}}
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = Path(folder, "theirs"), Path(folder, "ours")
        torch_dcp.save(state, storage_writer=torch_dcp.FileSystemWriter(theirs, sync_files=False))
        reader = torch_dcp.FileSystemReader(theirs)
        saved = dcp.save(state, checkpoint_id=ours)
        figures = {
            "DCP unpickles .metadata": best_us(reader.read_metadata, args.tensors, args.rounds),
            "checkpoint.catalog of the folder": best_us(lambda: checkpoint.catalog(theirs), args.tensors, args.rounds),
            "looking at what dcp.save returned": best_us(lambda: saved.state_dict_metadata, args.tensors, 1),
        }
    print(machine())
    for what, us in figures.items():
        print(f"{what}: {us:.1f} µs a tensor, {args.tensors} tensors of one chunk")


if __name__ == "__main__":
    main()
