"""What the memory tier costs and saves: stalls, commits in memory, restoring; and lost steps in simulated hours of failures.

``python -m benchmarks.memory_tier`` runs two ranks on gloo, each of which is a node of its own: a folder of its own on tmpfs.
Copies cross from one to the other by gloo over this machine's loopback.

1. Each round times, one after the other and in turn another one first: a memcpy of what a rank holds; the same bytes read from
   a file of the tmpfs and nothing else, by calls of read, also with a hash of each block, and by a mapping; the same bytes sent
   from each rank to the other in one message of gloo, and from one of them alone; an eager save without the tier, one with it
   and without copies, and one with a copy. Of saves it times the stall; with the tier also the time until they are committed in
   memory, and that of the copy. The bare work of a restore from the other node is timed too: one rank sends its part from a
   mapping while it reads and hashes it as its own part, and the other rank receives and hashes. All of that runs on this machine.
2. Then the job is left as by a failure, and is restored from its own memory, verified and not; from the other node's, one node
   having lost its own, while the other loads its own part; and from the disk, whose pages are in the cache.
3. The hours are simulated: failures come at random, some take a node with its memory, and a restart begins at the newest
   checkpoint that survives, by the rules of the tier's placement.

A figure is the minimum over all rounds: of the slowest rank's seconds, and of the CPU seconds of both ranks together. Where
others use the machine, the CPU seconds say more.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.checkpoint import Manager, Memory
from reshard_ckpt.comm.links import Links
from reshard_ckpt.core.planning.copies import copy_holders
from reshard_ckpt.format.files import BLOCK_BYTES
from reshard_ckpt.memory.restore import PEER_BYTES

from .ranks import Ranks, cpu_s, launch, save_json
from .report import machine

READ_BYTES = 1 << 20

TIMES = (
    "memcpy", "read from tmpfs", "read from tmpfs and hash", "copy from a new mapping of tmpfs", "raw send",
    "raw send and hash, beside a read", "raw send both ways", "stall without the tier", "stall with the tier",
    "committed in memory, no copy", "committed in memory", "copy to the other node", "restore from own memory",
    "restore from own memory, unverified", "restore from the other node", "restore from disk",
)  # fmt: skip


class Worker:
    """One rank of the benchmark: its part of a tensor, and its managers with and without the tier."""

    def __init__(self, gb: float, folder: Path, memory: str) -> None:
        self.ranks = Ranks()
        rank, size = self.ranks.rank, self.ranks.size
        num = int(gb * 1e9 / size / 4) // 1024
        self.part = torch.zeros(num, 1024, dtype=torch.int32)
        self.state = {"w": LocalShard(self.part, (num * size, 1024), (num * rank, 0))}
        self.touched = torch.ones_like(self.part)
        self.into = memoryview(self.touched.numpy()).cast("B")
        self.node, self.folder, self.step = Path(tempfile.mkdtemp(prefix="reshard-ckpt-bench-", dir=memory)), folder, 0
        self.times: dict[str, list[float]] = {name: [] for name in TIMES}
        self.cpu_times: dict[str, list[float]] = {name: [] for name in TIMES}
        with open(self.node / "raw", "wb+", buffering=0, opener=partial(os.open, mode=0o600)) as file:
            file.write(memoryview(self.part.numpy()).cast("B"))
            self.raw = os.dup(file.fileno())
        (self.node / "raw").unlink()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        begin, cpu = time.perf_counter(), cpu_s()
        yield
        self.note(name, time.perf_counter() - begin, cpu_s() - cpu)

    def note(self, name: str, wall_s: float, cpu: float) -> None:
        walls, cpus = zip(*self.ranks.gather((wall_s, cpu)), strict=True)
        self.times[name].append(max(walls))
        self.cpu_times[name].append(sum(cpus))

    def manager(self, *, with_tier: bool, copies: int = 1) -> Manager:
        if not with_tier:
            return Manager(self.folder / "plain")
        memory = Memory(copies, folder=str(self.node))
        return Manager(self.folder / ("tier" if copies else "alone"), memory=memory, persist_every="10h")

    def send(self, name: str, senders: Sequence[int]) -> None:
        """Send what a rank holds to the other one in one message: a copy cannot beat that."""
        rank = self.ranks.rank
        with self.timed(name):
            work = [dist.irecv(self.touched, 1 - rank)] if 1 - rank in senders else []
            work += [dist.isend(self.part, 1 - rank)] if rank in senders else []
            for one in work:
                assert one is not None
                one.wait()

    def restore_raw(self) -> None:
        """Do the bare work of a restore from the other node: rank 1 loads its own part, and sends another part to rank 0."""
        with self.timed("raw send and hash, beside a read"):
            starts = range(0, len(self.into), PEER_BYTES)
            if self.ranks.rank:
                with mmap.mmap(self.raw, len(self.into), access=mmap.ACCESS_COPY) as mapping:
                    sent = torch.frombuffer(mapping, dtype=torch.uint8)
                    work = [dist.isend(sent[at : at + PEER_BYTES], 0) for at in starts]
                    self.read_parts(hashes=True)
                    for one in work:
                        assert one is not None
                        one.wait()
                    del sent, work
            else:
                flat = self.touched.flatten().view(torch.uint8)
                for part in [flat[at : at + PEER_BYTES] for at in starts]:
                    dist.recv(part, 1)
                    hash_blocks(memoryview(part.numpy()))

    def read_parts(self, *, hashes: bool) -> None:
        for at in range(0, len(self.into), READ_BYTES):
            part = self.into[at : at + READ_BYTES]
            os.preadv(self.raw, [part], at)
            if hashes:
                hash_blocks(part)

    def memcpy(self) -> None:
        with self.timed("memcpy"):
            self.touched.copy_(self.part)

    def read(self) -> None:
        """Read a file of the tmpfs in parts, and copy it from a mapping: a restore from this node's memory beats neither."""
        with self.timed("read from tmpfs"):
            self.read_parts(hashes=False)
        with self.timed("read from tmpfs and hash"):
            self.read_parts(hashes=True)
        with (
            self.timed("copy from a new mapping of tmpfs"),
            mmap.mmap(self.raw, len(self.into), prot=mmap.PROT_READ) as mapping,
        ):
            self.into[:] = mapping

    def save(self, manager: Manager, *, with_tier: bool, copies: int = 1) -> None:
        begin, cpu = time.perf_counter(), cpu_s()
        handle = manager.async_save(self.step, self.state)
        stalled = time.perf_counter() - begin, cpu_s() - cpu
        handle.result()
        done = time.perf_counter() - begin, cpu_s() - cpu
        if copies:
            self.note(f"stall {'with' if with_tier else 'without'} the tier", *stalled)
        if with_tier:
            self.note("committed in memory" + ("" if copies else ", no copy"), *done)
            assert handle.copies == copies  # type: ignore[attr-defined]

    def saves(self, rounds: int) -> None:
        copied: list[tuple[float, float]] = []
        swap = Links.swap

        def timed(links: Links, *args: Any) -> None:
            begin, cpu = time.perf_counter(), cpu_s()
            swap(links, *args)
            copied.append((time.perf_counter() - begin, cpu_s() - cpu))

        Links.swap = timed  # type: ignore[method-assign]
        plain, tier, alone = self.manager(with_tier=False), self.manager(with_tier=True), self.manager(with_tier=True, copies=0)
        for turn in range(-4, rounds):  # the first ones touch the memory of all slots
            self.step += 1
            self.part.fill_(self.step)
            modes: list[Callable[[], None]] = [
                self.memcpy,
                self.read,
                partial(self.send, "raw send", [1]),
                self.restore_raw,
                partial(self.send, "raw send both ways", [0, 1]),
                partial(self.save, alone, with_tier=True, copies=0),
                partial(self.save, plain, with_tier=False),
                partial(self.save, tier, with_tier=True),
            ]
            copied.clear()
            for mode in modes[turn % len(modes) :] + modes[: turn % len(modes)]:
                self.ranks.gather(0)
                mode()
            self.note("copy to the other node", *map(sum, zip(*copied, strict=True)))
            if turn < 0:
                for samples in (*self.times.values(), *self.cpu_times.values()):
                    samples.clear()
        plain.close()
        alone.__exit__(RuntimeError, RuntimeError(), None)
        tier.__exit__(RuntimeError, RuntimeError(), None)

    def restore(self, name: str, tier: str, **options: Any) -> None:
        """Load the newest checkpoint of a job that failed."""
        if tier == "store":
            self.part.zero_()
            self.ranks.gather(0)
            with self.timed(name):
                checkpoint.load(self.folder / "plain" / f"step_{self.step}", self.state)
        else:
            manager = self.manager(with_tier=True)
            self.part.zero_()
            self.ranks.gather(0)
            with self.timed(name):
                found = manager.load_latest(self.state, **options)
            assert found is not None
            assert found.tier == tier
            manager.__exit__(RuntimeError, RuntimeError(), None)
        assert bool((self.part == self.step).all())

    def run(self, rounds: int) -> dict[str, dict[str, float]]:
        try:
            self.saves(rounds)
            for _ in range(rounds):
                self.restore("restore from own memory", "memory")
                self.restore("restore from own memory, unverified", "memory", verify=False)
                self.restore("restore from disk", "store")
            for _ in range(rounds):
                if self.ranks.rank == 0:
                    shutil.rmtree(self.node)  # the node is lost, and comes back empty
                self.ranks.gather(0)
                self.restore("restore from the other node", "peer")
        finally:
            shutil.rmtree(self.node, ignore_errors=True)
            self.ranks.close()
        both = {"s": self.times, "cpu_s": self.cpu_times}
        return {unit: {name: min(samples) for name, samples in times.items()} for unit, times in both.items()}


def hash_blocks(data: memoryview) -> None:
    """Hash each block, as verifying does."""
    for at in range(0, len(data), BLOCK_BYTES):
        xxhash.xxh3_64_intdigest(data[at : at + BLOCK_BYTES])


def ratios(times: dict[str, float]) -> dict[str, float]:
    """Compare the tier with the physical limits, all from one run."""
    pairs = (
        ("stall with the tier", "stall without the tier"),
        ("committed in memory, no copy", "memcpy"),
        ("copy to the other node", "raw send both ways"),
        ("read from tmpfs", "memcpy"),
        ("read from tmpfs and hash", "memcpy"),
        ("copy from a new mapping of tmpfs", "memcpy"),
        ("restore from own memory", "memcpy"),
        ("restore from own memory", "read from tmpfs and hash"),
        ("restore from own memory, unverified", "memcpy"),
        ("restore from own memory, unverified", "read from tmpfs"),
        ("raw send and hash, beside a read", "raw send"),
        ("restore from the other node", "raw send"),
        ("restore from the other node", "raw send and hash, beside a read"),
        ("restore from own memory", "restore from disk"),
    )
    return {f"{one} ÷ {other}": times[one] / times[other] for one, other in pairs}


def lost_steps(*, with_tier: bool, hours: int = 2000, nodes: int = 64, seed: int = 0) -> float:
    """Simulate hours of failures; returns the steps that are done again, per failure.

    A step takes a second, and the job fails every 10 minutes on average. Half of the failures take a node with its memory, and
    one in twenty of these a second one. Saves to memory come every 10 steps, to the store every 600.
    """
    chance, holders = random.Random(seed), copy_holders(range(nodes), 1)
    step = lost = failures = 0
    fails_at = chance.expovariate(1 / 600)
    for now in range(hours * 3600):
        step += 1
        if now < fails_at:
            continue
        gone: list[int] = []
        if chance.random() < 0.5:
            gone = chance.sample(range(nodes), 2 if chance.random() < 0.05 else 1)
        in_memory = with_tier and all({*holders[node]} - {*gone} for node in gone)
        begin = step - step % (10 if in_memory else 600)
        lost, failures, step = lost + step - begin, failures + 1, begin
        fails_at = now + chance.expovariate(1 / 600)
    return lost / failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.0, help="of both ranks together")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("bench_out/memory_tier"))
    parser.add_argument("--memory", default="/dev/shm", help="a tmpfs, such as one that is mounted with huge=within_size")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker = Worker(args.gb, args.folder.resolve(), args.memory)
        rank, found = worker.ranks.rank, worker.run(args.rounds)
        if rank == 0:
            (args.folder / "times.json").write_text(json.dumps(found))
        return
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    given = ["--gb", str(args.gb), "--rounds", str(args.rounds), "--folder", str(args.folder), "--memory", args.memory]
    where = machine()
    launch("benchmarks.memory_tier", 2, given, timeout_s=1800)
    times = json.loads((args.folder / "times.json").read_text())
    shutil.rmtree(args.folder)
    print(f"{'minima':66} {'wall':>9} {'CPU':>9}")
    for name in TIMES:
        print(f"  {name:64} {times['s'][name]:9.3f} {times['cpu_s'][name]:9.3f} s")
    found = {unit: ratios(one) for unit, one in times.items()}
    print("ratios")
    for name in found["s"]:
        print(f"  {name:64} {found['s'][name]:9.2f} {found['cpu_s'][name]:9.2f}")
    lost = {"with the tier": lost_steps(with_tier=True), "without": lost_steps(with_tier=False)}
    print("lost steps per failure")
    for name, value in lost.items():
        print(f"  {name:64} {value:9.3f}")
    if args.out:
        save_json(args.out, {"machine": where, "gb": args.gb, "rounds": args.rounds, **times, "ratios": found, "lost": lost})


if __name__ == "__main__":
    main()
