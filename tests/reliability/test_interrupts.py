"""Ctrl-C during a save, and the end of a process during one: real signals, real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.launch import ROOT
from tests.reliability.states import NEW, OLD, assert_clean, assert_next_save_works, held
from tests.warm_python import WHOLE_END, warm_python


def start(what: str, path: Path) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [warm_python(), "-m", "tests.reliability.interrupted", what, str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", WHOLE_END: "1"},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.slow
def test_ctrl_c_at_any_moment_leaves_the_old_checkpoint_no_file_and_no_thread(tmp_path: Path):
    process = start("interrupts", tmp_path / "ckpt")
    out, err = process.communicate()
    assert process.returncode == 0, err
    points = json.loads(out)
    assert points["sync"] > 30
    assert points["to the commit"] > 60
    for kind in ("eager", "lazy"):
        assert points[kind] > 2
        assert points[f"beginning, {kind}"] > 30


@pytest.mark.slow
def test_ctrl_c_from_outside_ends_a_save_that_hangs(tmp_path: Path):
    process = start("from_outside", tmp_path / "ckpt")
    pid, what = process.stdout.readline().split()
    assert what == "writes"
    os.kill(int(pid), signal.SIGINT)  # itself: what passes signals on to it does so after its input has ended
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert json.loads(out) is True


def test_the_loss_of_the_last_save_is_said_aloud(tmp_path: Path):
    process = start("loses_the_last_save", tmp_path / "ckpt")
    _, err = process.communicate()
    assert process.returncode == 0
    assert f"the save to {tmp_path / 'ckpt'} failed: " in err
    assert "No space left on device" in err
    assert held(tmp_path / "ckpt") == OLD
    assert_clean(tmp_path / "ckpt")
    assert_next_save_works(tmp_path / "ckpt")


def test_a_process_that_ends_by_an_error_finishes_its_last_save(tmp_path: Path):
    process = start("ends_while_saving", tmp_path / "ckpt")
    out, err = process.communicate()
    assert process.returncode == 1, err
    assert "ValueError: training failed" in err
    assert held(tmp_path / "ckpt") == NEW
    assert held(tmp_path / "late") == NEW
    assert out == "" or "no thread to save in can be started" in out
