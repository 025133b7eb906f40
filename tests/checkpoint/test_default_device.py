"""Whatever torch's default device is, host memory is saved and loaded there; "meta" stands in, which keeps nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import LiveReshard, Manager, Memory, PerRank, reshard_live
from reshard_ckpt.engine.common.host_memory import POOL

SHAPE = (300, 300)


def state(number: int) -> dict[str, Any]:
    """Tensors in and out of order, an optimizer, tensors that are values, and some of one rank."""
    torch.manual_seed(number)
    model = torch.nn.Linear(*SHAPE)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.full((1, SHAPE[0]), float(number))).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "turned": (torch.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE) + number).t(),
        "some": torch.arange(10)[::2] + number,
        "woven": (torch.arange(8) + number).as_strided((2, 3), (3, 2)),
        "empty": torch.zeros(0, 3),
        "extra": {"deep": [torch.ones(2) * number, torch.ones(0)], "long": "x" * 9000},
        "rng": PerRank(torch.get_rng_state()),
    }


def assert_is(found: dict[str, Any], number: int) -> None:
    wanted = state(number)
    assert torch.equal(found["model"].weight, wanted["model"].weight)
    for one, other in zip(found["model"].parameters(), wanted["model"].parameters(), strict=True):
        assert found["optimizer"].state[one].keys() == wanted["optimizer"].state[other].keys()
        for key, value in wanted["optimizer"].state[other].items():
            assert torch.equal(found["optimizer"].state[one][key], value)
    assert torch.equal(found["turned"], wanted["turned"])
    assert torch.equal(found["some"], wanted["some"])
    assert torch.equal(found["woven"], wanted["woven"])
    assert torch.equal(found["extra"]["deep"][0], wanted["extra"]["deep"][0])
    assert torch.equal(found["rng"].value, wanted["rng"].value)


@pytest.fixture(autouse=True)
def no_idle_buffer() -> None:
    POOL.clear()


def test_a_state_in_host_memory_is_saved_and_loaded(tmp_path: Path):
    states = {number: state(number) for number in (1, 2, 3)}
    with torch.device("meta"):
        checkpoint.save(tmp_path / "1", states[1], sha256=True)
        checkpoint.prepare(states[2])
        checkpoint.async_save(tmp_path / "2", states[2]).result()
        checkpoint.async_save(tmp_path / "3", states[3], staging="lazy").result()
    for number in states:
        assert checkpoint.verify(tmp_path / f"{number}").ok
        into = state(9)
        into["optimizer"] = torch.optim.AdamW(into["model"].parameters())  # which has no state yet
        with torch.device("meta"):
            checkpoint.load(tmp_path / f"{number}", into, verify_first=number == 2)
            read = checkpoint.read(tmp_path / f"{number}", ["turned", "empty"])
        assert_is(into, number)
        assert torch.equal(read["turned"], states[number]["turned"])
        assert read["empty"].device.type == "cpu"


def test_a_state_in_host_memory_goes_to_memory_and_from_layout_to_layout(tmp_path: Path):
    with torch.device("meta"), Manager(tmp_path / "run", memory=Memory(copies=0, folder=str(tmp_path / "shm"))) as manager:
        with torch.device("cpu"):
            one, two = state(1), state(2)
        manager.async_save(1, one).result()
        found = manager.load_latest(two)
        assert found.tier == "memory"
        with torch.device("cpu"):
            assert_is(two, 1)
            three, four = state(3), state(4)
        reshard_live(three, two)
        kept = LiveReshard(four, one, staged=True)
        kept.run()
        with torch.device("cpu"):
            assert_is(two, 3)
            assert_is(one, 4)


@pytest.mark.parametrize("to", ["dcp", "torch", "safetensors"])
def test_checkpoints_are_converted(tmp_path: Path, to: str):
    name = {"dcp": "to", "torch": "to.pt", "safetensors": "to.safetensors"}[to]
    model = state(1)["model"]
    checkpoint.save(tmp_path / "from", {"model": model})
    with torch.device("meta"):
        checkpoint.convert(tmp_path / "from", tmp_path / name, to=to)
        read = checkpoint.read(tmp_path / name)
    assert any(torch.equal(tensor, model.weight) for tensor in read.values())
