"""Values under new names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reshard_ckpt import checkpoint


def test_a_renamed_value_is_added_at_the_path_of_its_new_name(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"old": {"inner": {"step": 3}}})
    state: dict[str, Any] = {"new": {}}
    checkpoint.load(tmp_path, state, rename={"old": "new"})
    assert state == {"new": {"inner": {"step": 3}}}
