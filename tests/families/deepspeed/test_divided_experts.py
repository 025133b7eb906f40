"""Experts that are divided among ranks: which they are, and what of them is refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import CorruptError, UnsupportedError
from reshard_ckpt.families.deepspeed.names import global_name
from reshard_ckpt.families.deepspeed.open import refuse_other_order
from reshard_ckpt.families.deepspeed.places import GroupPlace, Params, named_globally, placed_groups
from tests.families.deepspeed.test_folders import Unpack, _model_file, _rewrite
from tests.families.deepspeed.test_folders import unpack as unpack  # a fixture

EXPERTS = "experts-2-fp16"
LAYER = "a.deepspeed_moe.experts.deepspeed_experts."


def test_each_expert_has_one_name_and_each_part_of_it_one_owner():
    seen = {}
    for rank in range(8):
        dense, pairs, quads = placed_groups([8, 4, 2], 8, rank)
        assert dense == GroupPlace(rank)
        groups = [Params.of({"w": (3,)}), Params.of({f"{LAYER}0.w": (3,), f"{LAYER}1.w": (3,)})]
        names = named_globally(groups, [dense, pairs])[1].names
        assert names == tuple(f"{LAYER}{2 * (rank % 2) + local}.w" for local in range(2))
        for name in names:
            assert seen.setdefault((name, pairs.rank), rank) == rank
        assert quads == GroupPlace(rank // 4, rank % 4)
    assert len(seen) == 4 * 4  # every expert, and of each its four parts
    with pytest.raises(CorruptError, match="among 3 of 8"):
        placed_groups([8, 3], 8, 0)
    assert global_name("b.w", {}, 1) == "b.w"


def test_experts_divided_in_other_ways_are_refused(unpack: Unpack, tmp_path: Path):
    root = unpack(EXPERTS)
    _rewrite(next(root.glob("*/mp_rank_00_model_states.pt")), lambda state: state.update(ds_autoep_layers=[{"ep_size": 2}]))
    with pytest.raises(UnsupportedError, match="AutoEP"):
        checkpoint.catalog(root)
    shutil.rmtree(root)
    with pytest.raises(UnsupportedError, match="use_data_before_expert_parallelism"):
        refuse_other_order({"use_data_before_expert_parallelism": True}, "x")
    root = unpack("t1-bf16-tp")
    shutil.copy(_model_file(root), _model_file(root).with_name("layer_0_expert_0_mp_rank_00_model_states.pt"))
    with pytest.raises(UnsupportedError, match="model parallelism"):
        checkpoint.catalog(root)
