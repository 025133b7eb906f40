"""Timing of an operation on several ranks at once: barrier, clock, barrier; the slowest rank's time is the operation's.

`launch` starts the ranks as processes of their own; `Ranks` is what one of them sees.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent


_LIBC = ctypes.CDLL(None)
_SET_PDEATHSIG = 1


def end_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the system send this process a signal when the one that started it ends, however it does; in the new process."""
    _LIBC.prctl(_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # it has ended already
        os.kill(os.getpid(), number)


def launch(module: str, ranks: int, args: Sequence[str], *, timeout_s: float) -> None:
    """Run ``python -m module --worker ARGS`` once for each rank; what they say on stderr is shown if one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    common["LOCAL_WORLD_SIZE"] = str(ranks)  # they share this machine's cores
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", module, "--worker", *args]
    ending = partial(end_with, os.getpid())
    # A file, not this terminal: the peers log every step of theirs.
    with tempfile.TemporaryFile("w+") as said:
        workers = [
            subprocess.Popen(command, cwd=ROOT, env={**common, "RANK": str(rank)}, stderr=said, preexec_fn=ending)
            for rank in range(ranks)
        ]
        problem = _watch(workers, time.monotonic() + timeout_s)
        if problem is not None:
            said.seek(0)
            raise SystemExit(f"{said.read()[-20000:]}\n{module}: {problem}")


def _watch(workers: Sequence[subprocess.Popen[bytes]], deadline: float) -> str | None:
    """Wait for all workers, end all of them when one fails; what went wrong."""
    try:
        while True:
            states = [worker.poll() for worker in workers]
            if any(states):
                return "a rank failed; see above"
            if all(state == 0 for state in states):
                return None
            if time.monotonic() > deadline:
                return "not done in time"
            time.sleep(0.1)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


@dataclass(frozen=True, slots=True)
class Sample:
    """One operation: the slowest rank's wall time; all ranks' CPU seconds, and bytes in calls of write and read."""

    wall_s: float
    cpu_s: float
    written_bytes: int
    read_bytes: int
    peak_bytes: int
    """Of the worst rank: how far resident memory rose above where it began."""


class Ranks:
    """All ranks of the benchmark, seen from one of them."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        """Gather every rank's value, on every rank."""
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value)
        return out

    def time(self, operation: Callable[[], Any]) -> Sample:
        """Run an operation on all ranks at once."""
        forget_peak()
        before = _resident("VmRSS")
        dist.barrier()
        cpu, (read, written), begin = cpu_s(), bytes_in_calls(), time.perf_counter()
        operation()
        wall = time.perf_counter() - begin
        cpu, (read_after, written_after) = cpu_s() - cpu, bytes_in_calls()
        peak = max(0, _resident("VmHWM") - before)
        samples = self.gather((wall, cpu, written_after - written, read_after - read, peak))
        walls, cpus, writes, reads, peaks = zip(*samples, strict=True)
        return Sample(max(walls), sum(cpus), sum(writes), sum(reads), max(peaks))

    def close(self) -> None:
        dist.barrier()
        dist.destroy_process_group()


def cpu_s() -> float:
    """Measure the CPU seconds of this process so far, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def cpu_s_of(pid: int) -> float:
    """Measure the CPU seconds of another process so far, all threads."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, after_name[11:13])) / os.sysconf("SC_CLK_TCK")


def forget_peak() -> None:
    """Let the kernel count the peak of resident memory from here."""
    Path("/proc/self/clear_refs").write_text("5")


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def bytes_in_calls() -> tuple[int, int]:
    """Return the bytes that this process has read and written in calls so far."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"]), int(counts["wchar"])


class Samples:
    """All samples of a run, by the operation's name; the first of each is its cold one."""

    def __init__(self) -> None:
        self.by_name: dict[str, list[Sample]] = {}

    def add(self, name: str, sample: Sample) -> None:
        self.by_name.setdefault(name, []).append(sample)

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    def least(self, name: str, what: str = "wall_s") -> float:
        """Return the minimum over a run's samples."""
        return float(min(getattr(sample, what) for sample in self.by_name[name]))

    def median(self, name: str, what: str = "wall_s") -> float:
        return float(statistics.median(getattr(sample, what) for sample in self.by_name[name]))

    def first(self, name: str) -> float:
        return self.by_name[name][0].wall_s

    def as_json(self) -> dict[str, Any]:
        return {name: [asdict(sample) for sample in samples] for name, samples in self.by_name.items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Samples:
        samples = cls()
        known = {field.name for field in fields(Sample)}
        for name, rows in data.items():
            for row in rows:
                samples.add(name, Sample(**{key: value for key, value in row.items() if key in known}))
        return samples


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds of an operation of all ranks: those of the slowest one."""
    dist.barrier()
    began = time.perf_counter()
    work()
    took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def times_by_turns(steps: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Time each step in turn, round by round. The first round, which warms up, is left out."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            took = timed(step)
            if number:
                times[name].append(took)
    return times


def run_in_rounds(module: str, doc: str | None, ranks: int, measure: Callable[[int, int], dict[str, Any]], rounds: int) -> None:
    """Be a benchmark of weights that lie on a few gloo ranks of this machine: start the ranks, and print what rank 0 returns.

    Parameters
    ----------
    measure
        Runs on each rank, and is given the size of the weights in bytes and the number of rounds. Returns the figures.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=235, help="size of the weights")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--out", "--json", dest="out", type=Path, help="also write the figures to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.worker:
        launch(module, ranks, [arg for arg in sys.argv[1:] if arg != "--worker"], timeout_s=1200)
        return
    dist.init_process_group("gloo")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    figures = {"machine": machine, **measure(options.mb * 10**6, options.rounds)}
    if dist.get_rank() == 0:
        print(json.dumps(figures, indent=1, ensure_ascii=False), flush=True)
        if options.out is not None:
            save_json(options.out, figures)
    dist.barrier()
    dist.destroy_process_group()


def save_json(path: Path, data: Any) -> None:
    """Write a result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")
