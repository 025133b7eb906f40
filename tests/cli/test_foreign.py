"""The commands look at checkpoints of other formats too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import UsageError
from tests.cli.running import run

STATE = {"emb": torch.arange(60.0).reshape(10, 6), "norm": torch.ones(4, dtype=torch.bfloat16)}


@pytest.fixture
def native(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "native", {"model": STATE})
    return tmp_path / "native"


@pytest.fixture(params=["model.safetensors", "model.pt"])
def foreign(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    file: Path = tmp_path / request.param
    if file.suffix == ".pt":
        torch.save(STATE, file)
    else:
        save_file(STATE, file)
    return file


def test_foreign_file_is_inspected_drawn_and_equal_to_the_same_saved_here(foreign: Path, native: Path, tmp_path: Path):
    said = run("inspect", foreign, "model.emb", "--stats", "--json").json
    assert said["format"] != "reshard_ckpt"
    assert (said["tensors"][0]["shape"], said["tensors"][0]["stats"]["max"]) == ([10, 6], 59.0)
    (shard,) = said["tensors"][0]["shards"]
    data = foreign.parent.joinpath(shard["file"]).read_bytes()[shard["offset"] :][: shard["num_bytes"]]
    assert data == STATE["emb"].numpy().tobytes()
    assert "mesh        unknown" in run("inspect", foreign).out
    shown = run("diff", foreign, native, "--values")
    assert (shown.code, shown.out.splitlines()[-1]) == (
        0,
        "equal under different layouts: 2 tensors bit by bit, and all values",
    )
    proved = run("verify", foreign)
    assert (proved.code, "their bytes cannot be verified, as this format has no checksums" in proved.out) == (0, True)
    assert "every byte" not in proved.out
    assert run("verify", foreign, "--json").json["bytes_unverified"] == foreign.stat().st_size
    for arguments in (["-o", tmp_path / "all.html"], ["model.emb", "-o", tmp_path / "emb.svg"]):
        assert run("plot", foreign, *arguments).code == 0


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (["compact"], 2, "compact is for this library's checkpoints, which may refer to others; this is a torch one"),
        (["verify", "--sha256"], 2, "a manifest is made of this library's checkpoints; this is a torch one"),
        (["plot", "--timeline", "-o", "t.json"], 1, "has no timeline, as this is a torch checkpoint; look at another"),
    ],
)
def test_commands_for_own_checkpoints_name_the_file_of_another_library(command: list[str], code: int, said: str, tmp_path: Path):
    torch.save({"model": {"w": torch.arange(3.0)}}, tmp_path / "x.pt")
    ran = run(command[0], tmp_path / "x.pt", *command[1:])
    assert ran.code == code
    assert ran.err.endswith(f": {tmp_path / 'x.pt'}: {said}\n")
    with pytest.raises(UsageError, match="a manifest is made of this library's checkpoints"):
        checkpoint.write_manifest(tmp_path / "x.pt")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 440449768\n"


@pytest.mark.parametrize(
    "command", [["inspect"], ["verify"], ["diff"], ["reshard", "--mesh", "tp=2"], ["convert"], ["plot", "-o", "x.html"]]
)
@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("notes.txt", b"hello", "notes.txt: no committed checkpoint: a file of no format that is known; check the path"),
        ("catalog.msgpack", b"hello", "a file of no format that is known; pass the folder that it is in"),
        ("none", None, "nothing is there; check the path"),
        ("folder/README", b"hello", "1 file (README), but no catalog.msgpack"),
        ("folder/__0_0.distcp", b"hello", "but no .metadata, which torch.distributed.checkpoint writes last"),
        ("half.pt", b"PK\x03\x04half", "is not a whole zip, as torch.save writes it"),
        (
            "folder/model.safetensors",
            POINTER,
            "model.safetensors: is a pointer of Git LFS, not the file itself; git lfs pull fetches it",
        ),
        (
            "folder/pytorch_model.bin",
            POINTER,
            "pytorch_model.bin: is a pointer of Git LFS, not the file itself; git lfs pull fetches it",
        ),
        ("half.safetensors", b"\xff\0\0\0\0\0\0\0{", "half.safetensors: ends after 9 bytes, within its header"),
    ],
)
def test_every_command_says_what_it_found_and_what_it_looked_for(
    command: list[str], name: str, data: bytes | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / name
    if data is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    where = tmp_path / name.partition("/")[0]
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(out)
    more = {"diff": [where], "reshard": [out / "dst"], "convert": [out / "dst"]}.get(command[0], [])
    ran = run(command[0], where, *more, *command[1:], "--json")
    assert ran.code == 1
    assert said in (ran.json["error"]["message"] if "error" in ran.json else "\n".join(ran.json["problems"]))
    if "error" in ran.json and "Error" not in ran.json["error"]["type"]:
        native, *others = ran.json["error"]["looked_for"]
        assert native == "catalog.msgpack (reshard_ckpt)"
        assert any("a folder of torch.distributed.checkpoint" in line for line in others)
        assert len(ran.err.splitlines()) == 1
    assert os.listdir(out) == []
