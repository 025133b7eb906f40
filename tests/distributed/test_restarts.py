"""Jobs under a real ``torchrun --max-restarts`` whose workers are killed in the middle of saves go on from the newest step."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
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

HANGS_S = 600
"""After which a job counts as one that hangs."""


def torchrun(output: Path, *args: str, leaves: int | None = None) -> subprocess.Popen[bytes]:
    """Start the command as a user does where workers may be restarted; a node that leaves has its process in ``AGENT``.

    `leaves` is the port of the rendezvous that is told of it.
    """
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [warm_python(), "-m", "torch.distributed.run", "--max-restarts=3", "--monitor-interval=0.1", *args]
    with output.open("wb") as stream:  # a file, which nobody needs to read for the job to go on
        return subprocess.Popen(
            ["sh", "-c", f'{f"AGENT=$$ RENDEZVOUS={leaves} " if leaves else ""}exec "$@"', "sh", *command],
            cwd=ROOT,
            env=env,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def kill(*jobs: subprocess.Popen[bytes]) -> None:
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def said(folder: Path) -> list[str]:
    """Return what the job has noted, of all its attempts."""
    path = folder / "said"
    return [line.split(" ", 1)[1] for line in path.read_text().splitlines()] if path.exists() else []


def counted(folder: Path) -> list[str]:
    """Return what was noted by attempts that count: not by one of a single node before another has joined."""
    return [line for line in said(folder) if not re.fullmatch(r"(begins after|saved) \d+ on 1", line)]


def check(folder: Path, output: str, size: int) -> None:
    assert not RAW.search(output.replace("torch.distributed.DistNetworkError", "")), output
    newest = max((folder / "run").glob("step_*"), key=lambda path: int(path.name[5:]))
    assert torch.equal(checkpoint.read(newest)["w"], restarts.expected(int(newest.name[5:])))
    assert checkpoint.verify(newest).ok
    assert len(checkpoint.catalog(newest).files) == size


@pytest.mark.slow
def test_a_job_whose_workers_are_killed_twice_goes_on_twice(tmp_path: Path) -> None:
    """First rank 1, then rank 0, whose process holds the store of the sessions."""
    job = torchrun(
        tmp_path / "out", "--standalone", "--nproc-per-node=2", restarts.__file__, str(tmp_path), "6", "3:1,5:0", "2", "0"
    )
    try:
        code = job.wait(HANGS_S)
    finally:
        kill(job)
    output = (tmp_path / "out").read_text()
    assert code == 0, output
    assert said(tmp_path) == [
        *("begins after 0 on 2", "saved 1 on 2", "saved 2 on 2"),
        *("begins after 2 on 2", "saved 3 on 2", "saved 4 on 2"),
        *("begins after 4 on 2", "saved 5 on 2", "saved 6 on 2", "done"),
    ]
    assert "the process of rank 1 ended before this was done" in output
    check(tmp_path, output, 2)


def two_nodes(folder: Path, steps: int, kills: str, leaves: int) -> tuple[list[int], str]:
    """Run a job that a second node joins once the first has saved; returns the exit codes and all output."""
    port = free_port()
    args = (
        *("--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
        # No node is taken for one that is gone on a machine that is busy; one that leaves says so itself.
        *("--rdzv-id=restarts", "--rdzv-conf=last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=150"),
        *(restarts.__file__, str(folder), str(steps), kills, "2", str(leaves)),
    )
    first, second = folder / "first", folder / "second"
    jobs = [torchrun(first, "--local-addr=127.0.0.1", *args)]
    try:
        while "saved 0 on 1" not in said(folder):
            assert jobs[0].poll() is None, first.read_text()
            time.sleep(0.1)
        jobs.append(torchrun(second, "--local-addr=127.0.0.1", *args, leaves=port))
        codes = [job.wait(HANGS_S) for job in jobs]
    finally:
        kill(*jobs)
    return codes, first.read_text() + second.read_text()


@pytest.mark.slow
def test_a_job_that_a_node_joins_goes_on_and_on_again_after_a_kill(tmp_path: Path) -> None:
    codes, output = two_nodes(tmp_path, 4, "3:1", 0)
    assert codes == [0, 0], output
    assert said(tmp_path)[0] == "begins after 0 on 1"
    assert counted(tmp_path) == [
        *("begins after 0 on 2", "saved 1 on 2", "saved 2 on 2"),
        *("begins after 2 on 2", "saved 3 on 2", "saved 4 on 2", "done"),
    ]
    check(tmp_path, output, 2)


@pytest.mark.slow
def test_a_job_that_has_been_restarted_goes_on_with_fewer_nodes(tmp_path: Path) -> None:
    """First a worker is killed, then a node; its worker and its agent, in the middle of a save."""
    codes, output = two_nodes(tmp_path, 7, "3:1", 5)
    assert sorted(codes) == [-signal.SIGKILL, 0], output
    assert counted(tmp_path) == [
        *("begins after 0 on 2", "saved 1 on 2", "saved 2 on 2"),
        *("begins after 2 on 2", "saved 3 on 2", "saved 4 on 2", "done"),
    ]
    assert said(tmp_path)[-5:] == ["begins after 4 on 1", "saved 5 on 1", "saved 6 on 1", "saved 7 on 1", "done"]
    check(tmp_path, output, 1)
