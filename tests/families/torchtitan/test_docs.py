"""The page about torchtitan says what happens: its script runs, and goes on with another number of ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.docs.runner import run_document

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torchtitan"), reason="needs torchtitan: make compat-torchtitan")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "torchtitan.md"


def test_script_of_the_page_runs_and_shows_what_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_document(PAGE, tmp_path) == 7
