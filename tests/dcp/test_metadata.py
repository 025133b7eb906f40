"""What `save` and `async_save` return: the `Metadata` that torch's calls return, read when somebody looks at it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import reshard_ckpt.dcp as dcp
from reshard_ckpt.errors import CheckpointNotFound
from reshard_ckpt.formats import source


def state() -> dict[str, Any]:
    model, optimizer = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(4, dtype=torch.bfloat16)}, {"lr": 0.5}
    groups = [{"lr": 0.1, "params": ["w"]}, {"lr": 0.2, "params": ["b"]}]
    return {"model": model, "groups": groups, "optimizer": optimizer, "step": 7, "long": "é" * 9000, "empty": torch.zeros(0, 3)}


def plain(metadata: Metadata) -> dict[str, Any]:
    """The names, dtypes and shapes in it, and which names are values."""
    described = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            assert sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel()
            described[name] = entry.properties.dtype, tuple(entry.size)
        else:
            assert isinstance(entry, BytesStorageMetadata)
            described[name] = None
    return described


@pytest.fixture
def theirs(tmp_path: Path) -> Metadata:
    return torch_dcp.save(state(), checkpoint_id=tmp_path / "theirs")


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_it_says_what_torchs_own_says(tmp_path: Path, theirs: Metadata, how: str):
    done = getattr(dcp, how)(state(), checkpoint_id=tmp_path / "ours")
    ours = done.result(600) if how == "async_save" else done
    assert isinstance(ours, Metadata)
    assert plain(ours) == plain(theirs)
    values = [name for name, entry in plain(theirs).items() if entry is None]
    assert {name: ours.planner_data[name] for name in values} == {name: theirs.planner_data[name] for name in values}
    assert ours.storage_meta.checkpoint_id == tmp_path / "ours"
    assert ours == dcp.ReshardReader(tmp_path / "ours").read_metadata()
    assert dcp.ReshardReader(tmp_path / "ours").read_metadata() == ours


@pytest.mark.parametrize("key", ["optimizer", "of.stage"])
def test_it_has_the_keys_that_lead_to_optimizer_state_and_into_dicts_with_values(tmp_path: Path, key: str):
    """torch's `load_sharded_optimizer_state_dict` and others rebuild a state dict from these keys."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    own = {key: get_optimizer_state_dict(model, optimizer), "list": [1, {"of.tensors": torch.ones(2)}]}
    own["with.dot"] = {"w": torch.ones(1), "n": 1}
    own["layer.weight"] = torch.ones(3)  # a key with a dot, as in a module's state dict
    theirs = torch_dcp.save(own, checkpoint_id=tmp_path / "theirs")
    ours = dcp.save(own, checkpoint_id=tmp_path / "ours")
    tensors = [name for name, entry in plain(theirs).items() if entry is not None]
    assert len(tensors) == 9
    assert {name: ours.planner_data[name] for name in tensors} == {name: theirs.planner_data[name] for name in tensors}


def test_it_is_not_read_before_somebody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    call_state_dicts: list[object] = []
    identified = source.identified_catalog

    def noting(storage: Any, found: Any) -> Any:
        call_state_dicts.append(storage)
        return identified(storage, found)

    monkeypatch.setattr(source, "identified_catalog", noting)
    metadata = dcp.save(state(), checkpoint_id=tmp_path)
    assert repr(metadata) == "<SavedMetadata, not read yet>"
    assert not call_state_dicts
    assert "model.w" in metadata.state_dict_metadata
    assert metadata.storage_data is None
    assert "TensorStorageMetadata" in repr(metadata)
    assert len(call_state_dicts) == 1


@pytest.mark.parametrize("looked_at", [False, True])
@pytest.mark.parametrize(
    "copied",
    [lambda m: pickle.loads(pickle.dumps(m)), copy.copy, copy.deepcopy, lambda m: dataclasses.replace(m, storage_data="1")],
    ids=["pickle", "copy", "deepcopy", "replace"],
)
def test_copies_hold_the_same(tmp_path: Path, looked_at: bool, copied: Any):
    metadata = dcp.save(state(), checkpoint_id=tmp_path)
    if looked_at:
        assert metadata.storage_meta is not None
    other = copied(metadata)
    assert isinstance(other, Metadata)
    assert plain(other) == plain(metadata)
    assert (other == metadata) is (other.storage_data is None)


def test_what_is_set_stays(tmp_path: Path):
    metadata = dcp.save(state(), checkpoint_id=tmp_path)
    metadata.storage_data = "mine"
    assert metadata.state_dict_metadata
    assert metadata.storage_data == "mine"


def test_another_save_at_the_path_is_not_taken_for_this_one(tmp_path: Path):
    first = dcp.save({"a": 1}, checkpoint_id=tmp_path)
    kept = dcp.save({"b": 1}, checkpoint_id=tmp_path)
    assert list(kept.state_dict_metadata) == ["b"]
    with pytest.raises(CheckpointNotFound, match="by now, and not"):
        _ = first.state_dict_metadata
    dcp.save({"c": 1}, checkpoint_id=tmp_path)
    assert list(kept.state_dict_metadata) == ["b"]
