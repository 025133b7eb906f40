"""Compare counts and CPU seconds of saves and loads with the committed ones of `guard.json`: ``make bench-guard``.

One process, one rank, an FSDP2 model with AdamW in ``/dev/shm``; ``python -m benchmarks.guard --write`` commits new figures.

1. *Calls*: functions that Python and C enter in the calling thread, for each tensor more (288 tensors beside 144), and for none.
   They are nearly exact, where seconds on a shared machine differ by half.
2. *Reads, writes, bytes*: of the process, as the kernel counts them, for 126 MB in 60 tensors.
3. *Requests*: of a rank above 0 to the job's store, of 8 ranks, by `benchmarks.control`.
4. *CPU*: seconds of a save ÷ those of a raw write and hash of the same bytes, and of a load ÷ those of a raw read and hash; the
   least of rounds by turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from reshard_ckpt import checkpoint

from .limits import as_bytes, read, write_durably
from .load_steps import hash_blocks
from .ranks import cpu_s

COMMITTED = Path(__file__).with_suffix(".json")

MARGINS = {"calls": 1.03, "reads": 1.02, "writes": 1.05, "bytes": 1.005, "requests": 1.15, "CPU": 1.4}
"""How far a figure may lie above the committed one, by the word that its name begins with."""

ROUNDS = 9
"""Of which the least CPU seconds are taken."""


def training_state(layers: int, width: int) -> dict[str, Any]:
    """Make a model under FSDP2, and its AdamW after one step: 12 small or large tensors a layer."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "extra": {"step": 1}}


def calls_of(operation: Callable[[], Any]) -> int:
    """Count the functions that an operation enters in this thread."""
    count = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    operation()  # the second time nothing is imported or planned anew
    sys.setprofile(note)
    try:
        operation()
    finally:
        sys.setprofile(None)
    return count


def io_of(operation: Callable[[], Any]) -> dict[str, int]:
    """Count the reads, the writes and their bytes of an operation."""

    def counted() -> dict[str, int]:
        lines = Path("/proc/self/io").read_text().splitlines()
        return {name: int(value) for name, value in (line.split(": ") for line in lines)}

    operation()
    before, between = counted(), counted()  # what the count itself reads
    operation()
    after = counted()
    return {name: after[name] - 2 * between[name] + before[name] for name in after}


def calls(folder: Path) -> dict[str, float]:
    """Count the calls of a save and a load, for each tensor and fixed."""
    found = {}
    few, many = training_state(12, 8), training_state(24, 8)
    for what, call in (("save", checkpoint.save), ("load", checkpoint.load)):
        small, large = (calls_of(partial(call, folder / name, state)) for name, state in (("few", few), ("many", many)))
        found[f"calls a tensor, {what}"] = (large - small) / 144
        found[f"calls, {what}"] = 2 * small - large
    return found


def bytes_and_cpu(folder: Path) -> dict[str, float]:
    """Count the reads and writes of a save and a load of 126 MB, and compare their CPU seconds with those of raw calls."""
    state = training_state(5, 1024)
    entries = state["optimizer"].state.values()
    tensors = [*state["model"].parameters(), *(value for entry in entries for value in entry.values())]
    memory = [as_bytes(getattr(tensor, "_local_tensor", tensor).detach()) for tensor in tensors]
    total, raw, ours = sum(map(len, memory)), folder / "raw", folder / "ours"

    def raw_write() -> None:
        raw.unlink(missing_ok=True)
        write_durably(raw, memory, total)
        for view in memory:
            hash_blocks(view)

    operations: dict[str, Callable[[], Any]] = {
        "raw write": raw_write,
        "save": lambda: checkpoint.save(ours, state),
        "raw read": lambda: read([raw], memory, 1 << 20, hash_blocks),
        "load": lambda: checkpoint.load(ours, state),
    }
    least: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, operation in operations.items():
            began = cpu_s()
            operation()
            least[name] = min(least.get(name, 1e9), cpu_s() - began)
    saved, loaded = io_of(operations["save"]), io_of(operations["load"])
    return {
        "bytes written ÷ the state's": saved["wchar"] / total,
        "bytes read ÷ the state's": loaded["rchar"] / total,
        "writes of a save": saved["syscw"],
        "reads of a save": saved["syscr"],
        "reads of a load": loaded["syscr"],
        "CPU of a save ÷ raw write and hash": least["save"] / least["raw write"],
        "CPU of a load ÷ raw read and hash": least["load"] / least["raw read"],
    }


def requests(folder: Path) -> dict[str, float]:
    """Count the requests of a save that is not a job's first: a first one polls, so its count differs from run to run."""
    out = folder / "control.json"
    command = [sys.executable, "-m", "benchmarks.control", "--ranks", "8", "--write-s", "0.2", "--json", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = json.loads(out.read_text())
    return {"requests of a rank, save": found["later"]["requests"]}


def above(found: Mapping[str, float], committed: Mapping[str, float]) -> list[str]:
    """Return the figures that lie further above the committed ones than their margin, or that nobody committed."""
    return [name for name, value in found.items() if value > committed.get(name, -1.0) * MARGINS[name.split()[0].strip(",")]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="write guard.json anew")
    write = parser.parse_args().write
    began = time.monotonic()
    os.environ["LOCAL_WORLD_SIZE"] = str(os.cpu_count())  # one reading thread: several would share the counts of calls
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="reshard_ckpt_guard_") as name:
        found = calls(Path(name)) | bytes_and_cpu(Path(name)) | requests(Path(name))
    dist.destroy_process_group()
    committed = {} if write else json.loads(COMMITTED.read_text())
    wrong = [] if write else above(found, committed)
    for figure, value in found.items():
        print(f"{figure:<38} {value:>10.4g} {committed.get(figure, value):>10.4g} {'ABOVE' if figure in wrong else ''}")
    print(f"{time.monotonic() - began:.0f} s")
    if write:
        COMMITTED.write_text(
            json.dumps({figure: round(value, 4) for figure, value in found.items()}, indent=1, ensure_ascii=False)
        )
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
