"""``reshard-ckpt convert`` says what it wrote and what it left out, and fails by its exit code."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from reshard_ckpt import checkpoint
from reshard_ckpt.storage import LocalStorage
from tests.cli.running import run
from tests.cli.states import save_trained, weights
from tests.damage import flip


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


def test_the_ending_of_the_result_chooses_its_format(tmp_path: Path):
    save_trained(tmp_path / "n")
    for name in ("x.pt", "x.pth"):
        ran = run("convert", tmp_path / "n", tmp_path / name)
        assert (ran.code, ran.out.partition(": ")[2].partition(",")[0]) == (0, "torch")
        assert torch.equal(torch.load(tmp_path / name, weights_only=True)["model"]["emb"], weights()["model.emb"][0])
    refused = run("convert", tmp_path / "n", tmp_path / "x.safetensors")
    assert (refused.code, (tmp_path / "x.safetensors").exists()) == (2, False)
    assert f"writes a folder, with model.safetensors in it; pass the folder's name, such as {tmp_path / 'x'}," in refused.err
    for form, name in (("safetensors", "y.safetensors"), ("dcp", "y.pt")):  # what is asked for counts
        assert run("convert", tmp_path / "n", tmp_path / name, "--to", form).out.partition(": ")[2].startswith(form)


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
    flip(file, -100)
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


def test_what_a_killed_conversion_had_finished_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_trained(tmp_path / "n")
    publish = LocalStorage.publish
    with monkeypatch.context() as patch:  # as if the process had died
        patch.setattr(shutil, "rmtree", lambda *args, **options: None)
        patch.setattr(LocalStorage, "publish", lambda self, key, data: 1 / 0 if "00003" in key else publish(self, key, data))
        with pytest.raises(ZeroDivisionError):
            run("convert", tmp_path / "n", tmp_path / "out", "--max-shard-size", "1kB")
    ran = run("convert", tmp_path / "n", tmp_path / "out", "--max-shard-size", "1kB", "--json")
    kept = sum(file.stat().st_size for file in (tmp_path / "out").glob("model-0000[12]-of-*.safetensors"))
    assert (ran.code, ran.json["bytes_kept"]) == (0, kept) != (0, 0)
    assert torch.equal(checkpoint.read(tmp_path / "out")["model.emb"], weights()["model.emb"][0])


def test_ranks_of_a_job_do_not_all_write_one_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_trained(tmp_path / "n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank in "03":
        monkeypatch.setenv("RANK", rank)
        ran = run("plot", "n", "-ox.html")
        assert ran.code == 2
        assert "plot is the work of one process, and WORLD_SIZE is 4; start it without torchrun" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["n"]
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert run("plot", "n", "-ox.html").code == 0


def test_slips_in_options_are_named(tmp_path: Path):
    save_trained(tmp_path / "n")
    for options, said in (
        (["--rename", "nodel=x"], "the checkpoint has no such name, nor any below it"),
        (["--rename", "=x"], "wanted two parts with = between them"),
        (["--select", "modle"], "modle: not in the checkpoint, which has 'extra', 'model', 'optimizer'"),
        (["--select", "extra"], "extra.step: nothing that was selected is a tensor, and safetensors hold no values"),
        (["--root", "ema"], "--root ema: nothing that was selected lies below it"),
    ):
        ran = run("convert", tmp_path / "n", tmp_path / "out", *options)
        assert (ran.code, ran.out) == (1 if "modle" in said else 2, "")
        assert said in ran.err
    assert run("convert", tmp_path / "n", "memory://x").code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["n"]


def test_a_full_disk_is_said_with_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_trained(tmp_path / "n")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    ran = run("convert", tmp_path / "n", tmp_path / "x.pt", "--to", "torch")
    assert (ran.code, "StorageError" in ran.err, "No space left on device; free space there" in ran.err) == (1, True, True)
    assert [path.name for path in tmp_path.iterdir()] == ["n"]
