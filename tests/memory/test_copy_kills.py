"""Of two nodes with a copy of each other's images one is killed, by SIGKILL: a whole generation is left every time."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.launch import ROOT
from tests.reliability.kills import CANNOT_TRACE
from tests.warm_python import warm_python

EVERY = 37


@pytest.mark.slow
def test_a_node_killed_at_any_instant_leaves_a_whole_generation_on_the_other(tmp_path: Path):
    """The harness itself judges what is left after each kill; here, that it did try. ``make crash-points`` tries every point."""
    command = [warm_python(), "-m", "tests.memory.copy_kills", "--victims", "1", "--every", str(EVERY)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--out", str(tmp_path / "out")], cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode == CANNOT_TRACE:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out").read_text())
    assert found["copying 1"]["points"] >= 40
    assert found["calls 1"]["points"] >= 60
    for tried in found.values():
        assert tried["tried"] >= tried["points"] // EVERY
