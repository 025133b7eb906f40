"""`plot` writes what its output's suffix says, of what was asked for, and a page that needs no network."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import CheckpointNotFound, MismatchError, StorageError, UsageError
from tests.cli.running import run
from tests.cli.states import save_trained

UP = "model.layers.0.up"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plot") / "ckpt"
    save_trained(folder, pp=2, dp=2, tp=2, step=30)
    return folder


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plot") / "timed"
    checkpoint.save(folder, {"model": torch.nn.Linear(30, 20), "<b>&": {"step": 4}})
    return folder


BEGINS = {".svg": b"<?xml", ".html": b"<!DOCTYPE html>", ".png": b"\x89PNG"}


@pytest.mark.parametrize("suffix", BEGINS)
def test_a_tensor_s_picture_is_what_its_suffix_says(suffix: str, trained: Path, tmp_path: Path):
    if suffix == ".png":
        pytest.importorskip("matplotlib")
    shown = run("plot", trained, UP, "-o", tmp_path / f"up{suffix}")
    data = (tmp_path / f"up{suffix}").read_bytes()
    assert (shown.code, shown.out) == (0, "")
    assert f"{tmp_path / f'up{suffix}'}: {len(data):,} bytes" in shown.err
    assert data.startswith(BEGINS[suffix])
    assert suffix == ".png" or UP.encode() in data


def test_page_of_a_checkpoint_has_all_parts_and_loads_nothing(timed: Path, tmp_path: Path):
    assert run("plot", timed, "-o", tmp_path / "report.html").code == 0
    page = (tmp_path / "report.html").read_text()
    assert list(re.findall(r"<h2>(.*?)</h2>", page)) == [
        "Bytes by rank",
        "Tensors by size",
        "Timeline of the save",
    ]
    assert "default-src 'none'" in page
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\(|(src|href)=", page)
    assert set(re.findall(r"https?://[^\"' <]+", page)) == {"http://www.w3.org/2000/svg"}
    for fact in ("620", "2.48 kB", "model", "write"):
        assert fact in page


def test_page_says_the_mesh_and_does_without_a_timeline(trained: Path, tmp_path: Path):
    assert run("plot", trained, "-o", tmp_path / "report.html").code == 0
    page = (tmp_path / "report.html").read_text()
    assert "pp 2 × dp 2 × tp 2 = 8 ranks" in page
    assert "Timeline" not in page
    assert "layers.0-1" in page


@pytest.mark.parametrize("suffix", [".svg", ".html", ".json"])
def test_timeline_is_drawn_or_written_as_a_trace(suffix: str, timed: Path, tmp_path: Path):
    output = tmp_path / f"save{suffix}"
    assert run("plot", timed, "--timeline", "-o", output).code == 0
    if suffix == ".json":
        trace = json.loads(output.read_text())
        assert trace == checkpoint.timeline(timed).chrome_trace()
        assert {event["name"] for event in trace["traceEvents"]} >= {"write", "publish"}
    else:
        assert "publish" in output.read_text()


def test_json_says_what_was_written(trained: Path, tmp_path: Path):
    output = tmp_path / "up.svg"
    assert run("plot", trained, UP, "-o", output, "--json").json == {"output": str(output), "bytes": output.stat().st_size}


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ([UP, "-o", "x.pdf"], UsageError, "x.pdf: a tensor's picture is written as .png or .svg or .html"),
        (["-o", "x.svg"], UsageError, "the page of a whole checkpoint is written as .html"),
        ([UP, "-o", "x.json"], UsageError, "a tensor's picture"),
        (["--timeline", "-o", "x.txt"], UsageError, "a timeline is written as"),
        ([UP, "--timeline", "-o", "x.svg"], UsageError, "one of them at a time"),
        (["model.layers", "-o", "x.svg"], MismatchError, "no tensor of the checkpoint"),
        (["--timeline", "-o", "x.svg"], CheckpointNotFound, "timeline.json"),
        ([UP, "-o", "no/such/folder/x.svg"], StorageError, "choose another output"),
    ],
)
def test_what_cannot_be_drawn_is_said(
    arguments: list[str], error: type, says: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    shown = run("plot", trained, *arguments)
    assert (shown.code, shown.out) == (2 if error is UsageError else 1, "")
    assert shown.err.startswith(f"{error.__name__}: ")
    assert says in shown.err
    assert list(tmp_path.iterdir()) == []


def test_output_is_needed(trained: Path):
    assert run("plot", trained).code == 2


def test_odd_tensors_are_drawn(tmp_path: Path):
    state = {"scalar": torch.tensor(3), "empty": torch.zeros(0, 5), "one": torch.ones(7), "deep": torch.ones(2, 3, 4, 5)}
    checkpoint.save(tmp_path / "ckpt", {**state, "tied": state["deep"]})
    for name in [*state, "tied"]:
        drawn = checkpoint.plot(tmp_path / "ckpt", name, output=tmp_path / f"{name}.svg")
        assert "rank 0" in drawn.read_text() or name == "empty"


def test_name_of_a_tensor_is_text_in_every_page(tmp_path: Path):
    name = "<script>alert(1)</script>"
    checkpoint.save(tmp_path / "ckpt", {name: torch.ones(3)})
    for output in (tmp_path / "one.html", tmp_path / "all.html"):
        checkpoint.plot(tmp_path / "ckpt", name if output.stem == "one" else None, output=output)
        assert "<script" not in output.read_text()
        assert "&lt;script&gt;" in output.read_text()
