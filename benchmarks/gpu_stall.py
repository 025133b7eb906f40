"""The rate of staging from a GPU, and the cost of saving for a training loop there.

1. *Copy*: the state's bytes from the device into pinned memory, by one copy of one tensor (the limit) and by our staging of all
   tensors into the image of the file, in turn; the ratio of minima, to be at least 0.90.
2. *Training*: a loop that saves every few steps with lazy staging, in turn with the same loop that does not; the slowdown of the
   whole loop, to be under 2 %, and the longest delay of a step. A loop ends when its last save is committed.

Without a CUDA device it says that it was skipped, and why.

    python -m benchmarks.gpu_stall --out bench_out/gpu_stall.json
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from reshard_ckpt import checkpoint
from reshard_ckpt.comm import SoloComm
from reshard_ckpt.engine.saving.agreement import PreviousCheckpoint, agree
from reshard_ckpt.engine.saving.async_save import take_ring
from reshard_ckpt.engine.saving.local_shards import describe_local
from reshard_ckpt.engine.saving.staging import Staging
from reshard_ckpt.engine.saving.write import lay_out
from reshard_ckpt.state.capture import capture

from .ranks import save_json
from .report import machine

MIN_BANDWIDTH_SHARE = 0.90
MAX_SLOWDOWN = 0.02


class Training:
    """A stack of transformer layers and AdamW on the device."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(options.dim, 16, 4 * options.dim, batch_first=True, dropout=0.0)
        self.model = nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.data = torch.randn(options.batch, options.tokens, options.dim, device="cuda")

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = self.model(self.data).float().square().mean()
        loss.backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


def seconds(work: Callable[[], object]) -> float:
    """Return how long work takes, with all that it queues on the device."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure_copy(state: dict[str, Any], pairs: int) -> dict[str, float]:
    """Return bytes a second of a plain pinned copy, and of staging."""
    captured = capture(state)
    local_shards = describe_local(captured.tensors, captured.values, captured.mesh, 0)
    assignment = agree(SoloComm(), local_shards, before=PreviousCheckpoint(b"", frozenset())).assignment
    layouts = lay_out(local_shards, assignment, 0)
    ring = take_ring(local_shards, layouts, None)
    held = sum(int(member.num_bytes) for layout in layouts for member in layout.members)
    source = torch.empty(held, dtype=torch.uint8, device="cuda")
    target = torch.empty(held, dtype=torch.uint8, pin_memory=True)
    staging = Staging(local_shards, assignment, layouts, ring)
    plain, staged = [], []
    for _ in range(pairs + 1):  # the first pair warms up
        plain.append(seconds(lambda: target.copy_(source, non_blocking=True)))
        staged.append(seconds(lambda: staging.fill(lambda _: True)))
    fastest, ours = min(plain[1:]), min(staged[1:])
    return {"bytes": held, "pinned_copy_gb_s": held / fastest / 1e9, "staging_gb_s": held / ours / 1e9, "share": fastest / ours}


def run_loop(training: Training, options: argparse.Namespace, *, saves: bool) -> tuple[float, float]:
    """Return the seconds of a whole loop, and of its longest step."""
    folder = Path(options.folder)
    longest = 0.0
    handle = None
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for step in range(options.steps):
        before = time.perf_counter()
        if saves and step % options.every == 0:
            handle = checkpoint.async_save(folder / "ckpt", training.state(), staging="lazy")
        training.step()
        torch.cuda.synchronize()
        longest = max(longest, time.perf_counter() - before)
    if handle is not None:
        handle.result()
    return time.perf_counter() - begin, longest


def measure_training(training: Training, options: argparse.Namespace) -> dict[str, float]:
    """Measure loops with and without saves, in turn."""
    run_loop(training, options, saves=True)  # allocates, plans, and compiles kernels
    plain, saving = [], []
    for _ in range(options.rounds):
        plain.append(run_loop(training, options, saves=False))
        saving.append(run_loop(training, options, saves=True))
    least, least_saving = min(total for total, _ in plain), min(total for total, _ in saving)
    return {
        "step_s": least / options.steps,
        "slowdown": least_saving / least - 1,
        "longest_delay_s": min(longest for _, longest in saving) - min(longest for _, longest in plain),
    }


def show(result: dict[str, Any]) -> None:
    """Print both figures with their bars."""
    copy, training = result["copy"], result["training"]
    print(f"{result['device']}: {copy['bytes'] / 1e9:.2f} GB held, steps of {training['step_s'] * 1e3:.0f} ms")
    rates = f"{copy['staging_gb_s']:.1f} GB/s ÷ {copy['pinned_copy_gb_s']:.1f} GB/s of a pinned copy"
    print(f"staging {rates}: {copy['share']:.2f} (at least {MIN_BANDWIDTH_SHARE})")
    delay = f"longest delay of a step {training['longest_delay_s'] * 1e3:.0f} ms"
    print(f"lazy saves slow the loop by {training['slowdown']:.1%} (at most {MAX_SLOWDOWN:.0%}); {delay}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--folder", default="bench_out/scratch_gpu", help="where checkpoints are written")
    parser.add_argument("--out", default="bench_out/gpu_stall.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        reason = f"torch {torch.__version__} finds no CUDA device here (torch.cuda.is_available() is False)"
        save_json(Path(options.out), {"skipped": reason, "machine": machine()})
        print(f"gpu_stall: skipped: {reason}")
        return
    try:
        training = Training(options)
        training.step()
        result = {
            "machine": machine(),
            "device": torch.cuda.get_device_name(),
            "bars": {"share": MIN_BANDWIDTH_SHARE, "slowdown": MAX_SLOWDOWN},
            "copy": measure_copy(training.state(), options.pairs),
            "training": measure_training(training, options),
        }
        save_json(Path(options.out), result)
        show(result)
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
