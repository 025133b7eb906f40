"""Values of each rank's own, and plain ones, across world sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import CheckpointError, LayoutError, MismatchError, PeerError
from tests.launch import on_ranks

SAMPLES = 101


class Loader:
    """Reads samples in strides; what it has not read yet is `left`."""

    def __init__(self, rank: int, size: int) -> None:
        self.left = list(range(rank, SAMPLES, size))

    def take(self, num: int) -> list[int]:
        taken, self.left = self.left[:num], self.left[num:]
        return taken

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]


def share(values: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """What all ranks have left, dealt out anew."""
    return {"left": sorted(sample for value in values for sample in value["left"])[rank::size]}


def of_ranks(mine: Any) -> list[Any]:
    """What each rank has, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


@on_ranks(4)
def test_values_of_each_rank_on_as_many_ranks_and_on_fewer(tmp_path: Path):
    rank, path = dist.get_rank(), tmp_path / "four"
    three = dist.new_group([0, 1, 2])
    loader = Loader(rank, 4)
    read = loader.take(3 + 2 * rank)
    torch.manual_seed(100 + rank)
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    optimizer.state[model.weight]["plain"] = 3
    extra = {
        "loader": checkpoint.PerRank(loader, combine=share),
        "rng": checkpoint.PerRank(torch.get_rng_state()),
        "large": checkpoint.PerRank(bytes([rank]) * 300_000),
        "plain": checkpoint.PerRank({"rank": rank, "nested": [rank, (rank, None)]}),
        "scheduler": scheduler,
        "array": np.arange(6).reshape(2, 3),
        "counts": {3: "three", (1, 2): "pair"},
        "_extra_states": 2,  # not the extra state of a module
    }
    checkpoint.save(path, {"model": model, "optimizer": optimizer, "extra": extra})
    draw = torch.rand(3)

    torch.manual_seed(7)
    again = Loader(rank, 4)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    state: dict[str, Any] = {
        "loader": checkpoint.PerRank(again, combine=share),
        "rng": checkpoint.PerRank(None),
        "large": checkpoint.PerRank(b""),
        "plain": checkpoint.PerRank(None),
        "scheduler": torch.optim.lr_scheduler.StepLR(other, step_size=9),
        "array": None,
        "counts": {3: "", (1, 2): ""},
    }
    checkpoint.load(path, {"model": model, "optimizer": other, "extra": state})
    torch.set_rng_state(state["rng"].value)
    assert again.left == loader.left
    assert torch.equal(torch.rand(3), draw)
    assert state["large"].value == bytes([rank]) * 300_000
    assert state["plain"].value == {"rank": rank, "nested": [rank, (rank, None)]}
    assert (state["scheduler"].gamma, state["scheduler"].step_size, state["scheduler"].last_epoch) == (0.5, 1, 1)
    assert other.param_groups[0]["lr"] == 0.25
    assert np.array_equal(state["array"], np.arange(6).reshape(2, 3))
    assert state["_extra_states"] == 2
    assert state["counts"] == {3: "three", (1, 2): "pair"}

    fewer = Loader(rank, 3)
    if rank < 3:
        target: dict[str, Any] = {"loader": checkpoint.PerRank(fewer, combine=share), "rng": checkpoint.PerRank("mine")}
        no_combine = r"extra.rng: saved by 4 ranks, wanted on 3; pass PerRank\(value, combine=...\)"
        with pytest.raises(MismatchError, match=no_combine) as refused:
            checkpoint.load(path, {"extra": target}, process_group=three)
        assert "extra.large" in str(refused.value)
        assert "extra.loader" not in str(refused.value)
        assert (fewer.left, target["rng"].value) == (Loader(rank, 3).left, "mine")
        report = checkpoint.load(path, {"extra": target}, strict=False, process_group=three)
        assert {line.split(":")[0] for line in report.values} == {"extra.rng", "extra.large", "extra.plain"}
        assert target["rng"].value == "mine"
        sizes = {"plain": checkpoint.PerRank(None, combine=lambda values: [v["rank"] for v in values])}
        wanted = {"rng": checkpoint.PerRank(None, combine=lambda v: v[0]), "large": checkpoint.PerRank(0, combine=len)}
        only = {"loader": checkpoint.PerRank(Loader(0, 1), combine=share), **sizes, **wanted}
        checkpoint.load(path, {"extra": only}, process_group=three)
        assert (only["plain"].value, only["large"].value) == ([0, 1, 2, 3], 4)

        def fails(values: list[Any], rank: int, size: int) -> Any:
            raise KeyError("no idea")

        broken = {**only, "plain": checkpoint.PerRank("as before", combine=fails if rank == 1 else len)}
        with pytest.raises(KeyError if rank == 1 else PeerError, match="no idea"):
            checkpoint.load(path, {"extra": broken}, process_group=three)
        assert broken["plain"].value == "as before"
    left = of_ranks(fewer.left if rank < 3 else [])
    assert sorted(sample for part in (*of_ranks(read), *left) for sample in part) == list(range(SAMPLES)), (
        "each sample is read once"
    )
    assert max(map(len, left[:3])) - min(map(len, left[:3])) <= 1
    with pytest.raises(
        MismatchError, match=r"extra.counts.3: in the checkpoint, but every rank passes None, an empty list or dict, or no key"
    ):
        checkpoint.load(path, {"extra": {"counts": None}})
    with pytest.raises(MismatchError, match="extra.counts.3: in the checkpoint, but every rank passes None"):
        checkpoint.load(path, {} if rank == 1 else {"extra": {"counts": None}})  # whoever lacks the key takes nothing
    on_others: dict[str, Any] = {"counts": None if rank == 1 else {}}
    checkpoint.load(path, {"extra": on_others})
    assert on_others["counts"] == (None if rank == 1 else {3: "three", (1, 2): "pair"})
    # torch gives the gathered dict to rank 0 alone. It is loaded there, and torch's set_optimizer_state_dict broadcasts it.
    other.param_groups[0]["lr"], other.state[model.weight]["plain"] = 0.125, 0
    of_rank_0 = get_optimizer_state_dict(model, other, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(of_rank_0) == (rank == 0)
    checkpoint.load(path, {"optimizer": of_rank_0})
    assert [group["lr"] for group in of_rank_0.get("param_groups", ())] == [0.25] * (rank == 0)
    assert of_rank_0.get("state", {}) == ({"weight": {"plain": 3}} if rank == 0 else {})
    with pytest.raises(MismatchError, match=r"groups: in the checkpoint, but every rank passes .*; ignore= of this name"):
        checkpoint.load(path, {"optimizer": {}})
    mixed = {"position": checkpoint.PerRank(rank) if rank == 2 else 1}
    with pytest.raises(CheckpointError, match="extra.position: a plain value on rank 0, a PerRank on rank 2"):
        checkpoint.save(tmp_path / "some", {"extra": mixed})
    some = {"position": checkpoint.PerRank(rank)} if rank != 2 else {}
    with pytest.raises(LayoutError, match=r"extra.position: a PerRank value is missing on ranks \[2\]"):
        checkpoint.save(tmp_path / "some", {"extra": some})
