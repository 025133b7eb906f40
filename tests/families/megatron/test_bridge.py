"""Megatron-Bridge's own ``save_checkpoint`` and ``load_checkpoint`` after `install`: ``make compat-megatron-bridge``."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def has_bridge() -> bool:
    return importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.bridge") is not None


@pytest.mark.skipif(not has_bridge(), reason="needs Megatron-Bridge: make compat-megatron-bridge")
@pytest.mark.timeout(0)
def test_it_saves_and_loads_on_other_layouts() -> None:
    command = [sys.executable, "-m", "tests.families.megatron.bridge_cases"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["bridge: done"], done.stdout
