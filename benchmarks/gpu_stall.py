"""The rate of staging from an accelerator, what a save costs a training loop there, and loads into its memory.

1. *Copy*: the state's bytes from the device into pinned memory, by one copy of one tensor (the limit) and by our staging of all
   tensors into the image of the file, in turn; the ratio of minima, to be at least 0.90.
2. *Training*: a loop that saves every few steps with lazy staging, in turn with the same loop that does not. Reported are the
   milliseconds that a save adds until the device is done, and those that the host falls back (its lost run-ahead): how much later
   it has queued the whole loop. A loop never waits for the device before its end; the time of the last commit is apart.
3. *Stalls*: how long a call of `async_save` takes until the state may change, in turn with DCP's (pinned staging) and with the
   pinned copy of 1; the device is idle before each.
4. *Loads* into device memory from the page cache, in turn: this library's, verified and not, DCP's, and reads into pinned memory
   followed by copies to the device (the limit).

Without an accelerator it says that it was skipped, and why. ``--simulated`` runs it on the device of the tests, whose figures
mean nothing: it shows that the benchmark works.

    python -m benchmarks.gpu_stall --out bench_out/gpu_stall.json
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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

from . import limits, peers
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


def minima(works: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the least seconds that each work measures of itself; a round does all of them, each time from another one on."""
    names, took = list(works), {name: [] for name in works}
    for number in range(rounds + 1):  # the first round allocates
        for name in names[number % len(names) :] + names[: number % len(names)]:
            torch.accelerator.synchronize()
            took[name].append(works[name]())
    return {name: min(of[1:]) for name, of in took.items()}


def add_peer(works: dict[str, Any], peer: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> None:
    """Measure DCP too, if it works with this device and release of torch."""
    try:
        prepare()
        peer()
    except (Exception, dcp.CheckpointException) as error:  # that of DCP is no Exception
        print(f"DCP is left out: {type(error).__name__}: {str(error).splitlines()[-1]}")
    else:
        works["dcp_s"] = peer


def measure_stalls(training: Training, options: argparse.Namespace) -> dict[str, float]:
    """Measure how long each way of saving holds the training up, and DCP's beside them."""
    folder, peer = Path(options.folder), peers.DcpAsync(pinned=True)
    state = {"model": dict(training.model.state_dict()), "optimizer": training.optimizer.state_dict()}
    held = sum(t.nbytes for t in tensors_in(state))
    source = torch.empty(held, dtype=torch.uint8, device=options.device)
    target = torch.empty(held, dtype=torch.uint8, pin_memory=True)

    def ours(**how: Any) -> float:
        begin = time.perf_counter()
        handle = checkpoint.async_save(folder / "ckpt", training.state(), **how)
        took = time.perf_counter() - begin
        handle.result()
        return took

    def theirs() -> float:
        begin = time.perf_counter()
        written = peer.save(state, folder / "dcp", "thread")
        took = time.perf_counter() - begin
        written.result()
        return took

    works: dict[str, Callable[[], float]] = {
        "pinned_copy_s": lambda: seconds(lambda: target.copy_(source, non_blocking=True)),
        "eager_s": ours,
        "lazy_s": lambda: ours(staging="lazy"),
        "lazy_caller_s": lambda: ours(staging="lazy", hold="caller"),
    }
    add_peer(works, theirs)
    try:
        return {"bytes": held, **minima(works, options.rounds)}
    finally:
        peer.close()


def measure_loads(training: Training, options: argparse.Namespace) -> dict[str, float]:
    """Measure loads of the whole state into the device's memory."""
    folder = Path(options.folder)
    state = {"model": dict(training.model.state_dict()), "optimizer": training.optimizer.state_dict()}
    checkpoint.save(folder / "ckpt", training.state())
    files = sorted((folder / "ckpt").rglob("*.safetensors"))
    buffers = [torch.empty(8 << 20, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = torch.empty(8 << 20, dtype=torch.uint8, device=options.device)

    def raw() -> None:
        events = [torch.Event(device=options.device) for _ in buffers]
        turn = 0
        for path in files:
            with open(path, "rb", buffering=0) as file:
                while True:
                    turn = 1 - turn
                    events[turn].synchronize()
                    if not (count := file.readinto(limits.as_bytes(buffers[turn]))):
                        break
                    there[:count].copy_(buffers[turn][:count], non_blocking=True)
                    events[turn].record()

    works: dict[str, Callable[[], object]] = {
        "raw_s": raw,
        "load_s": lambda: checkpoint.load(folder / "ckpt", training.state()),
        "unverified_s": lambda: checkpoint.load(folder / "ckpt", training.state(), verify=False),
    }

    def theirs() -> None:
        dcp.load(state, checkpoint_id=str(folder / "dcp"))

    add_peer(works, theirs, lambda: dcp.save(state, checkpoint_id=str(folder / "dcp")))
    return minima({name: partial(seconds, work) for name, work in works.items()}, options.rounds)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested dicts and lists."""
    for value in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from (value,) if isinstance(value, torch.Tensor) else tensors_in(value)


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
    dist.init_process_group("gloo" if options.simulated else "cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
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
        show(result)
        for part, measure, unit in (("stalls", measure_stalls, "pinned_copy_s"), ("loads", measure_loads, "raw_s")):
            result[part] = took = measure(training, options)
            save_json(Path(options.out), result)
            for name in took.keys() - {"bytes"}:
                print(f"{part}, {name}: {took[name]:.4f}, {took[name] / took[unit]:.3f} of {unit}")
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
