"""Offline work shared by 1, 2 and 4 processes: the CPU seconds of all of them, and of the busiest.

``python -m benchmarks.offline_ranks --gb 1 --json bench_out/offline_ranks.json``

A checkpoint of four ranks (`benchmarks.offline_reshard`) is verified, resharded to dp 2 × tp 4, compared with the result, and
converted to safetensors; and a checkpoint that refers to all its files is compacted. Four processes start once. In each round
one of them works alone, two of them work, and all four, each round in another order. CPU seconds are counted from a barrier on,
so the imports are left out; where processes outnumber cores they tell more than the clock. Figures are minima over the rounds.

The first rows are the limits: each process reads and hashes an even share of the files in plain Python, or also writes it to a
file of its own. They lose only what shared cores and caches cost.

1. *Of linear*: the CPU seconds of one process, divided by the sum of those of N. Below 1, processes repeat work.
2. *Busiest*: the CPU seconds of the busiest process, divided by an even share of the sum. Above 1, the shares are uneven.
3. *Read*: the bytes that all processes read, divided by those that one process reads.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from reshard_ckpt import checkpoint
from reshard_ckpt.format.catalog import encode_catalog
from reshard_ckpt.format.files import CATALOG_KEY, new_save_id
from reshard_ckpt.storage import open_storage

from .offline_reshard import HIDDEN, TARGET, files_below, make_source
from .ranks import Ranks, bytes_in_calls, cpu_s, launch, save_json

PROCESSES = (1, 2, 4)
WINDOW_BYTES, BLOCK_BYTES = 8 << 20, 128 << 10
BYTES_OF_LAYER = 12 * HIDDEN**2 * 10
"""Weights in bf16 and two moments in fp32."""


def read_and_hash(folder: Path, rank: int, size: int, copy: Path | None = None) -> None:
    """Read and hash an even share of each file, a window at a time, with nothing of the library; write it to `copy` too."""
    buffer = memoryview(bytearray(WINDOW_BYTES))
    copied = os.open(os.devnull if copy is None else f"{copy}.{rank}", os.O_WRONLY | os.O_CREAT)
    for path in files_below(folder):
        num_windows = path.stat().st_size // WINDOW_BYTES
        with path.open("rb", buffering=0) as file:
            file.seek(rank * num_windows // size * WINDOW_BYTES)
            for _ in range(rank * num_windows // size, (rank + 1) * num_windows // size):
                file.readinto(buffer)
                for low in range(0, WINDOW_BYTES, BLOCK_BYTES):
                    xxhash.xxh3_64_intdigest(buffer[low : low + BLOCK_BYTES])
                os.write(copied, buffer)
    os.close(copied)


def make_borrower(source: Path, folder: Path) -> None:
    """Write a checkpoint that refers to all files of another one beside it."""
    catalog, beside = checkpoint.catalog(source), f"../{source.name}"
    files = (
        replace(file, key=f"{beside}/{file.key}", digests_key=f"{beside}/{file.digests_key}", checkpoint=beside)
        for file in catalog.files
    )
    with open_storage(folder) as storage:
        storage.publish(CATALOG_KEY, encode_catalog(replace(catalog, files=tuple(files), save_id=new_save_id())))


def be_worker(folder: Path, rounds: int) -> None:
    """Do a share of all work, round by round; rank 0 leaves the figures of all ranks in a file."""
    ranks = Ranks()
    source, made = folder / "source", folder / "made"
    groups = {n: dist.new_group(list(range(n))) for n in PROCESSES}
    measured: dict[str, dict[int, list[tuple[float, list[float], int]]]] = {}
    for number in range(rounds + 1):
        for n in PROCESSES[number % 3 :] + PROCESSES[: number % 3]:
            group = groups[n]
            os.environ["LOCAL_WORLD_SIZE"] = str(n)  # the processes that share the cores now
            calls: dict[str, Callable[[], Any]] = {
                "read and hash": partial(read_and_hash, source, ranks.rank, n),
                "read, hash and write": partial(read_and_hash, source, ranks.rank, n, made / "copy"),
                "verify": partial(checkpoint.verify, source, process_group=group),
                "convert": partial(checkpoint.convert, source, made, root="", process_group=group),
                "compact": partial(checkpoint.compact, made, process_group=group),
                "reshard": partial(checkpoint.reshard, source, made, mesh=TARGET, process_group=group),
                "diff": partial(checkpoint.diff, source, made, values=True, process_group=group),
            }
            for work, call in calls.items():
                if work not in ("verify", "diff") and ranks.rank == 0:
                    shutil.rmtree(made, ignore_errors=True)
                    if work == "compact":
                        make_borrower(source, made)
                    elif work.startswith("read"):
                        made.mkdir()
                dist.barrier()
                began, read_before, before = time.perf_counter(), bytes_in_calls()[0], cpu_s()
                found = call() if ranks.rank < n else None
                used, wall_s = cpu_s() - before, time.perf_counter() - began
                assert not isinstance(found, checkpoint.VerifyReport) or found.ok
                assert not isinstance(found, checkpoint.Diff) or found.equal
                used_by_all, read_by_all = zip(*ranks.gather((used, bytes_in_calls()[0] - read_before))[:n], strict=True)
                measured.setdefault(work, {}).setdefault(n, []).append((wall_s, list(used_by_all), sum(read_by_all)))
    if ranks.rank == 0:
        save_json(folder / "measured.json", measured)
    ranks.close()


def summary(by_processes: dict[str, list[tuple[float, list[float], int]]]) -> dict[str, dict[str, float]]:
    """Return the minima over all rounds but the first, which is cold."""
    found: dict[str, dict[str, float]] = {}
    for n, samples in sorted(by_processes.items()):
        warm = samples[1:]
        found[n] = {
            "cpu_s": min(sum(used) for _, used, _ in warm),
            "busiest": min(max(used) * len(used) / sum(used) for _, used, _ in warm),
            "read_bytes": min(num_bytes for _, _, num_bytes in warm),
            "wall_s": min(wall_s for wall_s, _, _ in warm),
        }
        found[n]["of_linear"] = found["1"]["cpu_s"] / found[n]["cpu_s"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        be_worker(options.worker, options.rounds)
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="reshard_ckpt_offline_") as name:
        folder = Path(name)
        make_source(folder / "source", max(1, round(options.gb * 1e9 / BYTES_OF_LAYER)))
        num_bytes = checkpoint.catalog(folder / "source").file_bytes
        launch("benchmarks.offline_ranks", max(PROCESSES), [name, "--rounds", str(options.rounds)], timeout_s=600)
        measured = json.loads((folder / "measured.json").read_text())
    result = {work: summary(by_processes) for work, by_processes in measured.items()}
    machine = f"{os.cpu_count()} cores, torch {torch.__version__}"
    print(f"{num_bytes / 1e9:.2f} GB, {options.rounds} rounds, {machine}, load average {os.getloadavg()[0]:.1f}\n")
    print("| | processes | CPU s of all | of linear | busiest ÷ even share | read | wall s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for work, figures in result.items():
        for n, of in figures.items():
            read = of["read_bytes"] / figures["1"]["read_bytes"]
            cells = f"{of['cpu_s']:.2f} | {of['of_linear']:.2f} | {of['busiest']:.2f} | {read:.2f} | {of['wall_s']:.2f}"
            print(f"| {work} | {n} | {cells} |")
    if options.json:
        save_json(options.json, {"bytes": num_bytes, "rounds": options.rounds, "machine": machine, **result})


if __name__ == "__main__":
    main()
