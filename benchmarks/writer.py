"""A thread or a process as the writer in the background: what each takes from a training loop beside it.

The same work, hashing and writing a staged buffer durably as a save does, runs once in a thread of the training process, and once
in another process that shares the buffer's memory; in turn with a loop beside which nothing runs. Two kinds of step: *small*, of
many tiny operations, so that the interpreter is busy all the time, which is the worst case for a thread; and *large*, of few
matrix products.

    python -m benchmarks.writer --rounds 7
"""

from __future__ import annotations

import argparse
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from reshard_ckpt.engine.saving.write import WRITE_BYTES
from reshard_ckpt.format.files import BlockHasher
from reshard_ckpt.storage.local import LocalStorage

from .ranks import save_json
from .report import machine

MODES = ("nothing", "thread", "process")


def write(buffer: torch.Tensor, folder: str, key: str) -> float:
    """Hash and write a buffer as a save does; the seconds that it took."""
    begin = time.perf_counter()
    data, hasher = buffer.numpy().data, BlockHasher()
    with LocalStorage(folder) as storage, storage.create(key) as writer:
        for at in range(0, len(data), WRITE_BYTES):
            hasher.update(data[at : at + WRITE_BYTES])
            writer.write(data[at : at + WRITE_BYTES])
        hasher.finish()
    return time.perf_counter() - begin


def serve(buffer: torch.Tensor, folder: str, pipe: Any) -> None:
    """Return the process that writes when it is told a key."""
    torch.set_num_threads(1)
    while (key := pipe.recv()) is not None:
        pipe.send(write(buffer, folder, key))


class Training:
    """A model whose step is made of many small operations, or of few large ones."""

    def __init__(self, width: int, depth: int, batch: int) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.data = torch.randn(batch, width)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.data).square().mean().backward()
        self.optimizer.step()


def measure(training: Training, steps: int, start: Callable[[], Callable[[], float]]) -> tuple[float, float]:
    """Return the seconds of the loop, and of the writing beside it."""
    begin = time.perf_counter()
    finish = start()
    for _ in range(steps):
        training.step()
    return time.perf_counter() - begin, finish()


def in_thread(buffer: torch.Tensor, folder: str, key: str) -> Callable[[], float]:
    took: list[float] = []
    thread = threading.Thread(target=lambda: took.append(write(buffer, folder, key)))
    thread.start()

    def finish() -> float:
        thread.join()
        return took[0]

    return finish


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run rounds of all modes in turn, for both kinds of step."""
    torch.set_num_threads(1)
    buffer = torch.randint(0, 255, (options.megabytes << 20,), dtype=torch.uint8).share_memory_()
    folder = str(Path(options.folder).resolve())
    ours, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=serve, args=(buffer, folder, theirs), daemon=True)
    process.start()
    out: dict[str, Any] = {"machine": machine(), "megabytes": options.megabytes, "rounds": options.rounds}
    number = 0
    for name, training in (("small", Training(32, 24, 8)), ("large", Training(1024, 4, 256))):
        for _ in range(5):
            training.step()
        begin = time.perf_counter()
        for _ in range(10):
            training.step()
        steps = max(round(options.seconds / ((time.perf_counter() - begin) / 10)), 1)
        rows: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
        for _ in range(options.rounds):
            for mode in MODES:
                number += 1
                key = f"{number}.bin"
                rows[mode].append(measure(training, steps, starter(mode, buffer, folder, key, ours)))
                shutil.rmtree(folder, ignore_errors=True)
        least = {mode: min(total for total, _ in rows[mode]) for mode in MODES}
        out[name] = {
            mode: {"slowdown": least[mode] / least["nothing"] - 1, "write_s": min(w for _, w in rows[mode])} for mode in MODES[1:]
        }
    ours.send(None)
    process.join()
    return out


def starter(mode: str, buffer: torch.Tensor, folder: str, key: str, pipe: Any) -> Callable[[], Callable[[], float]]:
    """Return what begins the writing; it returns what waits for its end."""
    if mode == "nothing":
        return lambda: lambda: 0.0
    if mode == "thread":
        return lambda: in_thread(buffer, folder, key)

    def start() -> Callable[[], float]:
        pipe.send(key)
        return lambda: float(pipe.recv())

    return start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a loop beside which nothing runs")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", default="bench_out/scratch_writer")
    parser.add_argument("--out", default="bench_out/writer.json")
    options = parser.parse_args()
    try:
        result = run(options)
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)
    save_json(Path(options.out), result)
    for kind in ("small", "large"):
        for mode, row in result[kind].items():
            print(
                f"{kind} steps, {mode}: {row['slowdown']:.1%} slower; {options.megabytes} MiB written in {row['write_s']:.2f} s"
            )


if __name__ == "__main__":
    main()
