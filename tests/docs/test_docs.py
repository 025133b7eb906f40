"""The documents say what is true today: their code runs, what they show is what happens, and their links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from reshard_ckpt.cli import COMMANDS
from reshard_ckpt.cli.app import app
from tests.docs.runner import blocks, not_imported, run_document

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
RUN = [
    "cli.md",
    "coming-from-dcp.md",
    "coming-from-dcp-fsdp2.md",
    "coming-from-dcp-torchtitan.md",
    "coming-from-vescale.md",
    "offline-reshard.md",
    "tutorial.md",
    "resharding.md",
    "dcp-folders.md",
    "manager.md",
    "memory.md",
    "formats.md",
    "supported.md",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An empty folder, where modules are found too, and are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(DOCS)
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    yield tmp_path
    for module in set(sys.modules) - known:
        if str(getattr(sys.modules[module], "__file__", "")).startswith((str(tmp_path), str(DOCS))):
            del sys.modules[module]


def shown(picture: Path) -> list[tuple[str, str, str]]:
    """The words and the filled shapes of a picture. Another version of matplotlib may write other ids and styles around them."""
    return re.findall(r'<(?:text|title)[^>]*>([^<]*)|<path [^>]*d="([^"]*)"[^>]*style="fill: (#\w+)', picture.read_text())


@pytest.mark.parametrize("name", RUN)
def test_every_block_runs_and_shows_what_happens(name: str, folder: Path):
    assert run_document(DOCS / name, folder) == len(list(blocks(DOCS / name)))
    for picture in folder.glob("*.svg"):  # of those that it drew, the document shows some
        kept = DOCS / picture.name
        assert not kept.exists() or shown(kept) == shown(picture), f"{picture.name} is drawn otherwise today"


@pytest.mark.parametrize("name", RUN)
def test_scripts_import_each_module_of_torch_that_they_use(name: str):
    assert not {block.line: found for block in blocks(DOCS / name) if (found := not_imported(block.text))}


def test_picture_is_what_the_planners_return_today(folder: Path):
    from draw_resharding import draw

    draw(folder / "resharding.svg")
    assert shown(folder / "resharding.svg") == shown(DOCS / "resharding.svg")
    assert len(shown(DOCS / "resharding.svg")) > 200


@pytest.mark.parametrize(
    "page", [*(DOCS / name for name in PAGES), ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem
)
def test_commands_and_files_that_a_page_names_exist(page: Path):
    text = page.read_text()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= {*targets}
    modules = re.findall(r"python -m ((?:benchmarks|tests|examples)[.\w]*)", text)
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    paths = re.findall(r"\b((?:tests|benchmarks|examples)/[\w/]+\.py)\b", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    for name in COMMANDS:
        importlib.import_module(f"reshard_ckpt.cli.{name}")
    commands: Any = typer.main.get_command(app)
    for name, rest in re.findall(r"reshard-ckpt ([a-z]+)((?:[^\n`|;&]|\\\n)*)", text):
        if name in COMMANDS:
            known = {option for parameter in commands.commands[name].params for option in parameter.opts}
            assert {*re.findall(r"(?<=\s)--[a-z][a-z-]*", rest)} <= known, (name, rest)


def test_index_lists_every_page_and_design_note():
    linked = set(re.findall(r"\]\(([\w/-]+\.md)\)", (DOCS / "index.md").read_text()))
    assert sorted({*PAGES} - {"index.md"} - linked) == []


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str):
    page = DOCS / name
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            linked = (page.parent / path) if path else page
            assert linked.exists(), target
            if anchor:
                headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
                assert anchor in [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings], target
