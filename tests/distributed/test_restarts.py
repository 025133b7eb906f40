"""Jobs under a real ``torchrun --max-restarts`` whose workers are killed in the middle of saves go on from the newest step."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from reshard_ckpt import checkpoint
from tests.distributed import restarts
from tests.distributed.by_hand import free_port
from tests.launch import ROOT
from tests.warm_python import warm_python

RAW = re.compile(r"(UnicodeDecodeError|AssertionError|JSONDecodeError|struct\.error|KeyError|DistNetworkError: .*\n\n)\b")
"""Of errors in the output: what would be one of ours that has no name, or nothing above it that has."""


def torchrun(*args: str) -> subprocess.Popen[str]:
    """Start the command as a user does where workers may be restarted."""
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [warm_python(), "-m", "torch.distributed.run", "--max-restarts=3", "--monitor-interval=0.1", *args]
    return subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def kill(*jobs: subprocess.Popen[str]) -> None:
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a rank has a session of its own, and may hold the output open
            job.communicate(timeout=10)


def said(output: str) -> list[str]:
    """Return what the job itself printed."""
    return re.findall(r"<((?:begins after|saved) \d+ on \d+|done)>", output)


def check(folder: Path, output: str, size: int) -> None:
    assert not RAW.search(output.replace("torch.distributed.DistNetworkError", "")), output
    newest = max((folder / "run").glob("step_*"), key=lambda path: int(path.name[5:]))
    assert torch.equal(checkpoint.read(newest)["w"], restarts.expected(int(newest.name[5:])))
    assert checkpoint.verify(newest).ok
    assert len(checkpoint.catalog(newest).files) == size


@pytest.mark.slow
def test_a_job_whose_workers_are_killed_twice_goes_on_twice(tmp_path: Path) -> None:
    """First rank 1, then rank 0, whose process holds the store of the sessions."""
    job = torchrun("--standalone", "--nproc-per-node=2", restarts.__file__, str(tmp_path), "6", "3:1,5:0", "2")
    try:
        output = job.communicate(timeout=900)[0]
    finally:
        kill(job)
    assert job.returncode == 0, output
    assert said(output) == [
        *("begins after 0 on 2", "saved 1 on 2", "saved 2 on 2"),
        *("begins after 2 on 2", "saved 3 on 2", "saved 4 on 2"),
        *("begins after 4 on 2", "saved 5 on 2", "saved 6 on 2", "done"),
    ]
    assert "the process of rank 1 ended before this was done" in output
    check(tmp_path, output, 2)


@pytest.mark.slow
def test_a_job_that_a_node_joins_goes_on_and_on_again_after_a_kill(tmp_path: Path) -> None:
    args = (
        *("--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"),
        *("--rdzv-id=restarts", "--rdzv-conf=last_call_timeout=3", restarts.__file__, str(tmp_path), "4", "3:1", "2"),
    )
    first = torchrun(*args)
    jobs, lines = [first], []
    try:
        assert first.stdout is not None
        for line in first.stdout:
            lines.append(line)
            if "<saved 0 on 1>" in line and len(jobs) == 1:
                jobs.append(torchrun(*args))
        outputs = ["".join(lines), jobs[1].communicate(timeout=900)[0] if len(jobs) > 1 else ""]
        codes = [job.wait(900) for job in jobs]
    finally:
        kill(*jobs)
    output = "".join(outputs)
    assert codes == [0, 0], output
    told = [line for line in said(output) if line != "saved 0 on 1"]
    assert told[0] == "begins after 0 on 1"
    assert told[1:] == [
        *("begins after 0 on 2", "saved 1 on 2", "saved 2 on 2"),
        *("begins after 2 on 2", "saved 3 on 2", "saved 4 on 2", "done"),
    ]
    check(tmp_path, output, 2)
