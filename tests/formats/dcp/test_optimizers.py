"""Training goes on bit for bit from a folder of DCP, whatever form its optimizer state has. One process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from reshard_ckpt import checkpoint
from reshard_ckpt.dcp import ReshardReader
from reshard_ckpt.errors import MismatchError


class Training:
    """A small model, its optimizer with two groups, and steps on data that a seed gives."""

    def __init__(self, seed: int, *, named: bool = False) -> None:
        torch.manual_seed(seed)
        twice = nn.Linear(8, 8)  # tied: its parameters have two names each
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), twice, twice, nn.Linear(8, 2))
        rate = 0.01 * (1 + seed)
        params: list[Any] = list(self.model.named_parameters() if named else self.model.parameters())
        groups = [
            {"params": params[:2], "lr": rate},
            {"params": params[2:], "lr": torch.tensor(rate), "foreach": False, "weight_decay": 0.1 * seed},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=rate)

    def steps(self, seed: int) -> None:
        data = torch.Generator().manual_seed(seed)
        for _ in range(3):
            self.optimizer.zero_grad()
            self.model(torch.randn(16, 4, generator=data)).square().sum().backward()
            self.optimizer.step()

    def names_of_numbers(self) -> dict[str, str]:
        return {f"optimizer.state.{i}": f"optimizer.state.{name}" for i, (name, _) in enumerate(self.model.named_parameters())}

    def is_as(self, other: Training) -> bool:
        pairs = zip(self.model.state_dict().values(), other.model.state_dict().values(), strict=True)
        return all(torch.equal(one, two) for one, two in pairs)


def hyperparameters(training: Training) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in training.optimizer.param_groups]


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def states(training: Training, form: str) -> dict[str, Any]:
    """What a trainer passes to dcp.save."""
    model, optimizer = training.model, training.optimizer
    if form in ("numbered", "named"):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    theirs = get_optimizer_state_dict(model, optimizer, options=FLAT if "flat" in form else StateDictOptions())
    if "top" in form:
        return {**get_model_state_dict(model), "optimizer": theirs, "train_state": {"step": torch.tensor(3)}}
    if "app" in form:
        return {"app": {"model": get_model_state_dict(model), "optim": theirs}}
    return {"model": get_model_state_dict(model), "optimizer": theirs}


@pytest.mark.parametrize("form", ["nested", "flat", "top nested", "top flat", "app nested", "app flat", "named", "numbered"])
def test_training_goes_on_bit_for_bit(tmp_path, form: str):
    one, other = (Training(seed, named=form == "named") for seed in (1, 2))
    one.steps(5)
    dcp.save(states(one, form), checkpoint_id=tmp_path)
    rename = {"app.model": "model", "app.optim": "optimizer"} if "app" in form else {}
    if form == "numbered":
        rename = one.names_of_numbers()
    checkpoint.load(tmp_path, {"model": other.model, "optimizer": other.optimizer}, rename=rename)
    assert other.is_as(one)
    one.steps(6)
    other.steps(6)
    assert other.is_as(one)
    assert hyperparameters(other) == hyperparameters(one)


def test_numbers_without_names_say_what_to_do(tmp_path):
    one = Training(1)
    one.steps(5)
    dcp.save(states(one, "numbered"), checkpoint_id=tmp_path)
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


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("form", ["nested", "flat", "numbered"])
@pytest.mark.parametrize("saved", ["object", "nested", "flat", "numbered"])
def test_and_back_through_dcp(tmp_path, saved: str, form: str, named: bool):
    one, other, third, fourth = (Training(seed, named=named) for seed in (1, 2, 3, 4))
    one.steps(5)
    checkpoint.save(tmp_path / "ours", vars(one) if saved == "object" else states(one, saved))
    checkpoint.convert(tmp_path / "ours", tmp_path / "dcp", to="dcp", optimizer=form)
    if saved == "numbered" and not named:
        form = "numbered"  # there are no names to write
    readers = [FileSystemReader(tmp_path / "dcp")]
    if (form == "numbered") == (saved == "numbered" and not named):
        readers.append(ReshardReader(tmp_path / "ours"))
    for reader, loaded in zip(readers, (other, third), strict=False):
        loaded.steps(7)  # so that `optimizer.state_dict()` has tensors to load into
        state = states(loaded, form)
        dcp.load(state, storage_reader=reader)
        if form == "numbered":
            loaded.model.load_state_dict(state["model"])
            loaded.optimizer.load_state_dict(state["optimizer"])
        else:
            options = FLAT if form == "flat" else None
            set_model_state_dict(loaded.model, state["model"])
            set_optimizer_state_dict(loaded.model, loaded.optimizer, state["optimizer"], options=options)
        assert hyperparameters(loaded) == hyperparameters(one)
    rename = {} if named or saved != "numbered" else one.names_of_numbers()
    checkpoint.load(tmp_path / "dcp", {"model": fourth.model, "optimizer": fourth.optimizer}, rename=rename)
    one.steps(6)
    for loaded in (other, *([third] if len(readers) > 1 else []), fourth):
        loaded.steps(6)
        assert loaded.is_as(one)
