"""From killed to resumed: ``python -m benchmarks.restart``.

A job of 2 ranks under ``torchrun --max-restarts 1``, with ``finish_on_sigterm=True``. One rank is killed in the middle of a save
that the other one waits for; torchrun then ends that one with SIGTERM, and starts both anew. Taken from one run:

1. ``start``: from the command to the point at which the first attempt can train: what any start of the job costs.
2. ``killed to resumed``: from the kill to the point at which the next attempt has loaded the newest checkpoint. What it takes
   longer than a start is what ending the old attempt costs; were the rank that waits not to give up, torchrun would kill it after
   30 s.

Each round is measured twice: with ranks on one machine, which see each other's processes end, and with ranks that do not, as on
two machines: there the rank that waits gives up when the grace of 20 s is over.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from .ranks import ROOT, end_with

KILLED_AT, STEPS = 3, 4


def measure(folder: Path, apart: bool) -> tuple[float, float]:
    """Return the seconds of a start, and of resuming; `apart` for ranks that do not see each other's processes."""
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", **({"APART": "1"} if apart else {})}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    args = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1", "tests/distributed/restarts.py"]
    args += [str(folder), str(STEPS), f"{KILLED_AT}:1", "2", "0"]
    began = time.time()
    command = [sys.executable, "-m", "torch.distributed.run", *args]
    ending = partial(end_with, os.getpid(), signal.SIGTERM)  # by which it ends its ranks, too
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, preexec_fn=ending)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    told = [line.split(" ", 1) for line in (folder / "said").read_text().splitlines()]
    first, again = (float(at) for at, line in told if line.startswith("begins after"))
    return first - began, again - (folder / f"killed-{KILLED_AT}").stat().st_mtime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for _ in range(options.rounds):
        for apart in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                start, resume = measure(Path(folder), apart)
            where = "apart" if apart else "on one machine"
            print(f"{where}: start {start:.1f} s, killed to resumed {resume:.1f} s", flush=True)


if __name__ == "__main__":
    main()
