"""`convert --to megatron`: a folder whose keys, shapes and common state are those that Megatron-Core itself would save."""

from __future__ import annotations

import argparse
import json
import re
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard_ckpt import checkpoint, megatron
from reshard_ckpt.errors import NameCollisionError, UnsupportedError, UsageError
from reshard_ckpt.families.megatron import places
from reshard_ckpt.families.megatron.buckets import name_buckets
from reshard_ckpt.families.megatron.names import keys_of_catalog
from reshard_ckpt.families.megatron.open import read_metadata
from reshard_ckpt.formats.catalog_builder import CatalogBuilder
from reshard_ckpt.formats.parts import Part
from reshard_ckpt.storage import open_storage
from reshard_ckpt.torchfile.archive import read_object
from tests.families.megatron import values
from tests.families.megatron.folders import expected, unpack


def keys_of(path: Path) -> set[str]:
    saved = read_metadata(open_storage(str(path)))
    return {*saved.tensors, *saved.values}


def test_only_the_beginning_of_a_name_stands_for_the_model(tmp_path: Path) -> None:
    state = {"model": {"decoder.model.weight": torch.ones(2)}, "net": {"model.weight": torch.ones(2)}}
    checkpoint.save(tmp_path / "saved", state)
    saved = checkpoint.catalog(tmp_path / "saved")
    assert {keys_of_catalog(saved)(name) for name in saved.names} == {"decoder.model.weight", "net.model.weight"}


@pytest.mark.parametrize("name", ["0.16.1-moe", "0.16.1-plain", "0.16.1-buckets", "0.16.1-separate"])
def test_a_converted_folder_has_the_keys_of_the_one_it_was_made_of(tmp_path: Path, name: str) -> None:
    root = unpack(name, tmp_path)
    checkpoint.convert(root, tmp_path / "out", to="megatron")
    assert keys_of(tmp_path / "out") == keys_of(root / "iter_0000007")
    found = checkpoint.diff(root, tmp_path / "out", values=True)
    # Of a chain it is said that keys have no number of it, which this folder's job left out.
    assert found.equal or (name.endswith("moe") and set(found.added) == {"content_metadata.chained_optim_avoid_prefix"})
    assert json.loads((tmp_path / "out" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


@pytest.mark.parametrize("name", ["0.13.0-dense", "0.15.3-moe"])
def test_an_old_folder_becomes_one_that_is_fully_reshardable(tmp_path: Path, name: str) -> None:
    root = unpack(name, tmp_path)
    checkpoint.convert(root, tmp_path / "out", to="megatron")
    keys = keys_of(tmp_path / "out")
    assert keys == keys_of(unpack(f"0.16.1-{name.partition('-')[2]}", tmp_path) / "iter_0000007")
    common = read_object((tmp_path / "out" / "common.pt").read_bytes(), "common.pt")
    optimizers = [common["optimizer"]] if name.endswith("dense") else list(common["optimizer"].values())
    assert [one["param_state_sharding_type"] for one in optimizers] == ["fully_reshardable"] * len(optimizers)
    assert all("param_state" not in one and one["optimizer"]["param_groups"] for one in optimizers)
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    read = checkpoint.read(tmp_path / "out")
    for tensor in checkpoint.catalog(tmp_path / "out").names:
        assert torch.equal(read[tensor], expected(tensor, name, read[tensor])), tensor


def test_through_this_library_and_back_nothing_changes(tmp_path: Path) -> None:
    root = unpack("0.19.1-dense", tmp_path)
    checkpoint.convert(root, tmp_path / "own", to="reshard")
    checkpoint.convert(tmp_path / "own", tmp_path / "out", to="megatron")
    keys = keys_of(root / "iter_0000007") - {"common_state/shard_0_1"}
    assert keys_of(tmp_path / "out") == keys
    assert checkpoint.diff(root, tmp_path / "out", values=True).equal


def test_a_namespace_and_a_member_of_an_enum_are_written_as_what_they_were(tmp_path: Path) -> None:
    root = unpack("0.16.1-dense", tmp_path)
    checkpoint.convert(root, tmp_path / "own", to="reshard")
    checkpoint.convert(tmp_path / "own", tmp_path / "out", to="megatron")
    with torch.serialization.safe_globals([argparse.Namespace]), pytest.raises(Exception, match="AttnBackend"):
        torch.load(tmp_path / "out" / "common.pt", weights_only=True)
    globals_ = torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "out" / "common.pt")
    assert sorted(globals_) == ["argparse.Namespace", "megatron.core.transformer.enums.AttnBackend"]


def test_two_tensors_of_one_key_are_refused_by_name(tmp_path: Path) -> None:
    state = {"output_layer.weight": torch.ones(2)}
    checkpoint.save(tmp_path / "own", {"model": state, **state})
    with pytest.raises(NameCollisionError, match="are both output_layer.weight in a checkpoint of Megatron"):
        checkpoint.convert(tmp_path / "own", tmp_path / "out", to="megatron")
    assert not (tmp_path / "out").exists()


def test_a_value_that_megatron_has_no_place_for_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "own", {"model": {"output_layer.weight": torch.ones(2)}, "where": Path("x")})
    with pytest.raises(UnsupportedError, match="PosixPath has no place in a checkpoint of Megatron"):
        checkpoint.convert(tmp_path / "own", tmp_path / "out", to="megatron")


HUGGING_FACE = [
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.decoder.layers.0.self_attn.k_proj.weight",
    "model.decoder.layers.0.mlp.fc1.weight",
    "model.norm.weight",
    "encoder.layer.0.attention.output.dense.weight",
    "embeddings.word_embeddings.weight",
    "pooler.dense.weight",
    "lm_head.weight",
    "0.weight",
]


def test_a_model_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "own", {"model": {name: torch.ones(2) for name in HUGGING_FACE}, "extra": {"step": 1}})
    with pytest.raises(UnsupportedError, match=r"model\.0\.weight: is of no model of Megatron.* 10 tensors.*rename=.*add_rule"):
        checkpoint.convert(tmp_path / "own", tmp_path / "out", to="megatron")
    assert [path.name for path in tmp_path.iterdir()] == ["own"]
    rename = {"model.model.embed_tokens": "model.embedding.word_embeddings"}
    checkpoint.convert(tmp_path / "own", tmp_path / "out", to="megatron", rename=rename, select="model.embedding")
    assert keys_of(tmp_path / "out") == {"embedding.word_embeddings.weight"}


def test_modules_of_ones_own_are_written_where_a_rule_says_that_they_are_of_megatron(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_added", {})
    checkpoint.save(tmp_path / "own", {"model": {"adapter.weight": torch.ones(2)}})
    megatron.add_rule("adapter.weight", dim=None)
    checkpoint.convert(tmp_path / "own", tmp_path / "out", to="megatron")
    assert list(checkpoint.read(tmp_path / "out")) == ["model.adapter.weight"]


def test_a_save_whose_names_are_keys_is_written_with_these(tmp_path: Path) -> None:
    """As the calls that stand in for Megatron's own save: keys as they are, and Namespaces noted in the metadata."""
    state = {
        "model.w": torch.ones(2, 3),
        "optimizer.state.param.model.w": torch.full((2, 3), 2.0),
        "rng_state/shard_0_1": [1, 2],
        "args": {"lr": 0.5, "inner": {"x": 1}},
        "optimizer": {"optimizer": {"param_groups": [{"lr": 0.5}]}, "param_state_sharding_type": "dp_reshardable"},
    }
    about = {"megatron": {"namespaces": [["args"], ["args", "inner"]]}}
    checkpoint.save(tmp_path / "own", state, metadata=about)
    checkpoint.convert(tmp_path / "own", tmp_path / "out", to="megatron")
    assert keys_of(tmp_path / "out") == {"model.w", "optimizer.state.param.model.w", "rng_state/shard_0_1"}
    common = read_object((tmp_path / "out" / "common.pt").read_bytes(), "common.pt")
    tag = {"__class__": "argparse:Namespace"}
    assert common["args"] == {"lr": 0.5, "inner": {"x": 1, **tag}, **tag}
    assert common["optimizer"] == {"optimizer": {"param_groups": [{"lr": 0.5}]}, "param_state_sharding_type": "fully_reshardable"}


RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


@pytest.mark.parametrize(
    ("kind", "saved", "wanted"),
    [
        ("own", None, RESHARDABLE),
        ("own", {"distrib_optim_sharding_type": "dp_reshardable"}, RESHARDABLE),
        ("own", {"distrib_optim_sharding_type": "fully_reshardable", "other": 1}, {"other": 1}),
        ("chain", {"distrib_optim_sharding_type": "fully_reshardable"}, RESHARDABLE),
        ("plain chain", None, {"chained_optim_avoid_prefix": True}),
        ("plain", None, None),
    ],
)
def test_what_is_said_of_the_optimizer_is_what_megatron_asks_before_it_loads(
    tmp_path: Path, kind: str, saved: dict[str, Any] | None, wanted: dict[str, Any] | None
) -> None:
    """Its training makes the tree to load into by the content metadata: of these keys, whatever was said when it was saved."""
    groups = {"optimizer": {"param_groups": [{"lr": 0.5}]}}
    own = {**groups, "param_state_sharding_type": "fully_reshardable"}
    optimizer = {"own": own, "chain": {0: own, 1: own}, "plain": groups, "plain chain": {0: groups, 1: groups}}[kind]
    state = {"w": torch.ones(2), "optimizer.state.param.w": torch.ones(2), "optimizer": optimizer}
    said = {} if saved is None else {"content_metadata": saved}
    checkpoint.save(tmp_path / "own", {**state, **said}, metadata={"megatron": {"namespaces": []}})
    checkpoint.convert(tmp_path / "own", tmp_path / "out", to="megatron")
    common = read_object((tmp_path / "out" / "common.pt").read_bytes(), "common.pt")
    assert common["optimizer"] == optimizer
    assert (wanted or {}).items() <= common.get("content_metadata", {}).items()
    assert ("content_metadata" in common) == (wanted is not None)


@pytest.mark.parametrize("step", [{}, {"state": {"common_step": 7}}])
def test_groups_of_an_optimizer_without_masters_stay_beside_its_state(tmp_path: Path, step: dict[str, Any]) -> None:
    """An FP32 optimizer has no inner one; whether it has a step beside its groups depends on which Adam it is."""
    optimizer = {"param_groups": [{"lr": 0.5}], **step}
    name = "decoder.final_layernorm.weight"
    state = {name: torch.ones(2), f"optimizer.state.exp_avg.{name}": torch.zeros(2), "optimizer": optimizer}
    checkpoint.save(tmp_path / "own", state, metadata={"megatron": {"namespaces": []}})
    checkpoint.convert(tmp_path / "own", tmp_path / "out", to="megatron")
    checkpoint.convert(tmp_path / "out", tmp_path / "renamed", to="reshard")
    checkpoint.convert(tmp_path / "renamed", tmp_path / "again", to="megatron")
    for path in ("out", "again"):
        common = read_object((tmp_path / path / "common.pt").read_bytes(), "common.pt")
        assert common["optimizer"] == optimizer
    for path in ("own", "out", "renamed"):
        assert megatron.load_common_state_dict(str(tmp_path / path))["optimizer"] == optimizer


def test_unstacked_layers_and_experts_are_tensors_of_their_own(tmp_path: Path) -> None:
    root = unpack("0.16.1-moe", tmp_path)
    report = checkpoint.convert(root, tmp_path / "flat", to="safetensors", unstack=True, max_shard_size=4096)
    read = checkpoint.read(tmp_path / "flat")
    assert len(read) == report.num_tensors
    stacked = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    whole = values.whole(stacked, (2, 4, 32, 8), torch.bfloat16)
    for layer in range(2):
        for expert in range(4):
            name = f"model.decoder.layers.{layer}.mlp.experts.experts.{expert}.linear_fc1.weight"
            assert torch.equal(read[name], whole[layer, expert])
        name = "decoder.layers.self_attention.linear_qkv.weight"
        numbered = f"model.{name.replace('layers', f'layers.{layer}')}"
        assert torch.equal(read[numbered], values.whole(name, (2, 24, 8), torch.bfloat16)[layer])
    assert not [name for name in read if re.search(r"layers\.(?!\d)", name)]
    with pytest.raises(UsageError, match="unstack=True: is for to='safetensors'"):
        checkpoint.convert(root, tmp_path / "dcp", to="dcp", unstack=True)


def test_buckets_are_named_where_the_weights_prove_it(tmp_path: Path) -> None:
    """The moments that were saved are functions of the master weights, element by element."""
    root = unpack("0.16.1-buckets", tmp_path)
    checkpoint.convert(root, tmp_path / "out", to="megatron", optimizer="fully_reshardable")
    read, catalog = checkpoint.read(tmp_path / "out"), checkpoint.catalog(tmp_path / "out")
    assert {link.parameter for link in catalog.links().values()} == {n for n in catalog.names if n.startswith("model.")}
    for name, link in catalog.links().items():
        assert link.parameter is not None
        weight = read[link.parameter].float()
        wanted = {"param": weight, "exp_avg": weight * 2 + 1, "exp_avg_sq": weight * 4 + 3}[link.key]
        assert torch.equal(read[name], wanted), name
    assert not [name for name in read if "dp_group_idx" in name]
    assert read["optimizer.param_state_sharding_type"] == "fully_reshardable"
    assert [group["lr"] for group in read["optimizer.param_groups"]] == [0.001, 0.001]


def add(
    builder: CatalogBuilder, name: str, values: list[float], places: list[int], file: list[bytes], dtype: torch.dtype
) -> None:
    """Add a tensor of one dim, of which each part lies alone, end to end in one file."""
    data, parts = torch.tensor(values, dtype=dtype), []
    for low, high in pairwise([*places, len(values)]):
        parts.append(Part((low,), (high - low,), 0, sum(map(len, file))))
        file.append(data[low:high].view(torch.uint8).numpy().tobytes())
    builder.tensor(name, dtype, (len(values),), parts)


@pytest.mark.parametrize(
    ("weights", "proved"),
    [
        ({"a": [1, 2, 3], "b": [4, 5]}, {"a", "b"}),
        ({"a": [1, 2, 3], "b": [2, 3]}, {"a", "b"}),  # b fits within a, which is larger and takes its place
        ({"a": [1, 1], "b": [1, 1]}, set()),
        ({"a": [1, 1, 1], "b": [1, 1], "c": [7, 8]}, {"a", "b", "c"}),
        ({"a": [1, 1, 1], "b": [1, 1, 1], "c": [1, 1], "d": [7, 8]}, {"d"}),
        ({"a": [1, 2], "b": [3, 4], "c": [1, 2]}, {"b"}),
    ],
)
def test_only_what_fits_in_one_place_is_named(weights: dict[str, list[float]], proved: set[str]) -> None:
    file: list[bytes] = []
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    builder = CatalogBuilder("megatron", storage.url)
    for name, elements in weights.items():
        add(builder, f"model.{name}", elements, [0], file, torch.bfloat16)
    flat = [value for values in reversed(weights.values()) for value in (*values, 99.0)]  # padded, the last parameter first
    prefix = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0"
    for key in ("param", "exp_avg"):
        add(builder, f"{prefix}.{key}", flat, [0, 2], file, torch.float32)
    storage.publish("file", b"".join(file))
    builder.file("file", sum(map(len, file)))
    name_buckets(builder, storage)
    found = [tensor for name, tensor in builder.tensors.items() if not name.startswith("model.")]
    named = {tensor.name.split(".")[2] for tensor in found}
    assert (named, len(found)) == (proved, 2 * len(proved))
    assert set(builder.finish().unreadable) == {
        f"optimizer.state.{n}.{key}" for n in weights.keys() - proved for key in ("param", "exp_avg")
    }
    for tensor in found:
        values = {}
        for one in tensor.parts:
            data = bytearray(one.num_elements * 4)
            storage.read_into("file", one.offset, [memoryview(data)])
            values.update(enumerate(torch.frombuffer(data, dtype=torch.float32).tolist(), one.start))
        assert [values[i] for i in sorted(values)] == weights[tensor.name.split(".")[2]]


@pytest.mark.parametrize(("first", "is_named"), [(1.0, True), (1.001, False)])  # both are 1 in bfloat16
def test_a_replica_in_another_bucket_proves_nothing_if_its_master_weights_differ(first: float, is_named: bool) -> None:
    file: list[bytes] = []
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    builder = CatalogBuilder("megatron", storage.url)
    add(builder, "model.a", [1, 2, 3], [0], file, torch.bfloat16)
    for bucket, master in enumerate(([1, 2, 3], [first, 2, 3])):
        prefix = f"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_{bucket}"
        for key in ("param", "exp_avg"):
            add(builder, f"{prefix}.{key}", master, [0], file, torch.float32)
    storage.publish("file", b"".join(file))
    builder.file("file", sum(map(len, file)))
    name_buckets(builder, storage)
    assert ("optimizer.state.a.exp_avg" in builder.tensors) == is_named
    assert ("optimizer.state.a.exp_avg" in builder.finish().unreadable) != is_named
