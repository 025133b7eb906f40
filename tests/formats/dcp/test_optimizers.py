"""Training goes on bit for bit from a folder of DCP, whatever form its optimizer state has. One process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import MismatchError


class Training:
    """A small model, its optimizer with two groups, and steps on data that a seed gives."""

    def __init__(self, seed: int, *, named: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        rate = 0.01 * (1 + seed)
        first, rest = self.model[0], self.model[1:]
        groups: Any = [
            {"params": list(first.parameters()), "lr": rate},
            {"params": list(rest.parameters()), "lr": torch.tensor(rate), "foreach": False, "weight_decay": 0.1 * seed},
        ]
        self.optimizer = torch.optim.AdamW(self.model.named_parameters() if named else groups, lr=rate)

    def steps(self, seed: int) -> None:
        data = torch.Generator().manual_seed(seed)
        for _ in range(3):
            self.optimizer.zero_grad()
            self.model(torch.randn(16, 4, generator=data)).square().sum().backward()
            self.optimizer.step()

    def is_as(self, other: Training) -> bool:
        pairs = zip(self.model.state_dict().values(), other.model.state_dict().values(), strict=True)
        return all(torch.equal(one, two) for one, two in pairs)


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def states(training: Training, form: str) -> dict[str, Any]:
    """What a trainer passes to dcp.save."""
    model, optimizer = training.model, training.optimizer
    if form in ("numbers", "named"):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    theirs = get_optimizer_state_dict(model, optimizer, options=FLAT if "flat" in form else StateDictOptions())
    if "top" in form:
        return {**get_model_state_dict(model), "optimizer": theirs, "train_state": {"step": torch.tensor(3)}}
    if "app" in form:
        return {"app": {"model": get_model_state_dict(model), "optim": theirs}}
    return {"model": get_model_state_dict(model), "optimizer": theirs}


@pytest.mark.parametrize("form", ["nested", "flat", "top nested", "top flat", "app nested", "app flat", "named", "numbers"])
def test_training_goes_on_bit_for_bit(tmp_path, form: str):
    one, other = (Training(seed, named=form == "named") for seed in (1, 2))
    one.steps(5)
    dcp.save(states(one, form), checkpoint_id=tmp_path)
    rename = {"app.model": "model", "app.optim": "optimizer"} if "app" in form else {}
    if form == "numbers":
        rename = {f"optimizer.state.{i}": f"optimizer.state.{name}" for i, (name, _) in enumerate(one.model.named_parameters())}
    checkpoint.load(tmp_path, {"model": other.model, "optimizer": other.optimizer}, rename=rename)
    assert other.is_as(one)
    one.steps(6)
    other.steps(6)
    assert other.is_as(one)
    assert [float(g["lr"]) for g in other.optimizer.param_groups] == [float(g["lr"]) for g in one.optimizer.param_groups]


def test_numbers_without_names_say_what_to_do(tmp_path):
    one = Training(1)
    one.steps(5)
    dcp.save(states(one, "numbers"), checkpoint_id=tmp_path)
    with pytest.raises(MismatchError, match=r"knows parameters by number alone.*rename=.*named_parameters"):
        checkpoint.load(tmp_path, {"model": one.model, "optimizer": one.optimizer})


def test_an_optimizer_alone_at_the_top(tmp_path):
    one = Training(1)
    one.steps(5)
    for form in ("nested", "flat"):
        path = tmp_path / form
        dcp.save(states(one, form)["optimizer"], checkpoint_id=path)
        found = checkpoint.catalog(path)
        assert found.value_names == ("optimizer.param_groups",)
        assert all(name.startswith("optimizer.state.") for name in found.names)


@pytest.mark.parametrize("form", ["nested", "flat"])
def test_and_back_through_dcp(tmp_path, form: str):
    one, other = Training(1), Training(2)
    one.steps(5)
    checkpoint.save(tmp_path / "ours", {"model": one.model, "optimizer": one.optimizer})
    _write(tmp_path / "ours", tmp_path / "dcp", form)
    state = states(other, form)
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    set_model_state_dict(other.model, state["model"])
    set_optimizer_state_dict(other.model, other.optimizer, state["optimizer"], options=FLAT if form == "flat" else None)
    one.steps(6)
    other.steps(6)
    assert other.is_as(one)
    third = Training(3)
    checkpoint.load(tmp_path / "dcp", {"model": third.model, "optimizer": third.optimizer})
    third.steps(6)
    assert third.is_as(one)


def _write(saved: Path, folder: Path, form: str) -> None:
    checkpoint.convert(saved, folder, to="dcp", optimizer=form)
