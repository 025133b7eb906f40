"""The advice of errors: what it offers exists where the error is raised, and helps."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import CorruptError, MismatchError
from tests.damage import flip


class Extra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"value": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"value": 1}


def test_a_value_without_a_place_names_the_option_that_leaves_it_out(tmp_path: Path):
    checkpoint.save(tmp_path, {"model": Extra(2, 2)})
    into = {"model": nn.Linear(2, 2)}
    advised = r"ignore= of this name leaves it out.*with ignore=\[patterns\] to leave some out, or with strict=False"
    with pytest.raises(MismatchError, match=f"(?s)model._extra_state: {'.*'}{advised}"):
        checkpoint.load(tmp_path, into)
    assert not checkpoint.load(tmp_path, into, ignore=["model._extra_state"]).values


def test_a_tensor_that_was_saved_as_a_value_is_not_called_missing_too(tmp_path: Path):
    checkpoint.save(tmp_path, {"extra": {"step": 1}})
    with pytest.raises(MismatchError, match=r"^extra.step: saved as a value, wanted as a tensor"):
        checkpoint.load(tmp_path, {"extra": {"step": torch.zeros(1)}})


@pytest.mark.parametrize("key", ["optimizer", "optimizers[0]"])
def test_a_parameter_without_hyperparameters_names_the_option_that_keeps_them(tmp_path: Path, key: str):
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path, {"model": model, key: torch.optim.SGD([model.weight], lr=0.5)})
    into = {"model": model, key: torch.optim.SGD(model.parameters(), lr=0.25)}
    told = rf"bias; allow_missing= of its state keeps .*, as '{re.escape(key)}\.state\.bias' does for hyperparameters, or with"
    with pytest.raises(MismatchError, match=told) as refused:
        checkpoint.load(tmp_path, into)
    assert "did you mean" not in str(refused.value)  # the name of the group is right
    kept = checkpoint.load(tmp_path, into, allow_missing=[f"{key}.state.bias"]).kept
    assert kept == (f"{key}.param_groups[0]: no saved group holds parameter bias",)  # without the advice


def test_a_missing_value_may_be_allowed_and_the_state_of_another_optimizer_may_not(tmp_path: Path):
    model = nn.Linear(2, 2)
    sgd, adam = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    for optimizer in (sgd, adam):
        optimizer.step()
    checkpoint.save(tmp_path, {"model": model, "optimizer": sgd})
    with pytest.raises(MismatchError, match=r"step: not in the checkpoint; .* load with allow_missing="):
        checkpoint.load(tmp_path, {"model": model, "step": 1})
    with pytest.raises(MismatchError, match="saved by another kind of optimizer") as refused:
        checkpoint.load(tmp_path, {"model": model, "optimizer": adam})
    assert "optimizer.state.weight.exp_avg: not in the checkpoint" in str(refused.value)
    assert "allow_missing" not in str(refused.value)


@pytest.mark.parametrize(("wanted", "resizes"), [((4,), True), ((3, 1), False), ((), False)])
def test_a_resize_is_offered_where_it_helps(tmp_path: Path, wanted: tuple[int, ...], resizes: bool):
    state, into = {"x": torch.ones(3)}, {"x": torch.zeros(wanted)}
    checkpoint.save(tmp_path, state)
    with pytest.raises(MismatchError, match=r"x: saved with global shape \(3,\)") as refused:
        checkpoint.load(tmp_path, into)
    assert ("allow_resize=" in str(refused.value), "of another number of dims" in str(refused.value)) == (resizes, not resizes)
    with pytest.raises(MismatchError) as refused:
        checkpoint.load(tmp_path, {**into, "y": torch.zeros(1)}, allow_missing=["y"])
    assert "allow_missing" not in str(refused.value)  # it is given already
    if resizes:
        checkpoint.load(tmp_path, into, allow_resize=["x"])
    with pytest.raises(MismatchError, match=r"; load with strict=False to load what fits"):  # it has no allow_resize=
        checkpoint.reshard_live(state, into)


READERS: dict[str, Callable[[Path, Path], object]] = {
    "inspect": lambda path, other: checkpoint.inspect(path, stats=True),
    "diff": lambda path, other: checkpoint.diff(path, other, values=True),
    "convert": lambda path, other: checkpoint.convert(path, path.parent / "out", to="safetensors"),
}


@pytest.mark.parametrize("name", READERS)
def test_what_reads_into_no_state_speaks_of_no_state_and_of_no_option_that_it_lacks(tmp_path: Path, name: str):
    for folder in ("ckpt", "other"):
        checkpoint.save(tmp_path / folder, {"model": nn.Linear(20, 20)})
    (digests,) = (tmp_path / "ckpt").rglob("*.digests")
    (shard,) = (tmp_path / "ckpt").rglob("*.safetensors")
    flip(shard)
    with pytest.raises(CorruptError, match=r"is damaged in bytes [^;]*; use another checkpoint$"):
        READERS[name](tmp_path / "ckpt", tmp_path / "other")
    digests.unlink()
    with pytest.raises(CorruptError, match=r"is missing; .*; load, reshard and convert take verify=False, which reads them"):
        READERS[name](tmp_path / "ckpt", tmp_path / "other")


def test_names_with_a_colon_are_matched_whole(tmp_path: Path):
    checkpoint.save(tmp_path, {"x": {"v": 1}})
    into = {"x": {"v": 0, "loss: train": 3}}
    with pytest.raises(MismatchError, match="x.loss: train: not in the checkpoint"):
        checkpoint.load(tmp_path, into, ignore=["x.loss"])
    assert checkpoint.load(tmp_path, into, allow_missing=["x.loss: train"]).kept == ("x.loss: train: not in the checkpoint",)
    assert into["x"] == {"v": 1, "loss: train": 3}


class Replay:
    """Makes its tensors at its first sample."""

    def __init__(self) -> None:
        self.samples: list[torch.Tensor] = []

    def state_dict(self) -> dict[str, list[torch.Tensor]]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, list[torch.Tensor]]) -> None:
        self.samples = state["samples"]


@pytest.mark.parametrize("key", ["replay", "optimizer"])
def test_state_that_is_made_later_is_said_to_be_made_first_or_to_be_saved_whole(tmp_path: Path, key: str):
    def made(step: int) -> dict[str, object]:
        model, replay = nn.Linear(2, 2), Replay()
        optimizer = torch.optim.SGD(model.parameters())
        if step and key == "replay":
            replay.samples.append(torch.full((3,), float(step)))
        elif step:
            optimizer.state["k"] = torch.tensor([step])  # as that of MADGRAD, which belongs to no parameter
        return {"model": model, "optimizer": optimizer, "replay": replay}

    saved = made(step=3)
    checkpoint.save(tmp_path / "parts", saved)
    told = rf"{key} has no such state yet: let it make that first, .* or save it as checkpoint.Value\({key}\)"
    with pytest.raises(MismatchError, match=told):
        checkpoint.load(tmp_path / "parts", made(step=0))
    checkpoint.load(tmp_path / "parts", made(step=1))
    checkpoint.save(tmp_path / "whole", saved | {key: checkpoint.Value(saved[key])})
    fresh = made(step=0)
    checkpoint.load(tmp_path / "whole", fresh | {key: checkpoint.Value(fresh[key])})


def test_state_of_a_parameter_that_the_model_lacks_is_not_said_to_be_made_later(tmp_path: Path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer})
    smaller = nn.Linear(2, 2, bias=False)
    with pytest.raises(MismatchError, match="optimizer.state.bias.exp_avg: in the checkpoint") as refused:
        checkpoint.load(tmp_path, {"model": smaller, "optimizer": torch.optim.AdamW(smaller.parameters())})
    assert "no such state" not in str(refused.value)
