"""Whatever fills a tensor counts up its version, so that a backward pass over a graph from before does not use it unawares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from reshard_ckpt import LocalShard, checkpoint, dcp
from reshard_ckpt.errors import CorruptError
from tests.damage import flip
from tests.launch import on_ranks

State = Mapping[str, Any]
Fill = Callable[[Path, State, State], object]
"""Fills the second state with the first, which has the same names."""


def loaded(path: Any, source: State, target: State, **options: Any) -> None:
    checkpoint.save(path, source)
    checkpoint.load(path, target, **options)


def from_memory(path: Path, source: State, target: State) -> None:
    memory = checkpoint.Memory(copies=0, folder=str(path / "memory"))
    with checkpoint.Manager(path / "run", memory=memory, persist_every=100) as manager:
        manager.async_save(2, source).result()
        found = manager.load_latest(target)
        assert found.tier == "memory"


def by_dcp(path: Path, source: State, target: State) -> None:
    checkpoint.save(path, source)
    dcp.load(dict(target), checkpoint_id=path, no_dist=True)


WAYS: dict[str, Fill] = {
    "load": loaded,
    "load from a dict of this process": lambda path, source, target: loaded(f"memory://{path.name}", source, target),
    "load with a cast": lambda path, source, target: loaded(path, {"w": source["w"].double()}, target, cast=True),
    "load that reads once": lambda path, source, target: loaded(path, source, target, read_once=True),
    "load from the memory tier": from_memory,
    "dcp.load": by_dcp,
    "reshard_live": lambda path, source, target: checkpoint.reshard_live(source, target),
    "reshard_live, staged": lambda path, source, target: checkpoint.reshard_live(source, target, staged=True),
    "LiveReshard": lambda path, source, target: [checkpoint.LiveReshard(source, target).run() for _ in range(2)],
}


def is_noticed(fill: Fill, folder: Path, size: int, make: Callable[[torch.Tensor], Any]) -> bool:
    """Tell whether a backward pass notices that a tensor was filled after its forward pass."""
    before, after = torch.arange(2.0 * size).view(size, 2), torch.full((size, 2), 7.0)
    target = torch.nn.Parameter(make(before.clone()))
    loss = (target * target).sum()
    fill(folder, {"w": make(after)}, {"w": target})
    held = target.to_local() if isinstance(target, DTensor) else target
    assert held.unique().tolist() == [7.0]
    try:
        loss.backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return False


@pytest.mark.parametrize("size", [8, 40_000])  # small and large boxes are copied in other ways
@pytest.mark.parametrize("way", WAYS)
def test_a_backward_pass_notices_what_was_loaded_after_the_forward_pass(way: str, size: int, tmp_path: Path) -> None:
    assert is_noticed(WAYS[way], tmp_path, size, lambda tensor: tensor)


@on_ranks(2)
def test_ranks_notice_what_dtensors_and_other_ranks_gave_them(tmp_path: Path) -> None:
    """List the ways in which a DTensor is filled without a backward pass noticing it, and plain parts that other ranks send."""
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    missed = []
    for number, name in enumerate(("load", "load that reads once", "reshard_live", "LiveReshard")):
        path = tmp_path / str(number)
        if not is_noticed(WAYS[name], path, 8, lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])):
            missed.append(f"{name}, DTensor")
    whole = torch.zeros(8, 2, requires_grad=True)
    loss = (whole * whole).sum()
    half = LocalShard(torch.ones(4, 2), (8, 2), (4 * rank, 0))
    checkpoint.reshard_live({"w": half}, {"w": whole})
    assert whole.unique().tolist() == [1.0]
    try:
        loss.backward()
        missed.append("reshard_live from another rank")
    except RuntimeError:
        pass
    assert not missed


def test_what_a_load_leaves_alone_keeps_its_version(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"w": torch.ones(8), "other": torch.ones(3)})
    kept, target = torch.zeros(4), torch.zeros(8)
    checkpoint.load(tmp_path, {"w": target, "other": kept}, strict=False)
    assert kept._version == 0
    assert target._version
    file = next(tmp_path.rglob("*.safetensors"))
    flip(file, -5)
    target = torch.zeros(8)
    with pytest.raises(CorruptError):
        checkpoint.load(tmp_path, {"w": target}, ignore=["other"], verify_first=True)
    assert target._version == 0
