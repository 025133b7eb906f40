"""Accuracy and overhead of partial recovery, by policy of saving rows, on synthetic data in the shape of Criteo's.

``python -m benchmarks.partial_recovery --json bench_out/partial_recovery.json``

A DLRM-like model (13 numbers, 26 tables of embeddings, products of pairs, two small MLPs) learns from a hidden teacher. The rows
of all tables count as divided over 8 nodes. At random steps, the same for each policy, a node fails:

* ``none``: nothing fails. ``full``: everything goes back to the last checkpoint, and the steps since are repeated.
* ``partial``: the rows of the node, and their optimizer's state, go back to the last full checkpoint, and nothing is repeated.
* ``most_used``, ``sampled``, ``largest_change``: the same, and between two full saves 7 saves of 1/8 of the rows (`TouchedRows`).
* ``touched``: the same, and between two full saves 7 saves of all touched rows.

All runs are one process on /dev/shm: the node's rows are read by `checkpoint.read` and put back. Overhead is the time of saves,
reads and repeated steps, over the time of all other steps; both are CPU seconds.
"""

from __future__ import annotations

import argparse
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from reshard_ckpt import checkpoint

from .ranks import save_json
from .report import machine

NODES, TABLES, DENSE, DIM, BATCH = 8, 26, 13, 16, 256
SHARE = 1 / 8
FOLDER = Path("/dev/shm/reshard_ckpt_bench_partial")
POLICIES = ("none", "full", "partial", "touched", "most_used", "sampled", "largest_change")


def sizes(rows: int) -> list[int]:
    """The sizes of the tables: from 10 to `rows`, evenly on a logarithmic scale, as Criteo's are very unequal."""
    return [int(10 * (rows / 10) ** (i / (TABLES - 1))) for i in range(TABLES)]


class Teacher:
    """Draws samples; the label depends on every category and number, with noise."""

    def __init__(self, rows: int) -> None:
        random_state = torch.Generator().manual_seed(1)
        self.effects = [torch.randn(size, generator=random_state) * 0.5 for size in sizes(rows)]
        self.weights = torch.randn(DENSE, generator=random_state) * 0.3

    def batch(self, number: int, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        seen = torch.Generator().manual_seed(1000 + number)
        numbers = torch.randn(size, DENSE, generator=seen)
        # u ** 4: few categories are common, and most are rare.
        rows = torch.stack([(len(e) * torch.rand(size, generator=seen) ** 4).long() for e in self.effects], 1)
        logit = numbers @ self.weights + sum(e[rows[:, i]] for i, e in enumerate(self.effects))
        return numbers, rows, (torch.rand(size, generator=seen) < torch.sigmoid(logit)).float()


class Dlrm(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, DIM, sparse=True) for size in sizes(rows))
        for table in self.tables:
            nn.init.uniform_(table.weight, -0.05, 0.05)
        self.bottom = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, DIM), nn.ReLU())
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(nn.Linear(DIM * (TABLES + 1) + pairs, 64), nn.ReLU(), nn.Linear(64, 1))
        self.upper = torch.triu_indices(TABLES + 1, TABLES + 1, 1)

    def forward(self, numbers: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        found = [self.bottom(numbers), *(table(rows[:, i]) for i, table in enumerate(self.tables))]
        together = torch.stack(found, 1)
        products = (together @ together.transpose(1, 2))[:, self.upper[0], self.upper[1]]
        return self.top(torch.cat([together.flatten(1), products], 1)).squeeze(1)


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of pairs of a positive and a negative sample that are in order."""
    ranks = torch.empty(len(scores))
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1).float()
    positive = float(labels.sum())
    return float((ranks[labels > 0].double().sum() - positive * (positive + 1) / 2) / (positive * (len(labels) - positive)))


class Run:
    """The training of one policy."""

    def __init__(self, policy: str, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.policy, self.teacher = policy, Teacher(arguments.rows)
        self.model = Dlrm(arguments.rows)
        self.tables = torch.optim.Adagrad(self.model.tables.parameters(), lr=0.05)
        self.dense = torch.optim.Adam([*self.model.bottom.parameters(), *self.model.top.parameters()], lr=1e-3)
        self.state = {"model": self.model, "tables": self.tables, "dense": self.dense}
        by_rows = policy in ("touched", "most_used", "sampled", "largest_change")
        fraction = None if policy == "touched" else SHARE
        self.rows = checkpoint.TouchedRows(self.model, policy=policy, fraction=fraction) if by_rows else None
        self.every = round(arguments.every * SHARE) if by_rows else arguments.every
        self.saved_at, self.path = 0, FOLDER / policy / "0"
        self.written, self.lost_steps, self.pls, self.overhead_s = [], 0, 0.0, 0.0
        self.steps, self.full_every = arguments.steps, arguments.every

    def step(self, number: int) -> None:
        numbers, rows, labels = self.teacher.batch(number)
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(numbers, rows), labels)
        loss.backward()
        for optimizer in (self.tables, self.dense):
            optimizer.step()
            optimizer.zero_grad()

    def save(self, number: int) -> None:
        began, path = time.process_time(), FOLDER / self.policy / str(number)
        base = self.path if self.rows is not None and number % self.full_every else None
        report = checkpoint.save(path, self.state, base=base, rows=self.rows)
        self.saved_at, self.path = number, path
        self.written.append(report.bytes_written)
        self.overhead_s += time.process_time() - began

    def fail(self, node: int, number: int) -> int:
        """Lose a node before a step; return the step to go on from."""
        began = time.process_time()
        if self.policy == "full":
            checkpoint.load(self.path, self.state)
            self.lost_steps += number - self.saved_at
            self.overhead_s += time.process_time() - began
            return self.saved_at
        saved = checkpoint.read(self.path, ["model.tables", "tables.state"])
        with torch.no_grad():
            for i, table in enumerate(self.model.tables):
                table.weight[node::NODES] = saved[f"model.tables.{i}.weight"][node::NODES]
                held = self.tables.state[table.weight]["sum"]
                held[node::NODES] = saved[f"tables.state.tables.{i}.weight.sum"][node::NODES]
                if self.rows is not None:
                    self.rows.mark(table.weight, torch.arange(node, len(held), NODES))
        self.pls += (number - self.saved_at) / self.steps / NODES
        self.overhead_s += time.process_time() - began
        return number

    def train(self, failures: dict[int, int]) -> dict[str, Any]:
        failures = {} if self.policy == "none" else dict(failures)
        number, repeated_until, trained_s = 0, 0, 0.0
        self.step(0)  # the optimizer's state exists in all checkpoints
        self.save(0)
        while number < self.steps:
            if number in failures:
                repeated_until = number
                number = self.fail(failures.pop(number), number)
            began = time.process_time()
            self.step(number + 1)
            taken = time.process_time() - began
            if number < repeated_until:
                self.overhead_s += taken
            else:
                trained_s += taken
            number += 1
            if self.policy != "none" and number % self.every == 0:
                self.save(number)
        with torch.no_grad():
            numbers, rows, labels = self.teacher.batch(-1, 50_000)
            scores = torch.cat([self.model(n, r) for n, r in zip(numbers.split(5000), rows.split(5000), strict=True)])
        loss = nn.functional.binary_cross_entropy_with_logits(scores, labels)
        shutil.rmtree(FOLDER / self.policy, ignore_errors=True)
        return {
            "auc": auc(scores, labels),
            "log_loss": float(loss),
            "overhead": self.overhead_s / trained_s,
            "repeated_steps": self.lost_steps,
            "pls": self.pls,
            "saves": len(self.written),
            "mb_written_a_save": sum(self.written[1:]) / max(len(self.written) - 1, 1) / 1e6,
            "mb_written": sum(self.written[1:]) / 1e6,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--rows", type=int, default=20_000, help="rows of the largest table")
    parser.add_argument("--every", type=int, default=80, help="steps between two full saves")
    parser.add_argument("--failures", type=int, default=4)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = random.Random(arguments.seed)
    steps = chosen.sample(range(arguments.every, arguments.steps), arguments.failures)
    failures = {step: chosen.randrange(NODES) for step in steps}
    shutil.rmtree(FOLDER, ignore_errors=True)
    figures: dict[str, Any] = {"machine": machine(), "failures": failures, "steps": arguments.steps, "policies": {}}
    print(f"{'policy':>15} {'AUC':>8} {'log loss':>9} {'overhead':>9} {'repeated':>9} {'PLS':>7} {'MB written':>11}")
    for policy in POLICIES:
        found = figures["policies"][policy] = Run(policy, arguments).train(failures)
        print(
            f"{policy:>15} {found['auc']:8.4f} {found['log_loss']:9.4f} {found['overhead']:8.1%} {found['repeated_steps']:9} "
            f"{found['pls']:7.2%} {found['mb_written']:11.1f}",
            flush=True,
        )
    if arguments.json is not None:
        save_json(arguments.json, figures)


if __name__ == "__main__":
    main()
