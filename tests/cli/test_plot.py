"""`plot` writes what its output's suffix says, of what was asked for, and a page that needs no network."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import reshard_ckpt
from reshard_ckpt import checkpoint
from reshard_ckpt.core.catalog.specs import Mesh
from reshard_ckpt.errors import CheckpointNotFound, MismatchError, StorageError, UsageError
from reshard_ckpt.plotting.feeds import wanted_on
from tests.cli.running import run
from tests.cli.states import save_trained, weights

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
    shown = run("plot", trained, UP, "-o", tmp_path / f"up{suffix}")
    data = (tmp_path / f"up{suffix}").read_bytes()
    assert (shown.code, shown.out) == (0, "")
    assert f"{tmp_path / f'up{suffix}'}: {len(data):,} bytes" in shown.err
    assert data.startswith(BEGINS[suffix])
    assert suffix == ".png" or UP.encode() in data


def test_picture_of_another_mesh_says_which_rank_reads_what_which_wrote(trained: Path, tmp_path: Path):
    assert run("plot", trained, UP, "--to", "dp=2,tp=4", "-o", tmp_path / "up.svg").code == 0
    said = re.findall(r"rank (\S+) reads (\S+ \S+) that rank (\d+) wrote", (tmp_path / "up.svg").read_text())
    wrote = {shard.offsets[0]: str(shard.file.rank) for shard in checkpoint.catalog(trained).tensor(UP).shards}
    reads = [(ranks, source) for ranks, size, source in said if size != "0 B"]  # the last table
    # Rows 0 to 8 and 8 to 16 were saved; tp 0 and 1 want the first of them, tp 2 and 3 the second; dp replicates.
    assert reads == [("0,4", wrote[0]), ("1,5", wrote[0]), ("2,6", wrote[8]), ("3,7", wrote[8])]


@pytest.mark.parametrize("to", [{"dp": 3}, {"dp": 2, "tp": 3}, {"pp": 2, "dp": 4, "tp": 1}, {"tp": 5}, {"dp": 1}])
@pytest.mark.parametrize("name", [UP, "model.layers.3.norm", "optimizer.state.layers.1.down.exp_avg"])
def test_what_another_mesh_holds_covers_the_tensor_and_names_each_rank_once(name: str, to: dict[str, int], trained: Path):
    saved = checkpoint.catalog(trained)
    mesh = Mesh(tuple(to), tuple(to.values()))
    parts = wanted_on(saved, name, mesh, {"optimizer": [n.removeprefix("model.") for n in weights()]})
    ranks = [rank for part in parts for rank in part.ranks]
    assert len(set(ranks)) == len(ranks) <= mesh.size
    held = np.zeros(saved.tensor(name).shape, int)
    for part in parts:
        for offsets, lengths, start, count in part.runs:
            box = np.zeros(lengths, int)
            box.reshape(-1)[start : start + count] = 1
            held[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] += box
    assert (held == 1).all()


def test_page_of_a_checkpoint_has_all_parts_and_loads_nothing(timed: Path, tmp_path: Path):
    assert run("plot", timed, "-o", tmp_path / "report.html").code == 0
    page = (tmp_path / "report.html").read_text()
    assert list(re.findall(r"<h2>(.*?)</h2>", page)) == [
        "Bytes by rank",
        "Tensors by size",
        "Timeline of the save",
    ]
    assert "default-src 'none'" in page
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\((?!#)|src=|href=\"(?!#|data:image/png)", page)
    assert set(re.findall(r"https?://[^\"' <]+", page)) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
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
        (["--to", "tp=2", "-o", "x.html"], UsageError, "pass the name of one"),
        ([UP, "--to", "tp=0", "-o", "x.svg"], UsageError, "is not a mesh"),
        ([UP, "--to", "tp", "-o", "x.svg"], UsageError, "is not a mesh"),
        ([UP, "--to", "tp=2,tp=2", "-o", "x.svg"], UsageError, "'tp' is given twice"),
        ([UP, "--to", "dp=9,tp=99999999999999999999", "-o", "x.svg"], UsageError, "ranks, over the 131,072 that are planned for"),
        ([UP, "--timeline", "-o", "x.svg"], UsageError, "one of them at a time"),
        (["model.layers", "-o", "x.svg"], MismatchError, "no tensor of the checkpoint"),
        (["--timeline", "-o", "x.svg"], CheckpointNotFound, "timeline.msgpack"),
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


def test_a_picture_that_cannot_be_written_leaves_the_one_that_is_there(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "wq.svg"
    file.write_text("the picture of yesterday")

    def full(self: Path, data: bytes) -> int:
        with open(self, "wb") as half:
            half.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    shown = run("plot", trained, UP, "-o", file)
    assert (shown.code, "No space left on device; choose another output" in shown.err) == (1, True)
    assert os.listdir(tmp_path) == ["wq.svg"]
    assert file.read_text() == "the picture of yesterday"


def test_missing_extra_is_said_and_a_trace_needs_none(timed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    missing = "matplotlib"
    for module in [name for name in sys.modules if name.startswith(("reshard_ckpt.plotting", missing))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr(reshard_ckpt, "plotting", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    checkpoint.plot(timed, timeline=True, output=tmp_path / "x.json")
    for name, output in (("model.weight", "x.png"), (None, "x.html")):
        with pytest.raises(UsageError, match=rf"pictures need {missing}.*pip install 'reshard-ckpt\[plot\]'"):
            checkpoint.plot(timed, name, output=tmp_path / output)


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


def test_picture_of_another_mesh_is_what_a_reshard_to_it_gives(trained: Path, tmp_path: Path):
    to = {"dp": 3, "tp": 4}
    checkpoint.reshard(trained, tmp_path / "new", mesh=to)
    saved, new = checkpoint.catalog(trained), checkpoint.catalog(tmp_path / "new")
    groups = {"optimizer": [name.removeprefix("model.") for name in weights()]}
    for name in (UP, "model.layers.2.down", "optimizer.state.layers.1.down.exp_avg"):
        mesh = Mesh(tuple(to), tuple(to.values()))
        holds = {rank: part.runs for part in wanted_on(saved, name, mesh, groups) for rank in part.ranks}
        for shard in new.tensor(name).shards:  # what a rank wrote, it holds
            inside = np.zeros(saved.tensor(name).shape, bool)
            for offsets, lengths, start, count in holds[shard.file.rank]:
                box = np.zeros(lengths, bool)
                box.reshape(-1)[start : start + count] = True
                inside[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] |= box
            box = inside[tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.lengths, strict=True))]
            assert box.reshape(-1)[shard.start : shard.start + shard.count].all()
