"""Optimizers as users have them: groups, tied, frozen and stateless parameters, SGD, factored state, state dicts of
their own and by number, from layout to layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import LayoutError, MismatchError, UsageError
from tests import wrapping
from tests.distributed.net import UNITS, Net, local, positions
from tests.distributed.outcomes import Outcome, outcome
from tests.factored import Factored
from tests.launch import on_ranks
from tests.tries import pairs

Make = Callable[[str], nn.Module]


def stepped(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        net(torch.arange(4) + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trainable(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def plain_name(name: str) -> str:
    return name.removeprefix("module.")


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value


def as_it_is(value: Any) -> Any:
    return value


def kept_in(optimizer: Any) -> list[torch.optim.Optimizer]:
    if isinstance(optimizer, wrapping.Combined):
        return list(optimizer.parts.values())
    if isinstance(optimizer, wrapping.Container):
        return optimizer.optimizers
    return [getattr(optimizer, "inner", optimizer)]


def states(net: nn.Module, optimizer: Any, made: Callable[[Any], Any] = whole) -> dict[str, Any]:
    """All state by name and key, each tensor whole, or what else is made of it."""
    named = {plain_name(name): p for name, p in net.named_parameters()}
    return {
        f"{name}.{key}": made(value)
        for name, p in named.items()
        for inner in kept_in(optimizer)
        if p in inner.state
        for key, value in sorted(inner.state[p].items())
    }


@dataclass(frozen=True)
class Held:
    """Which elements of a parameter torch has left here."""

    shape: torch.Size
    at: torch.Tensor


def held_of(net: nn.Module, key: str = "other") -> dict[str, Held]:
    """What this rank has of each parameter of a net that was made with this key."""
    named = {plain_name(name): p for name, p in net.named_parameters()}
    return {name: Held(p.shape, positions(p, name, key)) for name, p in named.items()}


def same_here(found: dict[str, Any], wanted: dict[str, Any], held: dict[str, Held]) -> bool:
    """Whether the state of this rank is its part of the whole one; on all ranks together, whether it is all of it."""
    if found.keys() != wanted.keys():
        return False
    mine, theirs = {}, {}
    for name, value in found.items():
        of = held[name.rpartition(".")[0]]
        if isinstance(value, DTensor) and value.shape == of.shape:
            mine[name], theirs[name] = local(value).flatten(), wanted[name].flatten()[of.at]
        else:
            mine[name], theirs[name] = whole(value), wanted[name]
    return same(mine, theirs)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(v, other[k]) if isinstance(v, torch.Tensor) else v == other[k] for k, v in one.items()
    )


class Counting(torch.optim.SGD):
    """Momentum, and state that is no tensor."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["count"] = self.state[p].get("count", 0) + 1


def kinds_of(world: int) -> dict[str, Make]:
    mesh = init_device_mesh("cpu", (world,))

    def sharded(key: str) -> nn.Module:
        net = Net(UNITS, key)
        for layer in net.layers.values():
            fully_shard(layer, mesh=mesh)
        return fully_shard(net, mesh=mesh)

    return {"fsdp": sharded, "ddp": lambda key: DistributedDataParallel(Net(UNITS, key)), "plain": lambda key: Net(UNITS, key)}


MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": lambda net: Counting(trainable(net), lr=0.001, momentum=0.9),
    "factored": lambda net: Factored(trainable(net), lr=0.001),
    "counting": lambda net: wrapping.Counting(torch.optim.AdamW(reversed(trainable(net)), lr=0.01)),
    "combined": wrapping.Combined,
    "container": lambda net: wrapping.Container([net], lr=0.01),
    "scaled": lambda net: wrapping.Scaled(trainable(net), lr=0.01),
}
"""Optimizers with other state than AdamW's, and such that say their state themselves."""


@pytest.mark.slow
@on_ranks(3)
def test_state_of_any_optimizer_goes_from_layout_to_layout(tmp_path: Path):
    """Save each optimizer in each layout, and load it into a fresh one, or one that has stepped where a fresh one is refused."""
    kinds = kinds_of(dist.get_world_size())
    for name, make in MAKERS.items():
        wanted: dict[str, dict[str, Any]] = {}
        for saved in kinds:
            net = kinds[saved]("")
            optimizer = make(net)
            stepped(net, optimizer)
            state = {"model": net, "optimizer": optimizer}
            checkpoint.async_save(tmp_path / f"{name}-{saved}", state, staging="lazy").result()
            wanted[saved] = states(net, optimizer)
            assert wanted[saved]
        for saved, loaded in pairs([*kinds]):
            path, target = tmp_path / f"{name}-{saved}", kinds[loaded]("other")
            held, fresh = held_of(target), make(target)
            state = {"model": target, "optimizer": fresh}
            if (name, loaded) == ("factored", "fsdp"):
                # Nobody knows which part of a row or column statistic a sharded parameter would have.
                before = [local(p).clone() for p in target.parameters()]
                with pytest.raises(MismatchError, match="load into an optimizer that has stepped") as refused:
                    checkpoint.load(path, state)
                assert "optimizer.state.layers.0.up.weight.row: saved with shape (13,)" in str(refused.value)
                assert "not in the state passed" not in str(refused.value)
                assert all(torch.equal(local(p), b) for p, b in zip(target.parameters(), before, strict=True))
                assert not fresh.state
                stepped(target, fresh, 1)
            checkpoint.load(path, state)
            assert same_here(states(target, fresh, as_it_is), wanted[saved], held), f"{path.name} to {loaded}"


@pytest.mark.slow
@on_ranks(3)
def test_state_dicts_with_names_go_from_any_layout_to_any(tmp_path: Path):
    """Also parameters of which a rank holds nothing, and which it must find by their empty memory."""
    kinds = kinds_of(dist.get_world_size())

    def named_adamw(net: nn.Module, lr: float) -> torch.optim.AdamW:
        return torch.optim.AdamW([(n, p) for n, p in net.named_parameters() if p.requires_grad], lr=lr)

    for saved in ("fsdp", "plain"):
        net = kinds[saved]("")
        optimizer = named_adamw(net, 0.01)
        stepped(net, optimizer)
        wanted = states(net, optimizer)
        for form, state in (("dicts", optimizer.state_dict()), ("object", optimizer)):
            path = tmp_path / f"{saved}-{form}"
            checkpoint.save(path, {"model": net.state_dict(), "optimizer": state})
            for loaded in ("fsdp", "plain"):
                target = kinds[loaded]("other")
                held, fresh = held_of(target), named_adamw(target, 1.0)
                checkpoint.load(path, {"model": target, "optimizer": fresh})
                assert same_here(states(target, fresh, as_it_is), wanted, held), f"{path.name} to {loaded}"
                again = kinds[loaded]("other")
                last = named_adamw(again, 1.0)
                dicts = {"model": again.state_dict(), "optimizer": last.state_dict()}
                checkpoint.load(path, dicts)
                last.load_state_dict(dicts["optimizer"])
                assert same_here(states(again, last, as_it_is), wanted, held), f"{path.name} to dicts of {loaded}"


@on_ranks(2)
def test_groups_are_matched_by_names_and_hyperparameters_come_back(tmp_path: Path):
    """Groups are found by the names in them, whatever their order and cut."""
    kinds, path = kinds_of(dist.get_world_size()), tmp_path / "a"
    net = kinds["fsdp"]("")
    by_name = dict(net.named_parameters())
    del by_name["layers.0.norm.bias"]  # frozen

    def groups(params: dict[str, nn.Parameter], *cuts: Callable[[str], bool], **options: Any) -> list[dict[str, Any]]:
        return [{"params": [p for name, p in params.items() if cut(name)], **options} for cut in cuts]

    def bias(name: str) -> bool:
        return name.endswith("bias")

    def early(name: str) -> bool:
        return not bias(name) and name.startswith("layers.0")

    def late(name: str) -> bool:
        return not bias(name) and not early(name)

    saved = groups(by_name, bias, early, late)
    for group, lr in zip(saved, (0.5, 0.25, 0.25), strict=True):
        group |= {"lr": torch.tensor(lr) if lr == 0.5 else lr, "weight_decay": lr}
    optimizer = torch.optim.AdamW(saved, foreach=False)
    for name, p in by_name.items():
        if "norm" in name and name.startswith("layers.1"):
            continue  # two that no gradient has reached
        optimizer.state[p] = {"step": torch.tensor(5.0), "exp_avg": p.detach().clone(), "exp_avg_sq": p.detach().clone()}
    checkpoint.save(path, {"model": net, "optimizer": optimizer})

    other = kinds["ddp"]("other")
    params = {plain_name(name): p for name, p in other.named_parameters() if p.requires_grad}
    # The other way round, early and late together, with a group of nobody and state that the checkpoint says is not there.
    target = [*groups(params, lambda name: not bias(name), bias), {"params": []}]
    fresh = torch.optim.AdamW(target, lr=9.0, foreach=True)
    fresh.state[params["layers.1.norm.weight"]] = {"step": torch.tensor(1.0)}
    checkpoint.load(path, {"model": other, "optimizer": fresh})
    hyper = [(float(g["lr"]), g["weight_decay"], g["foreach"]) for g in fresh.param_groups]
    assert hyper == [(0.25, 0.25, True), (0.5, 0.5, True), (9.0, 0.01, True)]
    assert same(states(other, fresh), states(net, optimizer))
    assert [name for name, p in params.items() if p not in fresh.state] == ["layers.1.norm.weight", "layers.1.norm.bias"]

    mixed = torch.optim.AdamW(groups(params, lambda name: True), lr=9.0)
    with pytest.raises(MismatchError, match="whose lr differs: "):
        checkpoint.load(path, {"model": other, "optimizer": mixed})
    assert not mixed.state
    assert mixed.param_groups[0]["lr"] == 9.0
    report = checkpoint.load(path, {"model": other, "optimizer": mixed}, strict=False)
    told = "lr and decay differ; the state loads, the group keeps its own"
    assert (len(report.values), mixed.param_groups[0]["lr"], len(mixed.state)) == (2, 9.0, 10), told
    with pytest.raises(UsageError, match="pass the module that holds it"):
        checkpoint.save(tmp_path / "b", {"optimizer": optimizer})
    frozen = torch.optim.AdamW([*trainable(other), *(p for p in other.parameters() if not p.requires_grad)])
    with pytest.raises(MismatchError, match="layers.0.norm.bias"):
        checkpoint.load(path, {"model": other, "optimizer": frozen})
    differs = {"model": net, "optimizer": torch.optim.AdamW(trainable(net), lr=0.1 + dist.get_rank())}
    with pytest.raises(LayoutError, match="lr 0.1 on rank 0 and 1.1 on rank 1"):
        checkpoint.save(tmp_path / "b", differs)


class Extra(nn.Module):
    """A layer with extra state that is no tensor."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> int:
        return self.value

    def set_extra_state(self, state: int) -> None:
        self.value = state


@on_ranks(2)
def test_tied_weights_come_apart_and_together_and_extra_state_follows_its_stage(tmp_path: Path):
    """Tied on one rank, apart on two; and extra state that only one of the stages has."""
    rank = dist.get_rank()
    solo = [dist.new_group([0]), dist.new_group([1])][rank]

    def stage(index: int, key: str) -> nn.ModuleDict:
        net = Net(("embedding", 0) if index == 0 else (1, "head"), key)
        return nn.ModuleDict({"net": net, f"extra{index}": Extra(10 + index if not key else 0)})

    def both(key: str) -> nn.ModuleDict:
        return nn.ModuleDict({"net": Net(("embedding", 0, 1, "head"), key), "extra0": Extra(0), "extra1": Extra(0)})

    apart = stage(rank, "")
    checkpoint.save(tmp_path / "apart", {"model": apart}, mesh={"pp": 2})
    together = both("other")
    assert outcome(lambda: checkpoint.load(tmp_path / "apart", {"model": together}, process_group=solo)) == Outcome()
    assert together["net"].head.weight is together["net"].embedding.weight
    assert torch.equal(together["net"].head.weight, Net(("head",)).head.weight)
    assert (together["extra0"].value, together["extra1"].value) == (10, 11)
    if rank == 0:
        checkpoint.save(tmp_path / "tied", {"model": together}, process_group=solo)
    dist.barrier()
    back = stage(rank, "other")
    assert outcome(lambda: checkpoint.load(tmp_path / "tied", {"model": back})) == Outcome()
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), apart.parameters(), strict=True))
    assert back[f"extra{rank}"].value == 10 + rank
    of_stage = stage(rank, "other").state_dict()
    keys = set(of_stage)
    checkpoint.load(tmp_path / "tied", {"model": of_stage})
    assert set(of_stage) == keys
    assert of_stage[f"extra{rank}._extra_state"] == 10 + rank

    if rank == 1:
        apart["net"].head.weight.data[0, 0] += 1
    checkpoint.save(tmp_path / "unequal", {"model": apart})
    with pytest.raises(MismatchError, match="model.net.head.weight: tied to model.net.embedding.weight"):
        checkpoint.load(tmp_path / "unequal", {"model": both("other")})
