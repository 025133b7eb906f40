"""Saving, staging and loading beside the machine's limits and the peers.

``python -m benchmarks.compare`` (``make bench`` runs it as it is quoted in docs/benchmarks.md).

1. All of a round's operations run one after the other in the same processes on the same state, and rounds follow each other,
   so that what the machine does meanwhile meets all of them; figures are ratios of minima.
2. A synchronous save is durable: what each rank wrote is fsynced. A stall ends when the state may change.
3. Loaded values are checked after the timing, every element.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from reshard_ckpt import checkpoint
from reshard_ckpt.engine.common.host_memory import POOL
from reshard_ckpt.storage.protocol import DISK

from . import limits, load_steps, peers
from .blocks import touched_bytes
from .ranks import Ranks, Samples, launch, save_json
from .report import Result, machine, show
from .state import Layout, State, Weight, build, experts, gpt

PARTS = ("save", "stall", "load")


@dataclass(frozen=True, slots=True)
class LoadCase:
    """One load: its name in tables, the parameters and the layout that are saved, and the layout that is wanted."""

    what: str
    saved: tuple[list[Weight], Layout]
    target: Layout
    long_runs: bool = False
    """Whether the embedding is loaded alone, too."""
    across: bool = False
    """Whether most of what is saved and what is wanted is cut along different dims."""


class Run:
    """One rank of the benchmark."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.ranks, self.samples = options, Ranks(), Samples()
        self.notes: list[str] = [peers.torch_checkpointing_note()]
        self.facts: dict[str, float] = {}
        self.folder = Path(options.folder)
        self.weights = gpt(options.gb)
        tp = 2 if self.ranks.size >= 4 else 1
        self.layout = Layout(dp=self.ranks.size // tp, tp=tp, replicated=self.options.replicated)
        self.state = build(self.weights, self.layout, self.ranks.rank)
        self.state.fill()
        self.cases = list(self._cases())
        self._count = 0

    def time(self, name: str, operation: Callable[[], Any]) -> None:
        sample = self.ranks.time(operation)
        self.samples.add(name, sample)
        if self.ranks.rank == 0 and self.options.verbose:
            print(f"{name:>28}: {sample.wall_s:8.3f} s  {sample.cpu_s:7.2f} CPU s", flush=True)

    def new_path(self, *, kept: str | None = None) -> Path:
        """Return a path where nothing is yet."""
        self._count += 1
        return self.folder / (kept or f"n{self._count}")

    def drop(self, path: Path) -> None:
        """Remove what an operation wrote, once no rank needs it."""
        self.ranks.gather(None)
        if self.ranks.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        self.ranks.gather(None)

    def rounds(self, what: str, most: int, share: float) -> Iterator[int]:
        """Yield numbers of rounds, until there were that many or this part of the run has used its share of the time."""
        until = time.monotonic() + share * 60 * self.options.minutes
        for number in range(most):
            # One rank's clock counts for all: each must run the same rounds.
            if number and self.ranks.gather(time.monotonic() > until)[0]:
                self.notes.append(f"{what}: {number} rounds in the time that there was")
                return
            yield number

    def local_bytes(self) -> list[memoryview]:
        return [limits.as_bytes(local) for local in self.state.locals()]

    # -- the parts --------------------------------------------------------------------------------------------------------

    def first_stall(self) -> None:
        """Return the very first save of these processes: nothing is planned, staged or imported yet."""
        held = self.state.held_bytes
        self.time("memcpy, untouched", lambda: limits.copy(self.state.locals(), limits.untouched(held)))
        self._async_save("eager, first", staging="eager")

    def saves(self) -> None:
        """Measure durable saves beside write + fsync of the bytes that each rank writes."""
        path = self.new_path()
        self.time("save", lambda: checkpoint.save(path, self.state.modules))
        mine = sum(file.stat().st_size for file in path.glob(f"*/rank{self.ranks.rank:05d}-*"))
        self.drop(path)
        problem = peers.torchsnapshot_problem()
        operations: list[tuple[str, Callable[[Path], Any]]] = [
            ("raw write", lambda path: self._raw_write(path, mine)),
            ("save", lambda path: checkpoint.save(path, self.state.modules)),
            ("save, replicas sampled", lambda path: checkpoint.save(path, self.state.modules, replicas="sample")),
            ("dcp save", lambda path: dcp.save(self.state.tensors, checkpoint_id=str(path))),
        ]
        for number in self.rounds("saves", self.options.pairs, 0.3):
            # What pages cost depends on what was freed before, so each comes first in its turn.
            first = number % len(operations)
            for name, operation in operations[first:] + operations[:first]:
                self._save(name, operation)
            if problem is None and number < 2:  # too far from the limit to spend more time on
                problem = self._try("torchsnapshot save", lambda path: peers.torchsnapshot_save(self.state, path))
        if problem is not None:
            self.notes.append(f"torchsnapshot: {problem}")

    def _save(self, name: str, operation: Callable[[Path], Any]) -> None:
        path = self.new_path()
        if self.ranks.rank == 0:
            path.mkdir(parents=True)
        try:
            self.time(name, lambda: operation(path))
        finally:
            self.drop(path)

    def _try(self, name: str, operation: Callable[[Path], Any]) -> str | None:
        """Time a peer that may not work with this torch; what went wrong."""
        try:
            self._save(name, operation)
        except Exception as error:
            return f"fails: {type(error).__name__}: {error}"
        return None

    def _raw_write(self, path: Path, num_bytes: int) -> None:
        limits.write_durably(path / f"raw{self.ranks.rank}", self.local_bytes(), num_bytes)

    def stalls(self) -> None:
        """Return how long the caller is blocked, beside a copy of the bytes that each rank holds."""
        self._steady_stalls()
        held = self.state.held_bytes
        for _ in self.rounds("stalls into new memory", min(3, self.options.pairs), 0.1):
            POOL.clear()
            self._async_save("eager, new memory", staging="eager")
            POOL.clear()
            self.time("prepare", lambda: checkpoint.prepare(self.state.modules))
            self._async_save("eager, prepared", staging="eager")
            self.time("memcpy, untouched", lambda: limits.copy(self.state.locals(), limits.untouched(held)))
        POOL.clear()

    def _steady_stalls(self) -> None:
        touched = torch.zeros(self.state.held_bytes, dtype=torch.uint8)
        peer = peers.DcpAsync()
        for _ in self.rounds("stalls", self.options.pairs + 1, 0.3):
            self.time("memcpy", lambda: limits.copy(self.state.locals(), touched))
            self._async_save("eager", staging="eager")
            self._async_save("eager, replicas sampled", staging="eager", replicas="sample")
            self._async_save("lazy, call", staging="lazy")
            self._async_save("lazy, caller holds", staging="lazy", hold="caller")
            self._async_save("lazy, until staged", staging="lazy", until_staged=True)
            for mode in ("thread", "process"):
                self._dcp_async(peer, mode)
        peer.close()

    def _async_save(self, name: str, *, staging: str, until_staged: bool = False, **options: Any) -> None:
        path, handles = self.new_path(), []

        def operation() -> None:
            handles.append(checkpoint.async_save(path, self.state.modules, staging=staging, **options))
            if staging == "eager" or until_staged:
                handles[0].staged()

        self.time(name, operation)
        handles[0].result(120)
        self.drop(path)

    def _dcp_async(self, peer: peers.DcpAsync, mode: str) -> None:
        path, futures = self.new_path(), []
        self.time(f"dcp async {mode}", lambda: futures.append(peer.save(self.state.tensors, path, mode)))
        futures[0].result(120)
        self.drop(path)

    def loads(self) -> None:
        """Measure loads from the page cache, into the same layout and into others, beside a read of as many bytes."""
        ours, dcps, snapshot = (self.new_path(kept=name) for name in ("ours", "dcp", "torchsnapshot"))
        state, saved = self.state, self.cases[0].saved
        self._save_both(state, ours, dcps)
        for case in self.cases:
            if case.saved != saved:
                saved = case.saved
                self._save_both(build(*saved, self.ranks.rank), ours, dcps)
            state = state if case is self.cases[0] else build(saved[0], case.target, self.ranks.rank)
            self._loads(case.what, state, ours, dcps)
            if case is self.cases[0] and peers.torchsnapshot_problem() is None and self.ranks.size > 1:
                self._loads_of_torchsnapshot(snapshot)
            state = self.state = State({}, {})  # makes room for the next one
            if case.long_runs:
                self._long_runs(case.what, case.target, ours)
        for path in (ours, dcps, snapshot):
            self.drop(path)

    def _save_both(self, state: State, ours: Path, dcps: Path) -> None:
        self.drop(ours)
        self.drop(dcps)
        state.fill()
        checkpoint.save(ours, state.modules)
        dcp.save(state.tensors, checkpoint_id=str(dcps))

    def _cases(self) -> Iterator[LoadCase]:
        """Yield the loads: to the same layout and to others by rows; on a mesh, also those along other dims than the save's."""
        size, rows = self.ranks.size, (self.weights, self.layout)
        yield LoadCase("same layout", rows, self.layout)
        for target in (Layout(tp=size), Layout(dp=size), Layout(pp=2, tp=size // 2)):
            if target != self.layout:
                yield LoadCase(f"to {target}", rows, target, long_runs=target.pp == 1)
        if self.layout.dp == 1 or self.layout.tp == 1:
            return
        tp, dp, both = Layout(tp=size, columns=True), Layout(dp=size, columns=True), replace(self.layout, columns=True)
        yield LoadCase(f"rows to {dp}", rows, dp, across=True)
        yield LoadCase(f"columns to {tp}", (self.weights, both), tp, across=True)
        yield LoadCase(f"columns to {dp}", (self.weights, both), dp, across=True)
        yield LoadCase(f"columns to {Layout(dp=size)}, rows", (self.weights, both), Layout(dp=size), across=True)
        stacks = experts(self.options.gb)
        yield LoadCase(f"experts, columns to {tp}", (stacks, both), tp, across=True)
        yield LoadCase(f"experts, columns to {dp}", (stacks, both), dp, across=True)

    def _loads(self, what: str, state: State, ours: Path, dcps: Path) -> None:
        files = sorted(ours.glob("*/*.safetensors"))
        files = files[self.ranks.rank % len(files) :] * 2
        self.facts[f"wanted, {what}"] = sum(self.ranks.gather(state.held_bytes))
        self.facts[f"touched, {what}"] = sum(self.ranks.gather(touched_bytes(ours, state.modules)))
        memory = [limits.as_bytes(local) for local in state.locals()]
        profiles: list[list[dict[str, float]]] = []
        for _ in self.rounds(f"loads, {what}", self.options.pairs + 1, 0.04):
            self.time(f"raw read, {what}", lambda: limits.read(files, memory))
            state.clear()
            self.time(f"dcp load, {what}", lambda: dcp.load(state.tensors, checkpoint_id=str(dcps)))
            state.clear()
            self.time(f"load unverified, {what}", lambda: checkpoint.load(ours, state.modules, verify=False))
            self._prove(f"load unverified, {what}", state)
            state.clear()
            self.time(f"load, {what}", lambda: checkpoint.load(ours, state.modules))
            if self.options.profile:
                self.time(f"floor, {what}", lambda: limits.read(files, memory, DISK.read_bytes, load_steps.hash_blocks))
                steps = load_steps.Steps()
                with steps.measured():
                    checkpoint.load(ours, state.modules)
                profiles.append(self.ranks.gather(dict(steps.seconds)))
        self._prove(f"load, {what}", state)
        if profiles:
            least = min(profiles, key=lambda steps: sum(of_rank["total"] for of_rank in steps))
            raw, floor = (self.samples.least(f"{name}, {what}", "cpu_s") for name in ("raw read", "floor"))
            self.notes.append(load_steps.text_of(what, least, raw, floor))

    def _long_runs(self, what: str, target: Layout, path: Path) -> None:
        """Load the embedding alone: what each rank wants of it lies in runs of many blocks."""
        state = build(self.weights[:1], target, self.ranks.rank)
        self.facts[f"wanted, long runs {what}"] = sum(self.ranks.gather(state.held_bytes))
        for name, verify in (("load", True), ("load unverified", False)):
            load = functools.partial(checkpoint.load, path, state.modules, strict=False, verify=verify)
            self.time(f"{name}, long runs {what}", load)

    def _prove(self, what: str, state: State) -> None:
        if what in self.facts:  # each is proved once
            return
        wrong = sorted({name for names in self.ranks.gather(state.wrong()) for name in names})
        if wrong:
            raise SystemExit(f"{what}: {len(wrong)} tensors have wrong values: {', '.join(wrong[:5])}")
        self.facts[what] = 0

    def _loads_of_torchsnapshot(self, path: Path) -> None:
        try:
            peers.torchsnapshot_save(self.state, path)
            for _ in self.rounds("torchsnapshot loads", min(3, self.options.pairs), 0.02):
                self.state.clear()
                self.time("torchsnapshot load", lambda: peers.torchsnapshot_load(self.state, path))
        except Exception as error:
            self.notes.append(f"torchsnapshot load: fails: {type(error).__name__}: {error}")

    def result(self) -> Result:
        needed = sum(w.num_bytes for w in self.weights)
        return Result(
            options={
                key: value for key, value in vars(self.options).items() if key not in ("worker", "verbose", "folder", "out")
            },
            machine=machine(),
            layout=str(self.layout),
            loads={case.what: case.across for case in self.cases},
            num_tensors=4 * len(self.weights),
            needed_bytes=needed,
            facts=self.facts,
            notes=tuple(self.notes),
            samples=self.samples,
        )


def work(options: argparse.Namespace) -> None:
    run = Run(options)
    if "stall" in options.parts:
        run.facts["held"] = run.state.held_bytes
        run.first_stall()
    if "save" in options.parts:
        run.saves()
    if "stall" in options.parts:
        run.stalls()
    if "load" in options.parts:
        run.loads()
    if run.ranks.rank == 0:
        save_json(Path(options.out), run.result().as_json())
    run.ranks.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--gb", type=float, default=3.28, help="size of the state, of all ranks together")
    parser.add_argument("--replicated", action="store_true", help="dp replicates the optimizer too, as under DDP")
    parser.add_argument("--pairs", type=int, default=7, help="rounds, after a first one that is kept apart")
    parser.add_argument("--minutes", type=float, default=18, help="of rounds at most; fewer rounds are said so")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--folder", default="bench_out/scratch", help="where checkpoints are written: the disk that is measured")
    parser.add_argument("--out", default="bench_out/compare.json", help="the figures; the chart lies beside it, as .png")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds after which the run is ended")
    parser.add_argument("--verbose", action="store_true", help="print every sample")
    parser.add_argument("--profile", action="store_true", help="print the steps of each load, beside reading and hashing alone")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    folder = Path(options.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    passed = [
        "--gb",
        options.gb,
        "--pairs",
        options.pairs,
        "--minutes",
        options.minutes,
        "--parts",
        *options.parts,
        "--folder",
        folder,
    ]
    flags = [f"--{name}" for name in ("verbose", "replicated", "profile") if getattr(options, name)]
    passed += ["--out", Path(options.out).resolve(), "--ranks", options.ranks, *flags]
    try:
        launch("benchmarks.compare", options.ranks, [str(value) for value in passed], timeout_s=options.timeout)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(Path(options.out))


if __name__ == "__main__":
    main()
