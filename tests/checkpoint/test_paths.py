"""Paths: what is none, `~`, a run's root in place of a checkpoint, and a working folder that changes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard_ckpt import checkpoint, dcp
from reshard_ckpt.checkpoint import Manager
from reshard_ckpt.errors import CheckpointNotFound, UsageError
from reshard_ckpt.storage import path_text
from tests.cli.running import run

OPENERS: dict[str, Callable[[Any], Any]] = {
    "load": lambda path: checkpoint.load(path, {"w": torch.zeros(6)}),
    "read": checkpoint.read,
    "catalog": checkpoint.catalog,
    "verify": checkpoint.verify,
    "inspect": checkpoint.inspect,
    "timeline": checkpoint.timeline,
    "write_manifest": checkpoint.write_manifest,
    "diff": lambda path: checkpoint.diff(path, path),
    "convert": lambda path: checkpoint.convert(path, "out", to="dcp", overwrite=True),
    "reshard": lambda path: checkpoint.reshard(path, "out", mesh={"dp": 2}),
    "plot": lambda path: checkpoint.plot(path, output="out.html"),
    "dcp.load": lambda path: dcp.load({"w": torch.zeros(6)}, checkpoint_id=path),
    "dcp reader": lambda path: dcp.ReshardReader(path).read_metadata(),
}
WRITERS: dict[str, Callable[[Any], Any]] = {
    "save": lambda path: checkpoint.save(path, weights()),
    "async_save": lambda path: checkpoint.async_save(path, weights()).result(),
    "Manager": lambda path: Manager(path).close(),
    "reshard": lambda path: checkpoint.reshard("ckpt", path, mesh={"dp": 2}),
    "convert": lambda path: checkpoint.convert("ckpt", path, to="dcp"),
}


def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(6.0)}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a working folder with a checkpoint in each."""
    home, here = tmp_path / "home", tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    for folder in (home, here):
        checkpoint.save(folder / "ckpt", weights())
    return home


@pytest.mark.parametrize("path", [5, None, b"ckpt", ""], ids=repr)
@pytest.mark.parametrize("name", [*OPENERS, *(f"to {name}" for name in WRITERS)])
def test_what_is_no_path_is_wrong_use(name: str, path: Any, home: Path):
    call = WRITERS[name[3:]] if name.startswith("to ") else OPENERS[name]
    with pytest.raises(UsageError, match=r"is not a path: pass a folder|pass the folder"):
        call(path)


@pytest.mark.parametrize("name", [*OPENERS, *(f"to {name}" for name in WRITERS)])
def test_a_relative_path_without_a_working_folder_is_wrong_use(name: str, home: Path, monkeypatch: pytest.MonkeyPatch):
    call = WRITERS[name[3:]] if name.startswith("to ") else OPENERS[name]
    (home / "gone").mkdir()
    monkeypatch.chdir(home / "gone")
    (home / "gone").rmdir()
    with pytest.raises(UsageError, match="the working folder of this process was removed; pass an absolute path"):
        call("ckpt")
    assert path_text("memory://ckpt") == "memory://ckpt"  # which needs no working folder


@pytest.mark.parametrize("name", OPENERS)
def test_home_is_expanded_where_something_is_opened(name: str, home: Path):
    (home / "only").symlink_to(home / "ckpt")
    OPENERS[name]("~/only")
    OPENERS[name](Path("~/only"))


@pytest.mark.parametrize("name", WRITERS)
def test_home_is_expanded_where_something_is_written(name: str, home: Path):
    WRITERS[name]("~/new")
    assert (home / "new").exists()
    assert not Path("~").exists()


def test_home_is_expanded_for_pictures_and_on_the_command_line(home: Path):
    checkpoint.plot("~/ckpt", output="~/page.html")
    assert (home / "page.html").exists()
    assert run("inspect", "~/ckpt", "--json").json["summary"]["num_tensors"] == 1
    assert run("verify", "~/ckpt").code == 0
    assert run("convert", "~/ckpt", "~/out", "--to", "dcp").code == 0
    assert (home / "out").exists()


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a run of three steps, beside which the working folder's files go."""
    monkeypatch.chdir(tmp_path)
    with Manager(tmp_path / "run") as manager:
        for step in (20, 100, 3):
            manager.save(step, weights())
    return tmp_path / "run"


@pytest.mark.parametrize("name", OPENERS)
def test_the_root_of_a_run_and_a_step_that_is_not_there_name_those_that_are(name: str, run_here: Path):
    newest, gone = str(run_here / "step_100"), run_here / "step_40"
    with pytest.raises(CheckpointNotFound) as error:
        OPENERS[name](run_here)
    assert f"it holds those of a run: step_3, step_20, step_100; load the newest as {newest!r}, or with" in str(error.value)
    with pytest.raises(CheckpointNotFound) as error:
        OPENERS[name](gone)
    said = f"{gone}: no committed checkpoint: nothing is there; its run holds step_3, step_20, step_100; check the path"
    assert str(error.value) == said
    assert any(line.endswith("(dcp)") for line in error.value.looked_for)
    OPENERS[name](newest)


def test_a_root_without_any_commit_says_so(tmp_path: Path):
    (tmp_path / "step_7").mkdir()
    with pytest.raises(CheckpointNotFound, match="saves began in step_7 there, but none was committed"):
        checkpoint.read(tmp_path)


def test_inspect_lists_the_steps_of_a_run(tmp_path: Path):
    root = tmp_path / "run"
    with Manager(root) as manager:
        for step, metric in ((3, 0.25), (20, None), (100, 0.5)):
            manager.save(step, weights(), metric=metric)
    (root / "step_50").mkdir()
    catalog = root / "step_20" / "catalog.msgpack"
    catalog.write_bytes(catalog.read_bytes()[:-9])
    said = json.loads(run("inspect", root, "--json").out)
    assert (said["format"], [line["step"] for line in said["steps"]]) == ("run", [3, 20, 50, 100])
    first, damaged, begun, last = said["steps"]
    saved = checkpoint.catalog(root / "step_3")
    assert (first["metric"], last["metric"], first["created_s"], first["save_id"]) == (0.25, 0.5, saved.created_s, saved.save_id)
    assert first["num_bytes"] == sum(path.stat().st_size for path in (root / "step_3").rglob("*.safetensors"))
    assert begun["problem"] == "not committed"
    assert "step_20" in damaged["problem"]
    assert damaged["num_bytes"] is None
    lines = run("inspect", root).out.splitlines()
    assert lines[0].split() == ["step", "saved", "size", "metric", "path"]
    assert lines[1].split()[0] == "3"
    assert lines[1].split()[-2:] == ["0.25", str(root / "step_3")]
    assert lines[3].split() == ["50", "not", "committed"]
    refused = run("inspect", root, "w")
    assert refused.code == 1
    assert "it holds those of a run" in refused.err


def test_metadata_of_dcp_are_those_of_the_save_after_the_working_folder_has_changed(home: Path, monkeypatch: pytest.MonkeyPatch):
    future = dcp.async_save(weights(), checkpoint_id="a")
    saved = dcp.save(weights(), checkpoint_id="b")
    reader = dcp.ReshardReader("a")
    writer = dcp.ReshardWriter("c")
    monkeypatch.chdir(home)
    for metadata in (future.result(), saved, reader.read_metadata()):
        assert list(metadata.state_dict_metadata) == ["w"]
    import torch.distributed.checkpoint as torch_dcp

    torch_dcp.save(weights(), storage_writer=writer)
    assert not os.path.exists("c")
    assert checkpoint.read(home.parent / "here" / "c")["w"].tolist() == weights()["w"].tolist()
