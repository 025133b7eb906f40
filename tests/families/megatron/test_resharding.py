"""Resharding Megatron's folders: pipeline stages cut the dim of layers, expert parallelism that of experts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from reshard_ckpt import checkpoint, megatron
from reshard_ckpt.errors import UsageError
from tests.families.megatron.folders import expected, unpack
from tests.families.megatron.stand_ins import ShardedTensor


def held(path: Path, rank: int, name: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes of a tensor in the files of a rank."""
    catalog = checkpoint.catalog(path)
    table, index = catalog.tensors_table, catalog.index(name)
    found = []
    for row in range(int(table.row_start[index]), int(table.row_start[index + 1])):
        if f"rank{rank:05d}" in catalog.files[int(catalog.rows.file[row])].key:
            box = int(catalog.rows.box[row])
            ndim = int(table.ndim[index])
            offsets, lengths = catalog.boxes.offsets[box][-ndim:], catalog.boxes.lengths[box][-ndim:]
            found.append((tuple(offsets.tolist()), tuple(lengths.tolist())))
    return found


def test_pp_and_ep_cut_stacked_layers_and_experts(tmp_path: Path) -> None:
    root = unpack("0.16.1-moe", tmp_path)
    report = checkpoint.reshard(root, tmp_path / "out", mesh={"pp": 2, "ep": 2})
    for name in ("model.decoder.layers.mlp.experts.experts.linear_fc1.weight",):
        for tensor in (name, f"optimizer.state.{name.removeprefix('model.')}.exp_avg"):
            assert [(p.axis, p.kind, p.dim) for p in report.placements[tensor]] == [("pp", "shard", 0), ("ep", "shard", 1)]
            assert [held(tmp_path / "out", rank, tensor) for rank in range(4)] == [
                [((stage, 2 * expert, 0, 0), (1, 2, 32, 8))] for stage in (0, 1) for expert in (0, 1)
            ]
    norm = report.placements["model.decoder.final_layernorm.weight"][0]
    assert (norm.kind, norm.coords) == ("resident", (1,))
    word = report.placements["model.embedding.word_embeddings.weight"][0]
    assert (word.kind, word.coords) == ("resident", (0,))
    read = checkpoint.read(tmp_path / "out")
    for name in checkpoint.catalog(root).names:
        assert torch.equal(read[name], expected(name, "0.16.1-moe", read[name])), name


def test_a_save_whose_names_are_keys_is_cut_the_same_way(tmp_path: Path) -> None:
    """As the calls that stand in for Megatron's own save leave them: raw keys, with no ``model.`` before them."""
    experts, norm = "decoder.layers.mlp.experts.experts.linear_fc1.weight", "decoder.final_layernorm.weight"
    shapes = {experts: (2, 4, 6, 3), f"optimizer.state.exp_avg.{experts}": (2, 4, 6, 3), norm: (3,)}
    whole = {key: torch.arange(math.prod(shape), dtype=torch.float32).view(shape) for key, shape in shapes.items()}
    tree = {key: ShardedTensor(key, data, shapes[key], shapes[key], (0,) * data.ndim) for key, data in whole.items()}
    megatron.save(tree, str(tmp_path / "own"))
    checkpoint.reshard(tmp_path / "own", tmp_path / "out", mesh={"pp": 2, "ep": 2})
    for key in (experts, f"optimizer.state.exp_avg.{experts}"):
        assert [held(tmp_path / "out", rank, key) for rank in range(4)] == [
            [((stage, 2 * expert, 0, 0), (1, 2, 6, 3))] for stage in (0, 1) for expert in (0, 1)
        ]
    assert [bool(held(tmp_path / "out", rank, norm)) for rank in (0, 1)] == [False, False]
    wanted = {key: ShardedTensor(key, torch.zeros(shape), shape, shape, (0,) * len(shape)) for key, shape in shapes.items()}
    loaded = megatron.load(wanted, str(tmp_path / "out"))
    assert all(torch.equal(loaded[key], data) for key, data in whole.items())


def test_layers_that_stages_do_not_cut_evenly_are_refused_by_name(tmp_path: Path) -> None:
    root = unpack("0.13.0-uneven", tmp_path)
    with pytest.raises(UsageError, match="has 3 layers stacked along dim 0, which pp=2 does not cut evenly"):
        checkpoint.reshard(root, tmp_path / "out", mesh={"pp": 2})
    checkpoint.reshard(root, tmp_path / "out", mesh={"pp": 3})
    name = "model.decoder.layers.mlp.linear_fc2.weight"
    assert [held(tmp_path / "out", rank, name) for rank in range(3)] == [[((stage, 0, 0), (1, 8, 16))] for stage in range(3)]


def test_layers_with_numbers_are_whole_on_their_stage(tmp_path: Path) -> None:
    root = unpack("0.16.1-separate", tmp_path)
    report = checkpoint.reshard(root, tmp_path / "out", mesh={"pp": 2})
    stages = [report.placements[f"model.decoder.layers.{layer}.mlp.linear_fc2.weight"][0] for layer in (0, 1)]
    assert [(one.kind, one.coords) for one in stages] == [("resident", (0,)), ("resident", (1,))]
