"""`reshard_ckpt.megatron` on trees of stand-ins for Megatron's classes, over changes of all four axes."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import torch.distributed as dist

from reshard_ckpt import checkpoint, megatron
from tests.launch import run_ranks
from tests.megatron.stand_ins import (
    Grid,
    LocalNonpersistentObject,
    ShardedObject,
    build,
    on_rank,
    optimizer_of,
    part,
    shards_of,
    whole,
)

ARGS = argparse.Namespace(lr=0.1, dtype=torch.bfloat16, of_groups=argparse.Namespace(tp=2))
TP2_PP2 = Grid(0, tp=2, pp=2)
DP4 = Grid(0, dp=4, bucket=40)
TP4 = Grid(0, tp=4)
PP2_DP2 = Grid(0, pp=2, dp=2, bucket=60)
TP2_DP2_EP2 = Grid(0, tp=2, dp=2, ep=2)
DP4_EP4 = Grid(0, dp=4, ep=4)


def _tree(grid: Grid, *, filled: bool) -> tuple[Any, Any, dict[str, Any]]:
    model = build(grid, filled=filled)
    optimizer = optimizer_of(model, stepped=filled)
    if filled:
        for one in optimizer.chained_optimizers:
            one.fill(model)
    rng = ShardedObject("rng_state", [{"of": grid.rank}], (grid.tp * grid.dp * grid.pp,), (grid.rank,))
    tree = {
        "model": model.sharded_state_dict(),
        "optimizer": optimizer,
        "rng_state": rng,
        "iteration": 11,
        "args": ARGS,
        "by number": {3: "three", (1, 2): "a pair"},
        "groups": [{"lr": 0.5, "params": LocalNonpersistentObject([grid.rank])}],
    }
    return model, optimizer, tree


def _save(path: str, grid: Grid) -> None:
    _, _, tree = _tree(on_rank(grid, dist.get_rank()), filled=True)
    megatron.save(tree, path, content_metadata={"kind": "test", "dp_cp_group": dist.group.WORLD})


def _load(path: str, grid: Grid) -> list[str]:
    """Load on a grid; return what is wrong."""
    model, optimizer, tree = _tree(on_rank(grid, dist.get_rank()), filled=False)
    del tree["rng_state"]  # of as many ranks as saved
    out = megatron.load(tree, path)
    wrong = [line for one in optimizer.chained_optimizers for line in one.wrong(model)]
    for shard in shards_of(model.sharded):
        wanted = part(shard.key, shard.global_shape, shard.global_offset, shard.local_global_shape()).view(shard.local_shape)
        if not torch.equal(shard.data, wanted):
            wrong.append(f"{shard.key}: {shard.data.tolist()}")
    for name, sharded in model.sharded.items():
        if not torch.equal(out["model"][name], sharded.data):
            wrong.append(f"{name}: is not returned as it is")
    if out["model"]["extra"] != [{"of": [layer]} for layer in model.grid.layers]:
        wrong.append(f"extra: {out['model']['extra']}")
    common = {key: out[key] for key in ("iteration", "args", "by number", "groups", "content_metadata")}
    expected = {
        "iteration": 11,
        "args": ARGS,
        "by number": {3: "three", (1, 2): "a pair"},
        "groups": [{"lr": 0.5, "params": [dist.get_rank()]}],
        "content_metadata": {"kind": "test"},
    }
    if common != expected or out["model"]["a plain value"] != 3:
        wrong.append(f"common: {common}")
    for i, one in enumerate(optimizer.chained_optimizers):
        if one.step != 7 or out["optimizer"][i]["optimizer"] != {"param_groups": [{"lr": 0.5, "step": 7}]}:
            wrong.append(f"optimizer {i}: {one.step}, {out['optimizer'][i]}")
    return wrong


def _round(root: str, grids: list[Grid]) -> list[list[str]]:
    """Save on each grid, and load on the next; in one launch, as each takes a second."""
    out = []
    for i, (saved, loaded) in enumerate(zip(grids, [*grids[1:], grids[0]], strict=True)):
        _save(f"{root}/{i}", saved)
        out.append([f"{saved} to {loaded}: {line}" for line in _load(f"{root}/{i}", loaded)])
    return out


def test_models_and_distributed_optimizers_load_over_changes_of_all_axes(tmp_path):
    grids = [TP2_PP2, DP4, TP4, PP2_DP2, TP2_DP2_EP2, DP4_EP4]
    results = run_ranks(_round, 4, str(tmp_path), grids)
    assert [line for rank in results for lines in rank for line in lines] == []
    report = checkpoint.verify(tmp_path / "0")
    assert report.ok, report.problems
    saved = checkpoint.read(tmp_path / "0")
    for key, shape in {"layers.fc1": (4, 16, 3), "optimizer.state.exp_avg.layers.experts": (4, 4, 4, 8)}.items():
        assert torch.equal(saved[key], whole(key, shape))
    assert saved["iteration"] == 11
    assert saved["args.lr"] == 0.1
    assert saved["decoder.extra/shard_1_4"] == {"of": [1]}
    assert json.loads((tmp_path / "0" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
