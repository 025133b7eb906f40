"""`Value`, which needs no template to load into, and ``exclude=``, which leaves names out of a save."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from reshard_ckpt import checkpoint
from reshard_ckpt.checkpoint import Value
from reshard_ckpt.errors import CheckpointError, LayoutError, MismatchError, UnsupportedError, UsageError
from reshard_ckpt.format.values import encode_value
from tests.distributed.outcomes import outcome
from tests.launch import on_ranks


def replay(n: int = 3) -> dict[str, Any]:
    """Samples of unequal shapes, beside plain values and a sparse tensor."""
    samples = [torch.arange(float(i)) for i in range(n)]
    return {"samples": samples, ("key", 1): (torch.eye(2).to_sparse(), nn.Parameter(torch.ones(1))), "at": {n, "x"}}


def same(a: Any, b: Any) -> bool:
    return encode_value(a, "a") == encode_value(b, "b")


class Buffer:
    """An object whose state has other tensors each time."""

    def __init__(self, items: list[torch.Tensor]) -> None:
        self.items = items

    def state_dict(self) -> dict[str, Any]:
        return {"items": self.items}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = state["items"]


@pytest.mark.parametrize("n", [3, 3000])  # in the catalog, and in a file
def test_a_value_loads_whole_without_a_template(n: int, tmp_path: Path):
    state = {
        "model": nn.Linear(2, 2),
        "extra": {"list": [{"replay": Value(replay(n))}], "buffer": Value(Buffer([torch.ones(n)]))},
    }
    checkpoint.save(tmp_path, state)
    holder, buffer = Value(), Buffer([])
    checkpoint.load(tmp_path, {"model": nn.Linear(2, 2), "extra": {"list": [{"replay": holder}], "buffer": Value(buffer)}})
    assert same(holder.value, replay(n))
    assert torch.equal(buffer.items[0], torch.ones(n))
    assert same(checkpoint.read(tmp_path, ["extra.list.0.replay"]), {"extra.list.0.replay": replay(n)})
    lacking: dict[str, Any] = {"list": [{"replay": Value()}]}
    checkpoint.load(tmp_path, {"extra": lacking})
    assert same(lacking["buffer"], Buffer([torch.ones(n)]).state_dict()), "a dict without the key gets the plain value"
    lines = {line.name: line for line in checkpoint.inspect(tmp_path).lines}
    assert lines["extra.list.0.replay"].num_bytes == len(encode_value(replay(n), ""))


def test_a_value_differs_where_its_tensors_differ(tmp_path: Path):
    for name, at in (("a", 2.0), ("b", 2.5)):
        checkpoint.save(tmp_path / name, {"extra": Value({"x": [torch.ones(2), torch.tensor([1.0, at])]})})
    assert not checkpoint.diff(tmp_path / "a", tmp_path / "a").values
    (change,) = checkpoint.diff(tmp_path / "a", tmp_path / "b", values=True).values
    assert (change.where, change.by, change.relative) == ("['x'][1]", 0.5, 0.2)


def test_a_value_keeps_its_contents_if_the_load_fails(tmp_path: Path):
    checkpoint.save(tmp_path, {"extra": {"replay": Value(replay()), "step": 1}})
    holder = Value("before")
    with pytest.raises(MismatchError, match="absent"):
        checkpoint.load(tmp_path, {"extra": {"replay": holder, "step": 0, "absent": Value()}})
    with pytest.raises(MismatchError, match="replay: saved as one value for all ranks, wanted as PerRank"):
        checkpoint.load(tmp_path, {"extra": {"replay": checkpoint.PerRank(None), "step": 0}})
    assert holder.value == "before"


def test_a_value_refuses_parts_of_tensors_with_their_place(tmp_path: Path):
    part = checkpoint.Value({"x": [nn.Linear(1, 1)]})
    with pytest.raises(UnsupportedError, match=r"extra\['x'\]\[0\]: a .*Linear cannot be saved"):
        checkpoint.save(tmp_path, {"extra": part})


@on_ranks(2)
def test_values_of_two_ranks_are_compared(tmp_path: Path):
    rank = dist.get_rank()
    for n in (3, 1000, 400_000):
        equal = torch.arange(float(n))
        checkpoint.save(tmp_path / str(n), {"extra": Value([equal])})
        holder = Value()
        checkpoint.load(tmp_path / str(n), {"extra": holder})
        assert torch.equal(holder.value[0], equal)
        sizes = "extra: rank 0 has a value of 1,600,035 bytes, rank 1 has a value of 1,600,039 bytes"
        for other, says in ((equal + rank, "extra"), (torch.ones(n + rank), sizes if n == 400_000 else "extra")):
            with pytest.raises(LayoutError, match=says) as refused:
                checkpoint.save(tmp_path / "no", {"extra": Value([other])})
            assert "PerRank" in str(refused.value)
    own = {f"rank{rank}": torch.ones(3), "both": torch.ones(2)}
    said = outcome(lambda: checkpoint.save(tmp_path / "part", {"extra": own}, exclude=["extra.rank1", "extra.rank7"]))
    assert said.warned == (("exclude=['extra.rank7'] fits no name of the state, so correct it",) if rank == 0 else ())
    with pytest.raises(CheckpointError, match=r"exclude=\['extra.rank1'\]"):
        checkpoint.save(tmp_path / "no", {"extra": own}, exclude=[f"extra.rank{rank}"])
    assert sorted(checkpoint.catalog(tmp_path / "part").names) == ["extra.both", "extra.rank0"]


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False), nn.Linear(4, 2))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("background", [False, True])
def test_excluded_names_are_left_out(background: bool, tmp_path: Path):
    model = tied()
    optimizer = torch.optim.Adam(model.parameters())
    model[2](model[1](model[0](torch.tensor([1])))).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "extra": {"step": 3, "log": "x"}}
    exclude = ["model.0", "*.exp_avg", "extra.log"]
    with checkpoint.Manager(tmp_path) as manager:
        if background:
            manager.async_save(1, state, exclude=exclude).result()
        else:
            manager.save(1, state, exclude=exclude)
    path = tmp_path / "step_1"
    assert checkpoint.verify(path).ok
    names = set(checkpoint.read(path))
    assert names >= {"model.1.weight", "model.2.weight", "optimizer.state.0.weight.exp_avg_sq", "extra.step"}
    assert not any(name == "model.0.weight" or name.endswith("exp_avg") or name == "extra.log" for name in names)
    other = tied()
    checkpoint.load(path, {"model": other, "extra": {"step": 0}}, allow_missing=["model.0"])
    assert torch.equal(other[1].weight, model[1].weight)


def test_excluding_nothing_that_is_there_warns(tmp_path: Path):
    with pytest.warns(UserWarning, match=r"exclude=\['modle'\] fits no name"):
        checkpoint.save(tmp_path, {"x": torch.ones(2)}, exclude=["modle"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save(tmp_path, {"x": torch.ones(2), "y": 1}, exclude=["y"])
    for wrong in ("x", True, [3]):
        with pytest.raises(UsageError, match="exclude=.*: pass a list of patterns"):
            checkpoint.save(tmp_path, {"x": torch.ones(2)}, exclude=wrong)  # type: ignore[arg-type]
