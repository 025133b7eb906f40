"""Kill real processes at every instant of saves to memory, and look at what their node holds.

``python -m tests.memory.kills --out FILE`` forks each job from this process, so that torch is imported once.

1. A process saves steps 1 to 5 to memory, keeping two generations, of which some go on to the store. It is killed by SIGKILL
   after each of its system calls below a folder, or, as a mapped slot is filled without any, in each step of filling one.
2. The newest checkpoint must then load, bit for bit: no older one than the last whose save had returned, and where one had, from
   memory.
3. The next job must go on from there, and leave the memory within its budget.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from reshard_ckpt.checkpoint import Manager, Memory
from reshard_ckpt.engine.saving import staging
from reshard_ckpt.memory import slots, tier
from reshard_ckpt.memory.node import run_path
from tests.layouts import values_of
from tests.reliability.points import main, sweep
from tests.reliability.tracer import Traced, fork

STEPS = 5
SHAPE = (300, 1024)


@cache
def whole(number: int) -> torch.Tensor:
    """The tensor of a step, which nothing changes."""
    return values_of(SHAPE, "I32", number)


def state(number: int) -> dict[str, Any]:
    return {"w": whole(number).clone(), "extra": {"step": number, "long": "x" * 9000}}


def manager_of(base: Path) -> Manager:
    return Manager(base / "run", memory=Memory(copies=0, folder=str(base / "memory")), persist_every=2)


def job(base: Path) -> None:
    """Save, and say after each save that it has returned."""
    with manager_of(base) as manager:
        for step in range(1, STEPS + 1):
            handle = manager.async_save(step, state(step))
            handle.result()
            (base.parent / "returned").write_text(str(step))  # not below the folder that is followed
            handle.persisted()


def look(base: Path) -> str:
    """Load in the next job, and save once more; returns the tier."""
    returned = base.parent / "returned"
    least = int(returned.read_text()) if returned.exists() else 0
    with manager_of(base) as manager:
        into = state(0)
        found = manager.load_latest(into)
        step = 0 if found is None else found.step
        assert least <= step <= least + 1, f"step {step} loaded, {least} had returned"
        assert found is None or (into["w"].equal(whole(step)) and into["extra"]["step"] == step)
        assert found is None or not found.passed_over or step == least, found
        assert not least or (found is not None and found.tier == "memory"), found
        manager.async_save(step + 1, state(step + 1)).result()
        again = state(0)
        loaded = manager.load_latest(again)
        assert loaded is not None
        assert again["w"].equal(whole(step + 1))
    folder = run_path(str(base / "memory"), str(base / "run"))
    assert len(list(folder.glob("*.slot"))) <= 3, list(folder.iterdir())
    assert not list(folder.glob(".*")), list(folder.iterdir())
    return "" if found is None else found.tier


def fresh(parent: Path) -> Path:
    """Make an empty folder for one job."""
    shutil.rmtree(parent, ignore_errors=True)
    (parent / "base").mkdir(parents=True)
    return parent / "base"


def after_calls(parent: Path, every: int) -> dict[str, Any]:
    """Kill after each system call, or some."""

    def traced(kill_after: int | None = None) -> Traced:
        base = fresh(parent)
        child = Traced(str(base), kill_after)
        child.start(partial(job, base))
        child.finish()
        return child

    dry = traced()
    assert dry.status == 0
    tiers = sweep(dry.calls, lambda n: look(Path(traced(n).base)), every)
    return {"points": len(dry.calls), "tried": len(tiers), "tiers": {tier: tiers.count(tier) for tier in sorted(set(tiers))}}


def step_of(names: list[str], point: int) -> Callable[[str], None]:
    """Return what adds the name of a step to those so far, and dies if it is the one."""

    def step(name: str) -> None:
        names.append(name)
        if len(names) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return step


@contextmanager
def killed_at(point: int) -> Iterator[list[str]]:
    """Count the steps of filling slots, and die at one of them: in the middle of a stretch of memory, and after each step."""
    names: list[str] = []
    restored: list[tuple[Any, str, Any]] = []
    step = step_of(names, point)

    def patch(owner: Any, name: str, made: Callable[[Any], Any]) -> None:
        restored.append((owner, name, getattr(owner, name)))
        setattr(owner, name, made(getattr(owner, name)))

    def around(name: str) -> Callable[[Any], Any]:
        def made(old: Any) -> Any:
            def new(*args: Any, **options: Any) -> Any:
                out = old(*args, **options)
                step(name)
                return out

            return new

        return made

    def seal(slot: slots.Slot, table: slots.SlotTable) -> None:
        data, head = table.encoded(), len(slots.MAGIC)
        slot._map[head : len(data) // 2] = data[head : len(data) // 2]
        step("half of the header")
        slot._map[head : len(data)] = data[head:]
        step("header without its magic")
        slot._map[:head] = slots.MAGIC
        step("header on")

    patch(slots.Slot, "void", around("header off"))
    patch(slots.Slot, "put", around("digests"))
    patch(slots.Slot, "seal", lambda _: seal)
    patch(staging.Staging, "fill", around("data"))
    patch(tier, "keep_generation", around("generation"))
    try:
        yield names
    finally:
        for owner, name, old in restored:
            setattr(owner, name, old)


def while_filling(parent: Path, every: int) -> dict[str, Any]:
    """Kill at each step of filling a slot, or some."""
    with killed_at(0) as names:
        job(fresh(parent))
    points = list(names)

    def attempt(point: int) -> str:
        base = fresh(parent)

        def main() -> None:
            with killed_at(point):
                job(base)

        _, status = os.waitpid(fork(main), 0)
        assert os.WIFSIGNALED(status), status
        look(base)
        return points[point - 1]

    tried = sweep(points, attempt, every)
    return {"points": len(points), "tried": len(tried), "steps": sorted(set(tried))}


def run(folder: Path, args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    for number in range(STEPS + 2):
        whole(number)  # once for all processes, which are forks of this one
    yield "filling", while_filling(folder / "job", args.every)
    yield "calls", after_calls(folder / "job", args.every)


if __name__ == "__main__":
    sys.exit(main(__doc__, run, "/dev/shm"))
