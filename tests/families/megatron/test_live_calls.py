"""`reshard_ckpt.megatron` with the real megatron-core, on the CPU: ``make compat-megatron``."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed; make compat-megatron installs it"
)


CASES = ["dense", "experts", "eight", "whole", "vocabulary", "trees", "strategies", "scheduled", "folders", "ranks"]


@pytest.fixture(scope="module")
def said() -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.families.megatron.live_cases", *CASES]
    # Without a time limit: a busy machine would miss it, and its ranks, processes of their own, would stay behind.
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.stdout


@pytest.mark.timeout(0)  # the first waits for all of them
@pytest.mark.parametrize("case", CASES)
def test_live(said, case):
    assert [line for line in said.splitlines() if line.startswith(f"{case}: ")] == [f"{case}: done"], said
