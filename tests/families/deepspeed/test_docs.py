"""The page about DeepSpeed says what happens: its script runs, stops, and goes on at another size and stage."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.docs.runner import run_document

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed: make compat-deepspeed")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "deepspeed.md"


def test_script_of_the_page_runs_and_shows_what_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text().replace("```console", "```")  # commands on a folder that somebody else has
    page = tmp_path / "page.md"
    page.write_text(text)
    assert run_document(page, tmp_path) == 6
