"""What each optimisation of the engine saves: it is switched off in turn, in the operations that it is meant for.

``python -m benchmarks.switched_off`` runs one process in ``/dev/shm``. The figures are the CPU seconds, and the time, of an
operation without the optimisation ÷ those with it: minima of rounds in which both run by turns. Design note 015 has a table of
them.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from reshard_ckpt import FlatShard, LocalShard, checkpoint
from reshard_ckpt.core.geometry import columns, tiling
from reshard_ckpt.core.planning import load_plan, read_plan
from reshard_ckpt.engine.checking import statistics
from reshard_ckpt.engine.common import files, mover
from reshard_ckpt.engine.loading import read, stream
from reshard_ckpt.engine.resharding import reshard
from reshard_ckpt.storage.local import LocalStorage
from reshard_ckpt.storage.protocol import DISK

from .ranks import cpu_s, save_json
from .report import machine

MB = 1 << 20
Case = Callable[[Path], Callable[[], Any]]
"""Makes what an operation needs in a folder, and returns the operation."""


def _into(folder: Path, saved: dict[str, torch.Tensor], wanted: dict[str, Any]) -> Callable[[], Any]:
    checkpoint.save(folder, saved)
    return lambda: checkpoint.load(folder, wanted, strict=False)


def same_layout(folder: Path) -> Callable[[], Any]:
    state = {f"w{i}": torch.rand(64 * MB // 4 // 16) for i in range(16)}
    return _into(folder, state, {name: torch.zeros_like(one) for name, one in state.items()})


def small_tensors(folder: Path) -> Callable[[], Any]:
    state = {f"layers.{i}.weight": torch.rand(32, 256) for i in range(1500)}
    return _into(folder, state, {name: torch.zeros_like(one) for name, one in state.items()})


def flat_ranges(folder: Path) -> Callable[[], Any]:
    """All but the ends of a matrix, as one run of its elements, in windows that no row fits."""
    whole = torch.rand(4096, 5000)
    flat = FlatShard(torch.zeros(whole.numel() - 2000), tuple(whole.shape), 1000)
    return _into(folder, {"w": whole}, {"w": flat})


def half_rows(width: int) -> Case:
    """Half of each row of `width` floats."""

    def case(folder: Path) -> Callable[[], Any]:
        whole = torch.rand(64 * MB // 4 // width, width)
        half = LocalShard(torch.zeros(len(whole), width // 2), tuple(whole.shape), (0, width // 4))
        return _into(folder, {"w": whole}, {"w": half})

    return case


def new_memory(folder: Path) -> Callable[[], Any]:
    """Tensors that are larger than what the allocator keeps of freed memory."""
    checkpoint.save(folder, {f"w{i}": torch.rand(64 * MB // 4) for i in range(2)})
    return lambda: checkpoint.read(folder)


def used_rows(folder: Path) -> Callable[[], Any]:
    """A table, whose used rows three incremental saves have written."""
    table = nn.EmbeddingBag(1_000_000, 16, sparse=True, mode="sum")
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    state, rows = {"table": table, "optimizer": optimizer}, checkpoint.TouchedRows(table)
    checkpoint.save(folder / "0", state, rows=rows)
    for number in range(1, 4):
        table(torch.randint(0, len(table.weight), (1, 10_000))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save(folder / str(number), state, base=folder / str(number - 1), rows=rows)
    return lambda: checkpoint.load(folder / "3", {"table": table})


def offline(folder: Path) -> Callable[[], Any]:
    """Matrices cut into columns for another mesh."""
    checkpoint.save(folder / "src", {f"w{i}": torch.rand(1024, 1024) for i in range(16)})

    def operation() -> None:
        checkpoint.reshard(folder / "src", folder / "dst", mesh={"tp": 2}, rules={"w*": {"tp": "shard(1)"}})
        shutil.rmtree(folder / "dst")

    return operation


def numbers(folder: Path) -> Callable[[], Any]:
    checkpoint.save(folder, {f"w{i}": torch.rand(1024, 1024) for i in range(32)})
    return lambda: checkpoint.inspect(folder, stats=True)


def kept_live(shape: tuple[int, int], num: int) -> Case:
    """A kept live reshard of matrices; half of each row of them moves."""

    def case(folder: Path) -> Callable[[], Any]:
        src = {f"w{i}": torch.rand(shape) for i in range(num)}
        dst = {f"w{i}": torch.zeros(shape[0], 2 * shape[1])[:, : shape[1]] for i in range(num)}
        return checkpoint.LiveReshard(src, dst).run

    return case


def one_shot_live(folder: Path) -> Callable[[], Any]:
    """The same, of many small matrices, with a plan of its own each time."""
    src = {f"w{i}": torch.rand(32, 256) for i in range(1500)}
    dst = {f"w{i}": torch.zeros(32, 512)[:, :256] for i in range(1500)}
    return lambda: checkpoint.reshard_live(src, dst)


CASES: dict[str, Case] = {
    "same layout": same_layout,
    "half of each 8 MB row": half_rows(2 * MB),
    "half of each 8 KB row": half_rows(2048),
    "half of each 256 B row": half_rows(64),
    "1,500 tensors of 32 KB": small_tensors,
    "a flat range": flat_ranges,
    "into new memory": new_memory,
    "rows of a table": used_rows,
    "offline reshard": offline,
    "statistics": numbers,
    "live, 8 of 4 MB": kept_live((1024, 1024), 8),
    "live, 1,500 of 32 KB": kept_live((32, 256), 1500),
    "one-shot live, 1,500 of 32 KB": one_shot_live,
}


def _no_read_ahead(reader: stream.RunReader, windows: Any) -> Iterator[stream.Window]:
    yield from (fill() for batch in reader.batches(windows) for fill in batch)


def _only_if_empty(columns: Any) -> bool:
    return len(columns[0]) == 0


_HUGE = 1 << 60
_LOADS = (
    "same layout",
    "half of each 8 MB row",
    "half of each 8 KB row",
    "half of each 256 B row",
    "1,500 tensors of 32 KB",
    "a flat range",
    "rows of a table",
)
_LIVE = ("live, 8 of 4 MB", "live, 1,500 of 32 KB", "one-shot live, 1,500 of 32 KB")
_STREAMS = ("offline reshard", "statistics")

SWITCHES: dict[str, tuple[list[tuple[Any, str, Any]], tuple[str, ...]]] = {
    "reads over gaps": ([(read_plan, "NEAR_BYTES", 0)], _LOADS),
    "reads straight into place": ([(read_plan, "LAND_BYTES", _HUGE)], _LOADS),
    "windows that stay in the cache": ([(LocalStorage, "hints", replace(DISK, read_bytes=8 * MB))], _LOADS),
    "pause of the garbage collector": ([(gc, "disable", lambda: None)], _LOADS),
    "copies of short runs at once": ([(read, "FEW_COPIES", _HUGE)], ("rows of a table",)),
    "large pages for new memory": ([(read, "LARGE_BYTES", _HUGE)], ("into new memory",)),
    "planning in batches of pairs": ([(load_plan, "MAX_PAIRS", _HUGE)], ("rows of a table",)),
    "sorted rows are not sorted again": ([(columns, "_in_order", _only_if_empty)], ("rows of a table", *_LIVE)),
    "a sweep for crowded tensors": ([(tiling, "CROWDED", _HUGE)], ("rows of a table",)),
    "reading ahead": ([(statistics, "read_ahead", _no_read_ahead), (reshard, "read_ahead", _no_read_ahead)], _STREAMS),
    "plans for many windows": ([(stream, "BATCH_BYTES", 1)], _STREAMS),
    "windows that stay in the cache, streamed": (
        [(statistics, "WINDOW_BYTES", 64 * MB), (reshard, "WINDOW_BYTES", 64 * MB), (stream, "BATCH_BYTES", 256 * MB)],
        _STREAMS,
    ),
    "digests kept": ([(files, "DIGESTS_BYTES", 0)], _STREAMS),
    "views kept": ([(mover, "MAX_VIEWS", 0)], _LIVE),
    "small boxes by numpy": ([(mover, "LARGE_BYTES", 0)], _LIVE),
    "large boxes by torch": ([(mover, "LARGE_BYTES", _HUGE)], _LIVE),
}
"""What is patched to switch an optimisation off, and the cases that it is meant for."""


def ratios(
    operation: Callable[[], Any], patches: list[tuple[Any, str, Any]], rounds: int, make: Callable[[], Any] | None
) -> list[float]:
    """Return the least CPU seconds of an operation with these patches ÷ those without, by turns; and the same of its time.

    With `make`, the operation is made anew under the patches, because it keeps what it has planned.
    """
    least = [[1e9, 1e9], [1e9, 1e9]]
    made = [operation, operation]
    for number in range(-1, rounds):
        for is_off in (0, 1):
            with ExitStack() as stack:
                for owner, name, value in patches if is_off else []:
                    stack.enter_context(patch.object(owner, name, value))
                if number < 0:
                    made[is_off] = make() if make else operation
                    continue
                cpu, wall = cpu_s(), time.perf_counter()
                made[is_off]()
                took = cpu_s() - cpu, time.perf_counter() - wall
                least[is_off] = list(map(min, least[is_off], took))
    return [off / on for on, off in zip(*least, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=list(SWITCHES), help="names of optimisations")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in options.only}
    for case, make in CASES.items():
        chosen = [name for name in options.only if case in SWITCHES[name][1]]
        if not chosen:
            continue
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="reshard_ckpt_off_") as folder:
            operation = make(Path(folder))
            operation()
            for name in chosen:
                again = (lambda: make(Path(folder))) if case.startswith("live") else None  # noqa: B023
                cpu, wall = found[name][case] = ratios(operation, SWITCHES[name][0], options.rounds, again)
                print(f"{name:>42} | {case:<24} | CPU {cpu:5.2f} | time {wall:5.2f}", flush=True)
    if options.json is not None:
        save_json(options.json, {"machine": machine(), "rounds": options.rounds, "ratios of CPU and time": found})


if __name__ == "__main__":
    main()
