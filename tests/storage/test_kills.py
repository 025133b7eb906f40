"""Processes that are killed at requests to an object store leave what the next job needs, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.points import figures_of


@pytest.mark.slow
def test_a_process_killed_at_any_request_leaves_whole_checkpoints_and_no_leftovers(tmp_path: Path) -> None:
    """The program judges what is left after each kill; `make crash-points` tries every request of more operations."""
    found = figures_of("tests.storage.kills", tmp_path, "--sample", "--every", "29")
    assert len(found) == 4
    assert all(tried["requests"] >= 10 and tried["tried"] >= 1 for tried in found.values())
    assert sum(tried["tried"] for tried in found.values()) >= 8
