"""A tmpfs of 64 MB, in a mount namespace of its own: named skips, no SIGBUS, and training is unharmed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launch import ROOT
from tests.warm_python import warm_python

HOLD = 'mount -t tmpfs -o size=64m tmpfs "$0" && echo held && exec cat'
REASON = "this system permits no mount namespace; the other tests of room have an error of posix_fallocate stand in"


@pytest.mark.slow
def test_a_tmpfs_of_64_mb(tmp_path: Path):
    mounted = tmp_path / "shm"
    mounted.mkdir()
    if shutil.which("unshare") is None:
        pytest.skip(REASON)
    command = ["unshare", "--mount", "sh", "-c", HOLD, str(mounted)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as held:
        assert held.stdout is not None
        if held.stdout.readline() != "held\n":
            pytest.skip(REASON)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [warm_python(), "-m", "tests.memory.small_tmpfs", str(tmp_path / "run"), str(mounted), str(held.pid)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # a negative one is a signal: SIGBUS is -7
    two, one, none, full = json.loads(done.stdout).values()
    assert (two["tiers"], two["skipped"]) == (["memory"] * 6, 0)
    assert (one["tiers"], one["skipped"]) == (["memory"] + ["store"] * 5, 5)
    assert (none["tiers"], none["skipped"]) == (["store"] * 6, 6)
    (said,) = two["warnings"]
    assert "memory has room for fewer generations, so it keeps no more than 1" in said
    assert full == [["memory", 1.0], True, None, True, ["this save goes to the store, not to memory, and so may later ones"]]
    for found in (one, none):
        (said,) = found["warnings"]
        assert "goes to the store, not to memory" in said
        assert str(mounted) in said
