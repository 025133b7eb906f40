"""The pages about DeepSpeed say what happens: their scripts run, stop, and go on at another size, one at another stage too."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.docs.runner import blocks, run_document, run_script_here
from tests.families.deepspeed import jobs
from tests.launch import run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed: make compat-deepspeed")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "deepspeed.md"


def test_script_of_the_page_runs_and_shows_what_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text().replace("```console", "```")  # commands on a folder that somebody else has
    page = tmp_path / "page.md"
    page.write_text(text)
    assert run_document(page, tmp_path) == 6


def run(folder: str, *arguments: str) -> str:
    jobs.import_deepspeed()  # without compiling its operator
    return run_script_here(folder, "train_deepspeed.py", list(arguments))


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers: make compat-deepspeed")
def test_program_of_the_page_about_the_trainer_goes_on_at_other_numbers_of_ranks(tmp_path: Path) -> None:
    page = blocks(PAGE.with_name("trainer-deepspeed.md"))
    (tmp_path / "train_deepspeed.py").write_text(next(block.text for block in page if block.language == "python"))
    for ranks, start, end in ((2, None, 4), (3, 4, 8), (1, 8, 10)):
        printed, *_ = run_ranks(run, ranks, str(tmp_path), str(end), init=False)
        assert f"from {start and f'run/checkpoint-{start}'} to step {end}\n" in printed
