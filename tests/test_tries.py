"""The profile ``long`` reaches every test, also one that says how many examples it tries."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import settings

from tests.tries import examples


def test_long_profile_multiplies_a_number_that_a_test_gives():
    before = settings.get_current_profile_name()
    try:
        settings.load_profile("long")
        assert (examples(40).max_examples, settings().max_examples) == (2000, 5000)
        settings.load_profile("fixed")
        assert (examples(40).max_examples, settings().max_examples) == (40, 100)
    finally:
        settings.load_profile(before)


def test_no_test_says_a_number_that_the_profile_does_not_reach():
    files = Path(__file__).parent.rglob("test_*.py")
    assert [str(file) for file in files if re.search(r"max_examples\s*=\s*\d", file.read_text())] == []
