"""A soak test: jobs on ever other layouts save, load, fail and are killed, and what survives is compared bit for bit.

``python -m benchmarks.soak --minutes 15 --out FILE``

1. Each generation is a job of 1 to 4 processes on gloo. Each tensor is cut anew: along a dim, into a grid, flat, or not at all.
2. The job loads the newest checkpoint (all bits are compared), then saves step after step, with `async_save` or `save`. Now and
   then a write, a sync or a rename of one rank fails as a disk would: that save must fail on all ranks, and the next one succeed.
3. Most jobs end by SIGKILL, of one rank or of all, at a random moment; the ranks left must notice. Between jobs, the newest
   checkpoint is sometimes damaged on purpose: the next job must fall back, and say so.
4. After each job this process reads every checkpoint that is left, and compares all of it with what it must hold. The one whose
   commit was the last to be reported must be there.
5. Threads, open files and memory at the end are compared with those at the start, here and in the jobs that were not killed.
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.ranks import end_with, save_json
from reshard_ckpt import FlatShard, LocalShard, checkpoint
from reshard_ckpt.checkpoint import Manager
from reshard_ckpt.errors import CheckpointError

SHAPES = {"embed": (96, 64), "layers.0.qkv": (48, 32, 5), "layers.1.norm": (129,), "head": (64, 800), "scale": (), "none": (0, 7)}
DTYPES = {"embed": torch.bfloat16, "layers.0.qkv": torch.float32, "layers.1.norm": torch.float64, "head": torch.float32,
          "scale": torch.float32, "none": torch.float16}  # fmt: skip
TIMEOUT_S = 60
JOIN_S = 30
"""How long ranks wait for each other at the start of a job: in vain where one was killed before it came."""
WRONG, SAID = 3, 4
"""Exit codes of a rank: what it loaded was wrong; or it ended by a named error, as it should where another was killed."""


def whole(name: str, step: int) -> torch.Tensor:
    """Return the tensor of a step: every byte depends on name, step and position."""
    dtype, shape = DTYPES[name], SHAPES[name]
    num = int(np.prod(shape)) * dtype.itemsize
    if num == 0:
        return torch.empty(shape, dtype=dtype)
    salt = step * 1_000_003 + list(SHAPES).index(name) * 7919
    data = ((np.arange(num, dtype=np.uint64) * 2654435761 + salt) >> 5).astype(np.uint8) % 251
    return torch.from_numpy(data).view(dtype).reshape(shape)


class Shard:
    """What one rank holds of one tensor: a view of the whole that is cut out, and how it is declared."""

    def __init__(self, name: str, rank: int, size: int, draw: random.Random) -> None:
        self.name, shape = name, SHAPES[name]
        self.num = int(np.prod(shape))
        kinds = ["whole"] if not shape or self.num == 0 else ["whole", "dim", "flat", "grid"]
        self.kind, self.dim = draw.choice(kinds), draw.randrange(max(len(shape), 1))
        cuts = sorted(draw.randrange(self.num + 1) for _ in range(size - 1)) if self.num else []
        self.begin, self.end = [0, *cuts, self.num][rank : rank + 2] if self.kind == "flat" else (0, self.num)
        offsets, lengths = [0] * len(shape), list(shape)
        if self.kind == "dim":
            offsets[self.dim], lengths[self.dim] = _chunk(shape[self.dim], size, rank)
        elif self.kind == "grid":
            rows = 2 if size % 2 == 0 else 1
            offsets[0], lengths[0] = _chunk(shape[0], rows, rank % rows)
            if len(shape) > 1:
                offsets[-1], lengths[-1] = _chunk(shape[-1], size // rows, rank // rows)
            elif size > rows:  # the other ranks hold replicas
                pass
        self.offsets, self.lengths = tuple(offsets), tuple(lengths)
        self.tensor = torch.zeros_like(self.of(0))

    def of(self, step: int) -> torch.Tensor:
        """Make this rank's part of the tensor of a step."""
        value = whole(self.name, step)
        if self.kind == "flat":
            return value.reshape(-1)[self.begin : self.end].clone()
        for dim, (offset, length) in enumerate(zip(self.offsets, self.lengths, strict=True)):
            value = value.narrow(dim, offset, length)
        return value.clone()

    def declared(self) -> Any:
        if self.kind == "flat":
            return FlatShard(self.tensor, SHAPES[self.name], self.begin)
        return LocalShard(self.tensor, SHAPES[self.name], self.offsets)


def _chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    step = -(-size // parts)
    begin = min(index * step, size)
    return begin, min(step, size - begin)


class BadDisk:
    """Makes the n-th write, sync or rename of this process fail, once it is armed."""

    def __init__(self) -> None:
        self._left, self._error = -1, errno.EIO
        for name in ("write", "fsync", "replace"):
            setattr(os, name, self._failing(getattr(os, name)))

    def arm(self, after: int, error: int) -> None:
        self._left, self._error = after, error

    def disarm(self) -> None:
        self._left = -1

    def _failing(self, call: Any) -> Any:
        def maybe(*args: Any, **options: Any) -> Any:
            if self._left >= 0:
                self._left -= 1
                if self._left < 0:
                    raise OSError(self._error, os.strerror(self._error))
            return call(*args, **options)

        return maybe


@dataclass(frozen=True)
class Usage:
    """What a process holds."""

    threads: int
    files: int
    resident_bytes: int

    @classmethod
    def now(cls) -> Usage:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(threading.active_count(), len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE"))

    @classmethod
    def at_rest(cls, before: Usage) -> Usage:
        """Wait until it has no more than before, a minute at most: threads that are done take a moment to end."""
        deadline = time.monotonic() + 60
        while (usage := cls.now()).grew_from(before) and time.monotonic() < deadline:
            time.sleep(0.01)
        return usage

    def grew_from(self, before: Usage) -> bool:
        """Return whether there are more threads or files."""
        return self.threads > before.threads or self.files > before.files


@dataclass(frozen=True)
class Job:
    """One generation: what its ranks do. All ranks draw the same numbers from the same seed."""

    root: str
    size: int
    seed: int
    saves: int


def work(job: Job, rank: int, listener: socket.socket, report: int) -> int:
    """Run one rank, the first one with its store at the socket; returns its exit code."""
    raw_write = os.write
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch prints a page for each peer that dies

    def say(*words: object) -> None:
        raw_write(report, (" ".join(map(str, (rank, *words))) + "\n").encode())

    warnings.simplefilter("ignore")
    faulthandler.dump_traceback_later(8 * TIMEOUT_S, file=report)  # where it hangs, if it does
    try:
        try:
            join_s, port = timedelta(seconds=JOIN_S), listener.getsockname()[1]
            if rank:
                listener.close()
            fd = None if rank else listener.detach()
            store = dist.TCPStore("127.0.0.1", port, job.size, rank == 0, join_s, master_listen_fd=fd)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=job.size, timeout=join_s)
        except RuntimeError as error:  # another rank was killed before the group was there
            say("alone", type(error).__name__)
            return SAID
        return _train(job, rank, say)
    except CheckpointError as error:
        say("error", type(error).__name__, str(error).replace("\n", " "))
        return SAID
    except BaseException:
        say("crash", traceback.format_exc()[-800:].replace("\n", " | "))
        return 1


def _train(job: Job, rank: int, say: Any) -> int:
    draw, disk = random.Random(job.seed), BadDisk()
    shards = [Shard(name, rank, job.size, draw) for name in SHAPES]
    state = {"model": {shard.name: shard.declared() for shard in shards}, "extra": {"step": 0}}
    with Manager(job.root, keep_last=3, keep_every=50, timeout_s=TIMEOUT_S) as manager:
        loaded = manager.load_latest(state)
        first = 0 if loaded is None else loaded.step
        wrong = [shard.name for shard in shards if loaded and not _same(shard.tensor, shard.of(first))]
        if wrong or state["extra"]["step"] != first:
            say("wrong", first, *wrong)
            return WRONG
        say("loaded", first, 0 if loaded is None else len(loaded.passed_over))
        before = None
        for step in range(first + 1, first + 1 + job.saves):
            for shard in shards:
                shard.tensor.copy_(shard.of(step))
            state["extra"]["step"] = step
            faulty, victim, after = draw.random() < 0.15, draw.randrange(job.size), draw.randrange(8)
            error, background = draw.choice([errno.EIO, errno.ENOSPC]), draw.random() < 0.7
            if faulty and victim == rank:
                disk.arm(after, error)
            try:
                if background:
                    handle = manager.async_save(step, state)
                    for shard in shards:  # it may change now
                        shard.tensor.fill_(-1)
                    handle.result()
                else:
                    manager.save(step, state)
                say("saved", step)
            except CheckpointError as failure:
                if not faulty:
                    raise
                say("failed", step, type(failure).__name__)
            finally:
                disk.disarm()
            if step == first + 3:
                manager._wait()  # the pruning after a commit has a thread of its own
                before = Usage.now()
        manager._wait()
    if before is not None:
        say("usage", *asdict(before).values(), *asdict(Usage.at_rest(before)).values())
    dist.destroy_process_group()
    return 0


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bit for bit, where `torch.equal` would find no NaN equal to itself."""
    return a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


@dataclass
class Tally:
    """What a soak has done and found."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    job_growth_bytes: list[int] = field(default_factory=list)


class Soak:
    """Generations of jobs over one root, and what must hold between them."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.draw, self.tally = root, random.Random(seed), Tally()
        self.damaged: set[int] = set()

    def generation(self) -> None:
        draw, counts = self.draw, self.tally.counts
        job = Job(str(self.root), draw.randint(1, 4), draw.randrange(1 << 30), draw.randint(4, 14))
        kill = draw.choice(["none", "one", "all", "all"])
        counts[f"jobs of {job.size}"] += 1
        lines, codes, killed = self._run(job, kill, draw.randrange(job.saves * job.size), draw.randrange(job.size))
        counts["ranks killed"] += len(killed)
        said = [line.split(" ") for line in lines if line[:1].isdigit()]
        stacks = [line for line in lines if not line[:1].isdigit()]
        if stacks:
            self._problem(f"{job}: hangs:\n" + "\n".join(stacks))
        for rank, code in enumerate(codes):
            fine = {0, SAID, -signal.SIGKILL} if killed else {0}
            if code not in fine:
                mine = [line for line in lines if line.startswith(f"{rank} ")][-1:]
                self._problem(f"{job}: rank {rank} ended with {code}: {mine}")
        self._check_job(job, said, whole_job=not killed)
        self._check_root(said)

    def _problem(self, text: str) -> None:
        print(f"PROBLEM: {text}", file=sys.stderr, flush=True)
        self.tally.problems.append(text)

    def _run(self, job: Job, kill: str, after_lines: int, victim: int) -> tuple[list[str], list[int], set[int]]:
        """Fork the ranks, kill once so many lines are written, wait; returns lines, exit codes, and who was killed alive."""
        reading, writing = os.pipe()
        listener = socket.create_server(("127.0.0.1", 0), backlog=16)
        ranks, parent = [], os.getpid()
        for rank in range(job.size):
            if (child := os.fork()) == 0:
                end_with(parent)
                os.close(reading)
                os._exit(work(job, rank, listener, writing))
            ranks.append(child)
        os.close(writing)
        listener.close()
        chunks: list[bytes] = []
        listener = threading.Thread(target=lambda: chunks.extend(iter(lambda: os.read(reading, 1 << 16), b"")))
        listener.start()
        codes: dict[int, int] = {}
        killed: set[int] = set()
        begin = time.monotonic()
        while len(codes) < job.size:
            for rank, child in enumerate(ranks):
                if rank not in codes and (status := os.waitpid(child, os.WNOHANG))[0]:
                    codes[rank] = os.waitstatus_to_exitcode(status[1])
            late = time.monotonic() - begin
            if kill != "none" and b"".join(chunks).count(b"\n") >= after_lines:
                time.sleep(self.draw.uniform(0, 0.03))  # anywhere between two lines
                chosen = [victim] if kill == "one" else range(job.size)
                killed = {rank for rank in chosen if rank not in codes}
                for rank in killed:
                    os.kill(ranks[rank], signal.SIGKILL)
                kill = "none"
            if late > 10 * TIMEOUT_S:
                for rank in set(range(job.size)) - set(codes):
                    os.kill(ranks[rank], signal.SIGKILL)
                begin = time.monotonic()
            time.sleep(0.002)
        listener.join()
        os.close(reading)
        return b"".join(chunks).decode().splitlines(), [codes[rank] for rank in range(job.size)], killed

    def _check_job(self, job: Job, said: list[list[str]], *, whole_job: bool) -> None:
        counts = self.tally.counts
        outcomes: dict[str, set[str]] = {}
        for rank, what, *rest in said:
            if what in ("saved", "failed"):
                outcomes.setdefault(rest[0], set()).add(what)
                counts[f"saves that {'failed, as they should' if what == 'failed' else 'were committed'}"] += rank == "0"
            elif what == "loaded":
                counts["loads"] += rank == "0" and rest[0] != "0"
                counts["loads that fell back"] += rank == "0" and rest[1] != "0"
                if int(rest[0]) in self.damaged:
                    self._problem(f"{job}: loaded step {rest[0]}, which is damaged")
            elif what == "usage":
                before, after = Usage(*map(int, rest[:3])), Usage(*map(int, rest[3:]))
                self.tally.job_growth_bytes.append(after.resident_bytes - before.resident_bytes)
                if after.grew_from(before):
                    self._problem(f"{job}: rank {rank}: {before} grew to {after}")
            elif what == "error":
                counts["ranks that raised a named error as another was killed"] += 1
        for step, kinds in outcomes.items():
            if len(kinds) > 1 and whole_job:
                self._problem(f"{job}: step {step} was committed for one rank and failed for another")

    def _check_root(self, said: list[list[str]]) -> None:
        steps = Manager(self.root, read_only=True).steps()
        committed = [int(rest[0]) for rank, what, *rest in said if rank == "0" and what == "saved"]
        if committed and committed[-1] not in steps:
            self._problem(f"step {committed[-1]} was committed, but there are {steps}")
        self.damaged &= set(steps)
        for step in steps:
            path = self.root / f"step_{step}"
            report = checkpoint.verify(path)
            if not report.ok:
                if step not in self.damaged:
                    self._problem(f"step {step}: {report.problems}")
                continue
            self.damaged.discard(step)
            self.tally.counts["checkpoints compared bit for bit"] += 1
            held = checkpoint.read(path)
            wrong = [name for name in SHAPES if not _same(held[f"model.{name}"], whole(name, step))]
            if wrong or held["extra.step"] != step:
                self._problem(f"step {step}: wrong: {wrong}")
        if len(steps) - len(self.damaged) > 1 and self.draw.random() < 0.2:
            self._damage(steps[-1])

    def _damage(self, step: int) -> None:
        file = self.draw.choice(sorted(self.root.glob(f"step_{step}/*/*.safetensors")))
        at = self.draw.randrange(file.stat().st_size * 3 // 4, file.stat().st_size)  # beyond its header
        with file.open("r+b") as opened:
            opened.seek(at)
            byte = opened.read(1)[0]
            opened.seek(at)
            opened.write(bytes([byte ^ 1 << self.draw.randrange(8)]))
        self.damaged.add(step)
        self.tally.counts["checkpoints damaged on purpose"] += 1


WARM_UP = 5
"""Generations after which this process holds what it will hold."""


def run(seed: int, *, minutes: float = 0, generations: int = 0) -> dict[str, Any]:
    """Run for some time, or for a number of generations; returns what was done and found."""
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="soak"))
    soak, begin, count = Soak(root, seed), time.monotonic(), 0
    first = Usage.now()
    while count < generations if generations else time.monotonic() - begin < 60 * minutes:
        soak.generation()
        count += 1
        if count == WARM_UP:
            first = Usage.now()
    last = Usage.at_rest(first)
    if count > WARM_UP and last.grew_from(first):
        soak._problem(f"this process held {first} at the start and {last} at the end")
    shutil.rmtree(root)
    growth = soak.tally.job_growth_bytes
    return {
        "seed": seed,
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "generations": count,
        "counts": dict(sorted(soak.tally.counts.items())),
        "problems": soak.tally.problems,
        "start": asdict(first),
        "end": asdict(last),
        "largest_growth_of_a_job_bytes": max(growth, default=0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--generations", type=int, default=0, help="this many jobs, instead of for some minutes")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    result = run(args.seed, minutes=args.minutes, generations=args.generations)
    for what, count in result["counts"].items():
        print(f"{count:6} {what}")
    print(f"held at the start {result['start']}, at the end {result['end']}")
    if args.out:
        save_json(args.out, result)
    raise SystemExit(bool(result["problems"]))


if __name__ == "__main__":
    main()
