"""`newest` without Lightning: which checkpoint of a folder a run goes on from."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from reshard_ckpt import checkpoint
from reshard_ckpt.integrations.lightning import newest


def test_the_largest_step_is_the_newest_though_a_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert newest(tmp_path / "none") is None
    for name, step, now in (("a", 5, 900.0), ("last", 10, 100.0), ("b", 10, 99.0)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        checkpoint.save(tmp_path / "run" / name, {"trainer": checkpoint.Value({"global_step": step})})
        checkpoint.save(tmp_path / "fabric" / name, {"step": step})
    assert newest(tmp_path / "run") == str(tmp_path / "run" / "last")
    assert newest(tmp_path / "fabric") == str(tmp_path / "fabric" / "a")
