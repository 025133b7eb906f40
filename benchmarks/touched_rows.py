"""Saves of the rows that training used, beside a full save, and loads of both: ``python -m benchmarks.touched_rows``.

One process trains a table of `--rows` × 16 fp32 by SGD. Between two saves, 4 steps use `--used` rows at random. Figures are CPU
seconds, as another process may disturb the clock, and bytes of shard files and of the catalog.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from reshard_ckpt import checkpoint

from .ranks import save_json
from .report import machine

DIM, STEPS, SAVES = 16, 4, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--used", type=int, default=40_000)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    table = nn.EmbeddingBag(arguments.rows, DIM, sparse=True, mode="sum")
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    state, rows = {"table": table, "optimizer": optimizer}, checkpoint.TouchedRows(table)
    found: list[dict[str, Any]] = []

    def timed(name: str, call: Callable[[], Any], path: Path) -> None:
        began = time.process_time()
        report = call()
        seconds, size = time.process_time() - began, (path / "catalog.msgpack").stat().st_size
        runs = len(checkpoint.catalog(path).rows.file)
        line = {"name": name, "cpu_s": seconds, "written": getattr(report, "bytes_written", 0), "catalog": size, "runs": runs}
        found.append(line)
        print(f"{name:>24}: {seconds:6.2f} s CPU, {line['written']:>12,} bytes written, catalog {size:>10,} bytes, {runs:,} runs")

    def train() -> None:
        for _ in range(STEPS):
            table(torch.randint(0, arguments.rows, (1, arguments.used // STEPS))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    try:
        timed("full save", lambda: checkpoint.save(folder / "0", state, rows=rows), folder / "0")
        for n in range(1, SAVES + 1):
            began = time.process_time()
            train()
            print(f"{STEPS} steps: {time.process_time() - began:.3f} s CPU")
            path, base = folder / str(n), folder / str(n - 1)
            timed(f"save {n} of used rows", lambda path=path, base=base: checkpoint.save(path, state, base=base, rows=rows), path)
        for name in ("0", str(SAVES)):
            checkpoint.load(folder / name, {"table": table})
            timed(f"load {name}", lambda name=name: checkpoint.load(folder / name, {"table": table}), folder / name)
    finally:
        shutil.rmtree(folder)
    if arguments.json is not None:
        save_json(arguments.json, {"machine": machine(), "rows": arguments.rows, "figures": found})


if __name__ == "__main__":
    main()
