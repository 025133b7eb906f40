"""Real processes, killed by SIGKILL at instants of a save to memory, leave a whole generation every time."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.launch import ROOT
from tests.reliability.kills import CANNOT_TRACE
from tests.warm_python import warm_python

EVERY = 9


@pytest.mark.slow
def test_a_process_killed_at_any_instant_leaves_a_whole_generation(tmp_path: Path):
    """The harness itself judges what is left after each kill; here, that it did try."""
    command = [warm_python(), "-m", "tests.memory.kills", "--every", str(EVERY), "--out", str(tmp_path / "out")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode == CANNOT_TRACE:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out").read_text())
    assert found["filling"]["points"] >= 30
    assert found["calls"]["points"] >= 80
    assert sum(found["calls"]["tiers"].values()) == found["calls"]["tried"] >= found["calls"]["points"] // EVERY
    assert found["calls"]["tiers"]["memory"] > found["calls"]["tiers"].get("", 0)
