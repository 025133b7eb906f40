"""The budgets of one save and of one load: how many functions, in how many files, a reader must follow."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.warm_python import warm_python

BUDGETS = {
    "save": {"functions": 428, "frames": 752, "files": 50},
    "load": {"functions": 337, "frames": 572, "files": 45},
}
"""The most that `tests.stories` may count. A change that lets a story enter fewer lowers its numbers here. The goals are 500
frames in 50 files for a save, and 400 in 45 for a load."""


@pytest.mark.parametrize("name", BUDGETS)
def test_a_story_stays_within_its_budget(name: str) -> None:
    command = [warm_python(), "-m", "tests.stories", name]
    told = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True, timeout=120).stdout
    counted = json.loads(told)
    over = {key: (counted[key], most) for key, most in BUDGETS[name].items() if counted[key] > most}
    assert not over, f"{name}: counted more than the budget: {over}; see python -m tests.stories {name} --list"
    assert counted["functions"] > 100, "too few: was the package profiled?"
