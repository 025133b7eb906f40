"""The command line on Megatron's folders, as docs/megatron.md shows it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from reshard_ckpt import checkpoint
from tests.cli.running import run
from tests.families.megatron.folders import expected, unpack


def test_a_run_of_0_13_becomes_one_of_today(tmp_path: Path):
    old, new = unpack("0.13.0-dense", tmp_path), tmp_path / "new"
    assert run("verify", old).code == 0
    assert run("convert", old, new / "iter_0000007", "--to", "megatron").code == 0
    (new / "latest_checkpointed_iteration.txt").write_text("7\n")
    assert run("inspect", new).code == 0
    read = checkpoint.read(new)
    assert read["optimizer.param_state_sharding_type"] == "fully_reshardable"
    for name in checkpoint.catalog(old).names:
        assert torch.equal(read[name], expected(name, "0.13.0-dense", read[name])), name


def test_layers_are_taken_apart_and_cut_by_stages_on_request(tmp_path: Path):
    root, name = unpack("0.16.1-moe", tmp_path), "model.decoder.layers.mlp.experts.experts.linear_fc1.weight"
    assert run("convert", root, tmp_path / "flat", "--to", "safetensors", "--unstack", "--select", "model").code == 0
    flat = {key: tensor for file in (tmp_path / "flat").glob("*.safetensors") for key, tensor in load_file(file).items()}
    whole = checkpoint.read(root, [name])[name]
    (key,) = [key for key in flat if key.endswith("decoder.layers.1.mlp.experts.experts.2.linear_fc1.weight")]
    assert torch.equal(flat[key], whole[1, 2])
    assert run("reshard", root, tmp_path / "cut", "--mesh", "pp=2,ep=2").code == 0
    assert torch.equal(checkpoint.read(tmp_path / "cut", [name])[name], whole)
    assert checkpoint.catalog(tmp_path / "cut").mesh.axes == ("pp", "ep")


def test_sha256_is_proved_by_the_list_of_megatron(tmp_path: Path):
    root = unpack("0.20.0-integrity", tmp_path)
    assert run("verify", root, "--sha256").code == 0
    victim = next(root.rglob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    assert run("verify", root, "--sha256").code == 1
    assert run("verify", unpack("0.20.0-dense", tmp_path), "--sha256").code == 2  # it has no list
