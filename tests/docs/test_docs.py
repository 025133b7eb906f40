"""The documents say what is true today: their code runs, and what they show is what happens."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.docs.runner import blocks, run_document

DOCS = Path(__file__).resolve().parents[2] / "docs"
RUN = ["tutorial.md"]


@pytest.mark.parametrize("name", RUN)
def test_every_block_runs_and_shows_what_happens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    try:
        assert run_document(DOCS / name, tmp_path) == len(list(blocks(DOCS / name)))
    finally:
        for module in set(sys.modules) - known:  # a document's own files are found anew in the next one
            if str(tmp_path) in str(getattr(sys.modules[module], "__file__", "")):
                del sys.modules[module]
