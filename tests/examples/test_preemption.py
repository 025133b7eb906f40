"""`examples/preemption.py` under a real SIGTERM: a last save at one step of all ranks, exit code 0, and the next job goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from reshard_ckpt import checkpoint
from tests.launch import ROOT
from tests.warm_python import warm_python

EXAMPLE = ROOT / "examples" / "preemption.py"
MANY = 100_000
"""Steps of a job that is told to end after a few; what a failed test leaves behind ends, too."""


def run(root: Path, num_steps: int, nproc: int, told: Sequence[int] = ()) -> str:
    """Run the example, send SIGTERM to some of its ranks once it trains, and return what it printed."""
    command = [warm_python(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", str(EXAMPLE)]
    job = subprocess.Popen(
        [*command, str(root), str(num_steps)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    printed, waiting = "", set(told)
    try:
        for line in job.stdout or ():
            printed += line
            if waiting and "\nstep " in printed:
                pids = {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d+) is process (\d+)", printed)}
                assert len(pids) == nproc, printed
                while waiting:
                    os.kill(pids[waiting.pop()], signal.SIGTERM)
        job.wait()
    except BaseException:
        os.killpg(job.pid, signal.SIGKILL)
        raise
    assert job.returncode == 0, printed
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("told", [[1], [0, 1]], ids=["one rank is told", "all ranks are told"])
def test_sigterm_makes_a_last_save_and_the_next_job_goes_on_from_it(tmp_path: Path, told: list[int]):
    printed = run(tmp_path / "run", MANY, 2, told)
    saved = dict(re.findall(r"rank (\d) saved step (\d+)", printed))
    assert set(saved) == {"0", "1"}, printed
    (step,) = {int(step) for step in saved.values()}
    with checkpoint.Manager(tmp_path / "run", read_only=True) as manager:
        assert manager.latest() == step
    assert checkpoint.verify(tmp_path / "run" / f"step_{step}").ok
    again = run(tmp_path / "run", step + 2, 1)
    assert f"from step {step}\n" in again
    assert f"rank 0 saved step {step + 2} in" in again
