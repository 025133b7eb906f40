"""The time and memory of an offline reshard, beside ``cp`` and fsync of the same bytes.

``python -m benchmarks.offline_reshard --gb 4 --out bench_out/offline_reshard.json``

A checkpoint of a transformer with AdamW (bf16 and two fp32 moments), as four FSDP ranks save it, is resharded to dp 2 × tp 4:
weights are cut along other dims, and all files of the source feed files of the result. In each round ``cp`` and the reshards run
one after the other, each followed by fsync; a reshard runs in a process of its own, and asks the kernel for its peak memory. With
``--cold`` the source is dropped from the page cache before each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.ranks import end_with
from reshard_ckpt import checkpoint
from reshard_ckpt.core.catalog.specs import AxisPlacement, Mesh, Replication, StateLink, TensorSpec, box_piece, row_major_strides
from reshard_ckpt.core.planning.save_plan import plan_save
from reshard_ckpt.engine.common.progress import Recorder
from reshard_ckpt.engine.saving.commit import publish, read_previous
from reshard_ckpt.engine.saving.local_shards import describe_local
from reshard_ckpt.engine.saving.messages import (
    decode_assignment,
    decode_metadata,
    decode_receipts,
    encode_assignments,
    encode_metadata,
    encode_receipt,
)
from reshard_ckpt.engine.saving.options import SaveContents
from reshard_ckpt.engine.saving.replicas import all_fingerprints
from reshard_ckpt.engine.saving.write import chunks_in_place, write_files
from reshard_ckpt.format.dtypes import TORCH_DTYPES
from reshard_ckpt.format.files import new_save_id
from reshard_ckpt.storage import open_storage

RANKS = 4
TARGET = {"dp": 2, "tp": 4}
HIDDEN = 2048
RSS_LIMIT_MIB = 512


def weights(layers: int) -> Iterator[tuple[str, tuple[int, int], int]]:
    """Name, shape, and the dim that tensor parallelism cuts."""
    for i in range(layers):
        yield f"layers.{i}.qkv.weight", (3 * HIDDEN, HIDDEN), 0
        yield f"layers.{i}.out.weight", (HIDDEN, HIDDEN), 1
        yield f"layers.{i}.up.weight", (4 * HIDDEN, HIDDEN), 0
        yield f"layers.{i}.down.weight", (HIDDEN, 4 * HIDDEN), 1


def make_source(folder: Path, layers: int) -> None:
    """Save the checkpoint, rank by rank in this process; every tensor is another part of one buffer of noise."""
    generator = np.random.default_rng(0)
    noise = torch.from_numpy(generator.integers(0, 256, 192 << 20, dtype=np.uint8))
    storage = open_storage(folder)
    placement = (AxisPlacement("dp", "shard", 0), AxisPlacement("tp", "shard", 0))
    local_shards = []
    for rank in range(RANKS):
        held = []
        for number, (name, shape, tp) in enumerate(weights(layers)):
            rows = shape[0] // RANKS
            piece = box_piece((rank * rows, 0), (rows, shape[1]), 0, row_major_strides((rows, shape[1])))
            placed = (placement[0], AxisPlacement("tp", "shard", tp))
            for key, dtype in (("", "BF16"), (".exp_avg", "F32"), (".exp_avg_sq", "F32")):
                full = f"optimizer.state.{name}{key}" if key else f"model.{name}"
                size = rows * shape[1] * TORCH_DTYPES[dtype].itemsize
                begin = (number * 7919 + rank * 104729 + len(key)) * 4096 % (noise.numel() - size)
                memory = noise[begin : begin + size].view(TORCH_DTYPES[dtype])
                link = StateLink("optimizer", name, key[1:], f"model.{name}") if key else None
                held.append((TensorSpec(full, dtype, shape, (piece,), Replication.DECLARED, placed, link=link), memory))
        local_shards.append(describe_local(held, (), Mesh(("dp", "tp"), (RANKS, 1)), rank))
    tensors, rows, _ = zip(*(encode_metadata(one.local_metadata) for one in local_shards), strict=True)
    plan = plan_save(decode_metadata(tensors, rows))
    save_id, before = new_save_id(), read_previous(storage)
    assignments = [decode_assignment(data, save_id) for data in encode_assignments(plan)]
    receipts = [
        write_files(storage, chunks_in_place(h, a, rank, all_fingerprints(h, a.checks)), Recorder())
        for rank, (h, a) in enumerate(zip(local_shards, assignments, strict=True))
    ]
    publish(storage, SaveContents(plan, (), save_id, before=before), decode_receipts(list(map(encode_receipt, receipts))))


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def drop_cache(folder: Path) -> None:
    for path in files_below(folder):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def cpu_s() -> float:
    """Measure the CPU seconds of this process and of the children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def copy(source: Path, target: Path) -> dict[str, float]:
    """Copy with ``cp -r`` and an fsync of each file."""
    began, cpu = time.perf_counter(), cpu_s()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for path in files_below(target):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    return {"seconds": time.perf_counter() - began, "cpu_s": cpu_s() - cpu}


def reshard(source: Path, target: Path, *, verify: bool) -> dict[str, float]:
    """Reshard in a process of its own: seconds of the call, of the whole process, and its peak memory."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.offline_reshard", "--child", str(source), str(target), str(int(verify))]
    ending = partial(end_with, os.getpid())
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, preexec_fn=ending).stdout
    return {**json.loads(out), "process_s": time.perf_counter() - began}


def peak_rss_mib() -> float:
    """Measure the peak memory of this program alone: `getrusage` also counts the time before it was executed."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def child(source: str, target: str, verify: str) -> None:
    before = peak_rss_mib()
    first, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    report = checkpoint.reshard(source, target, mesh=TARGET, verify=verify == "1")
    seconds = time.perf_counter() - began
    now = resource.getrusage(resource.RUSAGE_SELF)
    figures = {
        "seconds": seconds,
        "cpu_s": now.ru_utime + now.ru_stime - first.ru_utime - first.ru_stime,
        "peak_rss_mib": peak_rss_mib(),
        "rss_of_imports_mib": before,
        "bytes_read": report.bytes_read,
        "bytes_written": report.bytes_written,
    }
    sys.stdout.write(json.dumps(figures))


def measure(folder: Path, num_bytes: int, rounds: int, *, cold: bool) -> dict[str, Any]:
    layers = max(round(num_bytes / (12 * HIDDEN**2 * 10)), 1)
    source, target = folder / "source", folder / "target"
    make_source(source, layers)
    size = sum(path.stat().st_size for path in files_below(source))
    measured: dict[str, list[Any]] = {"cp": [], "reshard": [], "reshard --no-verify": []}
    for n in range(rounds):
        for what in measured:
            drop_cache(source) if cold else None
            if what == "cp":
                measured[what].append(copy(source, target))
            else:
                measured[what].append(reshard(source, target, verify=what == "reshard"))
            if n == 0 and what == "reshard":
                assert checkpoint.verify(target).ok
            shutil.rmtree(target)
            os.sync()
    return {"bytes": size, "layers": layers, "rounds": rounds, "cold": cold, "measured": measured}


def table(result: dict[str, Any]) -> str:
    measured = result["measured"]
    base = min(run["seconds"] for run in measured["cp"])
    lines = ["| | seconds | ÷ cp + fsync | CPU s | peak RSS |", "| --- | ---: | ---: | ---: | ---: |"]
    for what, runs in measured.items():
        best = min(runs, key=lambda run: run["seconds"])
        cpu = min(run["cpu_s"] for run in runs)
        peak = f"{max(run['peak_rss_mib'] for run in runs):.0f} MiB" if what != "cp" else ""
        lines.append(f"| {what} | {best['seconds']:.2f} | {best['seconds'] / base:.2f}× | {cpu:.1f} | {peak} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="drop the source from the page cache before each run")
    parser.add_argument(
        "--folder", type=Path, default=Path("bench_out/offline_reshard"), help="where to write; removed afterwards"
    )
    parser.add_argument("--out", type=Path, help="JSON of this and of earlier runs")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    shutil.rmtree(options.folder, ignore_errors=True)
    load = os.getloadavg()[0]
    try:
        result = measure(options.folder, int(options.gb * 1e9), options.rounds, cold=options.cold)
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)
    result |= {"load_average": load, "machine": platform.platform(), "cpus": os.cpu_count(), "torch": torch.__version__}
    result["command"] = "python -m benchmarks.offline_reshard " + " ".join(sys.argv[1:])
    print(f"{result['bytes'] / 1e9:.2f} GB, {result['rounds']} rounds, load average {load:.1f}\n{table(result)}")
    worst = max(run["peak_rss_mib"] for runs in result["measured"].values() for run in runs if "peak_rss_mib" in run)
    print(f"peak memory {worst:.0f} MiB: {'within' if worst < RSS_LIMIT_MIB else 'OVER'} {RSS_LIMIT_MIB} MiB")
    if options.out:
        earlier = json.loads(options.out.read_text()) if options.out.exists() else []
        options.out.write_text(json.dumps([*earlier, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
