"""Checkpoints of every format version, as they were committed, are read for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from reshard_ckpt import LocalShard, checkpoint
from reshard_ckpt.core.catalog.specs import StateLink
from tests.data.make import expected

DATA = Path(__file__).parent.parent / "data"
VERSIONS = sorted(path.name for path in DATA.glob("v*"))


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)) if one.numel() else True
    return type(one) is type(other) and one == other


def test_there_is_a_checkpoint_of_each_version() -> None:
    assert VERSIONS == ["v2"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_committed_checkpoint_reads_as_it_was_saved(version: str) -> None:
    got, want = checkpoint.read(DATA / version), expected()
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert same(value, got[name]), name
    assert checkpoint.verify(DATA / version).ok


@pytest.mark.parametrize("version", VERSIONS)
def test_a_committed_checkpoint_loads_into_another_layout(version: str) -> None:
    want = expected()
    columns, moment = torch.zeros(12, 3), torch.zeros(12, 10)
    fused = torch.zeros(2, 6)
    state = {
        "model": {
            "up": LocalShard(columns, (12, 10), (0, 4)),
            "fused": LocalShard(fused, (8, 6), pieces=[((0, 0), (3, 0), (1, 6)), ((1, 0), (7, 0), (1, 6))]),
        },
        "optimizer": {"state": {"up": {"exp_avg": moment}}, "param_groups": [{"lr": 0.0, "params": ["up"]}]},
    }
    report = checkpoint.load(DATA / version, state, strict=False)
    assert {line.split(":")[0] for line in report.problems} == {
        f"model.{n}" for n in ("down", "tied", "untied", "fp8", "scalar", "empty")
    }
    assert torch.equal(columns, want["model.up"][:, 4:7])
    assert torch.equal(fused, want["model.fused"][[3, 7]])
    assert torch.equal(moment, want["optimizer.state.up.exp_avg"])
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.5


@pytest.mark.parametrize("version", VERSIONS)
def test_a_committed_catalog_says_where_everything_was(version: str) -> None:
    catalog = checkpoint.catalog(DATA / version)
    assert (catalog.mesh.axes, catalog.mesh.sizes) == (("dp", "tp"), (2, 2))
    assert catalog.metadata == {"made": "for the tests"}
    placed = {name: [(p.axis, p.kind, p.dim) for p in catalog.tensor(name).placement or ()] for name in catalog.names}
    assert placed["model.up"] == [("dp", "replicate", None), ("tp", "shard", 0)]
    assert placed["model.down"] == [("dp", "replicate", None), ("tp", "shard", 1)]
    assert placed["optimizer.state.up.exp_avg"] == [("dp", "flat", None), ("tp", "shard", 0)]
    assert catalog.links() == {
        "optimizer.state.up.exp_avg": StateLink("optimizer", "up", "exp_avg", "model.up"),
    }
    assert catalog.tensor("model.untied").alias_of == "model.tied"
    assert {shard.file.rank for name in catalog.names for shard in catalog.tensor(name).shards} == {0, 1, 2, 3}
