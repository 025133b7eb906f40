"""``Manager(also="safetensors")``: each committed step is also a folder of safetensors, which goes with its step."""

from __future__ import annotations

import errno
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import Manager, converting
from reshard_ckpt.errors import UsageError
from reshard_ckpt.format.files import exported_saves
from reshard_ckpt.manager import exports
from tests.reliability.faults import fails, faulty

THREAD = "reshard_ckpt export_0"


class Config:
    """A config as transformers has it."""

    def to_json_string(self) -> str:
        return json.dumps({"model_type": "small", "dtype": "bfloat16", "architectures": None})


class Small(nn.Module):
    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(64, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(11))
        self.head = nn.Linear(8, 64, bias=False)
        self.head.weight = self.embed.weight
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) + 1000 * i + fill)
        self.config, self.generation_config = Config(), Config()


def state(fill: float = 0.0) -> dict[str, Any]:
    model = Small(fill)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 1}


def exported(root: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the tensors of an export by its index, without tied names."""
    folder = root / f"step_{step}" / "safetensors"
    index = folder / "model.safetensors.index.json"
    files = {*json.loads(index.read_text())["weight_map"].values()} if index.exists() else {"model.safetensors"}
    return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}


def is_model(tensors: dict[str, torch.Tensor], fill: float) -> bool:
    wanted = dict(Small(fill).named_parameters())
    return tensors.keys() == wanted.keys() and all(torch.equal(tensors[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("call", ["save", "async_save"])
def test_each_step_has_an_export_with_its_config(tmp_path: Path, call: str):
    with mock.patch.object(converting, "MAX_SHARD_SIZE", "1kB"), Manager(tmp_path, also="safetensors") as manager:
        for step in (1, 2):
            getattr(manager, call)(step, state(step))
    for step in (1, 2):
        folder = tmp_path / f"step_{step}" / "safetensors"
        assert is_model(exported(tmp_path, step), step)
        assert len([*folder.glob("model-*-of-*.safetensors")]) > 1
        assert json.loads((folder / "config.json").read_text()) == {
            "model_type": "small", "dtype": "float32", "architectures": ["Small"],
        }  # fmt: skip
        assert json.loads((folder / "generation_config.json").read_text()) == json.loads(Config().to_json_string())
        assert checkpoint.verify(tmp_path / f"step_{step}").ok
        assert {*checkpoint.read(folder)} == {f"model.{name}" for name in Small().state_dict()}


def test_the_model_may_be_wrapped_and_have_another_key(tmp_path: Path):
    wrapped = torch.optim.swa_utils.AveragedModel(Small(5.0))
    with Manager(tmp_path, also="safetensors") as manager:
        manager.save(1, {"net": nn.DataParallel(Small(3.0)), "step": 1})
        manager.save(2, {"model": Small(4.0), "ema": wrapped})
    assert is_model(exported(tmp_path, 1), 3.0)
    assert json.loads((tmp_path / "step_1/safetensors/config.json").read_text())["architectures"] == ["Small"]
    assert is_model(exported(tmp_path, 2), 4.0)


def test_an_export_waits_for_the_store_as_long_as_its_manager(tmp_path: Path):
    with (
        mock.patch.object(exports, "open_storage", wraps=exports.open_storage) as opened,
        mock.patch.object(converting, "open_source", wraps=converting.open_source) as read,
        Manager(tmp_path, also="safetensors", timeout_s=7.0) as manager,
    ):
        manager.save(1, state(1))
    assert [call.kwargs["timeout_s"] for call in (*opened.mock_calls, *read.mock_calls)] == [7.0, 7.0]


def test_exports_go_with_their_steps(tmp_path: Path):
    with Manager(tmp_path, also="safetensors", keep_last=1) as manager:
        for step in (1, 2, 3):
            manager.async_save(step, state(step))
        manager.delete(3)
        assert not (tmp_path / "step_3").exists()
        manager.save(4, state(4.0))
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_4"]
    with Manager(tmp_path, keep_last=1) as manager:  # also without also=
        assert is_model(exported(tmp_path, 4), 4.0)  # a start removes no export that belongs to its step
        manager.save(5, state(5.0))
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_5"]


def test_a_step_saved_anew_never_keeps_the_export_of_before(tmp_path: Path):
    with Manager(tmp_path, also="safetensors") as manager:
        manager.save(1, state(1.0))
    mine = tmp_path / "step_1" / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    with Manager(tmp_path) as manager:
        manager.save(1, state(2.0))
    assert not (tmp_path / "step_1" / "safetensors").exists()
    assert (mine / "notes.txt").exists()
    with warnings.catch_warnings(record=True) as caught, Manager(tmp_path, also="safetensors") as manager:
        warnings.simplefilter("always")
        manager.save(1, state(3.0))
        manager.save(1, state(4.0))
    assert not caught  # the first export may have lost its checkpoint
    assert is_model(exported(tmp_path, 1), 4.0)
    catalog = checkpoint.catalog(tmp_path / "step_1")
    names = [f"safetensors/{path.name}" for path in (tmp_path / "step_1" / "safetensors").iterdir()]
    assert exported_saves(names) == {catalog.save_id}


def test_a_folder_of_the_user_with_that_name_stays(tmp_path: Path):
    with Manager(tmp_path) as manager:
        manager.save(1, state(1.0))
        folder = tmp_path / "step_1" / "safetensors"
        checkpoint.convert(tmp_path / "step_1", folder)
        manager.save(1, state(2.0))
        assert (folder / "model.safetensors").exists()


@contextmanager
def said(*words: str) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 1, messages
    assert all(word in messages[0] for word in words), messages


def test_a_failed_export_is_said_and_the_checkpoint_is_there(tmp_path: Path):
    with (
        said("step_1: saved, but not exported to safetensors: StorageError", "reshard-ckpt convert", "--root model"),
        faulty("write", None, fails(errno.ENOSPC), THREAD),
        Manager(tmp_path, also="safetensors") as manager,
    ):
        manager.async_save(1, state(1.0)).result()
    assert not [*tmp_path.glob("step_1/*safetensors*")]
    into = state()
    assert Manager(tmp_path, read_only=True).load_latest(into).step == 1
    assert torch.equal(into["model"].embed.weight, Small(1.0).embed.weight)


def test_a_killed_export_leaves_nothing_once_its_step_is_pruned(tmp_path: Path):
    with Manager(tmp_path, keep_last=1) as manager:
        manager.save(1, state(1.0))
        left = tmp_path / "step_1" / f".safetensors.{'0' * 32}.partial" / "result"
        left.mkdir(parents=True)
        (left / "model.safetensors").write_bytes(bytes(100))
        manager.save(2, state(2.0))
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_2"]


def test_options_and_states_are_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="also='gguf': there is 'safetensors'"):
        Manager(tmp_path, also="gguf")
    with pytest.raises(UsageError, match="exports are files"):
        Manager("memory://exports", also="safetensors")
    with Manager(tmp_path, also="safetensors") as manager:
        with pytest.raises(UsageError, match=r"no key 'model', and 2 modules \(a, b\)"):
            manager.save(1, {"a": Small(), "b": Small()})
        with pytest.raises(UsageError, match="0 modules"):
            manager.async_save(1, {"w": torch.ones(2)})
        assert manager.steps() == []


def test_an_export_stays_if_its_step_is_compacted(tmp_path: Path):
    with Manager(tmp_path, also="safetensors", incremental=True) as manager:
        for step in (1, 2):
            manager.save(step, state(1))
    assert checkpoint.compact(tmp_path / "step_2").num_files
    assert is_model(exported(tmp_path, 2), 1)
    Manager(tmp_path).close()
    assert is_model(exported(tmp_path, 2), 1)
    checkpoint.save(tmp_path / "step_2", state(2))
    assert not (tmp_path / "step_2" / "safetensors").exists()
