"""Values of each rank's own, and plain ones, across world sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from reshard_ckpt import checkpoint
from tests.distributed.outcomes import outcome
from tests.launch import run_ranks

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


def values_job(folder: str) -> dict[str, Any]:
    rank, path = dist.get_rank(), Path(folder, "four")
    three = dist.new_group([0, 1, 2])
    out: dict[str, Any] = {}
    loader = Loader(rank, 4)
    out["read"] = loader.take(3 + 2 * rank)
    torch.manual_seed(100 + rank)
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    extra = {
        "loader": checkpoint.PerRank(loader, combine=share),
        "rng": checkpoint.PerRank(torch.get_rng_state()),
        "large": checkpoint.PerRank(bytes([rank]) * 300_000),
        "plain": checkpoint.PerRank({"rank": rank, "nested": [rank, (rank, None)]}),
        "scheduler": scheduler,
        "array": np.arange(6).reshape(2, 3),
        "counts": {3: "three", (1, 2): "pair"},
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
    out["same_size"] = (
        again.left == loader.left,
        torch.equal(torch.rand(3), draw),
        state["large"].value == bytes([rank]) * 300_000,
        state["plain"].value == {"rank": rank, "nested": [rank, (rank, None)]},
        (state["scheduler"].gamma, state["scheduler"].step_size, state["scheduler"].last_epoch) == (0.5, 1, 1),
        other.param_groups[0]["lr"] == 0.25,
        np.array_equal(state["array"], np.arange(6).reshape(2, 3)),
        state["counts"] == {3: "three", (1, 2): "pair"},
    )
    if rank < 3:
        fewer = Loader(rank, 3)
        target: dict[str, Any] = {"loader": checkpoint.PerRank(fewer, combine=share), "rng": checkpoint.PerRank("mine")}
        out["no_combine"] = outcome(lambda: checkpoint.load(path, {"extra": target}, process_group=three))
        out["untouched"] = fewer.left == Loader(rank, 3).left and target["rng"].value == "mine"
        report = checkpoint.load(path, {"extra": target}, strict=False, process_group=three)
        out["report"] = report.values
        out["mine"] = target["rng"].value
        out["left"] = fewer.left
        sizes = {"plain": checkpoint.PerRank(None, combine=lambda values: [v["rank"] for v in values])}
        wanted = {"rng": checkpoint.PerRank(None, combine=lambda v: v[0]), "large": checkpoint.PerRank(0, combine=len)}
        only = {"loader": checkpoint.PerRank(Loader(0, 1), combine=share), **sizes, **wanted}
        checkpoint.load(path, {"extra": only}, process_group=three)
        out["combined"] = (only["plain"].value, only["large"].value)

        def fails(values: list[Any], rank: int, size: int) -> Any:
            raise KeyError("no idea")

        broken = {**only, "plain": checkpoint.PerRank("as before", combine=fails if rank == 1 else len)}
        out["broken"] = outcome(lambda: checkpoint.load(path, {"extra": broken}, process_group=three))
        out["broken_value"] = broken["plain"].value
    nowhere: dict[str, Any] = {"counts": None}
    out["nowhere"] = outcome(lambda: checkpoint.load(path, {"extra": nowhere}))
    on_others: dict[str, Any] = {"counts": None if rank == 1 else {}}
    checkpoint.load(path, {"extra": on_others})
    out["on_others"] = on_others["counts"]
    some = {"position": checkpoint.PerRank(rank)} if rank != 2 else {}
    mixed = {"position": checkpoint.PerRank(rank) if rank == 2 else 1}
    out["of_two_kinds"] = outcome(lambda: checkpoint.save(Path(folder, "some"), {"extra": mixed}))
    out["missing_on_a_rank"] = outcome(lambda: checkpoint.save(Path(folder, "some"), {"extra": some}))
    return out


def test_values_of_each_rank_on_as_many_ranks_and_on_fewer(tmp_path: Path):
    answers = run_ranks(values_job, 4, str(tmp_path))
    for out in answers:
        assert out["same_size"] == (True,) * 8
        assert (
            "extra.counts.3: in the checkpoint, but every rank passes None or an empty list above it; pass {} there"
            in out["nowhere"].message
        )
        assert "extra.position: a plain value on rank 0, a PerRank on rank 2" in out["of_two_kinds"].message
        assert out["missing_on_a_rank"].error == "LayoutError"
        assert "extra.position: a PerRank value is missing on ranks [2]" in out["missing_on_a_rank"].message
    counts = {3: "three", (1, 2): "pair"}
    assert [out["on_others"] for out in answers] == [counts, None, counts, counts]
    read = [sample for out in answers for sample in out["read"]]
    left = [sample for out in answers[:3] for sample in out["left"]]
    assert sorted(read + left) == list(range(SAMPLES)), "each sample is read once"
    assert max(len(out["left"]) for out in answers[:3]) - min(len(out["left"]) for out in answers[:3]) <= 1
    for rank, out in enumerate(answers[:3]):
        assert out["no_combine"].error == "MismatchError"
        assert "extra.rng: saved by 4 ranks, wanted on 3; pass PerRank(value, combine=...)" in out["no_combine"].message
        assert "extra.large" in out["no_combine"].message
        assert "extra.loader" not in out["no_combine"].message
        assert out["untouched"]
        assert {line.split(":")[0] for line in out["report"]} == {"extra.rng", "extra.large", "extra.plain"}
        assert out["mine"] == "mine"
        assert out["combined"] == ([0, 1, 2, 3], 4)
        assert out["broken"].error == ("KeyError" if rank == 1 else "PeerError"), out["broken"]
        assert "no idea" in out["broken"].message
        assert out["broken_value"] == "as before"
