"""torchft's own lighthouse and managers: a replica that is killed comes back, and a job that is killed goes on, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("torchft", reason="needs torchft: make compat-torchft")

from torchft.coordination import LighthouseServer

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "examples" / "torchft_replicas.py"
STEPS = 12


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """Run torchft's server, which says which replicas take part in a step."""
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=500, heartbeat_timeout_ms=1000)
    yield server.address()
    server.shutdown()


class Replica:
    """A process of the example, and the losses that it prints, by step."""

    def __init__(self, run: Path, number: int, lighthouse: str, log: Path, stack: ExitStack) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(PROGRAM), str(run), str(number), lighthouse]
        self._log = stack.enter_context(log.open("a"))
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True, env=env)
        stack.callback(self.kill)
        self.losses: dict[int, set[str]] = {}

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._take(STEPS)

    def _take(self, step: int) -> None:
        """Take in the lines that it prints until that of a step, or all."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            at, loss = line.split()
            self.losses.setdefault(int(at), set()).add(loss)  # a step that was not committed is done again
            if int(at) == step:
                break

    def until(self, step: int) -> Replica:
        """Wait until it has printed a step, or for `STEPS` until its end."""
        self._take(step)
        if step < STEPS:
            assert step in self.losses, Path(self._log.name).read_text()[-5000:]
            return self
        assert self._process.wait() == 0, Path(self._log.name).read_text()[-5000:]
        return self


def test_replicas_that_are_killed_go_on_with_the_same_losses(tmp_path: Path, lighthouse: str) -> None:
    with ExitStack() as stack:

        def start(run: str, number: int) -> Replica:
            return Replica(tmp_path / run, number, lighthouse, tmp_path / "log", stack)

        wanted = [one.until(STEPS).losses for one in [start("undisturbed", 0), start("undisturbed", 1)]]
        assert [sorted(losses) for losses in wanted] == [list(range(STEPS))] * 2

        replicas = [start("killed", 0), start("killed", 1)]
        replicas[1].until(4).kill()
        replicas.append(start("killed", 1))  # gets the state of the other
        assert min(replicas[2].until(8).losses) in (4, 5)
        for one in replicas:
            one.kill()
        replicas += [start("killed", 0), start("killed", 1)]  # begin at the newest checkpoint
        for one in replicas[-2:]:
            assert min(one.until(STEPS).losses) in (3, 6, 9)
        for one, number in zip(replicas, (0, 1, 1, 0, 1), strict=True):
            assert one.losses.items() <= wanted[number].items()
