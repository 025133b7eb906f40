"""The rate of staging from an accelerator, and what a save costs a training loop there.

1. *Copy*: the state's bytes from the device into pinned memory, by one copy of one tensor (the limit) and by our staging of all
   tensors into the image of the file, in turn; the ratio of minima, to be at least 0.90.
2. *Training*: a loop that saves every few steps with lazy staging, in turn with the same loop that does not. Reported are the
   milliseconds that a save adds until the device is done, and those that the host falls back (its lost run-ahead): how much later
   it has queued the whole loop. A loop never waits for the device before its end; the time of the last commit is apart.

Without an accelerator it says that it was skipped, and why. ``--simulated`` runs it on the device of the tests, whose figures
mean nothing: it shows that the benchmark works.

    python -m benchmarks.gpu_stall --out bench_out/gpu_stall.json
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from reshard_ckpt import checkpoint
from reshard_ckpt.comm import SoloComm
from reshard_ckpt.engine.saving.agreement import agree
from reshard_ckpt.engine.saving.local_shards import describe_local
from reshard_ckpt.engine.saving.staged_copy import take_ring
from reshard_ckpt.engine.saving.staging import Staging
from reshard_ckpt.engine.saving.write import lay_out
from reshard_ckpt.state.capture import capture
from tests import device as simulated

from .ranks import save_json
from .report import machine

MIN_BANDWIDTH_SHARE = 0.90


class Training:
    """A stack of linear layers with residuals, and AdamW, on the device."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(options.dim, options.dim) for _ in range(options.layers)]
        self.model = nn.ModuleList(layers).to(options.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.data = torch.randn(options.batch, options.dim).to(options.device)

    def step(self) -> None:
        self.optimizer.zero_grad()
        x = self.data
        for layer in self.model:
            x = x + torch.relu(layer(x))
        x.square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


def seconds(work: Callable[[], object]) -> float:
    """Return how long work takes, with all that it queues on the device."""
    torch.accelerator.synchronize()
    begin = time.perf_counter()
    work()
    torch.accelerator.synchronize()
    return time.perf_counter() - begin


def measure_copy(state: dict[str, Any], pairs: int) -> dict[str, float]:
    """Return bytes a second of a plain pinned copy, and of staging."""
    captured = capture(state)
    local_shards = describe_local(captured.tensors, captured.values, captured.mesh, 0)
    assignment, _ = agree(SoloComm(), local_shards)
    layouts = lay_out(local_shards, assignment, 0)
    ring = take_ring(local_shards, layouts, None)
    held = sum(int(member.num_bytes) for layout in layouts for member in layout.members)
    device = local_shards.rows[0][1].tensor.device
    source = torch.empty(held, dtype=torch.uint8, device=device)
    target = torch.empty(held, dtype=torch.uint8, pin_memory=True)
    staging = Staging(local_shards, assignment, layouts, ring)
    plain, staged = [], []
    for _ in range(pairs + 1):  # the first pair warms up
        plain.append(seconds(lambda: target.copy_(source, non_blocking=True)))
        staged.append(seconds(lambda: (staging.fill(lambda _: True), staging.settle())))
    fastest, ours = min(plain[1:]), min(staged[1:])
    return {"bytes": held, "pinned_copy_gb_s": held / fastest / 1e9, "staging_gb_s": held / ours / 1e9, "share": fastest / ours}


@dataclass(frozen=True)
class LoopTimes:
    """Seconds of one loop: until the host has queued it, until the device is done, and until the last save is committed."""

    host_s: float
    device_s: float
    committed_s: float


def run_loop(training: Training, options: argparse.Namespace, *, saves: bool) -> LoopTimes:
    """Time one loop of steps."""
    folder = Path(options.folder)
    handle = None
    torch.accelerator.synchronize()
    begin = time.perf_counter()
    for step in range(options.steps):
        if saves and step % options.every == 0:
            handle = checkpoint.async_save(folder / "ckpt", training.state(), staging="lazy")
        training.step()
    host = time.perf_counter()
    torch.accelerator.synchronize()
    device = time.perf_counter()
    if handle is not None:
        handle.result()
    return LoopTimes(host - begin, device - begin, time.perf_counter() - begin)


def measure_training(training: Training, options: argparse.Namespace) -> dict[str, float]:
    """Measure loops with and without saves, in turn; of each the fastest counts."""
    run_loop(training, options, saves=True)  # allocates, plans, and compiles kernels
    plain, saving = [], []
    for _ in range(options.rounds):
        plain.append(run_loop(training, options, saves=False))
        saving.append(run_loop(training, options, saves=True))
    num_saves = -(-options.steps // options.every)

    def added_ms(part: Callable[[LoopTimes], float]) -> float:
        return 1e3 * (min(map(part, saving)) - min(map(part, plain))) / num_saves

    return {
        "step_ms": 1e3 * min(loop.device_s for loop in plain) / options.steps,
        "num_saves": num_saves,
        "device_ms_per_save": added_ms(lambda loop: loop.device_s),
        "lost_run_ahead_ms_per_save": added_ms(lambda loop: loop.host_s),
        "commit_after_loop_ms": 1e3 * min(loop.committed_s - loop.device_s for loop in saving),
    }


def show(result: dict[str, Any]) -> None:
    """Print the figures, with the bar of the first."""
    copy, training = result["copy"], result["training"]
    print(f"{result['device']}: {copy['bytes'] / 1e9:.2f} GB held, steps of {training['step_ms']:.1f} ms")
    rates = f"{copy['staging_gb_s']:.1f} GB/s ÷ {copy['pinned_copy_gb_s']:.1f} GB/s of a pinned copy"
    print(f"staging {rates}: {copy['share']:.2f} (at least {MIN_BANDWIDTH_SHARE})")
    print(f"a lazy save adds {training['device_ms_per_save']:.1f} ms to the device's work")
    print(f"a lazy save costs the host {training['lost_run_ahead_ms_per_save']:.1f} ms of its run-ahead")
    print(f"the last commit comes {training['commit_after_loop_ms']:.0f} ms after the loop")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--folder", default="bench_out/scratch_gpu", help="where checkpoints are written")
    parser.add_argument("--out", default="bench_out/gpu_stall.json")
    parser.add_argument("--simulated", action="store_true", help="on the simulated device of the tests")
    options = parser.parse_args()
    if options.simulated:
        simulated.load()
    if not torch.accelerator.is_available():
        reason = f"torch {torch.__version__} finds no accelerator here (torch.accelerator.is_available() is False)"
        save_json(Path(options.out), {"skipped": reason, "machine": machine()})
        print(f"gpu_stall: skipped: {reason}")
        return
    options.device = torch.accelerator.current_accelerator().type
    try:
        training = Training(options)
        training.step()
        result = {
            "machine": machine(),
            "device": "simulated" if options.simulated else torch.get_device_module(options.device).get_device_name(),
            "bars": {"share": MIN_BANDWIDTH_SHARE},
            "copy": measure_copy(training.state(), options.pairs),
            "training": measure_training(training, options),
        }
        save_json(Path(options.out), result)
        show(result)
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
