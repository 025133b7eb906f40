"""The documents say what is true today: their code runs, what they show is what happens, and their links lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from reshard_ckpt.cli import COMMANDS
from reshard_ckpt.cli.app import app
from tests.docs.runner import blocks, not_imported, run_document
from tests.launch import run_ranks
from tests.storage.object_servers import make_bucket, moto_server, set_endpoint

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
    "api.md",
    "coming-from-fsdp1.md",
    "incremental.md",
    "touched-rows.md",
    "index.md",
]
SETUP = {
    "object-stores.md": """
import torch
from reshard_ckpt import checkpoint
model = torch.nn.Linear(4, 3)
""",
    "reliability.md": """
import torch
from reshard_ckpt import checkpoint
state = {"model": torch.nn.Linear(4, 3)}
checkpoint.save("ckpt/old", state)
""",
}
"""Code by page that defines what its blocks take for known."""
ON_RANKS = {
    "live.md": """
import torch
import torch.distributed as dist
trains, steps = dist.get_rank() == 0, 11
model, engine, trainer = (torch.nn.Linear(4, 3) for _ in range(3))
src, dst = {"model": trainer}, {"model": engine}
""",
    "recovery.md": """
import torch
import torch.distributed as dist
from reshard_ckpt import checkpoint
alive = dist.get_rank() == 0
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
state = {"model": model, "step": 7}
manager = checkpoint.Manager("run")
""",
}
"""The same for pages whose blocks are run on two ranks."""
ELSEWHERE = {
    "accelerate.md": "tests/families/accelerate/test_docs.py",
    "torchtitan.md": "tests/families/torchtitan/test_docs.py",
    "verl.md": "tests/families/verl/test_docs.py",
    "cookbook.md": "tests/examples/test_cookbook.py",
    "deepspeed.md": "tests/families/deepspeed/test_docs.py",
    "trainer-deepspeed.md": "tests/families/deepspeed/test_docs.py",
    "ray.md": "tests/families/ray/test_train.py",
    "lightning.md": "tests/families/lightning/test_docs.py",
}
"""Pages whose blocks another test runs."""
NOT_RUN = {
    "megatron-bridge.md": "needs GPUs; tests/families/megatron/test_bridge.py has its calls",
    "megatron.md": "needs Megatron and its checkpoints; tests/families/megatron has its calls",
    "plugins.md": "shows a part of a pyproject.toml",
}


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


@pytest.mark.parametrize("name", SETUP)
def test_every_block_runs_after_its_setup(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    with moto_server() as endpoint:
        set_endpoint(monkeypatch, endpoint)
        bucket = make_bucket(endpoint)
        page = folder / name
        page.write_text((DOCS / name).read_text().replace("s3://bucket", bucket))
        assert run_document(page, folder, SETUP[name]) == len(list(blocks(page)))


def run_page_here(page: str, folder: str, setup: str) -> int:
    """Run the blocks of a page on this rank."""
    os.chdir(folder)
    return run_document(Path(page), Path(folder), setup)


@pytest.mark.parametrize("name", ON_RANKS)
def test_every_block_runs_on_ranks(name: str, tmp_path: Path):
    count = len(list(blocks(DOCS / name)))
    assert run_ranks(run_page_here, 2, str(DOCS / name), str(tmp_path), ON_RANKS[name]) == [count, count]


def test_each_page_with_code_is_run_or_says_why_not():
    with_code = {name for name in PAGES if any(block.language != "console" for block in blocks(DOCS / name))}
    assert with_code == {*RUN, *SETUP, *ON_RANKS, *ELSEWHERE, *NOT_RUN}
    assert all((ROOT / test).exists() and name in (ROOT / test).read_text() for name, test in ELSEWHERE.items())


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
    paths = re.findall(r"\b(tests/[\w/]+(?:\.py)?|(?:benchmarks|examples)/[\w/]+\.py)\b", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert [(path, word) for path, word in re.findall(r"pytest (\S+) -k (\w+)", text) if not those_with(word, path)] == []
    for name in COMMANDS:
        importlib.import_module(f"reshard_ckpt.cli.{name}")
    commands: Any = typer.main.get_command(app)
    for name, rest in re.findall(r"reshard-ckpt ([a-z]+)((?:[^\n`|;&]|\\\n)*)", text):
        if name in COMMANDS:
            known = {option for parameter in commands.commands[name].params for option in parameter.opts}
            assert {*re.findall(r"(?<=\s)--[a-z][a-z-]*", rest)} <= known, (name, rest)


def those_with(word: str, path: str) -> list[str]:
    return re.findall(rf"^def (test_\w*{word}\w*)", (ROOT / path).read_text(), re.M)


def test_each_section_about_reliability_names_a_test_that_holds_it():
    _, *sections = re.split(r"^## ", (DOCS / "reliability.md").read_text(), flags=re.M)
    named = {section.partition("\n")[0]: re.findall(r"\btests/[\w/]+/test_\w+\.py", section) for section in sections}
    assert [title for title, tests in named.items() if not tests] == []
    assert [test for tests in named.values() for test in tests if not those_with("", test)] == []


def test_index_lists_every_page_and_design_note():
    linked = set(re.findall(r"\]\(([\w/-]+\.md)\)", (DOCS / "index.md").read_text()))
    assert sorted({*PAGES} - {"index.md"} - linked) == []
