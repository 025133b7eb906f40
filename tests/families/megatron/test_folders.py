"""Folders that Megatron-Core 0.13 to 0.20 saved: all of them open, every element is where it belongs, and values are plain."""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reshard_ckpt import checkpoint, megatron
from reshard_ckpt.errors import CheckpointNotFound, CorruptError, MismatchError, UnsupportedError, UsageError
from reshard_ckpt.families.megatron.names import keys_of_catalog
from reshard_ckpt.format.objects import Named
from reshard_ckpt.torchfile.archive import read_object
from reshard_ckpt.torchfile.object_writer import object_bytes
from tests.damage import Calls
from tests.families.megatron import values
from tests.families.megatron.folders import FSDP, NAMES, VERSIONS, expected, unpack

Unpacked = Callable[[str], Path]

LAYERS = {"uneven": 3, "virtual": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Unpacked:
    made: dict[str, Path] = {}

    def unpacked(name: str) -> Path:
        if name not in made:
            made[name] = unpack(name, tmp_path_factory.mktemp("megatron"))
        return made[name]

    return unpacked


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def test_folders_of_all_versions_are_committed() -> None:
    assert {name.partition("-")[0] for name in NAMES} == set(VERSIONS)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("buckets")])
def test_every_element_is_a_function_of_its_global_place(folder: Unpacked, name: str) -> None:
    catalog, read = checkpoint.catalog(folder(name)), checkpoint.read(folder(name))
    assert not catalog.unreadable
    for tensor in catalog.names:
        assert torch.equal(read[tensor], expected(tensor, name, read[tensor])), tensor
    layers = LAYERS.get(name.partition("-")[2], 2)
    if not name.endswith(("separate", "moe")):
        assert catalog.shape(catalog.index("model.decoder.layers.mlp.linear_fc1.weight")) == (layers, 32, 8)
    if name.endswith("moe"):
        assert catalog.shape(catalog.index("model.decoder.layers.mlp.experts.experts.linear_fc1.weight")) == (2, 4, 32, 8)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("buckets")])
def test_optimizer_state_has_the_shape_and_the_link_of_its_parameter(folder: Unpacked, name: str) -> None:
    catalog = checkpoint.catalog(folder(name))
    links = catalog.links()
    parameters = {tensor for tensor in catalog.names if tensor.startswith("model.")}
    assert {link.parameter for link in links.values()} == parameters
    assert {link.key for link in links.values()} == {"param", "exp_avg", "exp_avg_sq"}
    for tensor, link in links.items():
        assert link.parameter is not None
        assert catalog.shape(catalog.index(tensor)) == catalog.shape(catalog.index(link.parameter))


@pytest.mark.parametrize("name", NAMES)
def test_values_stand_where_a_user_looks_for_them(folder: Unpacked, name: str) -> None:
    read = checkpoint.read(folder(name))
    tp, pp = read["args.tensor_model_parallel_size"], read["args.pipeline_model_parallel_size"]
    assert (read["iteration"], read["args.lr"], read["args.nested.x"]) == (7, 0.001, 1)
    assert read["args.params_dtype"] is torch.bfloat16
    assert read["args.attention_backend"] == 3  # of an enum whose class is not imported here
    assert read["args.__class__"] == "argparse:Namespace"
    groups = next(value for key, value in read.items() if key.endswith(("param_groups", "dp_group_idx_0.optimizer.shard_0_1")))
    assert all("lr" in group for group in (groups["param_groups"] if isinstance(groups, dict) else groups))
    for stage in range(pp):
        for rank in range(tp):
            (state,) = read[f"rng_state.shard_{stage}.{rank}_{pp}.{tp}"]
            assert state["torch_rng_state"].tolist() == [stage, rank, 7, 9]
            assert state["np_rng_state"][1].tolist() == [0, 1, 2, 3]
    assert any("_extra_state.shard_" in value for value in read)


def test_a_chain_of_optimizers_is_a_dict_of_their_numbers_in_the_common_state(folder: Unpacked) -> None:
    optimizers = megatron.load_common_state_dict(str(folder("0.15.3-moe")))["optimizer"]
    assert isinstance(optimizers, dict)
    assert [type(key) for key in optimizers] == [int, int]
    assert all("param_groups" in optimizers[i]["optimizer"] for i in (0, 1))


def test_sha256_is_proved_by_the_list_of_megatron(tmp_path: Path) -> None:
    root = unpack("0.20.0-integrity", tmp_path)
    report = checkpoint.verify(root, sha256=True)
    assert (report.ok, report.bytes_unverified) == (True, 0)
    path = root / "iter_0000007" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    (problem,) = checkpoint.verify(root, sha256=True).problems
    assert "__0_0.distcp has SHA-256" in problem
    with pytest.raises(UsageError):
        checkpoint.verify(unpack("0.20.0-dense", tmp_path), sha256=True)


def test_buckets_open_under_their_own_keys(folder: Unpacked) -> None:
    catalog = checkpoint.catalog(folder("0.16.1-buckets"))
    buckets = [name for name in catalog.names if name.startswith("optimizer.distributed.")]
    assert {name.rpartition(".")[2] for name in buckets} == {"param", "exp_avg", "exp_avg_sq"}
    assert all(name.startswith(("model.", "optimizer.distributed.")) for name in catalog.names)
    wanted = {"optimizer": {"state": {"output_layer.weight": {"exp_avg": torch.zeros(32, 8)}}}}
    with pytest.raises(MismatchError, match=r"saved as flat buffers \(dp_reshardable\) such as optimizer.distributed"):
        checkpoint.load(folder("0.16.1-buckets"), wanted)


def test_a_run_is_opened_at_its_newest_iteration_and_says_where_it_looked(folder: Unpacked, tmp_path: Path) -> None:
    root = folder("0.19.1-dense")
    assert checkpoint.catalog(root).names == checkpoint.catalog(root / "iter_0000007").names
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("8")
    with pytest.raises(CheckpointNotFound, match="iter_0000008: is named by latest_checkpointed_iteration.txt"):
        checkpoint.catalog(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("eight")
    with pytest.raises(CorruptError, match="says 'eight', which is not an iteration"):
        checkpoint.catalog(tmp_path)


def test_a_flat_tensor_without_its_true_shape_is_refused_by_name(folder: Unpacked, tmp_path: Path) -> None:
    root = unpack("0.15.3-dense", tmp_path)
    path = root / "iter_0000007" / ".metadata"
    data = path.read_bytes()
    assert data.count(b"nd_reformulated_orig_global_shape")
    path.write_bytes(data.replace(b"nd_reformulated_orig_global_shape", b"nd_reformulated_orig_global_shapf"))
    catalog = checkpoint.catalog(root)
    name = "optimizer.state.output_layer.weight.exp_avg"
    assert name in catalog.unreadable
    assert not any(tensor.startswith("optimizer.") for tensor in catalog.names)
    with pytest.raises(UnsupportedError, match="saved flat, without its true shape"):
        checkpoint.read(root, [name])


def test_an_unfinished_save_is_no_checkpoint(tmp_path: Path) -> None:
    root = unpack("0.16.1-dense", tmp_path)
    (root / "iter_0000007" / "metadata.json").unlink()
    with pytest.raises(CorruptError, match="the save did not end"):
        checkpoint.catalog(root)


def test_another_backend_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    with pytest.raises(UnsupportedError, match="backend 'zarr'"):
        checkpoint.catalog(tmp_path)


@pytest.mark.parametrize("hostile", [Calls(os.system, "touch evil"), Calls(eval, "1")])
def test_a_hostile_common_state_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hostile: object) -> None:
    monkeypatch.chdir(tmp_path)
    root = unpack("0.16.1-dense", tmp_path)
    (root / "iter_0000007" / "common.pt").write_bytes(saved({"iteration": 7, "args": hostile}))
    catalog = checkpoint.catalog(root)
    assert "model.output_layer.weight" in catalog.names
    assert "nothing was executed" in str(catalog.unreadable["args"])
    assert checkpoint.read(root, ["iteration"]) == {"iteration": 7}
    assert not (tmp_path / "evil").exists()


def test_a_list_repeated_without_end_is_refused() -> None:
    value: list[Any] = []
    for _ in range(40):
        value = [value, value]
    with pytest.raises(CorruptError, match="repeat each other more often"):
        read_object(saved(value), "x")


@dataclass
class Settings:
    """As a program of one's own may keep beside its state."""

    rate: float
    names: list[str]


def test_objects_come_back_from_the_writer_as_what_they_were() -> None:
    value = {
        "settings": Settings(0.5, ["a", "b"]),
        "args": argparse.Namespace(x=1, inner=argparse.Namespace(y=(1, 2.5)), dtype=torch.bfloat16),
        0: {1: -2},
        (torch.bfloat16, torch.float32): [1],
        "set": {1, 2},
        "bytes": b"a\xff",
        "array": np.arange(6).reshape(2, 3).T,
        "texts": np.array(["ab", "c"]),
        "scalar": np.float32(2),
        "tensor": torch.arange(6).reshape(2, 3).t(),
        "device": torch.device("cuda:1"),
        "size": torch.Size([1, 2]),
        "numbers": [2**31, -5, 2**40, True, None, 1e300],
        "function": torch.nn.functional.gelu,
    }
    decoded = read_object(saved(value), "x")
    assert decoded["args"]["inner"] == {"y": (1, 2.5), "__class__": "argparse:Namespace"}
    assert decoded["settings"] == Named(__name__, "Settings", {"rate": 0.5, "names": ["a", "b"]})
    assert decoded["function"] == Named("torch._C._nn", "gelu", None)
    again = torch.load(io.BytesIO(object_bytes(decoded, "x")), weights_only=False)
    for key, item in value.items():
        assert repr(again[key]) == repr(item), key


def test_the_calls_find_the_keys_and_paths_of_megatron(folder: Unpacked, tmp_path: Path) -> None:
    root = folder("0.15.3-moe")
    catalog = checkpoint.catalog(root)
    keys = {*map(keys_of_catalog(catalog), (*catalog.names, *catalog.value_names))}
    assert "decoder.layers.mlp.experts.experts.linear_fc1.weight" in keys
    assert "optimizer.state.param.decoder.layers.mlp.experts.experts.linear_fc1.weight" in keys
    assert "rng_state/shard_0.0_2.1" in keys
    common = megatron.load_common_state_dict(str(root))
    assert isinstance(common["args"].nested, argparse.Namespace)
    assert isinstance(common["optimizer"][0]["optimizer"]["param_groups"], list)


def test_a_load_finds_the_error_of_what_cannot_be_read_by_its_key(folder: Unpacked, tmp_path: Path) -> None:
    error = CorruptError("damaged")
    names = ["model.a.weight", "optimizer.state.a.weight.exp_avg", "rng_state.shard_0.1_2.2", "args.seed"]
    catalog = replace(checkpoint.catalog(folder("0.15.3-moe")), unreadable=dict.fromkeys(names, error))
    keys = ["a.weight", "optimizer.state.exp_avg.a.weight", "rng_state/shard_0.1_2.2", "args.seed"]
    assert [*map(keys_of_catalog(catalog), names)] == keys


def test_a_run_that_dcp_saved_opens_at_its_newest_iteration(tmp_path: Path) -> None:
    weights = {"model": {"w": torch.arange(6.0).reshape(2, 3)}}
    checkpoint.save(tmp_path / "own", weights)
    checkpoint.convert(tmp_path / "own", tmp_path / "run" / "iter_0000003", to="dcp")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("3\n")
    assert torch.equal(checkpoint.read(tmp_path / "run")["model.w"], weights["model"]["w"])


def test_a_folder_of_megatron_fsdp_opens_whole_and_its_arguments_too(tmp_path: Path) -> None:
    """DTensors of tensor parallelism 2 and FSDP over 2, cut unevenly; SwiGLU weights are in halves, as Megatron has it."""
    root = unpack(FSDP, tmp_path)
    catalog, read = checkpoint.catalog(root), checkpoint.read(root)
    assert not catalog.unreadable
    assert checkpoint.verify(root).ok
    assert catalog.shape(catalog.index("model.module.decoder.layers.0.mlp.linear_fc1.weight_w")) == (16, 8)
    for name in catalog.names:
        if not name.endswith(".step"):
            assert torch.equal(read[name], values.whole(name, tuple(read[name].shape), read[name].dtype)), name
    assert (read["iteration"], read["args.lr"], read["args.data_path"]) == (7, 0.001, ["a", "b"])
    moments = [name for name in catalog.names if name.endswith(".exp_avg")]
    assert len(moments) == sum(name.startswith("model.") for name in catalog.names)
