"""`reshard_ckpt.megatron` on trees of stand-ins for Megatron's classes, over changes of all four axes."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import types
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from reshard_ckpt import checkpoint, megatron
from reshard_ckpt.errors import CheckpointNotFound, LayoutError, MismatchError, UnsupportedError, UsageError
from reshard_ckpt.families.megatron import strategies
from tests.families.megatron import values
from tests.families.megatron.folders import unpack
from tests.families.megatron.stand_ins import (
    DistributedOptimizer,
    Grid,
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    StrictHandling,
    build,
    on_rank,
    optimizer_of,
    part,
    shards_of,
    whole,
)
from tests.launch import on_ranks, run_ranks
from tests.warm_python import warm_python

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
    assert not [name for name in saved if "/replica_" in name]
    assert json.loads((tmp_path / "0" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


def _sharded(key: str, rank: int, **options: Any) -> ShardedTensor:
    return ShardedTensor(key, part(key, (4, 3), (rank, 0), (1, 3)).clone(), (1, 3), (4, 3), (rank, 0), **options)


@on_ranks(2)
def test_what_cannot_be_saved_is_named_on_every_rank(tmp_path):
    rank, path = dist.get_rank(), str(tmp_path / "step")
    half = {"model": {"w": _sharded("w", rank)}}  # rows 2 and 3 are nobody's
    no_data = {"w": _sharded("w", rank), "v": [ShardedTensor("v", None, (1,), (1,), (0,))][rank:]}
    of_ranks = "of.ranks: 1 of its 2 objects have a main replica, shard_0_2 first"
    for tree, error, says in (
        (half, LayoutError, "w: no rank holds"),
        ({"o": ShardedObject("of.ranks", rank, (2,), (rank,), rank)}, LayoutError, of_ranks),
        ({"o": ShardedObject("of.all", 1, (1, 1), (0, 0), (rank, 1))}, LayoutError,
         "of.all: none of its 1 objects have a main replica; have one rank declare"),
        ({"o": [ShardedObject("rng", 1, (1,), (0,), 1)][rank:]}, LayoutError, "rng: none of its 1 objects have a main replica"),
        (no_data, UsageError, "v: this ShardedTensor has no data"),
    ):  # fmt: skip
        with pytest.raises(error, match=says):
            megatron.save(tree, path)
    with pytest.raises(UnsupportedError):
        megatron.save(half, path, sharded_strategy=object())
    with pytest.raises(UsageError):
        megatron.load(half, path, strict="all")
    assert not os.path.exists(path) or not os.listdir(path)


@on_ranks(2)
def test_replicas_that_differ_are_named_once_and_the_main_one_is_saved(tmp_path):
    rank = dist.get_rank()
    replica = {
        "w": ShardedTensor("w", torch.full((64, 3), float(rank)), (64, 3), (64, 3), (0, 0), (0, 1 - rank)),
        "same": ShardedTensor("same", torch.ones(3), (3,), (3,), (0,), rank),
        "object": ShardedObject("an.object", rank, (1,), (0,), rank),
    }
    with pytest.raises(LayoutError, match="w: replicas differ"):
        megatron.save(replica, tmp_path, replicas="error")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        megatron.save(replica, tmp_path)
    of_ranks: list[list[str]] = [[], []]
    dist.all_gather_object(of_ranks, [str(w.message) for w in caught if "replicas" in str(w.message)])
    (warned,) = of_ranks[0] + of_ranks[1]
    assert "w: replicas differ between ranks; the main replica of each is saved whole" in warned
    assert checkpoint.catalog(tmp_path).value_names == ("an.object/shard_0_1",)
    back = torch.zeros(64, 3)
    megatron.load({"w": ShardedTensor("w", back, (64, 3), (64, 3), (0, 0), rank)}, tmp_path)
    assert back.unique().tolist() == [1.0]  # rank 1 has the main one
    megatron.async_save(replica, tmp_path).result()


@on_ranks(2)
def test_what_does_not_fit_a_checkpoint_is_named_as_the_strictness_says(tmp_path):
    rank, w = dist.get_rank(), torch.zeros(64, 3)
    saved = {
        "w": ShardedTensor("w", w, (64, 3), (64, 3), (0, 0), rank),
        "same": ShardedTensor("same", torch.ones(3), (3,), (3,), (0,), rank),
        "object": ShardedObject("an.object", rank, (1,), (0,), rank),
    }
    megatron.save(saved, tmp_path)
    wanted = {
        "w": ShardedTensor("w", w, (64, 3), (64, 3), (0, 0)),
        "more": _sharded("more", rank),
        "list": [_sharded("more", rank)],
    }
    for mode, is_unexpected in (("assume_ok_unexpected", False), ("raise_unexpected", False), ("raise_all", True)):
        with pytest.raises(MismatchError) as refused:
            megatron.load(wanted, tmp_path, strict=mode)
        assert ("more: not in the checkpoint" in str(refused.value)) or is_unexpected
        assert ("same: in the checkpoint, but in no rank's tree" in str(refused.value)) == is_unexpected
    out, missing, unexpected = megatron.load(wanted, tmp_path, strict=StrictHandling.RETURN_ALL)
    assert (sorted(out), missing, unexpected) == (["w"], {"an.object", "same"}, {"more"})
    wanted["o"] = ShardedObject("o", None, (1,), (0,))
    wanted["f"] = ShardedTensorFactory(
        "f", torch.zeros(2), lambda key, data, *_: [ShardedTensor(key, data, (2,), (2,), (0,))], torch.cat
    )
    assert sorted(megatron.load(wanted, tmp_path, strict=StrictHandling.LOG_ALL)) == ["w"]
    narrow = {"w": ShardedTensor("w", torch.zeros(64, 2), (64, 2), (64, 2), (0, 0))}
    with pytest.raises(MismatchError, match=r"saved with global shape \(64, 3\), wanted \(64, 2\)"):
        megatron.load(narrow, tmp_path)
    with pytest.raises(MismatchError, match="o/shard_0_1: not in the checkpoint"):
        megatron.load({"o": ShardedObject("o", None, (1,), (0,))}, tmp_path)


@on_ranks(4)
def test_a_vocabulary_padded_otherwise_keeps_what_was_saved_and_is_zero_beyond(tmp_path):
    """Save a padded vocabulary, and load it into larger and smaller ones of other layouts."""
    rank, wrong = dist.get_rank(), []
    _save(tmp_path, Grid(0, tp=2, dp=2, vocabulary=8))
    for grid in (Grid(0, tp=4, vocabulary=12), Grid(0, dp=4, vocabulary=10, bucket=30), Grid(0, tp=2, pp=2, vocabulary=6)):
        model = build(on_rank(grid, rank), filled=False)
        optimizer = optimizer_of(model, stepped=False)
        megatron.load({"model": model.sharded_state_dict(), "optimizer": optimizer}, tmp_path)
        for name, sharded in model.sharded.items():
            if name == "embedding":
                first, rows = sharded.global_offset[0], sharded.local_shape[0]
                if not torch.equal(sharded.data, _padded("embedding", first, rows)):
                    wrong.append(f"{grid}: {sharded.data.tolist()}")
                for one in optimizer.chained_optimizers:
                    for run, states in one.runs_of(sharded.data):
                        for key, state in states.items():
                            saved = _padded(f"optimizer.state.{key}.embedding", first, rows).flatten()[run]
                            if not torch.equal(state, saved):
                                wrong.append(f"{grid} {key}: {state.tolist()}")
    assert not wrong


def _padded(key: str, first: int, rows: int) -> torch.Tensor:
    """Rows of a saved vocabulary of 8, and zeros after it."""
    full = torch.zeros(64, 4)
    full[:8] = whole(key, (8, 4))
    return full[first : first + rows]


def test_a_factory_that_rearranges_is_refused_in_an_optimizer_and_saved_in_a_model():
    param = torch.nn.Parameter(torch.arange(6.0).view(2, 3))

    def build_fn(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        turned = data.t().contiguous()
        return ShardedTensor(key, turned, (3, 2), (3, 2), (0, 0), replica_id)

    model = {"w": ShardedTensorFactory("w", param, build_fn, lambda loaded: loaded.t())}
    megatron.save(model, "memory://turned")
    assert torch.equal(checkpoint.read("memory://turned")["w"], param.detach().t())
    assert torch.equal(megatron.load(model, "memory://turned")["w"], param)
    optimizer = DistributedOptimizer([param], 1, 0, 100, stepped=True)
    with pytest.raises(UnsupportedError, match=r"optimizer\.state\.param\.w: the factory of this parameter rearranges"):
        megatron.save({**model, "optimizer": optimizer}, "memory://refused")


def test_a_factory_that_keeps_its_own_key_is_refused_in_an_optimizer():
    """Its state would be saved in the parameter's place."""
    param = torch.nn.Parameter(torch.arange(6.0).view(2, 3))

    def build_fn(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        return ShardedTensor("w", data, (2, 3), (2, 3), (0, 0), replica_id)

    tree = {"w": ShardedTensorFactory("w", param, build_fn, lambda loaded: loaded)}
    tree["optimizer"] = DistributedOptimizer([param], 1, 0, 100, stepped=True)
    with pytest.raises(UnsupportedError, match=r"optimizer\.state\.param\.w: the factory of this parameter names its state w"):
        megatron.save(tree, "memory://kept")


def test_a_factory_that_copies_what_it_cuts_is_understood():
    param = torch.nn.Parameter(whole("w", (4, 3)).clone())

    def build_fn(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        return {
            str(i): ShardedTensor(f"{key}.{i}", half.clone(), (2, 3), (2, 3), (0, 0), replica_id)
            for i, half in enumerate(data.chunk(2))
        }

    model = {"w": ShardedTensorFactory("w", param, build_fn, lambda loaded: torch.cat([loaded["0"], loaded["1"]]))}
    optimizer = DistributedOptimizer([param], 1, 0, 100, stepped=True)
    for states in optimizer.held.values():
        for key, state in states.items():
            state.copy_(whole(key, (12,)))
    megatron.save({**model, "optimizer": optimizer}, "memory://copied")
    saved = checkpoint.read("memory://copied")
    assert torch.equal(torch.cat([saved["w.0"], saved["w.1"]]), param.detach())
    halves = [saved[f"optimizer.state.exp_avg.w.{i}"] for i in range(2)]
    assert torch.equal(torch.cat(halves), whole("exp_avg", (12,)).view(4, 3))


def test_state_for_which_an_optimizer_has_no_place_is_not_passed_over():
    param = torch.nn.Parameter(torch.zeros(4))
    tree = {"w": ShardedTensor("w", param, (4,), (4,), (0,))}
    optimizer = DistributedOptimizer([param], 1, 0, 100, stepped=True)
    megatron.save({**tree, "optimizer": optimizer}, "memory://stateful")
    for states in optimizer.held.values():
        del states["exp_avg"]
    with pytest.raises(
        MismatchError, match=r"optimizer\.state\.exp_avg\.w: in the checkpoint, but this optimizer has no such state"
    ):
        megatron.load({**tree, "optimizer": optimizer}, "memory://stateful")


def test_flattened_ranges_old_keys_and_buffers_of_bytes():
    data = torch.arange(12.0)
    old = {
        "flat": [
            ShardedTensor("chained_0.optimizer.state.fp32_param.w", data[5:], (2, 6), (2, 6), (0, 0), 0, 0, False, slice(5, 12))
        ],
        "first": ShardedTensor("optimizer.state.param.w", data[:5], (2, 6), (2, 6), (0, 0), 0, 0, False, slice(0, 5)),
        "none": ShardedTensor("w", data[:0], (2,), (2,), (0,), 0, 0, False, slice(0, 0)),
        "extra": ShardedObject("extra", io.BytesIO(b"state"), (1,), (0,)),
        "local": LocalNonpersistentObject({"kept": 1}),
    }
    megatron.save(old, "memory://old")
    saved = checkpoint.read("memory://old")
    assert torch.equal(saved["optimizer.state.param.w"], data.view(2, 6))
    new = ShardedTensor("optimizer.state.fp32_param.w", None, (2, 3), (2, 6), (0, 3))
    out = megatron.load({"w": new, "extra": old["extra"], "local": LocalNonpersistentObject([2])}, "memory://old")
    assert torch.equal(out["w"], data.view(2, 6)[:, 3:])
    assert out["extra"].read() == b"state"
    assert out["local"] == [2]
    assert megatron.load_common_state_dict("memory://old") == {}


def test_an_older_folder_fills_a_tree_of_todays_form(tmp_path, monkeypatch):
    """The flat state of 0.15, asked for as a Megatron without flat tensors does: the form of the tree is what it gets back."""
    path = str(unpack("0.15.3-dense", tmp_path))
    key, flat = "optimizer.state.exp_avg.decoder.final_layernorm.weight", "fully_sharded_model_space"
    common = megatron.load_common_state_dict(path) | {"content_metadata": {"distrib_optim_sharding_type": flat}}
    assert common["optimizer"]["param_state_sharding_type"] == flat
    assert megatron.load_content_metadata(preloaded_state_dict=common)["distrib_optim_sharding_type"] == flat
    mapping = types.ModuleType("megatron.core.dist_checkpointing.mapping")
    mapping.ShardedTensor = ShardedTensor
    monkeypatch.setitem(sys.modules, mapping.__name__, mapping)
    form = megatron.load_content_metadata(preloaded_state_dict=common)["distrib_optim_sharding_type"]
    assert form == "fully_reshardable"
    state = ShardedTensor(key, torch.zeros(8), (8,), (8,), (0,))
    asked = {"optimizer": {"optimizer": {}, "param_state": {0: {"exp_avg": state}}, "param_state_sharding_type": form}}
    loaded = megatron.load(asked, path)["optimizer"]
    assert torch.equal(loaded["param_state"][0]["exp_avg"], values.whole(key, (8,), torch.float32))
    assert loaded["param_state_sharding_type"] == form
    assert loaded["optimizer"]["param_groups"][0]["lr"] == 0.001
    # One that gives no state is given what was saved.
    assert megatron.load({}, path)["optimizer"]["param_state_sharding_type"] == flat


def test_errors_are_megatrons_too_where_it_is_imported(monkeypatch):
    class CheckpointingException(Exception):
        pass

    core = types.ModuleType("megatron.core.dist_checkpointing.core")
    core.CheckpointingException = CheckpointingException
    with pytest.raises(CheckpointNotFound) as alone:
        megatron.load({}, "memory://none")
    monkeypatch.setitem(sys.modules, core.__name__, core)
    with pytest.raises(CheckpointingException, match="no committed checkpoint") as both:
        megatron.load({}, "memory://none")
    assert not isinstance(alone.value, CheckpointingException)
    assert isinstance(both.value, CheckpointNotFound)
    assert isinstance(both.value, CheckpointException)
    assert list(both.value.failures) == [0]


def test_another_process_waits_until_a_save_is_over():
    over: list[Any] = []
    handle: Any = types.SimpleNamespace(add_done_callback=over.append)
    path = strategies.locked_until_over(handle)
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'rb'), fcntl.LOCK_SH | fcntl.LOCK_NB)"
    tried = subprocess.run([warm_python(), "-c", code, path], capture_output=True, text=True, check=False)
    assert "BlockingIOError" in tried.stderr
    over[0](handle)
    assert not os.path.exists(path)
    strategies.wait_for(path)
