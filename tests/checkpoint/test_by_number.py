"""Optimizers saved by number: told when they are saved and when they do not load, and named by `rename=`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reshard_ckpt import checkpoint
from reshard_ckpt.engine.saving import local_shards
from reshard_ckpt.errors import MismatchError
from tests.helpers import position_values


def trained(num: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Of so many parameters of one shape, momentum for the first and the last; the optimizer has them the other way round."""
    model = nn.ParameterDict({f"layer{i}": nn.Parameter(torch.zeros(2)) for i in range(num)})
    named = list(reversed(list(model.items())))
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)
    for i in (0, num - 1):
        optimizer.state[model[f"layer{i}"]]["momentum_buffer"] = position_values((2,), salt=i)
    return model, optimizer


@pytest.mark.parametrize("num", [3, 3000], ids=["small", "groups_in_a_file"])
def test_an_optimizer_saved_by_number_is_told_and_loads_once_its_numbers_are_named(tmp_path: Path, num: int):
    model, optimizer = trained(num)
    with pytest.warns(UserWarning, match="optimizer: this state dict numbers the parameters, .* pass the optimizer itself"):
        checkpoint.save(tmp_path / "a", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other = nn.ParameterDict({f"layer{i}": nn.Parameter(torch.ones(2)) for i in range(num)})
    fresh = torch.optim.SGD(other.parameters(), lr=9.0, momentum=0.5)
    state = {"model": other, "optimizer": fresh}
    with pytest.raises(MismatchError, match=r"optimizer was saved by number, as in optimizer.state.0.…, .*rename=\{f'optimizer"):
        checkpoint.load(tmp_path / "a", state)
    assert not fresh.state

    rename = {f"optimizer.state.{i}": f"optimizer.state.{fqn}" for i, fqn in enumerate(reversed(list(model)))}
    assert checkpoint.load(tmp_path / "a", state, rename=rename).problems == ()
    assert fresh.param_groups[0]["lr"] == 0.1
    assert len(fresh.state) == 2
    for i in (0, num - 1):
        assert torch.equal(fresh.state[other[f"layer{i}"]]["momentum_buffer"], position_values((2,), salt=i))


def test_renaming_parameters_reaches_groups_that_lie_in_a_file(tmp_path: Path):
    model, optimizer = trained(3000)
    checkpoint.save(tmp_path / "a", {"model": model, "optimizer": optimizer})
    other = nn.ParameterDict({f"block{i}": nn.Parameter(torch.ones(2)) for i in range(3000)})
    fresh = torch.optim.SGD(other.parameters(), lr=9.0)
    loaded = checkpoint.load(
        tmp_path / "a", {"model": other, "optimizer": fresh}, rename=lambda name: name.replace("layer", "block")
    )
    assert loaded.problems == ()
    assert torch.equal(fresh.state[other["block2999"]]["momentum_buffer"], position_values((2,), salt=2999))


@pytest.mark.filterwarnings("ignore:.*numbers the parameters:UserWarning")
@pytest.mark.parametrize("by_number", [False, True])
@pytest.mark.parametrize("to", ["reshard", "convert --to reshard", "convert --to torch", "convert --to dcp"])
def test_renaming_reaches_such_groups_also_in_a_copy(tmp_path: Path, to: str, by_number: bool, monkeypatch: pytest.MonkeyPatch):
    num = 40
    model, optimizer = trained(num)
    state = (
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if by_number
        else {"model": model, "optimizer": optimizer}
    )
    monkeypatch.setattr(local_shards, "INLINE_BYTES", 64)  # as if there were thousands of parameters
    checkpoint.save(tmp_path / "a", state)
    assert all(value.blobs for value in checkpoint.catalog(tmp_path / "a").values_table) == by_number
    rename = {f"model.layer{i}": f"model.block{i}" for i in range(num)}
    for number, fqn in enumerate(reversed(list(model))):  # also of parameters that have no state: the groups name them
        rename[f"optimizer.state.{number if by_number else fqn}"] = f"optimizer.state.{fqn.replace('layer', 'block')}"
    if to == "reshard":
        checkpoint.reshard(tmp_path / "a", tmp_path / "b", mesh={"dp": 2}, rename=rename)
    else:
        checkpoint.convert(tmp_path / "a", tmp_path / "b", to=to.split()[-1], rename=rename)
    other = nn.ParameterDict({f"block{i}": nn.Parameter(torch.ones(2)) for i in range(num)})
    fresh = torch.optim.SGD(other.parameters(), lr=9.0)
    assert checkpoint.load(tmp_path / "b", {"model": other, "optimizer": fresh}).problems == ()
    assert fresh.param_groups[0]["lr"] == 0.1
    for i in (0, num - 1):
        assert torch.equal(fresh.state[other[f"block{i}"]]["momentum_buffer"], position_values((2,), salt=i))


def test_names_where_numbers_are_wanted_are_told(tmp_path: Path):
    model, optimizer = trained(3)
    checkpoint.save(tmp_path / "a", {"model": model, "optimizer": optimizer})
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.raises(MismatchError, match=r"optimizer is wanted by number, .* pass the optimizer itself"):
        checkpoint.load(tmp_path / "a", state)


@pytest.mark.filterwarnings("ignore:.*numbers the parameters:UserWarning")
def test_the_state_dict_of_an_optimizer_that_has_not_stepped_is_told(tmp_path: Path):
    model, optimizer = trained(3)
    checkpoint.save(tmp_path / "a", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    fresh = torch.optim.SGD(model.parameters(), lr=9.0)
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": fresh.state_dict()}
    with pytest.raises(
        MismatchError, match=r"optimizer is the state_dict\(\) of an optimizer that has not stepped, .* pass the optimizer itself"
    ) as told:
        checkpoint.load(tmp_path / "a", state)
    assert "rename={f'optimizer.state.{i}'" in str(told.value)  # which the optimizer itself needs
    state["optimizer"] = optimizer.state_dict()
    with pytest.raises(MismatchError, match="x: not in the checkpoint") as told:
        checkpoint.load(tmp_path / "a", {**state, "x": 1})
    assert "has not stepped" not in str(told.value)


def test_nothing_is_told_of_an_optimizer_that_is_named(tmp_path: Path):
    model, optimizer = trained(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        checkpoint.save(tmp_path / "a", {"model": model, "optimizer": optimizer})
