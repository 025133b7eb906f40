"""``reshard-ckpt convert`` says what it wrote and what it left out, and fails by its exit code."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from reshard_ckpt import checkpoint
from tests.cli.running import run
from tests.cli.states import save_trained, weights


def test_every_option_reaches_the_conversion(tmp_path: Path):
    save_trained(tmp_path / "n", dp=2, tp=2)
    arguments = ["--max-shard-size", "1kB", "--rename", "model.layers=model.h", "--exclude", "*.norm", "--cast", "*.up=float16"]
    ran = run("convert", tmp_path / "n", tmp_path / "hf", *arguments)
    assert (ran.code, ran.out.splitlines()[0].partition(": ")[2]) == (0, "safetensors, 6 files, 9 tensors, 0 values, 3.84 kB")
    assert "model.h.0.norm" in ran.err or "4 names of model" in ran.err
    found = {name: tensor for file in (tmp_path / "hf").glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert torch.equal(found["h.3.up"], weights()["model.layers.3.up"][0].half())
    assert torch.equal(found["h.3.down"], weights()["model.layers.3.down"][0])


def test_json_is_the_report(tmp_path: Path):
    save_trained(tmp_path / "n", tp=2)
    ran = run("convert", tmp_path / "n", tmp_path / "x.pt", "--to", "torch", "--select", "model", "--root", "model", "--json")
    assert ran.code == 0
    assert (ran.json["format"], ran.json["files"], ran.json["num_tensors"]) == ("torch", ["x.pt"], 13)
    assert "extra.step" in ran.json["left_out"]
    assert torch.equal(torch.load(tmp_path / "x.pt", weights_only=True)["emb"], weights()["model.emb"][0])
    assert run("inspect", tmp_path / "x.pt").code == 0


def test_what_is_there_stays_unless_told_otherwise(tmp_path: Path):
    save_trained(tmp_path / "n")
    assert run("convert", tmp_path / "n", tmp_path / "out").code == 0
    refused = run("convert", tmp_path / "n", tmp_path / "out")
    assert (refused.code, refused.out) == (2, "")
    assert "already exists" in refused.err
    assert run("convert", tmp_path / "n", tmp_path / "out", "--to", "dcp", "--overwrite").code == 0
    assert set(checkpoint.catalog(tmp_path / "out").names) == set(checkpoint.catalog(tmp_path / "n").names)


def test_wrong_use_and_problems_have_their_codes(tmp_path: Path):
    save_trained(tmp_path / "n")
    assert run("convert", tmp_path / "n", tmp_path / "out", "--cast", "model.*").code == 2
    assert run("convert", tmp_path / "n", tmp_path / "out", "--to", "gguf").code == 2
    assert run("convert", tmp_path / "absent", tmp_path / "out").code == 1
    (file,) = (tmp_path / "n").glob("*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    ran = run("convert", tmp_path / "n", tmp_path / "out", "--to", "torch", "--json")
    assert (ran.code, ran.json["error"]["type"]) == (1, "CorruptError")
    assert run("convert", tmp_path / "n", tmp_path / "out", "--to", "torch", "--no-verify").code == 0


def test_optimizers_in_a_folder_of_dcp_have_the_form_asked_for(tmp_path: Path):
    model = torch.nn.Linear(2, 2)
    checkpoint.save(tmp_path / "n", {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.5)})
    for form in ("nested", "flat"):
        assert run("convert", tmp_path / "n", tmp_path / form, "--to", "dcp", "--optimizer", form).code == 0
        names = {name for name in FileSystemReader(tmp_path / form).read_metadata().state_dict_metadata if name.endswith("lr")}
        flat = {"optimizer.param_groups.weight.lr", "optimizer.param_groups.bias.lr"}
        assert names == (flat if form == "flat" else {"optimizer.param_groups.0.lr"})
    assert run("convert", tmp_path / "n", tmp_path / "out.pt", "--to", "torch", "--optimizer", "flat").code == 2
