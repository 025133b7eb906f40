"""What incremental saves cost and save, beside full ones: ``python -m benchmarks.incremental``.

One process holds a state of `--gb` in tensors of 64 MiB. Each round runs, in the same order: a raw write of the bytes; one pass
of XXH3 over them; a full save; the same asynchronously; and for each case a change and an incremental save of it:

* *a tenth*: every tenth tensor changes; *rows*: one row of 4 KiB in every 1,280 KiB, so that a tenth of all blocks holds one;
* *nothing* and *all*: no tensor, and every one.

Then a chain of ten incremental saves of a tenth each, another tenth each time, and a load of the last one beside a load of a full
save. A figure is the minimum over the rounds, in seconds of the clock and of CPU; ratios are of CPU seconds unless they say wall.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash

from reshard_ckpt import checkpoint

from .ranks import cpu_s, save_json
from .report import machine

TENSOR_BYTES = 64 << 20
ROW = 1024
CHAIN = 10


class Rounds:
    """The state, the folder, and the minimum of each figure so far: wall seconds, CPU seconds."""

    def __init__(self, gb: float, folder: Path) -> None:
        num = max(CHAIN, round(gb * 1e9 / TENSOR_BYTES))
        self.state = {f"w{i}": torch.full((TENSOR_BYTES // 4 // ROW, ROW), float(i)) for i in range(num)}
        self.folder, self.num = folder, 0
        self.num_bytes = sum(tensor.nbytes for tensor in self.state.values())
        self.times: dict[str, tuple[float, float]] = defaultdict(lambda: (float("inf"), float("inf")))
        self.counts: dict[str, int] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        os.sync()
        begin, cpu = time.perf_counter(), cpu_s()
        yield
        wall, used = self.times[name]
        self.times[name] = min(wall, time.perf_counter() - begin), min(used, cpu_s() - cpu)

    def path(self) -> Path:
        self.num += 1
        return self.folder / f"step_{self.num}"

    def raw(self) -> None:
        with self.timed("raw write"), open(self.folder / "raw", "wb", buffering=0) as file:
            for tensor in self.state.values():
                file.write(memoryview(tensor.numpy()).cast("B"))
            os.fsync(file.fileno())
        with self.timed("hash"):
            for tensor in self.state.values():
                view = memoryview(tensor.numpy()).cast("B")
                for at in range(0, len(view), 128 << 10):
                    xxhash.xxh3_64_intdigest(view[at : at + (128 << 10)])

    def save(self, name: str, change: Callable[[], int], base: Path | None) -> Path:
        """Save synchronously and in the background, each after a change; note the changed bytes and the written ones."""
        for how in ("", ", asynchronous"):
            changed, path = change(), self.path()
            with self.timed(name + how):
                if how:
                    began = time.perf_counter()
                    handle = checkpoint.async_save(path, self.state, base=base)
                    stall = time.perf_counter() - began
                    report = handle.result()
                    self.times[f"stall of {name}"] = min(self.times[f"stall of {name}"], (stall, stall))
                else:
                    report = checkpoint.save(path, self.state, base=base)
            self.counts[f"changed, {name}"], self.counts[f"written, {name}"] = changed, report.bytes_written
            base = path if base is not None else None
        return path

    def tenth(self, first: int) -> int:
        chosen = [tensor for i, tensor in enumerate(self.state.values()) if i % CHAIN == first]
        for tensor in chosen:
            tensor.add_(1)
        return sum(tensor.nbytes for tensor in chosen)

    def rows(self) -> int:
        changed = 0
        for tensor in self.state.values():
            rows = tensor[::320]
            rows.add_(1)
            changed += rows.numel() * 4
        return changed

    def all(self) -> int:
        return sum(self.tenth(first) for first in range(CHAIN))

    def run(self) -> None:
        self.raw()
        full = self.save("full save", lambda: 0, None)
        base = self.save("a tenth changed", lambda: self.tenth(0), full)
        base = self.save("rows changed", self.rows, base)
        base = self.save("nothing changed", lambda: 0, base)
        self.save("all changed", self.all, base)
        chain = full
        for first in range(CHAIN):
            self.tenth(first)
            checkpoint.save(path := self.path(), self.state, base=chain)
            chain = path
        target = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        for name, path in (("load of a full save", full), (f"load after {CHAIN} incremental saves", chain)):
            for _ in range(2):
                with self.timed(name):
                    checkpoint.load(path, target)
        assert all(torch.equal(target[name], tensor) for name, tensor in self.state.items())
        self.counts["files after the chain"] = len(checkpoint.catalog(chain).files)
        for path in self.folder.glob("step_*"):
            shutil.rmtree(path)

    def figures(self) -> dict[str, Any]:
        cpu = {name: used for name, (_, used) in self.times.items()}
        wall = {name: clock for name, (clock, _) in self.times.items()}
        load = f"load after {CHAIN} incremental saves"
        return {
            "written ÷ changed, a tenth": self.counts["written, a tenth changed"] / self.counts["changed, a tenth changed"],
            "blocks written ÷ blocks changed, rows": self.counts["written, rows changed"] / (self.num_bytes / CHAIN),
            "save of a tenth ÷ full save, wall": wall["a tenth changed"] / wall["full save"],
            "save of a tenth ÷ full save": cpu["a tenth changed"] / cpu["full save"],
            "save of nothing ÷ hash": cpu["nothing changed"] / cpu["hash"],
            "save of all ÷ full save": cpu["all changed"] / cpu["full save"],
            "stall of a tenth ÷ stall of a full save, wall": wall["stall of a tenth changed"] / wall["stall of full save"],
            "load after the chain ÷ load of a full save": cpu[load] / cpu["load of a full save"],
            "load after the chain ÷ load of a full save, wall": wall[load] / wall["load of a full save"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to save; a temporary folder by default")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="reshard-ckpt-bench-", dir=args.folder))
    try:
        rounds = Rounds(args.gb, folder)
        for _ in range(args.rounds):
            rounds.run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(machine())
    for name, (wall, used) in rounds.times.items():
        print(f"{name:40} {wall:8.3f} s {used:8.3f} CPU s")
    for name, count in rounds.counts.items():
        print(f"{name:40} {count:,}")
    for name, figure in rounds.figures().items():
        print(f"{name:50} {figure:6.2f}")
    if args.json:
        save_json(args.json, {"times": rounds.times, "counts": rounds.counts, "figures": rounds.figures()})


if __name__ == "__main__":
    main()
