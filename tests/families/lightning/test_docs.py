"""The programs of the page about Lightning: one trains on two ranks and goes on with one, the other reads its checkpoint."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.runner import blocks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning: make compat-lightning")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "lightning.md"


def test_programs_of_the_page_run(tmp_path: Path) -> None:
    for block in blocks(PAGE):
        if block.language == "python":
            (tmp_path / block.text.split("\n")[0].removeprefix("# ")).write_text(block.text)
    path = os.pathsep.join([str(PAGE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    torchrun = ("-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--nproc-per-node")
    assert "epochs done: 4" in run(*torchrun, "2", "train_lightning.py", "4")
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["epoch=3-step=40.ckpt"]
    assert "epochs done: 6" in run(*torchrun, "1", "train_lightning.py", "6")
    # ModelCheckpoint keeps the one that the run went on from.
    left = sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir())
    assert left == ["epoch=3-step=40.ckpt", "epoch=5-step=80.ckpt"]  # 40 + 2 × 20
    assert "a model of width 64" in run("evaluate_lightning.py")
