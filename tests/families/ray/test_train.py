"""Ray Train, the real one: the program of its page goes on with other numbers of workers, and after a kill before a commit."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from reshard_ckpt import checkpoint
from tests.docs.runner import blocks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: make compat-ray")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "train_ray.py"
    path.write_text(next(block.text for block in blocks(ROOT / "docs" / "ray.md") if block.language == "python"))
    return path


def run(program: Path, storage: Path, workers: int, steps: int, mode: str = "") -> float:
    """Run the program to its end; return the last loss."""
    storage.mkdir(exist_ok=True)
    driver, options = ROOT / "tests/families/ray/driver.py", (storage, workers, steps, mode)
    command = [sys.executable, str(driver), str(program), *map(str, options)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{program.parent}", "OMP_NUM_THREADS": "1"}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_ENABLE_STATE_TRACKING": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=storage, env=environment, capture_output=True, text=True, timeout=400)
    found = re.search(rf"^step {steps} loss (\S+) at (\S+)$", done.stdout, re.M)
    assert found is not None, done.stdout[-3000:] + done.stderr[-5000:]
    assert found[2] == str(storage / "run" / f"step_{steps}")
    assert checkpoint.verify(found[2]).ok
    kept = [path.name for path in (storage / "run").glob("step_*") if (path / "catalog.msgpack").exists()]
    assert kept == [f"step_{steps}"]  # Ray keeps one
    return float(found[1])


def test_a_run_goes_on_with_other_numbers_of_workers(program: Path, tmp_path: Path) -> None:
    expected = run(program, tmp_path / "whole", 2, 8)
    for workers in (1, 3):
        run(program, tmp_path / f"from-{workers}", 2, 4, "async" if workers == 3 else "")
        assert run(program, tmp_path / f"from-{workers}", workers, 8) == pytest.approx(expected, rel=1e-5)
    assert run(program, tmp_path / "killed", 2, 8, "kill") == pytest.approx(expected, rel=1e-5)
    assert (tmp_path / "killed" / "mark").exists()
