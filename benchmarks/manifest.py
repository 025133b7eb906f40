"""The cost of a SHA-256 manifest: saves with and without one, beside the rates at which this machine hashes and writes.

python -m benchmarks.manifest --mib 512 --folder /tmp
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from reshard_ckpt import checkpoint


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def plain_write(path: Path, data: memoryview) -> None:
    """Return the physical limit: the same bytes, written and synced by nobody's library."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="manifest-", dir=options.folder))
    weights = torch.randint(0, 256, (options.mib << 20,), dtype=torch.uint8)
    state = {"w": weights}
    calls: dict[str, Callable[[], object]] = {
        "hashlib.sha256 alone": lambda: hashlib.sha256(weights.numpy().data).digest(),
        "write and fsync alone": lambda: plain_write(folder / "plain", weights.numpy().data),
        "save": lambda: checkpoint.save(folder / "without", state),
        "save, sha256=True": lambda: checkpoint.save(folder / "with", state, sha256=True),
        "verify": lambda: checkpoint.verify(folder / "with"),
        "verify, sha256=True": lambda: checkpoint.verify(folder / "with", sha256=True),
    }
    try:
        times = {name: [] for name in calls}
        for _ in range(options.rounds):  # by turns, so that a busy moment of the machine falls on all alike
            for name, call in calls.items():
                times[name].append(seconds(call))
    finally:
        shutil.rmtree(folder)
    print(f"{options.mib} MiB, median of {options.rounds} rounds, {os.cpu_count()} cores")
    for name, taken in times.items():
        median = statistics.median(taken)
        print(f"{name:24} {median:7.2f} s   {options.mib * 1.048576 / median:7.0f} MB/s")


if __name__ == "__main__":
    main()
