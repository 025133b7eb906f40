"""The cost of saving for a training loop: slowdown of the whole and the longest delay of a step, beside the loop without saves.

``python -m benchmarks.train_stall`` trains a small GPT under FSDP2 with AdamW, on gloo.

1. A *stretch* begins with a save (but in the mode without), goes on for some steps, and ends when the save is committed, so that
   what goes on in the background is counted.
2. A round is one stretch in every mode, and each round begins with another mode; model, data and processes are the same.
3. A slowdown is the median, over the rounds, of what a mode's stretch takes beyond the one without a save of the same round: the
   machine's own unrest, which lasts longer than a round, is in both. That of the least stretches stands beside it.
4. CPU seconds are compared in the same way; those of processes that a rank started, such as DCP's, are counted.
5. *raw writer*: a thread writes and fsyncs as many bytes as a rank's save does, copying nothing: what the disk alone costs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from reshard_ckpt import checkpoint

from . import limits, peers
from .ranks import Ranks, cpu_s, cpu_s_of, launch, save_json
from .report import machine

MODES = ("none", "raw writer", "eager", "lazy", "dcp thread", "dcp process")
SHARES = ("slowdown", "slowdown_of_least", "added_cpu_s")
"""Figures of lazy saves that are compared with those of DCP's better mode."""


class Block(nn.Module):
    """Attention and feed-forward of one layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)]
        x = x + self.proj(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A language model as small as it can be and still be one."""

    def __init__(self, vocab: int, dim: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Training:
    """One rank of the loop."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.ranks = options, Ranks()
        torch.manual_seed(0)
        self.model = Gpt(options.vocab, options.dim, options.layers)
        mesh = init_device_mesh("cpu", (self.ranks.size,), mesh_dim_names=("dp",))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.peer = peers.DcpAsync()
        self.folder, self._count = Path(options.folder), 0
        self.step()
        self.shards = [p.to_local() for p in self.model.parameters()]  # type: ignore[attr-defined]
        self.shards += [t.to_local() for held in self.optimizer.state.values() for t in held.values() if t.ndim]

    def step(self) -> None:
        """Take one step: forward, backward, update."""
        tokens = torch.randint(0, self.options.vocab, (1, self.options.tokens + 1))
        logits = self.model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def begin_save(self, mode: str) -> Callable[[], Any]:
        """Begin a save; what is returned waits for its end."""
        self._count += 1
        path = self.folder / f"n{self._count}"
        if mode in ("eager", "lazy"):
            handle = checkpoint.async_save(path, self.state, staging=mode)
            return lambda: handle.result(120)
        if mode.startswith("dcp"):
            tensors = {
                "model": get_model_state_dict(self.model),
                "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            }
            future = self.peer.save(tensors, path, mode.split()[1])
            return lambda: future.result(120)
        path.mkdir(parents=True, exist_ok=True)
        memory = [limits.as_bytes(shard) for shard in self.shards]
        name, size = path / f"raw{self.ranks.rank}", sum(len(view) for view in memory)
        writer = threading.Thread(target=limits.write_durably, args=(name, memory, size))
        writer.start()
        return writer.join

    def stretch(self, mode: str, steps: int) -> dict[str, float]:
        """Save, and train on until the save is committed: the time of all of it, and of its longest and its median step."""
        self.ranks.gather(None)
        times: list[float] = []
        cpu, begin = self._cpu_s(), time.perf_counter()
        began = begin
        end = (lambda: None) if mode == "none" else self.begin_save(mode)
        for _ in range(steps):
            self.step()
            times.append(time.perf_counter() - began)
            began = time.perf_counter()
        end()
        total = time.perf_counter() - begin
        row = (total, max(times), statistics.median(times), self._cpu_s() - cpu)
        totals, longest, medians, cpus = zip(*self.ranks.gather(row), strict=True)
        if self.ranks.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        return {"total_s": max(totals), "longest_s": max(longest), "median_s": max(medians), "cpu_s": sum(cpus)}

    @staticmethod
    def _cpu_s() -> float:
        """Measure CPU seconds so far of this rank and of the processes that it started, such as DCP's."""
        return cpu_s() + sum(cpu_s_of(child.pid) for child in multiprocessing.active_children() if child.pid)

    def run(self) -> dict[str, Any]:
        """Return all rounds; the first save of each mode is made before, apart."""
        for mode in MODES:
            self.stretch(mode, 2)
        stretches: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
        for turn in range(self.options.rounds):
            first = turn % len(MODES)
            for mode in MODES[first:] + MODES[:first]:
                row = self.stretch(mode, self.options.every)
                stretches[mode].append(row)
                if self.ranks.rank == 0 and self.options.verbose:
                    print(f"{mode:>12}: {row['total_s']:.2f} s, {row['cpu_s']:.2f} CPU seconds", flush=True)
        held = sum(shard.nbytes for shard in self.shards)
        options = {k: v for k, v in vars(self.options).items() if k not in ("worker", "verbose", "folder", "out")}
        return {"options": options, "machine": machine(), "held_bytes": held, "stretches": stretches, **figures(stretches)}


def figures(stretches: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Compute for each mode what a save adds to a stretch of steps, to its longest step, and to the CPU seconds of all ranks."""

    def least(mode: str, what: str) -> float:
        return min(row[what] for row in stretches[mode])

    def added(mode: str, what: str) -> float:
        pairs = zip(stretches[mode], stretches["none"], strict=True)
        return statistics.median(row[what] - none[what] for row, none in pairs)

    whole = statistics.median(row["total_s"] for row in stretches["none"])
    step = least("none", "median_s")
    modes = {
        mode: {
            "added_s": added(mode, "total_s"),
            "added_cpu_s": added(mode, "cpu_s"),
            "slowdown": added(mode, "total_s") / whole,
            "slowdown_of_least": least(mode, "total_s") / least("none", "total_s") - 1,
            "longest_delay_s": least(mode, "longest_s") - step,
        }
        for mode in MODES
        if mode != "none"
    }
    return {"whole_s": whole, "step_s": step, "modes": modes, **{f"lazy_{key}_of_dcp": _of_dcp(modes, key) for key in SHARES}}


def _of_dcp(modes: dict[str, dict[str, float]], key: str) -> float | None:
    """Compute the share of lazy staging in what DCP's better mode takes; None where that takes nothing."""
    best = min(modes[mode][key] for mode in ("dcp thread", "dcp process"))
    return modes["lazy"][key] / best if best > 0 else None


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    options, ranks = result["options"], result["options"]["ranks"]
    title = (
        f"{ranks} ranks, {result['held_bytes'] / 1e6:.0f} MB held by each, steps of {result['step_s']:.2f} s, "
        f"a save every {options['every']}, {options['rounds']} times"
    )
    table = Table(title=title, caption="; ".join(f"{key} {value}" for key, value in result["machine"].items()))
    columns = ("mode", "slowdown of the loop", "of least", "CPU seconds a save, all ranks", "longest delay of a step, s")
    for column in columns:
        table.add_column(column, justify="left" if column == "mode" else "right")
    for mode, row in result["modes"].items():
        shares = f"{row['slowdown']:.1%}", f"{row['slowdown_of_least']:.1%}"
        table.add_row(mode, *shares, f"{row['added_cpu_s']:.2f}", f"{row['longest_delay_s']:.3f}")
    console = Console()
    console.print(table)
    held = "held to at most 0.33" if ranks == 2 else "reported only: more ranks than cores"
    values = (result[f"lazy_{key}_of_dcp"] for key in SHARES)
    slowdown, least, cpu = ("none to compare" if share is None else f"{share:.2f}" for share in values)
    console.print(f"lazy slowdown ÷ that of DCP's better mode: {slowdown} ({held}); of least {least}, CPU seconds {cpu}")


def work(options: argparse.Namespace) -> None:
    training = Training(options)
    result = training.run()
    if training.ranks.rank == 0:
        save_json(Path(options.out), result)
        show(result)
    training.peer.close()
    training.ranks.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=64, help="in a rank's batch")
    parser.add_argument("--every", type=int, default=4, help="steps from one save to the next")
    parser.add_argument("--rounds", type=int, default=18, help="saves in each mode")
    parser.add_argument("--folder", default="bench_out/scratch_train", help="where checkpoints are written")
    parser.add_argument("--out", default="bench_out/train_stall.json")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which the run is ended")
    parser.add_argument("--verbose", action="store_true", help="print every loop")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    passed = []
    for name, value in vars(options).items():
        if name not in ("worker", "verbose", "timeout"):
            passed += [f"--{name}", str(Path(value).resolve() if name in ("folder", "out") else value)]
    try:
        launch("benchmarks.train_stall", options.ranks, passed + ["--verbose"] * options.verbose, timeout_s=options.timeout)
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
