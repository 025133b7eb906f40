"""Modules that FSDP1 wraps, and their optimizers: onto other layouts and back. torch's own gathered state is the judge."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FlatParameter,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from reshard_ckpt import checkpoint, errors
from tests.launch import on_ranks

CPU = torch.device("cpu")
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(0.375)  # exact in bfloat16 too
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """Odd sizes, nested units, a tied weight, a weight of one element, and buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h * self.scale)


def wrapped(seed: int, group: Any, *, orig: bool, **options: Any) -> nn.Module:
    net, options = Net(seed), {"process_group": group, "use_orig_params": orig, "device_id": CPU, **options}
    for i, block in enumerate(net.blocks):
        net.blocks[i] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(net, **options)


def adamw(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.125)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):  # the same batches on every rank
        net(torch.arange(6) + step).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def gathered(net: nn.Module, optimizer: torch.optim.Optimizer, group: Any = None) -> dict[str, Any]:
    """All that torch gathers of an FSDP1 module and its optimizer, under this library's names."""
    configs = FullStateDictConfig(), FullOptimStateDictConfig()
    with warnings.catch_warnings(), FullyShardedDataParallel.state_dict_type(net, StateDictType.FULL_STATE_DICT, *configs):
        warnings.simplefilter("ignore")
        model = {f"model.{name}": tensor.clone() for name, tensor in net.state_dict().items()}
        if any(isinstance(param, FlatParameter) for param in net.parameters()):
            states = FullyShardedDataParallel.optim_state_dict(net, optimizer, group=group)["state"]
        else:
            states = joined(net, optimizer, {name.removeprefix("model."): t.shape for name, t in model.items()})
    return model | {f"optimizer.state.{fqn}.{key}": value for fqn, entry in states.items() for key, value in entry.items()}


def joined(net: nn.Module, optimizer: torch.optim.Optimizer, shapes: dict[str, torch.Size]) -> dict[str, dict[str, Any]]:
    """Each rank's runs of the optimizer's state, in order of rank. (On a CPU, torch gathers each state into the same memory.)"""
    states: dict[str, dict[str, Any]] = {}
    for name, param in net.named_parameters():
        group: Any = None if net.sharding_strategy == ShardingStrategy.NO_SHARD else net.process_group
        runs: list[Any] = [dict(optimizer.state[param]) if param in optimizer.state else {}]
        if group is not None:
            mine, runs = runs[0], [None] * dist.get_world_size(group)
            dist.all_gather_object(runs, mine, group)
        fqn = name.replace("_fsdp_wrapped_module.", "")
        found = [run for run in runs if run]
        states[fqn] = {key: torch.cat([run[key] for run in found]).view(shapes[fqn]) for key in ("exp_avg", "exp_avg_sq")}
        states[fqn]["step"] = found[0]["step"]
    return states


def differences(one: dict[str, Any], other: dict[str, Any], what: str) -> list[str]:
    wrong = [f"{what}: {name} is in one of them" for name in one.keys() ^ other.keys()]
    for name in one.keys() & other.keys():
        a, b = one[name], other[name]
        same = torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
        wrong += [] if same else [f"{what}: {name}: {a} and {b}"]
    return wrong


def tensors_of(path: Path) -> dict[str, Any]:
    return {name: value for name, value in checkpoint.read(path).items() if isinstance(value, torch.Tensor)}


def matches_torch(path: Path, expected: dict[str, Any], what: str) -> list[str]:
    read = tensors_of(path)
    # torch's state has only the first name of a tied parameter.
    return differences(expected, {name: value for name, value in read.items() if "state.head.weight." not in name}, what)


def targets(groups: dict[int, Any]) -> dict[str, tuple[int, Any]]:
    """Each layout to load into: how many ranks it has, and what makes the module."""

    def sharded() -> nn.Module:
        net = Net(9)
        for unit in (*net.blocks, net):
            fully_shard(unit, mesh=init_device_mesh("cpu", (4,)))
        return net

    def sharded_over_tp() -> nn.Module:
        net, mesh = Net(9), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for block in net.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for unit in (*net.blocks, net):
            fully_shard(unit, mesh=mesh["dp"])
        return net

    def flat_over_tp() -> nn.Module:
        net, mesh = Net(9), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for i, block in enumerate(net.blocks):
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            net.blocks[i] = FullyShardedDataParallel(block, device_mesh=mesh["dp"], use_orig_params=True, device_id=CPU)
        return FullyShardedDataParallel(net, device_mesh=mesh["dp"], use_orig_params=True, device_id=CPU)

    return {
        "orig x tp": (4, flat_over_tp),
        "plain": (1, lambda: Net(9)),
        "fsdp2": (4, sharded),
        "fsdp2 x tp": (4, sharded_over_tp),
        "orig on 3": (3, lambda: wrapped(9, groups[3], orig=True)),
        "flat on 3": (3, lambda: wrapped(9, groups[3], orig=False)),
        "orig on 4, low": (4, lambda: wrapped(9, groups[4], orig=True, mixed_precision=LOW)),
        "flat on 2, whole": (2, lambda: wrapped(9, groups[2], orig=False, sharding_strategy=ShardingStrategy.NO_SHARD)),
    }


@pytest.mark.parametrize("orig", [True, False])
@on_ranks(4, timeout_s=60)
def test_fsdp1_onto_other_layouts_and_back(orig: bool, tmp_path: Path) -> None:
    rank, wrong = dist.get_rank(), list[str]()
    groups = {num: dist.new_group(list(range(num))) for num in (1, 2, 3, 4)}
    first = tmp_path / "first"
    if rank < 2:
        net = wrapped(0, groups[2], orig=orig)
        optimizer = adamw(net)
        train(net, optimizer, 2)
        checkpoint.save(first, {"model": net, "optimizer": optimizer}, process_group=groups[2])
        wrong += matches_torch(first, gathered(net, optimizer, groups[2]), "saved")
        train(net, optimizer, 2)
        expected = gathered(net, optimizer, groups[2])
    dist.barrier()
    saved = checkpoint.read(first)
    for what, (num, make) in targets(groups).items():
        path = tmp_path / what
        if rank < num:
            target = make()
            fresh = adamw(target)
            checkpoint.load(first, {"model": target, "optimizer": fresh}, process_group=groups[num])
            checkpoint.save(path, {"model": target, "optimizer": fresh}, process_group=groups[num])
            wrong += differences(saved, checkpoint.read(path), what)
        dist.barrier()
        if rank < 2:  # and back: over a module that has trained otherwise, and has just run an eval forward
            net = wrapped(7, groups[2], orig=orig)
            optimizer = adamw(net)
            train(net, optimizer, 1)
            with torch.no_grad():
                net(torch.arange(6))
            checkpoint.load(path, {"model": net, "optimizer": optimizer}, process_group=groups[2])
            train(net, optimizer, 2)
            wrong += differences(expected, gathered(net, optimizer, groups[2]), f"back from {what}")
        dist.barrier()
    assert not wrong


@pytest.mark.parametrize("orig", [True, False])
@on_ranks(4, timeout_s=60)
def test_each_sharding_strategy_and_mixed_precision(orig: bool, tmp_path: Path) -> None:
    """Each strategy saves what torch gathers, also after a forward that leaves parameters gathered, and loads it again."""
    wrong: list[str] = []
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])], [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    hybrid = pairs[0][rank // 2], pairs[1][rank % 2]
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "grad op": (None, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
        "hybrid": (hybrid, {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}),
        "whole, low": (None, {"sharding_strategy": ShardingStrategy.NO_SHARD, "mixed_precision": LOW}),
        "low": (None, {"mixed_precision": LOW}),
    }
    for what, (group, options) in cases.items():
        path = tmp_path / what
        net = wrapped(0, group, orig=orig, **options)
        optimizer = adamw(net)
        train(net, optimizer, 2)
        with torch.set_grad_enabled("low" not in what):  # torch itself cannot go on from there in low precision
            net(torch.arange(6))
        with checkpoint.async_save(path, {"model": net, "optimizer": optimizer}, staging="lazy") as handle:
            handle.result()
        wrong += matches_torch(path, gathered(net, optimizer), what)
        train(net, optimizer, 1)
        expected = gathered(net, optimizer)
        again = wrapped(5, group, orig=orig, **options)
        other = adamw(again)
        with torch.set_grad_enabled("low" not in what):
            again(torch.arange(6))
        checkpoint.load(path, {"model": again, "optimizer": other})
        train(again, other, 1)
        wrong += differences(expected, gathered(again, other), f"{what}, loaded")
    assert not wrong


def torch_dicts(folder: str) -> list[str]:
    """What ``get_state_dict`` gives has the names of the modules themselves, and each loads what the other has saved."""
    wrong: list[str] = []
    net = wrapped(0, None, orig=True)
    optimizer = adamw(net)
    train(net, optimizer, 2)
    model, optim = get_state_dict(net, optimizer)
    checkpoint.save(Path(folder, "dicts"), {"model": model, "optimizer": optim})
    checkpoint.save(Path(folder, "objects"), {"model": net, "optimizer": optimizer})
    wrong += matches_torch(Path(folder, "objects"), tensors_of(Path(folder, "dicts")), "dicts")
    expected = gathered(net, optimizer)
    other = wrapped(3, None, orig=True)
    fresh = adamw(other)
    train(other, fresh, 1)
    model, optim = get_state_dict(other, fresh)
    checkpoint.load(Path(folder, "objects"), {"model": model, "optimizer": optim})
    set_state_dict(other, fresh, model_state_dict=model, optim_state_dict=optim)
    wrong += differences(expected, gathered(other, fresh), "objects into dicts")
    return wrong


def without_state(folder: str) -> list[str]:
    """A parameter without saved state gets zeros in a flat parameter that has stepped, where it had other state."""
    path, name = Path(folder, "partly"), "optimizer.state.blocks.1.up.weight."
    net = Net(0)
    optimizer = adamw(net)
    train(net, optimizer, 2)
    del optimizer.state[net.blocks[1].up.weight]
    checkpoint.save(path, {"model": net, "optimizer": optimizer})
    flat = wrapped(3, None, orig=False)
    stepped = adamw(flat)
    train(flat, stepped, 2)
    checkpoint.load(path, {"model": flat, "optimizer": stepped})
    found = gathered(flat, stepped)
    wrong = [f"{name}{key}: kept" for key in ("exp_avg", "exp_avg_sq") if found[f"{name}{key}"].any()]
    return wrong + matches_torch(path, {each: value for each, value in found.items() if not each.startswith(name)}, "partly")


@on_ranks(2, timeout_s=60)
def test_the_dicts_of_get_state_dict_and_a_parameter_without_state(tmp_path: Path) -> None:
    assert torch_dicts(tmp_path) + without_state(tmp_path) == []


@on_ranks(2, timeout_s=60)
def test_what_flat_parameters_cannot_hold_is_refused_on_all_ranks(tmp_path: Path) -> None:
    conv = FullyShardedDataParallel(nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last), device_id=CPU)
    with pytest.raises(errors.UnsupportedError, match=r"model: FSDP1 flattened weight of shape \(4, 2, 3, 3\)"):
        checkpoint.save(tmp_path / "conv", {"model": conv})
    net = Net(0)
    optimizer = adamw(net)
    train(net, optimizer, 1)
    optimizer.state[net.blocks[1].up.bias]["step"] += 1
    checkpoint.save(tmp_path / "steps", {"model": net, "optimizer": optimizer})
    flat = wrapped(0, None, orig=False)
    with pytest.raises(errors.MismatchError, match="state step(?s:.*)use_orig_params=True"):
        checkpoint.load(tmp_path / "steps", {"model": flat, "optimizer": adamw(flat)})
