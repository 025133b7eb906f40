"""Folders of torch_checkpointing, written by the real package (tests/data/torch_checkpointing/make.py)."""

from __future__ import annotations

import pickle
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import CheckpointError, CheckpointNotFound, CorruptError, UnsupportedError

DATA = Path(__file__).parents[1] / "data" / "torch_checkpointing"
FOLDER = DATA / "step-3"


def net() -> nn.Module:
    found = nn.Module()
    found.up, found.down = nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 2, bias=False))
    found.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
    return found


def test_all_files_together_are_one_checkpoint() -> None:
    read = checkpoint.read(FOLDER)
    expected = load_file(DATA / "expected.safetensors")
    assert {name: tensor for name, tensor in expected.items() if not torch.equal(read.pop(name), tensor)} == {}
    (group,) = read.pop("optimizer.param_groups")
    assert (group["lr"], group["params"]) == (0.1, ["up.weight", "up.bias", "down.0.weight"])
    values = {"dataloader.dp_rank_0": bytes(4), "dataloader.dp_rank_1": b"\1" * 4, "dataloader.world_size": 2}
    assert read == {**values, "train_state.step": 3, "train_state.ntokens_seen": 48}


def test_it_loads_into_a_module_and_a_new_optimizer() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    checkpoint.load(FOLDER, {"model": model, "optimizer": optimizer, "train_state": (state := {"step": 0, "ntokens_seen": 0})})
    expected = load_file(DATA / "expected.safetensors")
    assert all(torch.equal(tensor, expected[f"model.{name}"]) for name, tensor in model.state_dict().items())
    assert torch.equal(optimizer.state[model.up.weight]["exp_avg"], expected["optimizer.state.up.weight.exp_avg"])
    assert (optimizer.param_groups[0]["lr"], state["step"]) == (0.1, 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "step-3"))


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    said = pickle.loads((folder / "metadata.pkl").read_bytes())
    change(said)
    (folder / "metadata.pkl").write_bytes(pickle.dumps(said))


def test_a_missing_file_of_a_rank_is_named(folder: Path) -> None:
    (folder / "model_1.pt").unlink()
    with pytest.raises(CorruptError, match=r"model_1.pt is missing, a file of model"):
        checkpoint.read(folder)


def test_two_tensors_of_one_name_are_refused(folder: Path) -> None:
    for rank in range(2):
        torch.save({"a": {"b": torch.zeros(2)}, "a.b": torch.ones(2)}, folder / f"ema_{rank}.pt")
    with pytest.raises(CorruptError, match=r"ema_0.pt has two tensors or values of the name ema\.a\.b"):
        checkpoint.read(folder)


def test_an_item_of_which_only_one_ranks_file_is_missing_is_not_rank_0s_alone(folder: Path) -> None:
    changed(folder, lambda said: said.update(world_size=3))
    for item in ("dataloader", "train_state"):
        shutil.copy(folder / f"{item}_1.pt", folder / f"{item}_2.pt")
    (folder / "train_state_1.pt").unlink()
    with pytest.raises(CorruptError, match=r"train_state_1.pt is missing, a file of train_state"):
        checkpoint.read(folder)


def test_tensors_of_an_item_that_differ_between_ranks_are_named_by_rank(folder: Path) -> None:
    for rank in range(2):
        torch.save({"cpu": torch.full((3,), rank), "seed": torch.ones(2)}, folder / f"rng_{rank}.pt")
    read = checkpoint.read(folder)
    assert [read[f"rng_of_rank.{rank}.cpu"].tolist() for rank in range(2)] == [[0] * 3, [1] * 3]
    assert read["rng.seed"].tolist() == [1, 1]


def test_items_may_have_files_of_other_names_and_rank_0_may_save_an_item_alone(folder: Path) -> None:
    (folder / "own").mkdir()
    layout = {"serialization_format": {"type": "TorchSerialization"}}
    layouts = {rank: {"file_path": f"own/weights.{rank}", **layout} for rank in range(2)}
    for rank in range(2):
        (folder / f"model_{rank}.pt").rename(folder / layouts[rank]["file_path"])
    (folder / "train_state_1.pt").unlink()
    changed(folder, lambda said: said["metadata"]["model"].update(rank_to_layout_info=layouts))
    assert checkpoint.diff(folder, FOLDER).equal


def test_another_form_of_an_item_is_refused_by_name_and_the_others_load(folder: Path) -> None:
    form = {"file_path": "optimizer.safetensors", "serialization_format": {"type": "SafetensorsSerialization"}}
    changed(folder, lambda said: said["metadata"]["optimizer"]["rank_to_layout_info"].update({0: form}))
    model = net()
    checkpoint.load(folder, {"model": model})
    with pytest.raises(CheckpointError, match=r"optimizer was saved by \['SafetensorsSerialization'\]"):
        checkpoint.load(folder, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda said: said.update(version="1.0"), UnsupportedError, r"version '1.0', and '2.0' is known"),
        (lambda said: said["metadata"].update(model=3), CorruptError, r"another form than torch_checkpointing writes"),
        (lambda said: said.update(world_size=(1 << 24) - 1), CorruptError, r"is missing, a file of dataloader"),
        (lambda said: said.update(world_size=-1), CorruptError, r"a number of ranks of -1"),
        (lambda said: said.pop("world_size"), CheckpointNotFound, r"no committed checkpoint"),
        (lambda said: said.update(more=OrderedDict), CheckpointNotFound, r"no committed checkpoint"),
    ],
)
def test_other_metadata_are_refused_by_name(change: Any, error: type[Exception], message: str, folder: Path) -> None:
    changed(folder, change)
    with pytest.raises(error, match=message):
        checkpoint.read(folder)
