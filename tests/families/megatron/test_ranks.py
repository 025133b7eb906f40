"""Megatron's folders of a file for each rank: cuts, stages and experts are put together, rules are proved, and nothing is run."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard_ckpt import checkpoint, megatron
from reshard_ckpt.errors import CheckpointError, CorruptError, UnsupportedError, UsageError
from reshard_ckpt.families.megatron import places
from reshard_ckpt.families.megatron.open import read_metadata
from reshard_ckpt.storage import open_storage
from tests.damage import Calls
from tests.families.megatron import values
from tests.families.megatron.folders import RANKS, unpack

State = dict[str, Any]


@pytest.fixture(autouse=True)
def _no_rules() -> Iterator[None]:
    yield
    places._added.clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def unpacked(name: str) -> Path:
        if name not in made:
            made[name] = unpack(name, tmp_path_factory.mktemp("ranks"))
        return made[name]

    return unpacked


def expected(name: str, like: torch.Tensor) -> torch.Tensor:
    """What the real job wrote: of weights a function of their place, of the optimizer a function of the weights."""
    match = re.fullmatch(r"optimizer\.state\.(.+)\.(\w+)", name)
    if match is None:
        key = name.removeprefix("model.").replace("lm_head.output_layer", "output_layer")  # of T5: one tensor under two names
        return values.whole(key, tuple(like.shape), like.dtype)
    weight = values.whole(match[1], tuple(like.shape), torch.bfloat16).float()
    return {"param": weight, "exp_avg": weight * 2 + 1, "exp_avg_sq": weight * 4 + 3}[match[2]]


def is_buffer(name: str) -> bool:
    return ".gbuf_idx_" in name


@pytest.mark.parametrize("name", RANKS)
def test_every_element_is_where_megatron_has_it(folder: Callable[[str], Path], name: str) -> None:
    catalog, read = checkpoint.catalog(folder(name)), checkpoint.read(folder(name), ["model.*"])
    assert {one for one in catalog.unreadable if not one.startswith("optimizer.")} == set()
    assert len([one for one in read if one in catalog.names]) > 10
    for tensor in filter(catalog.names.__contains__, read):
        assert torch.equal(read[tensor], expected(tensor, read[tensor])), tensor
    assert checkpoint.verify(folder(name)).ok


def test_names_and_shapes_are_those_of_newer_folders(folder: Callable[[str], Path]) -> None:
    for mine, newer in (("dense", "dense"), ("virtual", "virtual")):
        old, new = checkpoint.catalog(folder(f"0.16.1-ranks-{mine}")), checkpoint.catalog(folder(f"0.16.1-{newer}"))
        wanted = {one: new.shape(new.index(one)) for one in new.names if one.startswith("model.")}
        assert {one: old.shape(old.index(one)) for one in old.names if one.startswith("model.")} == wanted
        objects = {one for one in new.value_names if "shard_" in one}
        assert {one for one in old.value_names if "shard_" in one} == objects
    moe = checkpoint.catalog(folder("0.16.1-ranks-moe"))
    assert moe.shape(moe.index("model.decoder.layers.mlp.experts.experts.linear_fc1.weight")) == (2, 4, 32, 8)
    tied = checkpoint.catalog(folder("0.16.1-ranks-uneven"))
    assert "model.output_layer.weight" not in tied.names
    assert tied.shape(tied.index("model.decoder.layers.mlp.linear_fc2.weight")) == (3, 8, 16)


def test_values_are_those_of_the_first_file_and_the_parts_of_all(folder: Callable[[str], Path]) -> None:
    read = checkpoint.read(folder("0.16.1-ranks-dense"), ["iteration", "args", "rng_state", "optimizer.param_groups"])
    assert (read["iteration"], read["args.lr"], read["args.nested.x"]) == (7, 0.001, 1)
    assert read["args.__class__"] == "argparse:Namespace"
    for pp, tp in ((0, 0), (0, 1), (1, 0), (1, 1)):
        (state,) = read[f"rng_state.shard_{pp}.{tp}_2.2"]
        assert state["torch_rng_state"].tolist() == [pp, tp, 7, 9]
    assert {group["step"] for group in read["optimizer.param_groups"]} == {1.0}


@pytest.mark.parametrize("name", ["dense", "uneven", "virtual", "moe"])
def test_convert_makes_a_folder_of_today_with_the_optimizer(folder: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    """Buffers of a distributed optimizer get their names where the weights prove them."""
    old, new = folder(f"0.16.1-ranks-{name}"), tmp_path / "iter_0000007"
    checkpoint.convert(old, new, to="megatron", optimizer="fully_reshardable")
    catalog, read = checkpoint.catalog(new), checkpoint.read(new)
    assert not catalog.unreadable
    model = {one for one in catalog.names if one.startswith("model.")}
    assert {link.parameter for link in catalog.links().values()} == model
    assert {link.key for link in catalog.links().values()} == {"param", "exp_avg", "exp_avg_sq"}
    for tensor in catalog.names:
        assert torch.equal(read[tensor], expected(tensor, read[tensor])), tensor
    assert read["args.params_dtype"] is torch.bfloat16
    keys = read_metadata(open_storage(str(new))).tensors
    assert {key.split(".")[2] for key in keys if key.startswith("optimizer.state.")} == {"param", "exp_avg", "exp_avg_sq"}
    said = {key: read[f"content_metadata.{key}"] for key in ("distrib_optim_sharding_type", "chained_optim_avoid_prefix")}
    assert said == {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    parts = ["optimizer.0", "optimizer.1"] if name == "moe" else ["optimizer"]
    assert [read[f"{one}.param_state_sharding_type"] for one in parts] == ["fully_reshardable"] * len(parts)


def test_an_optimizer_by_position_is_refused_by_name_and_its_model_read(folder: Callable[[str], Path], tmp_path: Path) -> None:
    plain = folder("0.16.1-ranks-plain")
    assert set(checkpoint.catalog(plain).unreadable) == {"optimizer.state", "optimizer.param_groups"}
    with pytest.raises(UnsupportedError, match="kept by position"):
        checkpoint.convert(plain, tmp_path / "all", to="megatron")
    checkpoint.convert(plain, tmp_path / "model", to="megatron", exclude=["optimizer"])
    read = checkpoint.read(tmp_path / "model", ["model.*"])
    assert torch.equal(
        read["model.output_layer.weight"], expected("model.output_layer.weight", read["model.output_layer.weight"])
    )


# Folders that are made here: what is odd about them no job writes.


def write(root: Path, model_of: Callable[[int], State], *, tp: int = 2, **args: Any) -> Path:
    """Write a folder of tensor-parallel ranks."""
    for rank in range(tp):
        folder = root / f"mp_rank_{rank:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        of_job = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": 1, **args}
        torch.save({"args": argparse.Namespace(**of_job), "model": model_of(rank)}, folder / "model_optim_rng.pt")
    return root


def grid(rows: int, columns: int, rank: int = 0) -> torch.Tensor:
    return torch.arange(rows * columns).view(rows, columns) + rank * 1000.0


def error_of(path: Path, name: str) -> CheckpointError:
    error = checkpoint.catalog(path).unreadable[name]
    with pytest.raises(type(error), match=re.escape(str(error)[:60])):
        checkpoint.read(path, [name])
    return error


def test_a_name_without_a_rule_is_refused_with_the_call_that_adds_one(tmp_path: Path) -> None:
    path = write(
        tmp_path, lambda rank: {"decoder.adapter.weight": grid(2, 3, rank), "decoder.final_layernorm.weight": grid(1, 3)}
    )
    error = error_of(path, "model.decoder.adapter.weight")
    assert isinstance(error, UnsupportedError)
    assert "megatron.add_rule('decoder.adapter.weight', dim=…)" in str(error)
    assert "model.decoder.final_layernorm.weight" in checkpoint.read(path, ["*norm*"])
    megatron.add_rule("decoder.adapter.*", dim=1)
    read = checkpoint.read(path, ["*adapter*"])
    assert torch.equal(read["model.decoder.adapter.weight"], torch.cat([grid(2, 3), grid(2, 3, 1)], 1))
    megatron.add_rule("*.adapter.weight", dim=0, sections=2)
    read = checkpoint.read(path, ["*adapter*"])
    assert torch.equal(read["model.decoder.adapter.weight"][:, 0], torch.tensor([0.0, 1000.0, 3.0, 1003.0]))


def test_without_tensor_parallelism_no_rule_is_needed(tmp_path: Path) -> None:
    path = write(tmp_path, lambda rank: {"some.thing": grid(2, 3)}, tp=1)
    assert torch.equal(checkpoint.read(path)["model.some.thing"], grid(2, 3))


def test_replicas_that_differ_are_no_replicas(tmp_path: Path) -> None:
    path = write(tmp_path, lambda rank: {"decoder.final_layernorm.weight": grid(1, 3, rank)})
    assert "should be the same, and are not" in str(error_of(path, "model.decoder.final_layernorm.weight"))
    megatron.add_rule("*final_layernorm.weight", dim=None, prove=False)
    assert torch.equal(checkpoint.read(path)["model.decoder.final_layernorm.weight"], grid(1, 3))


def test_replicas_above_a_mebibyte_are_compared_by_samples(tmp_path: Path) -> None:
    def position(rank: int) -> State:
        whole = torch.zeros(1 << 19)
        whole[-1] = rank
        return {"embedding.position_embeddings.weight": whole}

    path = write(tmp_path, position)
    assert "should be the same, and are not" in str(error_of(path, "model.embedding.position_embeddings.weight"))


def test_cut_tensors_that_are_all_alike_are_replicas(tmp_path: Path) -> None:
    path = write(tmp_path, lambda rank: {"output_layer.weight": grid(2, 3), "output_layer.bias": torch.ones(2)})
    assert "as if each had all of it" in str(error_of(path, "model.output_layer.weight"))
    assert checkpoint.read(path, ["*.bias"])["model.output_layer.bias"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(("rows", "firsts"), [(4, [0, 3, 1000, 1003, 6, 9, 1006, 1009]), (2, [0, 3, 1000, 1003])])
def test_gated_projections_are_told_by_their_width(tmp_path: Path, rows: int, firsts: list[int]) -> None:
    path = write(tmp_path, lambda rank: {"mlp.linear_fc1.weight": grid(rows, 3, rank), "mlp.linear_fc2.weight": grid(3, 2, rank)})
    assert checkpoint.read(path)["model.mlp.linear_fc1.weight"][:, 0].tolist() == firsts


def test_a_projection_that_is_neither_gated_nor_plain_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, lambda rank: {"mlp.linear_fc1.weight": grid(3, 3, rank), "mlp.linear_fc2.weight": grid(3, 2, rank)})
    assert "nothing tells whether it is gated" in str(error_of(path, "model.mlp.linear_fc1.weight"))


def test_layers_that_differ_have_their_numbers(tmp_path: Path) -> None:
    names = ("decoder.layers.0.input_layernorm.weight", "decoder.layers.1.other_norm.weight")
    path = write(tmp_path, lambda rank: {name: grid(1, 3) for name in names})
    assert set(checkpoint.catalog(path).names) == {f"model.{name}" for name in names}
    same = write(tmp_path / "same", lambda rank: {f"decoder.layers.{i}.input_norm.weight": grid(1, 3) + i for i in range(2)})
    assert checkpoint.read(same)["model.decoder.layers.input_norm.weight"].shape == (2, 1, 3)
    listed = write(tmp_path / "listed", lambda rank: {"decoder.layers.0.input_norm.weight": grid(1, 3)}, moe_layer_freq=[0])
    assert checkpoint.catalog(listed).names == ("model.decoder.layers.0.input_norm.weight",)


def test_grouped_experts_are_stacked_and_packed_ones_refused(tmp_path: Path) -> None:
    def of_rank(rank: int) -> State:
        base = "decoder.layers.0.mlp.experts"
        weights = {f"{base}.linear_fc2.weight{i}": grid(2, 3, rank) + 100 * i for i in range(2)}
        return {**weights, f"{base}.weight1": grid(2, 3)}

    path = write(tmp_path, of_rank)
    read = checkpoint.read(path, ["*linear_fc2*"])["model.decoder.layers.mlp.experts.experts.linear_fc2.weight"]
    assert torch.equal(read[0, 1], torch.cat([grid(2, 3), grid(2, 3, 1)], 1) + 100)
    assert "several experts" in str(error_of(path, "model.decoder.layers.0.mlp.experts.weight1"))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"tensor_model_parallel_size": 3}, "mp_rank_02 is not there"),
        ({"tensor_model_parallel_size": 1}, "mp_rank_01 is there"),
        ({"pipeline_model_parallel_size": 1 << 16}, "mp_rank_00_000 is not there"),
        ({"pipeline_model_parallel_size": None}, "pipeline_model_parallel_size=None"),
    ],
)
def test_folders_must_be_those_of_the_job(tmp_path: Path, args: State, said: str) -> None:
    with pytest.raises(CorruptError, match=said):
        checkpoint.catalog(write(tmp_path, lambda rank: {"x": grid(1, 1)}, **args))


def test_files_of_two_iterations_are_refused(tmp_path: Path) -> None:
    root = write(tmp_path, lambda rank: {"x": grid(1, 1)})
    for rank in range(2):
        path = root / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        torch.save({**torch.load(path, weights_only=False), "iteration": 7 + rank}, path)
    with pytest.raises(CorruptError, match="iteration is 7 in mp_rank_00/.* and 8 in mp_rank_01/.*files of two saves are mixed"):
        checkpoint.catalog(root)


def test_models_before_the_core_and_other_experts_are_refused(tmp_path: Path) -> None:
    nested = {"language_model": {"embedding": {"word_embeddings": {"weight": grid(2, 3)}}}}
    with pytest.raises(UnsupportedError, match="before its core"):
        checkpoint.catalog(write(tmp_path / "old", lambda rank: nested, tp=1))
    for ep in range(2):
        folder = tmp_path / "etp" / f"mp_rank_00_{ep:03d}"
        folder.mkdir(parents=True)
        sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 2}
        of_job = argparse.Namespace(**sizes, expert_tensor_parallel_size=2)
        torch.save({"args": of_job, "model": {}}, folder / "model_optim_rng.pt")
    with pytest.raises(UnsupportedError, match="experts are cut over 2 ranks"):
        checkpoint.catalog(tmp_path / "etp")


def test_hostile_files_are_refused_and_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    evil = Calls(os.system, "touch reshard_ckpt_was_here")
    path = write(tmp_path / "value", lambda rank: {"a": grid(1, 2), "b": evil}, tp=1, user=evil)
    catalog = checkpoint.catalog(path)
    assert "calls" in str(catalog.unreadable["args.user"])
    assert "model.b" in catalog.unreadable
    assert torch.equal(checkpoint.read(path, ["model.a"])["model.a"], grid(1, 2))
    assert not list(tmp_path.glob("reshard_ckpt_was_here"))


def test_a_value_that_repeats_itself_is_bounded(tmp_path: Path) -> None:
    node: Any = {"leaf": 1}
    for _ in range(40):
        node = {"a": node, "b": node}
    folder = tmp_path / "mp_rank_00"
    folder.mkdir()
    of_job = argparse.Namespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    torch.save({"args": of_job, "model": {"a": grid(1, 2)}, "deep": node}, folder / "model_optim_rng.pt")
    with pytest.raises(CorruptError, match="repeat each other more often than its .* bytes can spell"):
        checkpoint.catalog(tmp_path)


@pytest.mark.parametrize(("dim", "sections"), [(-1, 1), (1, 2), (0, 0), (None, 2)])
def test_rules_that_say_nothing_are_refused(dim: int | None, sections: int) -> None:
    with pytest.raises(UsageError, match="add_rule: 'x'"):
        megatron.add_rule("x", dim, sections=sections)


def test_shapes_that_do_not_fit_a_rule_are_told(tmp_path: Path) -> None:
    path = write(tmp_path, lambda rank: {"output_layer.weight": grid(2, 3 + rank, rank)})
    assert "do not fit along dim 0" in str(error_of(path, "model.output_layer.weight"))
