"""The commands look at checkpoints of other formats too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from reshard_ckpt import checkpoint
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
    assert run("verify", foreign).code == 0
    for arguments in (["-o", tmp_path / "all.html"], ["model.emb", "-o", tmp_path / "emb.svg"]):
        assert run("plot", foreign, *arguments).code == 0
