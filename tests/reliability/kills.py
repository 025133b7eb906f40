"""Kill real processes after each system call of a save, one after the other, and look at what they leave.

``python -m tests.reliability.kills --out FILE`` tries every point; ``--every N`` every N-th of them. It forks each job from this
process, so that torch is imported once; `tests.reliability.tracer` counts the calls and kills.

1. A save of one process, or of four on gloo of which one is followed and killed. The others are killed at the same moment, as by
   torchrun or a node that goes down, or go on alone until they notice.
2. The path must then hold the old state or the new one, bit for bit, or nothing where there was nothing.
3. The next save must work, and leave nothing but its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from reshard_ckpt import LocalShard, checkpoint
from tests.reliability.calls import Call
from tests.reliability.points import main, sweep
from tests.reliability.states import NEW, OLD, ROWS, assert_next_save_works, expected, held, plain
from tests.reliability.tracer import Traced, fork


@dataclass(frozen=True)
class Case:
    """One kind of save, and whom it loses."""

    kind: str
    ranks: int = 1
    victim: int = 0
    survivors: str = "die"
    old: int | None = None

    @property
    def label(self) -> str:
        what = f"{self.kind}, {'overwrite' if self.old else 'first save'}"
        return what if self.ranks == 1 else f"{what}, rank {self.victim} of {self.ranks}, the others {self.survivors}"


CASES = [
    *(Case(kind, old=old) for kind in ("sync", "eager", "lazy") for old in (None, OLD)),
    *(Case(kind, 4, victim, "die", old) for kind in ("sync", "eager") for victim in (0, 1, 3) for old in (None, OLD)),
    *(Case("sync", 4, victim, "go on", OLD) for victim in (0, 2)),
]
SAMPLE = [
    *(Case(kind, old=old) for kind in ("sync", "lazy") for old in (None, OLD)),
    Case("sync", 4, 0, "die", OLD),
    Case("eager", 4, 3, "die", OLD),
    Case("sync", 4, 2, "go on", OLD),
]


def save(kind: str, path: Path, state: dict, **options: float) -> None:
    if kind == "sync":
        checkpoint.save(path, state, **options)
    else:
        checkpoint.async_save(path, state, staging=kind, **options).result()


def state_of(rank: int, ranks: int, number: int) -> dict:
    """What one rank of a job passes to a save."""
    if ranks == 1:
        return plain(number)
    state, each = plain(number), ROWS // ranks
    rows = expected(number)["t.rows"][rank * each : (rank + 1) * each].clone()
    state["t"]["rows"] = LocalShard(rows, (ROWS, 5), (rank * each, 0))
    return state


def job_of(case: Case, rank: int, path: Path, listener: socket.socket | None, timeout_s: float) -> Callable[[], None]:
    """What one process does."""

    def run() -> None:
        options = {}
        if listener is not None:
            port, wait_s = listener.getsockname()[1], timedelta(seconds=600)
            fd = listener.fileno() if rank == 0 else None
            store = dist.TCPStore("127.0.0.1", port, case.ranks, rank == 0, wait_s, master_listen_fd=fd)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=case.ranks, timeout=wait_s)
            options = {"timeout_s": timeout_s}
        save(case.kind, path, state_of(rank, case.ranks, NEW), **options)

    return run


def run_case(case: Case, base: Path, kill_after: int | None) -> Traced:
    """One job, killed; what it did until then."""
    path = base / "p"
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir()
    if case.old is not None:
        checkpoint.save(path, plain(case.old))
    traced = Traced(str(base), kill_after)
    listener = None
    # Those that go on without the victim may give it up soon; where nobody is killed, nobody is given up on a busy machine.
    timeout_s = 2.0 if kill_after is not None and case.survivors == "go on" else 600.0
    others: list[int] = []
    if case.ranks > 1:
        listener = socket.create_server(("127.0.0.1", 0), backlog=16)
    try:
        others += [fork(job_of(case, r, path, listener, timeout_s)) for r in range(case.ranks) if r != case.victim]
        traced.start(job_of(case, case.victim, path, listener, timeout_s))
        traced.finish(when_killed=lambda: end({*others} - traced.others.keys()) if case.survivors == "die" else None)
    finally:
        end({*others} - traced.others.keys())  # the number of one that was waited for may be another process by now
        if listener is not None:
            listener.close()
    return traced


def end(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def dry_run(case: Case, base: Path) -> list[Call]:
    """The calls of the process that will be killed, undisturbed."""
    traced = run_case(case, base, None)
    assert traced.status == 0, f"{case.label}: exit status {traced.status}"
    assert held(base / "p") == NEW
    return traced.calls


@dataclass(frozen=True)
class Tally:
    """What became of a case's points."""

    label: str
    points: int
    tried: int
    left_old: int
    left_new: int
    left_nothing: int
    seconds: float


def swept(case: Case, base: Path, every: int = 1, first: int = 1) -> Tally:
    """Kill at every point, or at some; anything but the old or the new state is an error."""
    began = time.monotonic()

    def attempt(n: int) -> int | None:
        traced = run_case(case, base, n)
        assert traced.killed or case.ranks > 1, f"{case.label}: ended before call {n}"
        found = held(base / "p")
        assert found in (case.old, NEW), f"{case.label}: killed after {traced.calls[-1]}, the path holds {found}"
        assert_next_save_works(base / "p")
        return found

    points = dry_run(case, base)
    found = sweep(points, attempt, every, first)
    if case.ranks == 1:  # one process makes its calls in one order, so there is one moment from which on it is the new one
        assert found == sorted(found, key=lambda number: number == NEW)
    counts = [found.count(number) for number in (OLD, NEW, None)]
    return Tally(case.label, len(points), len(found), *counts, round(time.monotonic() - began, 1))


def traces(base: Path) -> Iterator[tuple[Case, list[Call]]]:
    """The real calls of the cases of one process."""
    for case in CASES:
        if case.ranks == 1:
            yield case, dry_run(case, base)


def as_json(call: Call) -> dict[str, object]:
    return {"name": call.name, "path": call.path, "target": call.target, "size": call.size}


def run(folder: Path, args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    base = folder / "disk"
    if args.traces:
        args.traces.write_text(json.dumps([[asdict(case), calls] for case, calls in traces(base)], default=as_json))
    for i, case in enumerate(SAMPLE if args.sample else CASES):
        yield case.label, asdict(swept(case, base, args.every, 1 + i % args.every))


if __name__ == "__main__":
    sample = {"action": "store_true", "help": "some cases alone"}
    traced = {"type": Path, "help": "where to write the calls of undisturbed saves of one process, as JSON"}
    sys.exit(main(__doc__, run, sample=sample, traces=traced))
