"""The soak program itself: a few of its generations, so that it works on the day it is needed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.helpers import NEWER
from tests.launch import ROOT
from tests.warm_python import warm_python


@pytest.mark.slow
@pytest.mark.skipif(not NEWER, reason="its layouts cut FSDP2 with tensor parallelism unevenly")
def test_a_few_generations_find_nothing(tmp_path: Path):
    """It may wait for a minute: for a rank that is killed before the others know its process, or while it leaves."""
    out = tmp_path / "soak.json"
    command = [warm_python(), "-m", "benchmarks.soak", "--generations", "5", "--seed", "11", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(out.read_text())["counts"]
    assert counts["saves that were committed"] > 5
    assert counts["checkpoints compared bit for bit"] > 5
    assert counts["ranks killed"] > 0
