"""A script written for Azure's Nebula runs on the calls of `reshard_ckpt.nebula`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import reshard_ckpt.nebula as nm
from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import Memory
from reshard_ckpt.errors import CheckpointError, CheckpointNotFound, UsageError


class Pair(NamedTuple):
    """A tuple that takes its fields one by one."""

    first: Any
    second: int


def test_a_script_of_nebula_saves_lists_and_loads(tmp_path: Path, shm: Path):
    with pytest.raises(UsageError, match="call init"):
        nm.list_checkpoints()
    memory = Memory(copies=0, folder=str(shm))
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    nm.init(str(tmp_path / "run"), persistent_time_interval=3600, num_of_version_in_retention=1, memory=memory)
    assert nm.get_latest_checkpoint() is None
    assert nm.get_latest_checkpoint_path("model") == ""

    nm.Checkpoint("global_step10").save("model", model)  # one file: committed at once
    both = nm.Checkpoint("global_step20", -2)
    both.save("model", model)
    both.save("optimizer", optimizer)
    assert both.handle is None
    assert both.commit()
    wanted = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    both.handle.staged()
    with torch.no_grad():
        model.weight.zero_()
    two = nm.Checkpoint("", 2)
    two.save("model", model)
    assert two.handle is None
    two.save("epoch", {"epoch": 7, 3: [1, (2.5, None)]})
    two.handle.result()
    assert [one.tag for one in nm.list_checkpoints()] == ["global_step20", "21"]  # two generations, and none persisted yet
    assert nm.get_latest_checkpoint_path("model") == str(tmp_path / "run" / "step_21")
    latest = nm.get_latest_checkpoint()
    assert latest is not None
    assert latest.load("epoch") == {"epoch": 7, 3: [1, (2.5, None)]}
    with pytest.raises(CheckpointNotFound, match="no file 'scheduler'"):
        latest.load("scheduler")
    again = nm.get_checkpoint("global_step20")
    loaded = again.load("model")
    assert list(loaded) == list(wanted)
    assert all(torch.equal(loaded[key], wanted[key]) for key in wanted)
    into = torch.optim.Adam(torch.nn.Linear(5, 3).parameters())
    into.load_state_dict(again.load("optimizer"))
    assert torch.equal(into.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    with pytest.raises(CheckpointNotFound, match="no checkpoint 'global_step30'; there are: global_step20"):
        nm.get_checkpoint("global_step30").load("model")
    latest = nm.get_latest_checkpoint()
    assert latest.tag == "21"  # an older one was only looked at
    nm.finish()
    assert checkpoint.verify(tmp_path / "run" / "step_21").ok


def test_a_save_at_an_older_step_goes_on_from_what_was_loaded(tmp_path: Path, shm: Path):
    memory = Memory(copies=0, folder=str(shm), generations=8)
    nm.init(str(tmp_path / "run"), num_of_version_in_retention=8, memory=memory)
    for step in (10, 20, 30):
        save_number(f"global_step{step}", step)
    assert nm.get_checkpoint("global_step10").load("x")["x"] == 10
    save_number("global_step40", 40)  # beyond all, so the newer ones still count
    assert [one.tag for one in nm.list_checkpoints()] == [f"global_step{step}" for step in (10, 20, 30, 40)]
    assert nm.get_checkpoint("global_step10").load("x")["x"] == 10
    save_number("global_step25", 25)
    assert [one.tag for one in nm.list_checkpoints()] == ["global_step10", "global_step25"]
    nm.finish()
    nm.init(str(tmp_path / "run"), num_of_version_in_retention=8, memory=memory)
    assert nm.get_latest_checkpoint().load("x")["x"] == 25


def save_number(tag: str, number: int) -> None:
    one = nm.Checkpoint(tag)
    one.save("x", {"x": torch.tensor(number)})
    one.handle.result()


def test_tags_that_end_in_one_number_are_two_checkpoints(tmp_path: Path, shm: Path):
    memory = Memory(copies=0, folder=str(shm), generations=8)
    nm.init(str(tmp_path / "run"), num_of_version_in_retention=4, memory=memory)
    tags = ["step_1", "best_1", "step_2", "best_1", "step_9"]
    for number, tag in enumerate(tags):
        save_number(tag, number)
    assert [one.tag for one in nm.list_checkpoints()] == tags
    nm.finish()
    nm.init(str(tmp_path / "run"), num_of_version_in_retention=4, memory=memory)
    save_number("best_9", 5)
    save_number("step_9", 6)
    assert [one.tag for one in nm.list_checkpoints()] == [*tags, "best_9"]
    for tag, number in (("best_9", 5), ("step_9", 6), ("best_1", 3), ("step_2", 2)):  # the newest of each tag
        assert nm.get_checkpoint(tag).load("x")["x"] == number
    nm.finish()


def test_a_tuple_of_a_class_of_its_own_is_refused_by_name_and_a_size_comes_back(tmp_path: Path, shm: Path):
    damaged = tmp_path / "run" / "step_0" / "catalog.msgpack"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"no catalog")  # and the others are found all the same
    nm.init(str(tmp_path / "run"), memory=Memory(copies=0, folder=str(shm)))
    assert nm.list_checkpoints() == []
    with pytest.raises(CheckpointError, match="sizes.*Pair"):
        nm.Checkpoint("1").save("sizes", {"pair": Pair(torch.ones(2), 3)})
    one = nm.Checkpoint("1")
    one.save("sizes", {"size": torch.Size([2, 3]), "none": torch.zeros(0, 4), "scalar": torch.tensor(2.5)})
    one.handle.result()
    found = nm.get_checkpoint("1").load("sizes")
    assert (found["size"], type(found["size"]), found["none"].shape) == (torch.Size([2, 3]), torch.Size, (0, 4))
    assert found["scalar"].item() == 2.5


def test_the_buffer_size_of_the_environment_bounds_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NEBULA_MEMORY_BUFFER_SIZE", str(200_000_000))
    memory = nm.memory_from_environment()
    assert (memory.copies, memory.max_bytes) == (0, 200_000_000)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "4")
    assert nm.memory_from_environment().copies == 1


@pytest.fixture(autouse=True)
def closed(shm: Path) -> Iterator[None]:
    yield
    nm.finish()
